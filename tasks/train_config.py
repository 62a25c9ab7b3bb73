"""How a policy update runs: ranks and what they share, precision, packing, faults; no torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tasks.deepep_config import DeepEPConfig
from tasks.grid import Grid
from tasks.nvlink_config import NVLinkConfig
from tasks.section import Section, divisors

TOPOLOGIES = {"single_1x1": (1, 1), "laptop_1x2": (1, 2), "node_1x8": (1, 8), "cluster_16x8": (16, 8)}
"""Trainer topologies: name -> (nodes, ranks a node). Flyte fixes a topology when a task is registered, so
each name is one task in ``tasks/train.py``."""


class TrainConfig(Section):
    topology: Literal["single_1x1", "laptop_1x2", "node_1x8", "cluster_16x8"] = "laptop_1x2"
    pool: Literal["tasks", "standing"] = "tasks"
    """``tasks``: each update starts its ranks. ``standing``: ranks that keep the policy in memory run beside
    the campaign (``torchrun ... -m tasks.policy.standing``), and the update stage waits for them."""
    standing_timeout_seconds: float = Field(default=1800.0, gt=0)
    """A standing trainer that does not answer for this long stops the run."""
    ep: int = Field(default=2, ge=1)
    """Expert-parallel size: ranks of one group hold disjoint experts."""
    fsdp: int = Field(default=1, ge=1)
    """Ranks with other samples over which, together with their cp ranks, dense parameters are split; experts
    over ``fsdp * cp * tp / ep``. 1 keeps both whole. The ranks that are left hold copies."""
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel size: ranks that share attention heads, dense widths and the vocabulary."""
    cp: int = Field(default=1, ge=1)
    """Context-parallel size: ranks that share the positions of every sample."""
    pp: int = Field(default=1, ge=1)
    """Pipeline stages: blocks of ranks that hold consecutive layers."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations and the weights they meet; master weights, gradients and their sums are float32."""
    dispatcher: Literal["local", "all_to_all", "deepep", "nvlink"] = "all_to_all"
    """``nvlink`` is for the GPUs of one node, which fetch rows from each other's memory in expert order."""
    deepep: DeepEPConfig = DeepEPConfig()
    nvlink: NVLinkConfig = NVLinkConfig()
    network: Literal["any", "efa"] = "any"
    """``efa`` ends a run whose NCCL does not send through libfabric's EFA provider between nodes."""
    backend: Literal["gloo", "nccl"] = "gloo"
    learning_rate: float = Field(default=2e-3, gt=0, le=1)
    final_learning_rate_share: float = Field(default=0.1, gt=0, le=1)
    """The rate is constant for the first half of a campaign, then decays linearly to this share."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-5, gt=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Tokens of one forward and backward on a rank, padding included; changes memory and speed, never the
    gradient."""
    packing: Literal["padded", "packed"] = "padded"
    """``packed`` lays the samples of a micro-batch one after another in one row, without padding; attention
    stays inside a sample."""
    logprob_kernel: Literal["torch", "chunked", "fused"] = "torch"
    """``torch`` holds all logits of a micro-batch; the others compute log-probabilities and entropies from a
    chunk of them at a time: ``chunked`` on CPU, ``fused`` in one pass each and, like all kernels, on CUDA."""
    logprob_keep_gb: float = Field(default=0.0, ge=0)
    """Logits that these keep from forward to backward instead of computing them again there."""
    expert_kernel: Literal["torch", "fused"] = "torch"
    """``fused`` permutes rows and applies SwiGLU and routing weights in one pass each."""
    norm_kernel: Literal["torch", "fused"] = "torch"
    """``fused`` runs each root-mean-square norm in one pass."""
    loss_kernel: Literal["torch", "fused"] = "torch"
    """``fused`` computes a policy's loss, its gradients and its metrics in one pass over the tokens."""
    rotary_kernel: Literal["torch", "fused"] = "torch"
    """``fused`` turns queries and keys by their positions in one pass each."""
    optimizer_kernel: Literal["torch", "fused"] = "torch"
    """``fused`` steps each tensor in one pass, split parameters as well."""
    activation_checkpointing: bool = False
    """Compute a layer's parts again in the backward pass instead of keeping their activations; never repeats
    an exchange between ranks."""
    deterministic: bool = True
    """Bit-equal results on equal hardware: deterministic kernels and one thread a rank on CPU."""
    collective_timeout_seconds: int = Field(default=120, ge=10)
    """A rank that waits longer for the others ends the run; Flyte starts it again."""
    stuck_after_seconds: float = Field(default=60.0, gt=0)
    """A rank that has not moved for so long is named in the log, with its phase."""
    slow_rank_factor: float = Field(default=2.0, gt=1)
    """A rank that works more than so many times as long as the median rank is named in the metrics."""
    grace_seconds: float = Field(default=25.0, gt=0, le=110)
    """After SIGTERM a rank finishes its mini-batch and stores what the update has done, for the next attempt
    to go on from; if that takes longer, it ends without. The trainer's pods have 120 s."""
    max_nonfinite_steps: int = Field(default=5, ge=1)
    """Steps in a row without a finite loss and gradient, each skipped, after which the run stops."""
    replay_routing: Literal["none", "experts", "experts_and_weights"] = "none"
    """Send each token to the experts that the rollout engine chose for it, with the weights it gave them or
    with the trainer's own; needs ``rollout.record_routing``."""
    freeze_router: bool = False
    """Leave the routers as the sampling policy has them."""
    router_aux_loss_coefficient: float = Field(default=0.0, ge=0)
    """Weight of a loss that evens out the use of experts in each sequence; 0 = off. Metrics list it if on."""
    router_bias_rate: float = Field(default=0.0, ge=0, lt=1)
    """By how much a step moves the bias with which an expert is selected, up if it was used less than the
    mean, else down (DeepSeek-V3's routers and GLM-4-MoE's); 0 = off. Metrics list it if on."""
    offload_optimizer: bool = False
    """Keep AdamW's moments in host memory between steps."""

    @property
    def world_size(self) -> int:
        nodes, ranks = TOPOLOGIES[self.topology]
        return nodes * ranks

    @property
    def grid(self) -> Grid:
        return Grid(
            world_size=self.world_size, ep=self.ep, fsdp=self.fsdp, tp=self.tp, cp=self.cp, pp=self.pp
        )

    @property
    def mesh(self) -> str:
        """What a run says of its ranks: ``laptop_1x2, ep 1, tp 2``; of other axes those above 1."""
        axes = {name: getattr(self, name) for name in ("fsdp", "cp", "tp", "pp")}
        others = [f"{name} {size}" for name, size in axes.items() if size > 1]
        return ", ".join([self.topology, f"ep {self.ep}", *others])

    @property
    def kernels(self) -> dict[str, str]:
        """What computes each part of a step that has a fused kernel."""
        return {
            "logprob": self.logprob_kernel,
            "experts": self.expert_kernel,
            "norms": self.norm_kernel,
            "loss": self.loss_kernel,
            "rotary": self.rotary_kernel,
            "optimizer": self.optimizer_kernel,
        }

    @model_validator(mode="after")
    def _ranks_make_a_grid(self) -> Self:
        self.grid.checked()
        if self.stuck_after_seconds >= self.collective_timeout_seconds:
            raise ValueError(
                "stuck_after_seconds must be below collective_timeout_seconds, or the run ends before a "
                f"stuck rank is named, got {self.stuck_after_seconds} >= {self.collective_timeout_seconds}. "
                f"Lower it to {self.collective_timeout_seconds / 2}."
            )
        for name in ("router_aux_loss_coefficient", "router_bias_rate"):
            if self.freeze_router and getattr(self, name):
                raise ValueError(
                    f"{name} must be 0 with freeze_router, which leaves it nothing to train, "
                    f"got {getattr(self, name)}. Set one of them to its default."
                )
        if self.router_aux_loss_coefficient and self.cp * self.pp > 1:
            raise ValueError(
                "router_aux_loss_coefficient must be 0 with cp or pp above 1: it is of whole sequences and "
                f"all layers, got cp={self.cp}, pp={self.pp}. Set it to 0, or cp and pp to 1."
            )
        if (self.dispatcher == "local") != (self.ep == 1):
            raise ValueError(
                f"dispatcher 'local' goes with ep=1 and only with it, got dispatcher={self.dispatcher!r}, "
                f"ep={self.ep}. Set dispatcher to {'local' if self.ep == 1 else 'all_to_all'}."
            )
        return self

    @model_validator(mode="after")
    def _nvlink_can_run(self) -> Self:
        if self.dispatcher != "nvlink":
            if self.nvlink != NVLinkConfig():
                raise ValueError(
                    f"nvlink speaks to dispatcher 'nvlink' only, got dispatcher={self.dispatcher!r} and "
                    f"{self.nvlink}. Leave its fields out, or set dispatcher to 'nvlink'."
                )
            return self
        nodes, ranks = TOPOLOGIES[self.topology]
        if self.backend != "nccl" or (nodes > 1 and ranks % self.ep):
            raise ValueError(
                f"dispatcher 'nvlink' joins GPUs of one node, got backend={self.backend!r}, ep={self.ep} "
                f"with {ranks} ranks a node. Set backend to 'nccl' and ep to one of "
                f"{[n for n in divisors(ranks) if n > 1]}, or dispatcher to 'deepep'."
            )
        if self.nvlink.max_tokens < self.micro_batch_tokens:
            raise ValueError(
                "nvlink.max_tokens must be at least micro_batch_tokens, got "
                f"{self.nvlink.max_tokens} < {self.micro_batch_tokens}. Set it to {self.micro_batch_tokens}."
            )
        return self

    @model_validator(mode="after")
    def _deepep_can_run(self) -> Self:
        if self.network == "efa" and self.backend != "nccl":
            raise ValueError(
                f"network 'efa' is for backend 'nccl', got backend={self.backend!r}. Set network to 'any'."
            )
        if self.dispatcher != "deepep":
            if self.deepep != DeepEPConfig():
                raise ValueError(
                    f"deepep speaks to dispatcher 'deepep' only, got dispatcher={self.dispatcher!r} and "
                    f"{self.deepep}. Leave its fields out, or set dispatcher to 'deepep'."
                )
            return self
        if self.backend != "nccl" or self.compute_dtype != "bfloat16":
            raise ValueError(
                "dispatcher 'deepep' sends bfloat16 rows between GPUs, got "
                f"backend={self.backend!r}, compute_dtype={self.compute_dtype!r}. Set them to 'nccl' and "
                "'bfloat16', or the dispatcher to 'all_to_all'."
            )
        if self.deepep.max_tokens < self.micro_batch_tokens:
            raise ValueError(
                "deepep.max_tokens must be at least micro_batch_tokens, got "
                f"{self.deepep.max_tokens} < {self.micro_batch_tokens}. Set it to {self.micro_batch_tokens}."
            )
        return self

    @model_validator(mode="after")
    def _fused_kernels_can_run(self) -> Self:
        if self.backend != "nccl" and "fused" in self.kernels.values():
            raise ValueError(
                f"fused kernels need CUDA and so backend 'nccl', got backend={self.backend!r}, "
                f"{self.kernels}. Set the kernels to 'torch' or the backend to 'nccl'."
            )
        if self.logprob_kernel == "chunked" and self.backend == "nccl":
            raise ValueError(
                "logprob_kernel 'chunked' is for CPUs, got backend='nccl'. Set it to 'fused', which works in "
                "chunks as well."
            )
        if self.logprob_keep_gb and self.logprob_kernel == "torch":
            raise ValueError(
                "logprob_keep_gb must be 0 with logprob_kernel 'torch', which keeps all logits, got "
                f"{self.logprob_keep_gb}. Leave it out, or set logprob_kernel to 'chunked' or 'fused'."
            )
        return self
