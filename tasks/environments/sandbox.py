"""Python code of a policy, run in a child process: no network, no files to write, nothing that outlives it.

A seccomp filter refuses the system calls that make sockets, open files for writing, change the file system,
start or signal other processes, trace, mount, or lift limits. With ``namespace`` the child also gets a user,
network and process namespace of its own; ``seccomp`` does without, where containers forbid namespaces. A
machine that cannot build the wall that the configuration names is refused at start.

What it does not do: the child reads what the account that runs it may read (and can tell nobody).
"""

import contextlib
import ctypes
import errno
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from functools import partial
from typing import Literal

Network = Literal["namespace", "seccomp"]

MEMORY_BYTES = 512 * 2**20
REFUSED_EXIT = 97
CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWPID, CLONE_NEWIPC = 0x10000000, 0x40000000, 0x20000000, 0x08000000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 38, 22, 2
DENIED_X86_64 = {
    "sockets": (41, 42, 53, 425),  # socket, connect, socketpair, io_uring_setup
    "processes": (57, 58, 62, 200, 234, 129, 297, 424, 434, 101, 310, 311),  # fork, kill, ptrace
    "files": (76, 82, 83, 84, 85, 86, 87, 88, 90, 91, 92, 93, 94, 133, 188, 189, 190, 197, 198, 199, 258, 259,
              260, 263, 264, 265, 266, 268, 280, 304, 316, 437, 452),  # rename, unlink, chmod, openat2, ...
    "machine": (155, 160, 161, 163, 164, 165, 166, 167, 169, 170, 172, 175, 176, 227, 246, 250, 272, 298, 302,
                308, 313, 321, 323),  # mount, chroot, setrlimit, unshare, setns, modules, bpf, ...
}  # fmt: skip
OPEN, OPENAT, CLONE, CLONE3 = 2, 257, 56, 435
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CLONE_THREAD = 0x00010000
X86_64_ARCH = 0xC000003E

RUNNER = """
import os, sys
word, code, tests = sys.stdin.read().split("\\x00")
verdict = os.dup(1)
os.dup2(2, 1)
scope = {"__name__": "__main__"}
exec(compile(code, "<response>", "exec"), scope)
exec(compile(tests, "<tests>", "exec"), scope)
os.write(verdict, word.encode())
"""


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
    try:
        child = subprocess.Popen(
            [os.path.realpath(sys.executable), "-I", "-S", "-c", RUNNER],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8"}, close_fds=True,
            start_new_session=True, preexec_fn=partial(_confine, network, _limits(seconds), _filter()),
        )  # fmt: skip
        try:
            said, _ = child.communicate(source.encode(errors="replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            said = b""
        finally:
            _kill(child)
        if child.returncode == REFUSED_EXIT:
            raise SandboxUnavailable(_remedy(network))
        return said[:256].decode(errors="replace")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
        f"that. Set it to '{other}', allow it (user namespaces: sysctl kernel.unprivileged_userns_clone, or "
        "the container's seccomp profile), or score with another verifier."
    )


def _limits(seconds: float) -> dict[int, int]:
    """That of memory is the last one: the child is as large as its parent until it runs Python, and gets no
    more from then on."""
    return {
        resource.RLIMIT_CPU: int(seconds) + 1, resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_STACK: 16 * 2**20, resource.RLIMIT_AS: MEMORY_BYTES,
    }  # fmt: skip


def _confine(network: Network, limits: dict[int, int], program: ctypes.Array[ctypes.c_char]) -> None:
    """In the child, before it runs Python. An exception here is one of ``Popen`` in the parent."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if network == "namespace":
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWPID):
            os._exit(REFUSED_EXIT)
        if os.fork():  # a new process namespace begins with the next child; when that ends, so does all in it
            os.closerange(0, 1024)  # the parent waits for the end of these pipes
            _, status = os.wait()
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    header = ctypes.create_string_buffer(struct.pack("HP", len(program) // 8, ctypes.addressof(program)))
    where = ctypes.c_ulong(ctypes.addressof(header))
    for name, value in limits.items():
        _, most = resource.getrlimit(name)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(name, (value, value))
    _check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, where, 0, 0))


def _filter() -> ctypes.Array[ctypes.c_char]:
    """Instructions of the filter of system calls, 8 bytes each; made by the parent, which may get memory."""
    load, equal, has, over, answer = 0x20, 0x15, 0x45, 0x35, 0x06
    allow, kill, refuse, missing = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    number, architecture = (load, 0, 0, 0), (load, 0, 0, 4)
    program = [architecture, (equal, 1, 0, X86_64_ARCH), (answer, 0, 0, kill), number]
    program += [(over, 0, 1, 0x40000000), (answer, 0, 0, kill)]  # x32: other numbers for the same calls
    for denied in DENIED_X86_64.values():
        for call in denied:
            program += [(equal, 0, 1, call), (answer, 0, 0, refuse)]
    program += [(equal, 0, 1, CLONE3), (answer, 0, 0, missing)]  # the C library then uses clone
    for call, argument, bits, if_set, if_not in ((OPEN, 1, WRITES, 0, 1), (OPENAT, 2, WRITES, 0, 1),
                                                 (CLONE, 0, CLONE_THREAD, 1, 0)):  # fmt: skip
        program += [(equal, 0, 4, call), (load, 0, 0, 16 + 8 * argument), (has, if_set, if_not, bits)]
        program += [(answer, 0, 0, refuse), number]
    program.append((answer, 0, 0, allow))
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    return ctypes.create_string_buffer(code, len(code))


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
