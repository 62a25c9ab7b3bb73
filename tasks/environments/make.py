"""The environment that a configuration names."""

from collections.abc import Callable
from functools import partial

from tasks.environment_config import EnvironmentConfig
from tasks.environments.digits import DigitsEnvironment, reverse
from tasks.environments.protocol import Environment


def make_environment(config: EnvironmentConfig, *, seed: int) -> Environment:
    """The environment a configuration names."""
    digits = partial(
        DigitsEnvironment,
        name=config.name,
        num_digits=config.num_digits,
        num_held_out=config.held_out,
        seed=seed,
    )
    makers: dict[str, Callable[[], Environment]] = {
        "reverse_digits": lambda: digits(transform=reverse),
        "sort_digits": lambda: digits(transform=sorted),
    }
    return makers[config.name]()
