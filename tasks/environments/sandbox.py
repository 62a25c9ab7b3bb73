"""Python code of a policy, run in a child process: no network, no files to write, nothing that outlives it.

A seccomp filter refuses the system calls that make sockets, open files for writing, change the file system,
start or signal other processes, trace, mount, or lift limits. With ``namespace`` the child also gets a user,
network and process namespace of its own; ``seccomp`` does without, where containers forbid namespaces. A
machine that cannot build the wall that the configuration names is refused at start.

What it does not do: the child reads what the account that runs it may read (and can tell nobody).
"""

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Literal

from tasks.environments import wall

Network = Literal["namespace", "seccomp"]
SAID_BYTES = 1024
"""Nothing is read after so many: code that floods the pipe of the verdict would fill the scorer's memory."""
START_SECONDS = 20.0
"""Until the wall stands, 20 ms on a machine at rest. The time of the code begins then: a busy machine is no
fault of a response and must not make it a wrong one."""

NAMESPACES: dict[Network, int] = {
    "namespace": wall.CLONE_NEWUSER | wall.CLONE_NEWNET | wall.CLONE_NEWIPC | wall.CLONE_NEWPID,
    "seccomp": 0,
}


class SandboxUnavailable(RuntimeError):
    """This machine cannot keep code off the network in the way that was asked for."""


def passes_tests(tests: str, response: str, *, network: Network, seconds: float) -> float:
    """1.0 if the response's code runs and then the tests raise nothing, else 0.0.

    The verdict is a random word, so printing "passed" or exiting with 0 is no pass. Tests run in the process
    of the code all the same: code that sets out to attack them (patching builtins, walking frames) can.
    """
    word = os.urandom(16).hex()
    said = run_python(extract_code(response), tests, word=word, network=network, seconds=seconds)
    return float(said == word)


def extract_code(response: str) -> str:
    """The last fenced block, or the whole response."""
    parts = response.split("```")
    if len(parts) < 3:
        return response
    block = parts[-2] if len(parts) % 2 else parts[-1]
    first, _, rest = block.partition("\n")
    return rest if first.strip() in ("", "py", "python", "python3") else block


def run_python(code: str, tests: str, *, word: str, network: Network, seconds: float) -> str:
    """What the child says on its verdict pipe; empty when it failed, was killed or took too long."""
    source = "\0".join(text.replace("\0", "") for text in (word, code, tests))
    folder = tempfile.mkdtemp(prefix="sandbox-")
    program = [os.path.realpath(sys.executable), "-I", "-S", os.path.realpath(wall.__file__)]
    try:
        with subprocess.Popen(
            [*program, str(NAMESPACES[network]), str(seconds), str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder, bufsize=0,
            env={"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8"}, start_new_session=True,
        ) as child:  # fmt: skip
            try:
                said = _converse(child, source.encode(errors="replace"), seconds)
            finally:
                _kill(child)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if said is None:
        return ""
    if not said.startswith(wall.STANDS):
        reason = said[1:256].decode(errors="replace")
        reason = reason or f"its Python ended before the wall stood, or took over {START_SECONDS:g} s for it"
        raise SandboxUnavailable(f"{_remedy(network)} ({reason})")
    return said.removeprefix(wall.STANDS)[:256].decode(errors="replace")


def _converse(child: subprocess.Popen[bytes], source: bytes, seconds: float) -> bytes | None:
    """What the child says once it is told ``source``, or the first of it: nothing if the wall did not stand
    in time, None if the code then took longer than ``seconds``."""
    assert child.stdin is not None and child.stdout is not None
    deadline, told, said = time.monotonic() + START_SECONDS, 0, b""
    os.set_blocking(child.stdin.fileno(), False)
    with selectors.DefaultSelector() as pipes:
        pipes.register(child.stdin, selectors.EVENT_WRITE)
        pipes.register(child.stdout, selectors.EVENT_READ)
        while len(said) < SAID_BYTES:
            left = deadline - time.monotonic()
            if left <= 0:
                return None if said else said
            ready = [key.fileobj for key, _ in pipes.select(left)]
            if child.stdin in ready:
                with contextlib.suppress(BrokenPipeError):  # it has ended, and says so on the other pipe
                    told += os.write(child.stdin.fileno(), source[told : told + 2**16])
                    if told < len(source):
                        continue
                pipes.unregister(child.stdin)
                child.stdin.close()
            if child.stdout in ready:
                some = os.read(child.stdout.fileno(), SAID_BYTES)
                if not some:
                    break
                if not said:
                    deadline = time.monotonic() + seconds
                said += some
    return said


def require_sandbox(network: Network) -> None:
    """Raise where this machine cannot build the wall, or the wall does not hold."""
    if os.uname().machine != "x86_64":
        raise SandboxUnavailable(
            f"code runs in a sandbox on x86_64 only, got {os.uname().machine}. Score there, or with another "
            "verifier."
        )
    tests = (
        "import socket\n"
        "try:\n"
        "    socket.create_connection(('127.0.0.1', 9), timeout=1)\n"
        "except ConnectionRefusedError:\n"
        "    raise AssertionError('the network of the machine answered')\n"
        "except OSError:\n"
        "    pass\n"
    )
    try:
        said = run_python("", tests, word="held", network=network, seconds=20.0)
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailable(f"{_remedy(network)} ({error})") from None
    if said != "held":
        raise SandboxUnavailable(_remedy(network))


def _remedy(network: Network) -> str:
    other = "seccomp" if network == "namespace" else "namespace"
    return (
        f"code must run without a network by prompt_files.network '{network}', and this machine cannot do "
        f"that. Set it to '{other}', allow it (user namespaces: sysctl kernel.unprivileged_userns_clone, "
        "user.max_user_namespaces, or the container's seccomp profile), or score with another verifier."
    )


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
