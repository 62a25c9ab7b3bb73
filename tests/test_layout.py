"""The shape of the repository: where things may be, which way imports point, how long things may get."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.config import CampaignConfig
from tasks.section import Section

ROOT = Path(__file__).resolve().parent.parent
TOP_LEVEL = {"workflows", "tasks", "kernels", "images", "configs", "tests", "pyproject.toml", "README.md"}
TRACKED = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()
PYTHON = [ROOT / name for name in TRACKED if name.endswith(".py") and (ROOT / name).exists()]
SOURCES = [path for path in PYTHON if path.relative_to(ROOT).parts[0] != "tests"]
HEAVY = {"torch", "transformers", "sglang", "polars", "pandera", "valkey", "matplotlib", "boto3", "numpy"}


def relative(path):
    return str(path.relative_to(ROOT))


def imports(path, *, at_module_level=False):
    """Dotted names a file imports; optionally only those that importing the file itself executes."""
    tree = ast.parse(path.read_text())
    nodes = list(_executed_on_import(tree)) if at_module_level else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            is_package = len(parts) > 1 and ROOT.joinpath(*parts, "__init__.py").exists()
            names = [f"{node.module}.{alias.name}" for alias in node.names]  # modules, or what it defines
            yield from names if is_package else [node.module]


def _executed_on_import(node):
    for child in ast.iter_child_nodes(node):
        is_type_checking = isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING"
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_type_checking:
            continue
        yield child
        yield from _executed_on_import(child)


def test_the_top_level_is_what_the_owner_fixed():
    assert {name.split("/")[0] for name in TRACKED if not name.startswith(".")} <= TOP_LEVEL


def test_kernels_folder_does_not_shadow_the_pypi_package():
    assert not (
        ROOT / "kernels/__init__.py"
    ).exists()  # transformers and sglang import Hugging Face's `kernels`
    assert (ROOT / "kernels/moe_kernels/__init__.py").exists()


LAYERS = ["workflows", "tasks", "tasks package", "moe_kernels"]


def layer(name):
    parts = name.split(".")
    if parts[0] == "tasks":
        is_package = len(parts) > 1 and (ROOT / "tasks" / parts[1]).is_dir()
        return LAYERS.index("tasks package" if is_package else "tasks")
    return LAYERS.index(parts[0]) if parts[0] in LAYERS else None


CONFIGURATION = {path.stem for path in (ROOT / "tasks").glob("*config.py")}
SHARED_VALUES = {
    f"tasks.{name}" for name in CONFIGURATION | {"section", "grid", "records", "say", "schema", "session"}
}
"""Files of ``tasks/`` that the packages read: values and how to open what they name. They hold no task."""


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_import_arrows_point_one_way(path):
    own = layer(".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("kernels."))
    for name in imports(path):
        target = layer(name)
        if own is not None and target is not None and name not in SHARED_VALUES:
            assert own <= target, f"{relative(path)} must not import {name}"


def test_packages_form_no_circle():
    """Whoever reads one needs those below it, and none above."""
    below: dict[str, set[str]] = {}
    for path in SOURCES:
        own = path.relative_to(ROOT).parts
        if own[0] == "tasks" and len(own) > 2:
            named = (name.split(".")[1] for name in imports(path) if layer(name) == layer("tasks.rl"))
            below.setdefault(own[1], set()).update(set(named) - {own[1]})
    order = list(graphlib.TopologicalSorter(below).static_order())
    assert order.index("rl") < order.index("experience") < order.index("policy") < order.index("engine")


POLICY = ["training", "step", "checkpoint", "models", "parallel", "dispatch", "ranks"]
"""Packages of ``tasks/policy``, from the top."""


@pytest.mark.parametrize("path", [path for path in SOURCES if "policy" in path.parts], ids=relative)
def test_a_package_of_the_policy_imports_from_those_below_it_alone(path):
    own = path.relative_to(ROOT / "tasks/policy").parts
    if len(own) == 2:
        targets = {name.split(".")[2] for name in imports(path) if name.startswith("tasks.policy.")}
        assert targets <= {*POLICY[POLICY.index(own[0]) :], "libraries"}, f"{relative(path)}: {targets}"
    else:
        assert path.stem in {"__init__", "launch", "standing", "libraries"}, "what is started by name"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_what_registers_a_workflow_imports_nothing_heavy(path):
    parts = path.relative_to(ROOT).parts
    if parts[0] == "workflows" or (parts[0] == "tasks" and len(parts) == 2 and parts[1] != "schema.py"):
        assert not {name.split(".")[0] for name in imports(path, at_module_level=True)} & HEAVY


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_pure_maths_knows_no_process_group_and_no_flyte(path):
    if path.relative_to(ROOT).parts[:2] == ("tasks", "rl"):
        assert not {"torch.distributed", "flytekit"} & set(imports(path))


@pytest.mark.parametrize("path", PYTHON, ids=relative)
def test_files_stay_within_400_lines_and_functions_within_60(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{relative(path)}:{node.lineno} {node.name}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_public_functions_are_typed_and_modules_documented(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree) or not tree.body, f"{relative(path)} needs a module docstring"
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        for function in members:
            if isinstance(function, ast.FunctionDef) and not function.name.startswith("_"):
                arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
                untyped = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
                assert not untyped and function.returns is not None, (
                    f"{relative(path)}: {function.name} {untyped}"
                )


def configuration_fields(section=CampaignConfig, prefix=""):
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from configuration_fields(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


@pytest.mark.parametrize("field", list(configuration_fields()))
def test_every_configuration_key_is_used(field):
    if field.startswith("model.random."):
        return  # passed on as a whole: build_random takes each by name and would refuse another
    uses = re.compile(rf"\.{field.rsplit('.', 1)[-1]}\b")
    assert any(uses.search(path.read_text()) for path in SOURCES if path.stem not in CONFIGURATION), field


def test_no_package_imports_the_installed_project_under_another_name():
    assert "moe_rl" not in sys.modules


FORBIDDEN = re.compile(r"/work/|\bpypi\.org\b|files\.pythonhosted|registry\.npmjs", re.IGNORECASE)


@pytest.mark.parametrize("name", [n for n in TRACKED if n != "tests/test_layout.py"])
def test_no_file_names_a_registry_host_or_a_path_of_one_machine(name):
    path = ROOT / name
    if path.suffix not in {".png"} and path.exists():
        assert not FORBIDDEN.search(path.read_text())
