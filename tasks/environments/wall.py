"""A program that runs a policy's code behind a wall which it builds around itself first.

    python -I -S wall.py NAMESPACES SECONDS PARENT (stdin: a word, the code and its tests, apart by NUL)

It says ``STANDS`` on stdout once the wall stands, or ``FELL`` and why; then the word if code and tests raised
nothing. ``tasks.environments.sandbox`` starts it.

A program, so that nothing is done in a fork of who starts it: gRPC starts threads in each fork of a process
that has a channel, with threads no user namespace can be entered, and Python in a fork of a process with more
threads may wait for a lock for ever.
"""

import ctypes
import errno
import os
import resource
import signal
import struct
import sys

STANDS, FELL = b"+", b"-"
MEMORY_BYTES = 512 * 2**20
CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWPID, CLONE_NEWIPC = 0x10000000, 0x40000000, 0x20000000, 0x08000000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 38, 22, 2
DENIED_X86_64 = {
    "sockets": (41, 42, 53, 425),  # socket, connect, socketpair, io_uring_setup
    "processes": (57, 58, 59, 322, 62, 200, 234, 129, 297, 424, 434, 438, 101, 310, 311,  # fork, exec, kill
                  109, 112, 141, 142, 144, 203, 251, 314),  # setpgid, setsid; priorities and cores of others
    "files": (76, 82, 83, 84, 85, 86, 87, 88, 90, 91, 92, 93, 94, 132, 133, 188, 189, 190, 197, 198, 199, 235,
              258, 259, 260, 261, 263, 264, 265, 266, 268, 280, 304, 316, 437, 452),  # rename, unlink, chmod
    "memory": (29, 64, 68, 240, 248, 249, 319, 447),  # shmget, ..., memfd_create: no limit counts, some stays
    "machine": (155, 160, 161, 163, 164, 165, 166, 167, 169, 170, 172, 175, 176, 227, 246, 250, 272, 298, 302,
                308, 313, 321, 323),  # mount, chroot, setrlimit, unshare, setns, modules, bpf, ...
}  # fmt: skip
OPEN, OPENAT, CLONE, CLONE3, FCNTL, PRCTL = 2, 257, 56, 435, 72, 157
DENIED_ARGUMENTS = (
    (PRCTL, 0, PR_SET_PDEATHSIG),  # without it code would outlive who asked for it
    (FCNTL, 1, 8), (FCNTL, 1, 15),  # F_SETOWN, F_SETOWN_EX: signals by way of a pipe
)  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CLONE_THREAD = 0x00010000
X86_64_ARCH = 0xC000003E


def main(namespaces: int, seconds: float, parent: int) -> None:
    try:
        _build(namespaces, seconds, parent)
    except (OSError, ValueError) as error:
        os.write(1, FELL + str(error).encode())
        return
    os.write(1, STANDS)
    _run()


def _run() -> None:
    word, code, tests = sys.stdin.read().split("\0")
    verdict = os.dup(1)
    os.dup2(2, 1)
    scope = {"__name__": "__main__"}
    exec(compile(code, "<response>", "exec"), scope)
    exec(compile(tests, "<tests>", "exec"), scope)
    os.write(verdict, word.encode())


def _build(namespaces: int, seconds: float, parent: int) -> None:
    """From here on this process is inside, in a child of the one that was started where it has namespaces.

    Raises:
        OSError: this machine does not let it, or the parent has ended.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended while Python started, and no signal comes any more
        raise ProcessLookupError(errno.ESRCH, f"process {parent}, which started this one, has ended")
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if namespaces:
        _check(libc.unshare(namespaces))
        if os.fork():  # a new process namespace begins with the next child; when that ends, so does all in it
            _, status = os.wait()
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    program = _filter()
    header = ctypes.create_string_buffer(struct.pack("HP", len(program) // 8, ctypes.addressof(program)))
    where = ctypes.c_ulong(ctypes.addressof(header))
    limits = {
        resource.RLIMIT_CPU: int(seconds) + 1, resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_STACK: 16 * 2**20, resource.RLIMIT_AS: MEMORY_BYTES,
    }  # fmt: skip
    for name, value in limits.items():
        _, most = resource.getrlimit(name)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(name, (value, value))
    _check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, where, 0, 0))


def _filter() -> ctypes.Array[ctypes.c_char]:
    """Instructions of the filter of system calls, 8 bytes each."""
    load, equal, has, over, answer = 0x20, 0x15, 0x45, 0x35, 0x06
    arguments = [(call, argument, equal, value, 0, 1) for call, argument, value in DENIED_ARGUMENTS]
    arguments += [
        (OPEN, 1, has, WRITES, 0, 1),
        (OPENAT, 2, has, WRITES, 0, 1),
        (CLONE, 0, has, CLONE_THREAD, 1, 0),
    ]
    allow, kill, refuse, missing = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    number, architecture = (load, 0, 0, 0), (load, 0, 0, 4)
    program = [architecture, (equal, 1, 0, X86_64_ARCH), (answer, 0, 0, kill), number]
    program += [(over, 0, 1, 0x40000000), (answer, 0, 0, kill)]  # x32: other numbers for the same calls
    for denied in DENIED_X86_64.values():
        for call in denied:
            program += [(equal, 0, 1, call), (answer, 0, 0, refuse)]
    program += [(equal, 0, 1, CLONE3), (answer, 0, 0, missing)]  # the C library then uses clone
    for call, argument, test, value, if_so, if_not in arguments:
        program += [(equal, 0, 4, call), (load, 0, 0, 16 + 8 * argument), (test, if_so, if_not, value)]
        program += [(answer, 0, 0, refuse), number]
    program.append((answer, 0, 0, allow))
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    return ctypes.create_string_buffer(code, len(code))


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
