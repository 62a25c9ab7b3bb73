"""What is asked; no torch. ``environment.name`` chooses, and the section of that name says the rest."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tasks.section import Section

DIGITS = ("reverse_digits", "sort_digits", "large_digits")


def _as_json(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else value


Options = Annotated[str, BeforeValidator(_as_json), Field(pattern=r"^\{")]
"""A mapping in a YAML, kept as JSON: Flyte has no type for values of any kind."""


class ReasoningGymConfig(Section):
    """A generator and scorer of reasoning-gym."""

    dataset: str = ""
    """Its name there: ``spell_backward``, ``chain_sum``, ..."""
    options: Options = "{}"
    """Arguments of the generator, without ``seed`` and ``size``."""
    size: int = Field(default=2000, ge=1)
    """Problems to generate; those whose prompt repeats an earlier one are left out."""
    pattern: str = ""
    """A regular expression; its first group is what is asked. Empty asks the whole question."""
    lowercase: bool = False
    """Ask and score in lower case, for a policy that has no capitals."""


class PromptFilesConfig(Section):
    """Prompts of a Parquet, JSONL or JSON file, or of a folder of them, as Hugging Face datasets stores
    them."""

    path: str = ""
    """File, folder or ``*`` pattern."""
    prompt_field: str = "prompt"
    """Text, or a chat of one user message."""
    answer_field: str = "answer"
    verifier: Literal["exact", "number", "math", "python"] = "exact"
    """``python`` runs the response in a sandbox; the answer is then the test code."""
    network: Literal["namespace", "seccomp"] = "namespace"
    """How ``python`` is kept off the network; a machine that cannot do it is refused."""
    run_seconds: float = Field(default=5.0, gt=0)
    """Wall time of one ``python`` run."""


class CalculatorConfig(Section):
    """Sums that the policy may hand to a calculator tool: ``=12+34`` is answered with the result."""

    num_terms: int = Field(default=2, ge=2, le=4)
    largest_term: int = Field(default=99, ge=9, le=9999)
    operators: str = Field(default="+", pattern=r"^[-+*]+$")
    max_turns: int = Field(default=2, ge=2, le=8)


class VerifiersConfig(Section):
    """A taskset of the library ``verifiers`` whose tasks are single turns without a container."""

    taskset: str = ""
    """Its id: an installed package, or a module that defines one."""
    options: Options = "{}"
    """Fields of the taskset's configuration."""
    num_tasks: int = Field(default=1000, ge=2)
    """The first so many tasks are used."""


class TaskConfig(Section):
    """One environment."""

    name: Literal[
        "reverse_digits", "sort_digits", "large_digits", "reasoning_gym", "prompt_files", "calculator",
        "verifiers", "module",
    ] = "reverse_digits"  # fmt: skip
    num_digits: int = Field(default=4, ge=2, le=8)
    """Of the environments ``*_digits``."""
    held_out: int = Field(default=256, ge=1)
    """Prompts that are kept out of training; every evaluation uses them."""
    reasoning_gym: ReasoningGymConfig = ReasoningGymConfig()
    prompt_files: PromptFilesConfig = PromptFilesConfig()
    calculator: CalculatorConfig = CalculatorConfig()
    verifiers: VerifiersConfig = VerifiersConfig()
    module: str = ""
    """A Python module with ``make(*, held_out, seed, options)``: an environment of your own."""
    options: Options = "{}"
    """Handed to ``make`` of ``module``."""

    @model_validator(mode="after")
    def _some_prompts_remain(self) -> Self:
        if self.name in DIGITS and self.held_out * 2 > 10**self.num_digits:
            raise ValueError(
                f"held_out must be at most half of the {10**self.num_digits} prompts of {self.num_digits} "
                f"digits, got {self.held_out}. Lower held_out or raise num_digits."
            )
        return self

    @model_validator(mode="after")
    def _what_the_name_needs_is_given(self) -> Self:
        needed = {
            "reasoning_gym": ("reasoning_gym.dataset", self.reasoning_gym.dataset),
            "prompt_files": ("prompt_files.path", self.prompt_files.path),
            "verifiers": ("verifiers.taskset", self.verifiers.taskset),
            "module": ("module", self.module),
        }
        field, value = needed.get(self.name, ("", "given"))
        if not value:
            raise ValueError(
                f"{field} must be given with name '{self.name}', got ''. Set environment.{field}."
            )
        return self


class MixPart(Section):
    """One environment of a mix, and its share over the curriculum."""

    environment: TaskConfig
    weight: float = Field(default=1.0, ge=0)
    final_weight: float | None = Field(default=None, ge=0)
    """Weight at the end of ``curriculum_prompts``, reached linearly; not given = ``weight`` throughout."""


class EnvironmentConfig(TaskConfig):
    """One environment, or with ``mix`` several by weight."""

    mix: list[MixPart] = Field(default_factory=list)
    """Not empty: prompts come from these; the fields above are of no effect."""
    curriculum_prompts: int = Field(default=0, ge=0)
    """Training prompts over which the weights of a mix go from ``weight`` to ``final_weight``."""

    @property
    def title(self) -> str:
        """What the report calls it."""
        return " + ".join(task.name for task in self.tasks)

    @property
    def may_answer(self) -> bool:
        """Whether the environment may answer turns, as far as the configuration knows: a module does where
        what it makes does (``answers_turns``)."""
        return self.answers or any(task.name == "module" for task in self.tasks)

    @property
    def answers(self) -> bool:
        """Whether the configuration says that the environment answers turns."""
        return any(task.name == "calculator" for task in self.tasks)

    @property
    def max_turns(self) -> int:
        """Turns that a conversation may have, where the configuration knows it: a module's it does not."""
        return max((task.calculator.max_turns for task in self.tasks if task.name == "calculator"), default=1)

    @property
    def tasks(self) -> list[TaskConfig]:
        return [part.environment for part in self.mix] or [self]

    @property
    def shortest_answer(self) -> int:
        """Tokens that an answer needs besides its end, where the configuration knows it."""
        return max((task.num_digits for task in self.tasks if task.name in DIGITS), default=0)

    @model_validator(mode="after")
    def _a_curriculum_has_weights_to_change(self) -> Self:
        has_final = any(part.final_weight is not None for part in self.mix)
        if has_final != bool(self.curriculum_prompts):
            raise ValueError(
                "curriculum_prompts must be given with a final_weight in the mix and only with it, got "
                f"curriculum_prompts={self.curriculum_prompts}, final_weight "
                f"{'given' if has_final else 'none'}. Set both or neither."
            )
        for end in ("weight", "final_weight"):
            weights = [getattr(part, end) for part in self.mix]
            weights = [p.weight if w is None else w for w, p in zip(weights, self.mix, strict=True)]
            if self.mix and sum(weights) <= 0:
                raise ValueError(f"some {end} of the mix must be positive, got {weights}. Raise one.")
        return self
