"""Prompts of Parquet, JSONL or JSON files, with a named verifier: what Hugging Face datasets stores on
disk."""

import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

from tasks.environment_config import PromptFilesConfig
from tasks.environments.answers import exact_answer, math_answer, number_answer
from tasks.environments.problems import Problem, ProblemEnvironment

SUFFIXES = (".parquet", ".jsonl", ".json")


def prompt_file_environment(config: PromptFilesConfig, *, held_out: int, seed: int) -> ProblemEnvironment:
    """The rows of the files, in the order of their names."""
    problems = [
        _problem(row, config, where) for where, row in read_rows(config.path, field="prompt_files.path")
    ]
    by_text = {problem.text: problem for problem in problems}
    _require_one_answer(problems, by_text)
    answers = [problem.answer for problem in by_text.values()]
    judge = _verifier(config)
    return ProblemEnvironment(
        list(by_text.values()),
        score=lambda index, response: judge(answers[index], response),
        name=f"prompt_files.{config.verifier}",
        held_out=held_out,
        seed=seed,
    )


def _require_one_answer(problems: Sequence[Problem], by_text: Mapping[str, Problem]) -> None:
    """Rows that ask the same are one prompt, and one of two answers would be rewarded as wrong."""
    for problem in problems:
        if (other := by_text[problem.text].answer) != problem.answer:
            raise ValueError(
                "rows of prompt_files.path that ask the same must have one answer, got "
                f"{problem.answer!r:.80} and {other!r:.80} to {problem.text!r:.80}. Remove the wrong one."
            )


def _verifier(config: PromptFilesConfig) -> Callable[[str, str], float | None]:
    if config.verifier == "python":
        from tasks.environments.sandbox import passes_tests, require_sandbox

        require_sandbox(config.network)
        return partial(passes_tests, network=config.network, seconds=config.run_seconds)
    if config.verifier == "math":
        importlib.import_module("math_verify")  # if it is missing, that is said now and not by every sample
    return {"exact": exact_answer, "number": number_answer, "math": math_answer}[config.verifier]


def read_rows(path: str, *, field: str) -> Iterable[tuple[str, dict[str, Any]]]:
    """(where it is, row) of every row, in the order of the files' names."""
    where = Path(path).expanduser()
    pattern = [f"{where}/**/*{suffix}" for suffix in SUFFIXES] if where.is_dir() else [str(where)]
    files = sorted({name for each in pattern for name in glob(each, recursive=True)})
    files = [name for name in files if name.endswith(SUFFIXES)]
    if not files:
        raise ValueError(
            f"{field} must name files that end in {', '.join(SUFFIXES)}, got {path!r} and none "
            "found. Check the path; relative ones start at the folder the run was started in."
        )
    for name in files:
        for number, row in enumerate(_read(Path(name), field)):
            if not isinstance(row, dict):
                raise ValueError(f"{name} row {number} must be an object with fields, got {row!r:.80}.")
            yield f"{name} row {number}", row


def _read(path: Path, field: str) -> list[Any]:
    if path.suffix == ".parquet":
        import polars as pl

        try:
            return pl.read_parquet(path).to_dicts()
        except pl.exceptions.PolarsError as error:
            raise ValueError(f"{field} must name whole Parquet files, got {path}: {error}.") from None
    try:
        text = path.read_text(encoding="utf-8-sig")  # some write a mark before the first byte
    except UnicodeDecodeError as error:
        raise ValueError(f"{field} must name files in UTF-8, got {path}: {error}. Convert it.") from None
    # at line feeds alone: JSON's strings may hold what str.splitlines takes for ends of lines, such as U+2028
    parts = text.split("\n") if path.suffix == ".jsonl" else [text]
    rows: list[Any] = []
    for number, part in enumerate(parts, start=1):
        try:
            rows += [json.loads(part)] if part.strip() else []
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{field} must name files of valid JSON, got {path} line {number}: {error}. Mend the file."
            ) from None
    if path.suffix == ".jsonl":
        return rows
    table = rows[0].get("data") if rows and isinstance(rows[0], dict) else next(iter(rows), None)
    if not isinstance(table, list):
        raise ValueError(
            f"{field} must name JSON files with a list of rows, or one under 'data', got {path}. Convert it "
            "to .jsonl."
        )
    return table


def _problem(row: dict[str, Any], config: PromptFilesConfig, where: str) -> Problem:
    for field in (config.prompt_field, config.answer_field):
        if row.get(field) is None:
            raise ValueError(
                f"{where} must have the field {field!r}, got {sorted(row)}. Set prompt_files.prompt_field "
                "and answer_field."
            )
    text, answer = _text(row[config.prompt_field], where), row[config.answer_field]
    if isinstance(answer, list | dict):  # Python's spelling of it would be asked for
        raise ValueError(
            f"{where} must have one text or number in {config.answer_field!r}, got {answer!r:.80}. Write it "
            "as the answer that is expected."
        )
    problem = Problem(text=text, answer=str(answer))
    try:
        f"{problem.text}{problem.answer}".encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} must hold whole characters, got {error}. Mend the row.") from None
    return problem


def _text(prompt: Any, where: str) -> str:
    """A chat's only user message: the policy's template is put around it once, by the campaign."""
    if isinstance(prompt, str):
        return prompt
    match prompt:
        case [{"role": "user", "content": str(text)}]:
            return text
    raise ValueError(
        f"{where} must be text or a chat of one user message of text, got {prompt!r:.160}. Join a system "
        "message and the question into one text."
    )
