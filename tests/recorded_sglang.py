"""A small HTTP server that answers as SGLang was recorded to, with the faults that a test asks for."""

import json
import select
import socket
import threading
import time
import zlib
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tasks.engine.sglang import Fleet
from tasks.sglang_config import SglangConfig


def answer(**meta):
    entries = [[-0.5, 9, None], [-0.25, 1, None]]
    return {
        "output_ids": [9, 1],
        "meta_info": {
            "id": "r", "output_token_logprobs": entries, "finish_reason": {"type": "stop", "matched": 1},
            "weight_version": "7", **meta,
        },
    }  # fmt: skip


class Recorded(BaseHTTPRequestHandler):
    """Answers as SGLang 0.5.17 does, with the faults that a test asks for."""

    protocol_version = "HTTP/1.1"

    def setup(self):
        super().setup()
        self.server.state["connections"] = self.server.state.get("connections", 0) + 1

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        state = self.server.state
        if state.get("is_dead"):
            return self.hang_up()
        time.sleep(state.get("thinks_seconds", 0.0))
        if self.path.startswith("/v1/loads"):
            return self.reply({"version": state.get("build", "0.5.17")})
        return self.reply({"is_generation": True, "weight_version": state["version"]})

    def do_POST(self):
        state = self.server.state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if state.get("is_dead"):
            return self.hang_up()
        state.setdefault("told", []).append(self.path.lstrip("/"))
        if self.path in ("/pause_generation", "/continue_generation", "/freeze_gc"):
            return self.reply({})
        if self.path == "/update_weights_from_disk":
            state.setdefault("updates", []).append(body)
            state.setdefault("running_at_update", []).append(state.get("running", 0))
            time.sleep(state.get("update_seconds", 0.0))
            if state.get("refuses_updates"):
                return self.reply({"success": False, "message": "torn"}, 400)
            state["version"] = state.get("claims", body["weight_version"])
            if not state.get("keeps_weights"):
                files = sorted(Path(body["model_path"]).glob("*.safetensors"))
                content = b"".join(path.read_bytes() for path in files)
                state["weights"] = zlib.crc32(content) + state.get("drift", 0)
            return self.reply({"success": True})
        if self.path == "/abort_request":
            state.setdefault("aborted", []).append("all" if body.get("abort_all") else body["rid"])
            return self.reply({})
        state.setdefault("asked", []).extend(body["rid"])
        if body["rid"][0].startswith("probe-"):
            values = [[-float(state["weights"]), token, None] for token in body["input_ids"][0]]
            return self.reply([{"meta_info": {"input_token_logprobs": values}}])
        state["generated"] = state.get("generated", 0) + 1
        held = state.setdefault("held", set())
        if twice := held.intersection(body["rid"]):
            return self.reply({"error": {"message": f"Duplicate request ID detected: {min(twice)}"}}, 400)
        if state["generated"] in state.get("stumbles", ()):
            held.update(body["rid"])
            return self.hang_up()
        if state.get("dies_at") == state["generated"]:
            state["is_dead"] = True
            return self.hang_up()
        if len(body["input_ids"][0]) > state.get("context", 10**6):
            return self.reply({"error": {"message": "longer than the model's context length"}}, 400)
        state["running"] = state.get("running", 0) + 1
        time.sleep(state.get("seconds", 0.0))
        state["running"] -= 1
        meta = {"weight_version": state.get("lies", state["version"])}
        is_ended = state.get("aborts_until", 0) >= state["generated"]
        stop = {"type": "abort", "message": "ended"} if is_ended else {"type": "stop", "matched": 1}
        reason = state.get("reason", stop)
        answers = [answer(**meta, id=rid, finish_reason=reason) for rid in body["rid"]]
        if state.get("tells_prompts"):  # each answer begins with the last token of its prompt
            for given, prompt in zip(answers, body["input_ids"], strict=True):
                given["output_ids"][0] = given["meta_info"]["output_token_logprobs"][0][1] = prompt[-1]
        return self.reply(answers)

    def hang_up(self):
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def reply(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class RecordedRouter(Recorded):
    """SGLang's router 0.3.2, as far as versions go: who its workers are. It samples by itself, version 7."""

    def do_GET(self):
        workers = [{"id": name, "url": url} for name, url in self.server.state["workers"].items()]
        return self.reply({"workers": workers})

    def do_POST(self):
        state = self.server.state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/generate":
            state["generated"] = state.get("generated", 0) + 1
            if state["generated"] in state.get("stumbles", ()):
                return self.hang_up()
            time.sleep(state.get("seconds", 0.0))
            if select.select([self.connection], [], [], 0)[0]:  # who asked has hung up
                state["given_up"] = state.get("given_up", 0) + 1
                return self.hang_up()
            return self.reply(answer(id=body["rid"]))
        state["workers"][f"w{len(state['workers'])}"] = body["url"]
        return self.reply({"status": "accepted"}, 202)  # it asks the worker in its own time

    def do_DELETE(self):
        del self.server.state["workers"][self.path.rpartition("/")[2]]
        return self.reply({"status": "accepted"}, 202)


@contextmanager
def recorded(kind=Recorded, **state):
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    server.state = {"version": "none", "weights": 0, **state}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def attached(*servers, **changes):
    urls = tuple(f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    values = {"device": "cpu", "attention": "torch_native", "cuda_graphs": False, "max_running_requests": 8}
    return Fleet(SglangConfig(urls=list(urls), **(values | changes)), dtype="float32", folder=Path()).view()
