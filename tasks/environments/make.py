"""The environment that a configuration names."""

from tasks.config import EnvironmentConfig
from tasks.environments.digits import DigitsEnvironment, reverse
from tasks.environments.protocol import Environment


def make_environment(config: EnvironmentConfig, *, seed: int) -> Environment:
    """The environment a configuration names."""
    transform = {"reverse_digits": reverse, "sort_digits": sorted}[config.name]
    return DigitsEnvironment(
        name=config.name,
        transform=transform,
        num_digits=config.num_digits,
        num_held_out=config.held_out,
        seed=seed,
    )
