"""A stand-in for EC2's instance metadata service, as strict about tokens as the real one (IMDSv2)."""

import json
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class MetadataServer:
    """Answers 404 until a notice is set, 401 without a valid token."""

    def __init__(self) -> None:
        self.token, self.answers, self.requests = "token-1", {}, []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                outer.requests.append(("PUT", self.path))
                is_asked_well = self.path == "/latest/api/token" and self.headers.get(
                    "X-aws-ec2-metadata-token-ttl-seconds"
                )
                self._reply(200 if is_asked_well else 400, outer.token.encode())

            def do_GET(self) -> None:
                outer.requests.append(("GET", self.path))
                if self.headers.get("X-aws-ec2-metadata-token") != outer.token:
                    return self._reply(401, b"")
                body = outer.answers.get(self.path.removeprefix("/latest/meta-data/"))
                return self._reply(404, b"") if body is None else self._reply(200, body)

            def _reply(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def reclaim(self, *, in_seconds: float) -> None:
        at = datetime.now(UTC) + timedelta(seconds=in_seconds)
        notice = {"action": "terminate", "time": f"{at:%Y-%m-%dT%H:%M:%SZ}"}
        self.answers["spot/instance-action"] = json.dumps(notice).encode()

    def recommend_rebalance(self) -> None:
        self.answers["events/recommendations/rebalance"] = b'{"noticeTime": "2026-01-01T00:00:00Z"}'

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
