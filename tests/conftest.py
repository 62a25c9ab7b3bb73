"""Real servers for the tests, started once a session. A campaign name a test keeps the tests apart."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore
    from tasks.embedded.seaweed import S3Endpoint


@pytest.fixture(scope="session")
def store_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the session's embedded store; its S3 server runs."""
    from tasks.embedded.seaweed import ensure_s3

    folder = tmp_path_factory.mktemp("store")
    ensure_s3(folder)
    return folder


@pytest.fixture(scope="session")
def s3_endpoint(store_folder: Path) -> S3Endpoint:
    from tasks.embedded.seaweed import ensure_s3

    return ensure_s3(store_folder)


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tasks.embedded.valkey import ensure_valkey

    return ensure_valkey(tmp_path_factory.mktemp("buffer"))


@pytest.fixture(scope="session")
def shard_urls(tmp_path_factory: pytest.TempPathFactory, valkey_url: str) -> list[str]:
    from tasks.embedded.valkey import ensure_valkey

    return [valkey_url, ensure_valkey(tmp_path_factory.mktemp("shard"))]


@pytest.fixture
def campaign() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def policy_store(store_folder: Path, campaign: str, tmp_path: Path) -> PolicyStore:
    """The session's store under this test's campaign, with a cache of its own."""
    from tasks.artifacts.store import open_store

    return open_store(str(store_folder), campaign, cache=tmp_path / "cache")


@pytest.fixture
def untied(tmp_path: Path) -> list[Path]:
    """Two versions of a policy with a head of its own, which an SGLang server reads as they are."""
    from policies import save_tiny_policy

    return [save_tiny_policy(tmp_path / str(seed), family="deepseek_v3", seed=seed) for seed in (0, 1)]


@pytest.fixture
def leave_servers(tmp_path: Path) -> Iterator[None]:
    """The test process stops using the servers below the test's folder, which ends them."""
    yield
    from tasks.embedded import process

    for folder in [folder for folder in process._memberships if folder.is_relative_to(tmp_path)]:
        os.close(process._memberships.pop(folder).fifo)


INTERPRETER = pytest.param("interpreter", marks=pytest.mark.interpreter)
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", INTERPRETER, CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where a kernel runs: its plain-torch formula, its Triton interpreted on CPU, its Triton on CUDA."""
    return "cpu" if request.param == "cpu" else _triton_device(request.param, monkeypatch)


@pytest.fixture(params=[INTERPRETER, CUDA])
def triton_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same for a kernel whose formula is elsewhere."""
    return _triton_device(request.param, monkeypatch)


def _triton_device(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if name == "interpreter":
        from interpreter import interpret

        interpret(monkeypatch)
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return "cuda"
