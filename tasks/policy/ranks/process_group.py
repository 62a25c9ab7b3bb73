"""The ranks of a training, joined: a process group whose collectives have a deadline."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from tasks.config import CampaignConfig
from tasks.policy.libraries import nccl_warnings, record_nccl_log
from tasks.say import say


def device_of(config: CampaignConfig) -> torch.device:
    """This rank's device."""
    if config.train.backend == "nccl":
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


@contextlib.contextmanager
def process_group(config: CampaignConfig) -> Iterator[None]:
    """Join the other ranks; a collective that waits longer than the configured time fails."""
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(1)
    if config.train.backend == "nccl":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS asks for it
        torch.cuda.set_device(device_of(config))
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != config.train.world_size:
        raise RuntimeError(
            f"topology {config.train.topology} must run {config.train.world_size} ranks, got "
            f"WORLD_SIZE={world_size}."
        )
    with tempfile.TemporaryDirectory() as logs:
        if config.train.backend == "nccl":
            record_nccl_log(Path(logs), is_needed=config.train.network != "any")
        timeout = timedelta(seconds=config.train.collective_timeout_seconds)
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        # from torch 2.12 a restarted group finds in torchrun's store the addresses of ranks that are gone
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        dist.init_process_group(
            config.train.backend,
            store=PrefixStore(f"attempt {attempt}", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            # with its device known, NCCL makes every group's communicator at once
            device_id=device_of(config) if config.train.backend == "nccl" else None,
        )
        try:
            yield
        except Exception:
            for line in nccl_warnings():
                say("nccl", line)
            raise
        finally:
            dist.destroy_process_group()
