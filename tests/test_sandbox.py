"""Code of a policy in a child process. Blind spot: x86_64 only, and code that attacks the tests it is run
with."""

import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import grpc
import pytest

from tasks.environments import sandbox
from tasks.environments.sandbox import SandboxUnavailable, extract_code, passes_tests, require_sandbox

GOOD = "def add(a, b):\n    return a + b\n"
TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0\n"
STAYS = """
import ctypes, time
libc = ctypes.CDLL(None)
libc.prctl(1, 0, 0, 0, 0)  # the parent's death is none of its business
libc.setsid()  # nor is it of its group
time.sleep(20)
"""


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
        ("import os\nos.write(1, b'-'); os.write(3, b'-'); os._exit(97)", 0.0),  # nor does it fell the wall
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
        "import os; os.setsid()",
        "import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, {pid})",
        "import os; os.sched_setaffinity({pid}, [0])",
        "import os; os.memfd_create('evil')",
        "import ctypes; bytes(ctypes.CDLL(None).prctl(1, 0, 0, 0, 0))",  # bytes(-1) raises
        "import ctypes; bytes(ctypes.CDLL(None).shmget(0, 4096, 0o600))",
        "import ctypes; bytes(ctypes.CDLL(None).syscall(235, b'{folder}/kept', None))",  # utimes
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


def left_behind(parent):
    """Processes behind a wall that ``parent`` started: it is named in how they are called."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if sandbox.wall.__file__.encode() in words and str(parent).encode() in words:
            found.append(path.parent.name)
    return found


def nothing_stays(parent):
    end = time.monotonic() + 3.0
    while left_behind(parent) and time.monotonic() < end:
        time.sleep(0.02)
    return not left_behind(parent)


def test_no_code_outlives_its_time(network):
    assert run(STAYS, network, seconds=0.5) == 0.0
    assert nothing_stays(os.getpid())


def test_no_code_outlives_who_asked_for_it(network):
    """It was alive 20 s after a killed scorer, where it had asked for no signal at its parent's death."""
    program = f"from tasks.environments.sandbox import *; passes_tests('', {STAYS!r}, network={network!r}, "
    scorer = subprocess.Popen([sys.executable, "-c", f"{program} seconds=30.0)"])
    end = time.monotonic() + 10.0
    while not left_behind(scorer.pid) and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.3)  # it sleeps by now
    assert left_behind(scorer.pid)
    scorer.kill()
    scorer.wait()
    assert nothing_stays(scorer.pid)


def test_no_code_runs_for_one_who_has_ended_already(network):
    """Python takes 10 ms to start, and who is killed in them sends no signal afterwards."""
    call = [sys.executable, "-I", "-S", sandbox.wall.__file__, str(sandbox.NAMESPACES[network]), "3"]
    said = subprocess.run([*call, "1"], input=b"word\0\0", capture_output=True)
    assert said.stdout.startswith(b"-") and b"process 1, which started this one, has ended" in said.stdout
    said = subprocess.run([*call, str(os.getpid())], input=b"word\0\0", capture_output=True)
    assert said.stdout == b"+word"


def test_code_that_floods_the_pipe_of_its_verdict_fills_no_memory(network):
    """Two seconds of it were 3.2 GB in the scorer."""
    tracemalloc.start()
    try:
        assert run("import os\nfor _ in range(512): os.write(3, bytes(2**16))", network) == 0.0
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [1, 2**16, 3 * 2**20])
def test_code_arrives_whole(network, size):
    assert run(f"x = {'é' * size!r}", network, tests=f"assert len(x) == {size}") == 1.0


def test_a_wall_that_never_stood_is_no_verdict_on_the_code(network, monkeypatch, tmp_path):
    """A Python that cannot start made every response a wrong one."""
    (tmp_path / "wall.py").write_text("import no_such_module")
    monkeypatch.setattr(sandbox.wall, "__file__", str(tmp_path / "wall.py"))
    with pytest.raises(SandboxUnavailable, match="its Python ended before the wall stood"):
        run(GOOD, network)


def test_the_time_of_the_code_begins_when_the_wall_stands(network, monkeypatch, tmp_path):
    """A busy machine made right answers wrong ones; one that builds no wall at all makes none."""
    slow = tmp_path / "slow.py"
    source = Path(sandbox.wall.__file__).read_text()
    slow.write_text(source.replace('__main__":\n', '__main__":\n    import time; time.sleep(1)\n', 1))
    monkeypatch.setattr(sandbox.wall, "__file__", str(slow))
    assert run(GOOD, network, seconds=0.5) == 1.0
    monkeypatch.setattr(sandbox, "START_SECONDS", 0.2)
    with pytest.raises(SandboxUnavailable, match=r"or took over 0\.2 s"):
        run(GOOD, network)


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
