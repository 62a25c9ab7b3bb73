"""Code of a policy in a child process. Blind spot: x86_64 only, and code that attacks the tests it is run
with."""

import subprocess
import time
from pathlib import Path

import grpc
import pytest

from tasks.environments import sandbox
from tasks.environments.sandbox import SandboxUnavailable, extract_code, passes_tests, require_sandbox

GOOD = "def add(a, b):\n    return a + b\n"
TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0\n"


@pytest.fixture(scope="module", params=["namespace", "seccomp"])
def network(request):
    try:
        require_sandbox(request.param)
    except SandboxUnavailable as error:
        pytest.skip(f"this machine has no {request.param}: {error}")
    return request.param


def run(code, network, *, tests=TESTS, seconds=3.0):
    return passes_tests(tests, code, network=network, seconds=seconds)


def test_a_process_with_grpc_in_it_scores_as_any_other(network):
    """It starts threads in each fork of a process with a channel, as one with the embedded store is, and with
    threads no user namespace can be entered: the machine was said to have none."""
    with grpc.insecure_channel("127.0.0.1:9") as channel:
        with pytest.raises(grpc.FutureTimeoutError):
            grpc.channel_ready_future(channel).result(timeout=0.2)
        assert run(GOOD, network) == 1.0


@pytest.mark.parametrize(
    ("code", "score"),
    [
        (GOOD, 1.0),
        (f"Here it is:\n```python\n{GOOD}```\nDone.", 1.0),
        ("def add(a, b):\n    return a - b\n", 0.0),
        ("def add(a, b)\n    return a + b\n", 0.0),
        ("", 0.0),
        ("print('passed'); raise SystemExit(0)", 0.0),  # an exit code is no verdict
        ("import os\nos._exit(0)", 0.0),
        (
            "import os\nos.write(1, b'-'); os.write(3, b'-'); os._exit(97)",
            0.0,
        ),  # nor can it tear the wall down
        ("print(1)\n" + GOOD, 1.0),
    ],
)
def test_code_passes_if_its_tests_run_through(network, code, score):
    assert run(code, network) == score


@pytest.mark.parametrize(
    "attempt",
    [
        "open({folder!r} + '/evil', 'w')",
        "import os; os.open({folder!r} + '/evil', os.O_CREAT | os.O_WRONLY)",
        "import os; os.mkdir({folder!r} + '/evil')",
        "import os; os.unlink({folder!r} + '/kept')",
        "import os; os.rename({folder!r} + '/kept', {folder!r} + '/evil')",
        "import os; os.truncate({folder!r} + '/kept', 0)",
        "import os; os.chmod({folder!r} + '/kept', 0)",
        "import socket; socket.socket()",
        "import socket; socket.create_connection(('127.0.0.1', 9), timeout=1)",
        "import os; os.fork()",
        "import os; os.execv('/bin/true', ['true'])",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.kill({pid}, 9)",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "x = bytearray(2 ** 30)",
    ],
)
def test_what_code_may_not_do_raises_in_it(network, tmp_path, attempt):
    """The attempt raises, is caught, and the tests pass: so nothing but the attempt failed."""
    (tmp_path / "kept").write_text("kept")
    bystander = subprocess.Popen(["sleep", "30"])
    try:
        line = attempt.format(folder=str(tmp_path), pid=bystander.pid)
        code = (
            f"try:\n    {line}\n    did = True\nexcept (OSError, MemoryError, ValueError):\n    did = False\n"
        )
        assert run(code, network, tests="assert not did") == 1.0
        assert bystander.poll() is None
        assert [path.name for path in tmp_path.iterdir()] == ["kept"]
        assert (tmp_path / "kept").read_text() == "kept"
    finally:
        bystander.kill()
        bystander.wait()


def test_code_that_does_not_end_is_killed(network):
    start = time.monotonic()
    assert run("while True:\n    pass\n", network, seconds=0.5) == 0.0
    assert time.monotonic() - start < 3.0
    assert run("import time\ntime.sleep(60)\n", network, seconds=0.5) == 0.0


def test_threads_and_arithmetic_still_work(network):
    code = (
        "import threading, math\nt = threading.Thread(target=print)\nt.start()\nt.join()\nx = math.gcd(4, 6)"
    )
    assert run(code, network, tests="assert x == 2") == 1.0


def test_nothing_is_left_in_the_folder_for_temporary_files(network, monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    run(GOOD, network)
    assert not list(Path(tmp_path).iterdir())


def test_a_machine_without_the_wall_is_refused(monkeypatch):
    monkeypatch.setitem(sandbox.NAMESPACES, "namespace", 0x1)  # no such namespace
    with pytest.raises(
        SandboxUnavailable,
        match=r"'namespace', and this machine cannot.*Set it to 'seccomp'.*Invalid argument",
    ):
        require_sandbox("namespace")


def test_code_is_the_last_fenced_block_or_all_of_it():
    assert extract_code("a = 1") == "a = 1"
    assert extract_code("```\na = 1\n```") == "a = 1\n"
    assert extract_code("```py\na = 1\n``` then ```python\nb = 2\n``` end") == "b = 2\n"
    assert extract_code("```python\nb = 2\n") == "```python\nb = 2\n"
