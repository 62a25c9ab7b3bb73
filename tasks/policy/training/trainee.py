"""The policy of one update with its optimizer and all that watches over it, as the configuration asks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from transformers import PreTrainedModel

from tasks.artifacts.manifest import Manifest
from tasks.artifacts.owned import Checkpoint
from tasks.config import CampaignConfig
from tasks.policy.checkpoint import weights
from tasks.policy.models.norms import use_fused_norms
from tasks.policy.models.recompute import checkpoint_activations
from tasks.policy.models.rotary import use_fused_rotary
from tasks.policy.models.router import RouterBalance, freeze_routers
from tasks.policy.models.router_bias import RouterBias
from tasks.policy.models.routers import Routers
from tasks.policy.models.routing import Routing
from tasks.policy.parallel.context import split_context
from tasks.policy.parallel.mesh import ParallelMesh
from tasks.policy.parallel.packed import require_packable
from tasks.policy.ranks.stopping import StopRequest
from tasks.policy.step.offload import offload_moments, put_moments_away
from tasks.policy.step.trainer import Learner
from tasks.policy.training.nonfinite import NonFiniteSteps
from tasks.policy.training.resume import seed_generators
from tasks.policy.training.workbench import Workbench


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainee(Learner):
    """With what is watched in a policy alone."""

    nonfinite: NonFiniteSteps
    routers: Routers = field(default_factory=Routers)

    @property
    def routing(self) -> Routing | None:
        return self.routers.routing


def make_trainee(
    bench: Workbench,
    parent: Manifest,
    checkpoint: Checkpoint,
    *,
    resumes: bool,
    stop: StopRequest,
    held: Trainee | None,
) -> Trainee:
    """The policy of ``checkpoint``, with the optimizer's state there if it ``resumes`` one; or ``held``, if
    memory has these. What watches over it is made anew."""
    config, batch = bench.config, bench.batch
    bench.progress.at("load")
    is_supervised = batch.objective == "supervised"
    rate = config.warm_start.learning_rate if is_supervised else learning_rate(config, batch.iteration)
    nonfinite = NonFiniteSteps(
        bench.store,
        iteration=batch.iteration + 1,
        rank=bench.mesh.rank,
        limit=config.train.max_nonfinite_steps,
        in_a_row=int(parent.metrics.get("nonfinite_in_a_row", 0)),
    )
    reseed = partial(seed_generators, bench.run, batch.iteration)
    if held is not None:
        for group in held.optimizer.param_groups:
            group["lr"] = rate
        if config.train.offload_optimizer:
            put_moments_away(held.optimizer)
        return replace(held, progress=bench.progress, nonfinite=nonfinite, stop=stop, reseed=reseed)
    model = bench.load(checkpoint)
    routers = _adjust(model, config, bench.mesh)
    optimizer = bench.optimizer(model, rate)
    if resumes:
        weights.load_optimizer(model, optimizer, checkpoint.folder, fetch=checkpoint.fetch)
    if config.train.offload_optimizer:
        offload_moments(optimizer)
    return Trainee(
        model, optimizer, bench.mesh, bench.progress, stop, reseed, nonfinite=nonfinite, routers=routers
    )


def learning_rate(config: CampaignConfig, iteration: int) -> float:
    """Constant for the first half of the campaign's iterations, then linear to the final share."""
    last = max(config.schedule.iterations - 1, 1)
    decayed = min(max(2 * iteration / last - 1, 0.0), 1.0)
    return config.train.learning_rate * (1 - decayed * (1 - config.train.final_learning_rate_share))


def _adjust(model: PreTrainedModel, config: CampaignConfig, mesh: ParallelMesh) -> Routers:
    """What the configuration asks of the model beside its weights. The order matters: hooks and fused parts
    come before recomputation, which wraps the forward it finds."""
    train = config.train
    routing = Routing(model, replay=train.replay_routing, cp_group=mesh.cp_group)
    if train.freeze_router:
        freeze_routers(model)
    if train.norm_kernel == "fused":
        use_fused_norms(model)
    if train.rotary_kernel == "fused":
        use_fused_rotary(model)
    if train.activation_checkpointing:
        checkpoint_activations(model, is_context_split=mesh.cp > 1)
    if train.packing == "packed":
        require_packable(model)
    split_context(model, mesh.cp_group)  # after the test of packing, which takes whole rows
    coefficient, rate = train.router_aux_loss_coefficient, train.router_bias_rate
    return Routers(
        routing=routing,
        balance=RouterBalance(model, coefficient=coefficient) if coefficient else None,
        bias=RouterBias(model, rate=rate) if rate else None,
    )
