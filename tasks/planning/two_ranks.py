"""Two processes that add their ranks, over the network even inside one node.

NCCL would use NVLink or shared memory between two GPUs of a node; with both switched off it takes the network
that two nodes would use, and says in its log which one that is.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

NETWORK_ONLY = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_DEBUG": "INFO",
                "NCCL_DEBUG_SUBSYS": "INIT,NET"}  # fmt: skip
NUM_ELEMENTS = 1 << 22
PROGRAM = """
import sys, datetime, torch, torch.distributed as dist
rank, file, backend, n = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
if backend == "nccl":
    torch.cuda.set_device(rank)
dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=120))
x = torch.full((n,), float(rank + 1), device="cuda" if backend == "nccl" else "cpu")
dist.all_reduce(x)
print("SUM", x[0].item() if bool((x == x[0]).all()) else "unequal", flush=True)
dist.destroy_process_group()
"""


def exchange(*, gpus: int, counters: Callable[[], int], timeout: float = 300) -> dict[str, Any]:
    """The sum that both ranks see, NCCL's log, and the bytes that the EFA devices counted meanwhile."""
    backend = "nccl" if gpus >= 2 else "gloo"
    elements = NUM_ELEMENTS if backend == "nccl" else 1024
    before = counters()
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meet")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(NETWORK_ONLY if backend == "nccl" else {})}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(rank), meeting, backend, str(elements)],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            logs = [rank.communicate(timeout=timeout)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    sums = {line.split()[1] for log in logs for line in log.splitlines() if line.startswith("SUM ")}
    log = "\n".join(logs)
    both = len(sums) == 1 and all(rank.returncode == 0 for rank in ranks) and "unequal" not in sums
    return {
        "sum": float(sums.pop()) if both else None,
        "nccl_log": "\n".join(line for line in log.splitlines() if "NCCL" in line)[:20000],
        "log": "" if both else log[-2000:],
        "efa_bytes": counters() - before,
    }
