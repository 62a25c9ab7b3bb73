"""The environment that a configuration names. Libraries of the extra ``environments`` are imported here, on
demand; one that is missing is an error that says what to install."""

import importlib
import json
from collections.abc import Callable
from functools import partial

from tasks.environment_config import EnvironmentConfig, TaskConfig
from tasks.environments.digits import DigitsEnvironment, reverse
from tasks.environments.protocol import Environment


def make_environment(config: EnvironmentConfig, *, seed: int) -> Environment:
    """The environment a configuration names."""
    if not config.mix:
        return _one(config, seed=seed)
    from tasks.environments.mix import MixedEnvironment, Share

    shares = [
        Share(
            environment=_one(part.environment, seed=seed),
            weight=part.weight,
            final_weight=part.weight if part.final_weight is None else part.final_weight,
        )
        for part in config.mix
    ]
    return MixedEnvironment(shares, curriculum_prompts=config.curriculum_prompts, seed=seed)


def _one(config: TaskConfig, *, seed: int) -> Environment:
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
        "large_digits": lambda: _large_digits(config, seed),
        "reasoning_gym": lambda: _reasoning_gym(config, seed),
        "prompt_files": lambda: _prompt_files(config, seed),
        "calculator": lambda: _calculator(config, seed),
        "verifiers": lambda: _verifiers(config, seed),
        "module": lambda: _module(config, seed),
    }
    try:
        return makers[config.name]()
    except ModuleNotFoundError as error:
        if config.name == "module" and error.name == config.module:
            raise ValueError(
                f"environment.module must name a module on the Python path, got {config.module!r}. Put "
                "its file beside workflows/, add its folder to PYTHONPATH, or install it."
            ) from None
        extra = "verifiers" if config.name == "verifiers" else "environments"
        raise ModuleNotFoundError(
            f"environment '{config.name}' needs the package {error.name!r}, which is not installed. "
            f"Run pip install 'moe-rl[{extra}]'.",
            name=error.name,
        ) from None


def _large_digits(config: TaskConfig, seed: int) -> Environment:
    from tasks.environments.large_digits import LargeDigitsEnvironment

    return LargeDigitsEnvironment(num_digits=config.num_digits, num_held_out=config.held_out, seed=seed)


def _reasoning_gym(config: TaskConfig, seed: int) -> Environment:
    from tasks.environments.reasoning import reasoning_environment

    return reasoning_environment(config.reasoning_gym, held_out=config.held_out, seed=seed)


def _prompt_files(config: TaskConfig, seed: int) -> Environment:
    from tasks.environments.prompt_files import prompt_file_environment

    return prompt_file_environment(config.prompt_files, held_out=config.held_out, seed=seed)


def _calculator(config: TaskConfig, seed: int) -> Environment:
    from tasks.environments.calculator import CalculatorEnvironment

    return CalculatorEnvironment(config.calculator, held_out=config.held_out, seed=seed)


def _verifiers(config: TaskConfig, seed: int) -> Environment:
    from tasks.environments.tasksets import taskset_environment

    return taskset_environment(config.verifiers, held_out=config.held_out, seed=seed)


def _module(config: TaskConfig, seed: int) -> Environment:
    module = importlib.import_module(config.module)
    return module.make(held_out=config.held_out, seed=seed, options=json.loads(config.options))
