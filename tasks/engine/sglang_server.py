"""An SGLang server of our own: its arguments, and a process that lives as long as the worker that uses it.

The server works in a folder outside the repository: its import of a package called ``kernels`` must not find
ours. ``server.log`` there keeps what it said.
"""

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

from tasks.embedded.ports import HOST
from tasks.embedded.process import Launch, Server, ensure_running, leave
from tasks.sglang_config import SglangConfig

GRACE_SECONDS = 5.0
"""From SIGTERM to SIGKILL: whoever still waits for tokens has ended, or there would be a user."""
STOP_SECONDS = 60.0


def server_arguments(
    config: SglangConfig, *, model: Path, version: int, dtype: str, port: int, routing: bool
) -> list[str]:
    """Arguments of ``sglang.launch_server`` (0.5.17 and newer) for a configuration; ids in, ids out."""
    values: dict[str, object] = {
        "model-path": model,
        "weight-version": version,
        "dtype": dtype,
        "host": HOST,
        "port": port,
        "device": config.device,
        "tp-size": config.tp,
        "ep-size": config.ep,
        "attention-backend": config.attention,
        "sampling-backend": config.sampling,
        "moe-runner-backend": config.moe_runner,
        "grammar-backend": "none",
        "mem-fraction-static": config.memory_share,
        "max-running-requests": config.max_running_requests,
        "max-total-tokens": config.max_total_tokens or None,
        "context-length": config.context_length or None,
        "quantization": "fp8" if config.quantization == "fp8" else None,  # blocks are in config.json
        "moe-a2a-backend": None if config.moe_a2a == "none" else config.moe_a2a,
        "deepep-mode": config.deepep_mode if config.moe_a2a == "deepep" else None,
        "dp-size": config.tp if config.dp_attention else None,
    }
    flags = {
        "skip-tokenizer-init": True,
        "skip-server-warmup": True,
        "enable-dp-attention": config.dp_attention,
        "enable-deterministic-inference": config.deterministic,
        "enable-return-routed-experts": routing,
        "disable-cuda-graph": not config.cuda_graphs,
        "disable-overlap-schedule": config.device == "cpu",
    }
    arguments = [
        text for name, value in values.items() if value is not None for text in (f"--{name}", str(value))
    ]
    return arguments + [f"--{name}" for name, is_set in flags.items() if is_set]


class LaunchedServer:
    """One server in ``folder``; ``start`` after it died brings it back, on its port if that is free."""

    def __init__(self, config: SglangConfig, folder: Path, *, dtype: str, routing: bool):
        self.config, self.folder, self.dtype, self.routing = config, folder, dtype, routing

    def start(self, model: Path, version: int) -> str:
        """Serve the policy in ``model``; returns the address. The error quotes an unknown argument."""

        def plan(folder: Path, ports: list[int]) -> Launch:
            arguments = server_arguments(
                self.config, model=model.absolute(), version=version, dtype=self.dtype, port=ports[0],
                routing=self.routing,
            )  # fmt: skip
            python = self.config.python or sys.executable
            return Launch(argv=[python, "-m", "sglang.launch_server", *arguments], env=self.environment())

        server = Server(
            name="SGLang",
            port_field="the port of an SGLang server",
            num_ports=1,
            plan=plan,
            is_ready=lambda folder, ports: answers(f"http://{HOST}:{ports[0]}"),
            grace_s=GRACE_SECONDS,
            deadline_s=self.config.startup_seconds,
        )
        (port,) = ensure_running(server, self.folder)
        return f"http://{HOST}:{port}"

    def stop(self) -> None:
        leave(self.folder, deadline_s=STOP_SECONDS)

    def environment(self) -> dict[str, str]:
        """Ours without PYTHONPATH, which would put this project's folders before the server's packages."""
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        cpu = {"SGLANG_USE_CPU_ENGINE": "1"} if self.config.device == "cpu" else {}
        return inherited | {"HF_HUB_OFFLINE": "1"} | cpu | self.config.environment


def answers(url: str) -> bool:
    """Whether the server has started: it knows its model by then."""
    try:
        with urllib.request.urlopen(f"{url}/model_info", timeout=5) as response:
            return bool(json.load(response)["is_generation"])
    except (urllib.error.URLError, OSError, ValueError, KeyError):
        return False
