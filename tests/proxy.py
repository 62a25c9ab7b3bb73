"""A real HTTP proxy before the S3 server, which breaks requests as networks and clouds do."""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass(kw_only=True)
class Fault:
    """What happens to the requests that match, at most ``times`` of them, after the first ``after``."""

    kind: str
    """``error``, ``reset`` in the middle of the request, ``cut`` in the middle of the answer, ``slow``, or
    ``lost``: the server does it, and the answer never comes."""
    method: str = ""
    path: str = ""
    status: int = 503
    code: str = "SlowDown"
    times: int = 1_000_000
    after: int = 0
    seconds: float = 0.05
    hits: int = field(default=0, init=False)

    def strikes(self, method: str, path: str) -> bool:
        if self.method not in ("", method) or self.path not in path:
            return False
        self.hits += 1
        return self.after < self.hits <= self.after + self.times


class Proxy:
    """Forwards everything to ``target`` except what a fault strikes."""

    def __init__(self, target: str) -> None:
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.host = urlsplit(target).netloc
        handler = type("Handler", (_Handler,), {"proxy": self})

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def clear(self) -> None:
        self.faults.clear()

    def count(self, matches: Callable[[str, str], bool]) -> int:
        return sum(matches(*request) for request in self.requests)


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy
    protocol_version = "HTTP/1.1"

    def serve(self) -> None:
        self.proxy.requests.append((self.command, self.path))
        fault = next((f for f in self.proxy.faults if f.strikes(self.command, self.path)), None)
        kind = fault.kind if fault else ""
        length = int(self.headers.get("Content-Length") or 0)
        if kind == "reset":
            self.rfile.read(length // 2)
            return self.abort()
        if fault and kind == "slow":
            time.sleep(fault.seconds)
        body = self.rfile.read(length)
        if fault and kind == "error":
            text = f"<Error><Code>{fault.code}</Code><Message>by the proxy</Message></Error>"
            return self.answer(fault.status, {}, b"" if self.command == "HEAD" else text.encode())
        upstream = http.client.HTTPConnection(self.proxy.host, timeout=60)
        upstream.request(self.command, self.path, body, dict(self.headers))
        response = upstream.getresponse()
        data = response.read()
        upstream.close()
        if kind == "lost":
            return self.abort()
        self.answer(response.status, dict(response.headers), data, cut=kind == "cut")

    def answer(self, status: int, headers: dict, data: bytes, *, cut: bool = False) -> None:
        self.send_response_only(status)
        hop = {"transfer-encoding", "connection", "content-length"}
        length = headers.get("Content-Length") if self.command == "HEAD" else len(data)
        for name, value in headers.items():
            if name.lower() not in hop:
                self.send_header(name, value)
        self.send_header("Content-Length", str(length or 0))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else b"" if self.command == "HEAD" else data)
        if cut:
            self.abort()

    def abort(self) -> None:
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the connection broken on purpose
            super().handle()

    def finish(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def log_message(self, format: str, *args: object) -> None: ...

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = serve
