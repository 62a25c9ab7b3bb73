"""Ports on loopback for servers that start a little later."""

import random
import socket
from collections.abc import Sequence

HOST = "127.0.0.1"
# Below Linux's range for outgoing connections (32768-60999): a server that binds two seconds after the choice
# does not find its port taken by somebody's connection.
PORT_RANGE = (15000, 32000)


def free_ports(number: int, *, preferred: Sequence[int] = ()) -> list[int]:
    """The preferred ones that are free, then others, ``number`` in all."""
    ports = [port for port in preferred if is_free(port)]
    while len(ports) < number:
        # a campaign that seeds the global generator would choose the same ports in every process
        candidate = random.SystemRandom().randrange(*PORT_RANGE)
        if candidate not in ports and is_free(candidate):
            ports.append(candidate)
    return ports


def is_free(port: int) -> bool:
    """Whether a server may listen there; a connection in TIME_WAIT does not count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def accepts(port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection((HOST, port), timeout=2.0).close()
    except OSError:
        return False
    return True


def answers(path: str) -> bool:
    """Whether somebody listens at a socket of this machine's file system."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
