"""What ``pyflyte run`` answers where a run cannot begin or go on: a sentence, as the other commands do.

flytekit prints each error as a traceback of the graph's code, 60 lines above what is said, and takes a
configuration that is not there for JSON.
"""

import re
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
import yaml
from flytekit.exceptions.user import FlyteUserRuntimeException
from flytekit.interaction.click_types import JsonParamType

from tasks.campaign_file import load_json, read_campaign
from tasks.elastic import TrainingPreempted

Workflow = TypeVar("Workflow")
PROJECT = Path(__file__).resolve().parent
SAID = (ValueError, RuntimeError, TrainingPreempted)
"""What the project raises with a sentence for people; other errors are faults, and need their traceback."""
_WHERE = re.compile(r"(USER:\w+: error=)?(Error encountered while executing '[^']+':\s*)?")


class Stopped(click.ClickException):
    """Ctrl-C, of which pyflyte says nothing at all."""

    exit_code = 128 + signal.SIGINT


def says_what_is_wrong(workflow: Workflow) -> Workflow:
    """The workflow; where ``pyflyte run`` executes it, an error that this project raised is shown as its
    sentence and the line that raised it. ``pyflyte -v run`` shows the traceback, and so does any other
    error."""
    execute = workflow.local_execute  # pyright: ignore[reportAttributeAccessIssue]

    def local_execute(*context: Any, **inputs: Any) -> Any:
        try:
            with _interruptible():
                return execute(*context, **inputs)
        except click.ClickException:  # what is refused at launch is shown as it is
            raise
        except KeyboardInterrupt:
            if not _is_quiet():
                raise
            raise Stopped("stopped by Ctrl-C. What was published stays; run it again to go on.") from None
        except FlyteUserRuntimeException as error:  # of a rank, whose traceback was printed where it ended
            if _is_quiet():
                raise click.ClickException(_WHERE.sub("", str(error))) from error
            raise
        except SAID as error:
            if _is_quiet() and (said := _said(error)):
                raise click.ClickException(said) from error
            raise

    workflow.local_execute = local_execute  # pyright: ignore[reportAttributeAccessIssue]
    return workflow


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises, as in any Python program; flytekit's own handler ends the process with 1."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _is_quiet() -> bool:
    """Whether a command of ``pyflyte`` runs, and was not asked for more words."""
    context = click.get_current_context(silent=True)
    return context is not None and context.find_root().params.get("verbose") == 0


def _said(error: Exception) -> str:
    """The sentence and where it was raised; empty if that was not in this project."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    path = Path(last.filename)
    if not path.is_relative_to(PROJECT):
        return ""
    where = f"{path.relative_to(PROJECT.parent)}:{last.lineno}"
    return f"{_WHERE.sub('', str(error))}\n\n{where}; pyflyte -v run ... shows the way there."


def _parse(self: JsonParamType, value: Any, param: click.Parameter | None) -> Any:
    """The value of an argument that is JSON, or the name of a file of JSON or YAML."""
    if not isinstance(value, str):
        return _parse_json(self, value, param)
    is_json = value.lstrip().startswith("{")
    if not is_json and Path(value).suffix not in (".json", ".yaml", ".yml"):
        return _parse_json(self, value, param)
    try:
        return load_json(value) if is_json else read_campaign(Path(value))
    except (OSError, ValueError, yaml.YAMLError) as error:
        text = f"must be JSON, got {value}" if is_json else f"must name a YAML or JSON file, got {value}"
        raise click.BadParameter(f"{text}: {error}", param=param) from None


_parse_json = JsonParamType._parse
JsonParamType._parse = _parse
