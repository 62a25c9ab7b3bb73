"""What a campaign takes: memory of a rank, bytes an iteration moves, nodes and their price. Pure arithmetic.

Not in it: activations, logits and what fully sharded layers gather (memory); prompts, evaluations, gradients
and parameters on the trainer's own network (bytes); control plane, system nodes, NAT and S3 (price).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.config import CampaignConfig
from tasks.planning.fetched import fetched_by_nodes
from tasks.planning.instances import InstanceType
from tasks.planning.shape import Shape
from tasks.train_config import TOPOLOGIES, TrainConfig

PATCH_SHARE = 0.015
"""Of a whole version, at most: ``tasks/artifacts/README.md``, measured at a learning rate of 1e-6."""
SAMPLE_BYTES = 11
"""A token in the buffer: its id, log-probability, mask and version."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def parameters_of_a_rank(shape: Shape, train: TrainConfig) -> float:
    """An even share; what tensor parallelism leaves whole (norms, routers) is counted as cut."""
    grid = train.grid
    dense = shape.dense / (grid.pp * grid.tp * grid.dense_shards)
    return dense + shape.experts / (grid.pp * grid.expert_shards)


def memory_of_a_rank(shape: Shape, train: TrainConfig) -> dict[str, float]:
    """GB that stay on a rank's device between steps."""
    gb = parameters_of_a_rank(shape, train) / 1e9
    found = {"masters": 4 * gb, "gradients": 4 * gb}
    return found if train.offload_optimizer else {**found, "moments": 8 * gb}


def bytes_moved(shape: Shape, config: CampaignConfig) -> dict[str, float]:
    """GB an iteration moves between nodes and services, at most."""
    train, rollout, full_every = config.train, config.rollout, config.checkpoint.full_every
    nodes, ranks = TOPOLOGIES[train.topology]
    size = DTYPE_BYTES[config.model.dtype]
    whole = shape.parameters * size / 1e9
    # float32 weights are the masters; half-precision ones are stored beside them
    state = shape.parameters * (8 if size == 4 else 12) / 1e9
    has_patches = full_every > 1 and size == 2
    shipped = whole * PATCH_SHARE if has_patches else whole
    weights = (
        f"weights (a patch; whole, {whole:,.1f}, each {full_every}th time)" if has_patches else "weights"
    )
    apart = shape.experts / shape.parameters if shape.are_experts_apart else 0.0
    parts = {"dense": (whole + state) * (1 - apart), "experts": (whole + state) * apart}
    fetched = sum(fetched_by_nodes(train.grid, ranks, **parts))
    if train.pool == "standing":  # has it in memory, and fetches what it has stored to find what changes
        fetched = shipped if full_every > 1 else 0.0
    tokens = rollout.samples_per_iteration * rollout.max_new_tokens
    routed = {"none": 0, "experts": 1, "experts_and_weights": 5}[rollout.record_routing]
    row = SAMPLE_BYTES + routed * shape.layers * shape.experts_per_token
    # out and back, forward and backward, in half precision; a share of 1 / ep stays where it is
    rows = tokens * shape.layers * shape.experts_per_token * shape.hidden * 2 * 4 * (1 - 1 / train.ep) / 1e9
    return {
        "trainer -> S3: optimizer state": state,
        f"trainer -> S3: {weights}": shipped,
        f"S3 -> {nodes} training nodes: what their ranks own": fetched,
        f"S3 -> {rollout.workers} rollout nodes: {'the patch' if has_patches else 'weights'}":
            rollout.workers * shipped,
        "rollouts -> buffer -> scorers: samples": 2 * tokens * row / 1e9,
        f"experts' rows, {'inside' if train.ep <= ranks else 'between'} nodes": rows,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """Equal nodes that a campaign keeps."""

    what: str
    instance: InstanceType
    number: int
    is_spot: bool = False

    @property
    def on_demand(self) -> float:
        """USD an hour."""
        return self.number * self.instance.usd_per_hour

    @property
    def as_placed(self) -> float:
        """USD an hour, on Spot where the pool is and a Spot price was stated."""
        spot = self.is_spot and self.instance.spot_usd_per_hour
        return self.number * self.instance.spot_usd_per_hour if spot else self.on_demand


def price(nodes: Sequence[Nodes]) -> tuple[float, float]:
    """USD an hour as placed, and with everything on demand."""
    return sum(group.as_placed for group in nodes), sum(group.on_demand for group in nodes)
