"""A TorchX component for those who submit trainings that way; the campaign itself does not use it.

    pip install '.[torchx]'
    torchx run --scheduler kubernetes tasks/torchx_component.py:trainer \\
        --config configs/campaigns/one_node.yaml --iteration 3 --code s3://moe-rl-flyte/code/standing.tar.gz

TorchX's Kubernetes scheduler writes Volcano jobs, so Volcano must run beside Kueue and on other nodes. It has
no hugepages; EFA is told to do without.
"""

# pyright: reportMissingImports=false

from pathlib import Path

from torchx import specs
from torchx.components.dist import ddp

from tasks import placement
from tasks.campaign_file import read_campaign
from tasks.planning.instances import gib
from tasks.train_config import TOPOLOGIES


def trainer(config: str, iteration: int, code: str, output: str = "/tmp/candidate.json") -> specs.AppDef:
    """One policy update on the trainer pool, through torchrun.

    Args:
        config: a file of configs/campaigns; its topology decides nodes and ranks
        iteration: the iteration whose sealed batch is trained
        code: archive of the project, as a registration uploads it
        output: where rank 0 writes the candidate
    """
    topology = read_campaign(Path(config))["train"]["topology"]
    pool, (nodes, ranks) = placement.TRAINER_OF[topology], TOPOLOGIES[topology]
    app = ddp(
        "--config", f"/root/{config}", "--iteration", str(iteration), "--output", output,
        m="tasks.policy.launch",
        name="/trainer",
        image=f"{placement.REGISTRY}/{pool.image}",
        j=f"{nodes}x{ranks}",
        env={**pool.variables, "FI_EFA_USE_HUGE_PAGE": "0"},
        max_retries=pool.retries,
    )  # fmt: skip
    (role,) = app.roles
    timeouts = ",".join(f"{name}={seconds}" for name, seconds in placement.RENDEZVOUS.items())
    unpack = f"pyflyte-fast-execute --additional-distribution {code} --dest-dir /root --"
    command = role.args[1].replace("torchrun ", f"torchrun --rdzv_conf {timeouts} ", 1)
    role.args = ["-c", f"{unpack} {command}"]
    role.resource = specs.Resource(
        cpu=int(pool.cpu),
        gpu=pool.gpus,
        memMB=int(gib(pool.memory) * 1024),
        devices={name: int(count) for name, count in pool.devices.items() if name.endswith("/efa")},
        capabilities={"node.kubernetes.io/instance-type": pool.instance.name},
    )
    return app
