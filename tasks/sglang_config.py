"""How SGLang serves the policy: one server or several, their parallelism, limits and deadlines; no torch.

Combinations that SGLang is known to get wrong are refused at launch, each with its reason.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from tasks.section import Section

DEEPEP_ROOM = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
"""Environment variable of SGLang: tokens of a GPU in one step of decoding."""
DEFAULT_ROOM, LARGEST_ROOM = 128, 1024


class SglangConfig(Section):
    urls: list[str] = Field(default_factory=list)
    """Servers to attach to, all of them serving this policy; empty = each worker launches one of its own."""
    router_url: str = ""
    """SGLang's router in front of ``urls``: prompts go through it, everything else to each server."""
    python: str = ""
    """Interpreter that has sglang, for a server in an environment of its own; empty = this one."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Added to the server's environment."""
    device: Literal["cuda", "cpu"] = "cuda"
    tp: int = Field(default=1, ge=1)
    """GPUs of one server, each with a share of every weight; with ``ep`` each has experts of its own."""
    ep: int = Field(default=1, ge=1)
    """Expert-parallel size: 1, or all of ``tp``."""
    dp_attention: bool = False
    """Each GPU attends to requests of its own; for models with few key-value heads (MLA)."""
    moe_a2a: Literal["none", "deepep"] = "none"
    """What carries tokens to the experts of other GPUs."""
    deepep_mode: Literal["auto", "normal", "low_latency"] = "auto"
    """``auto``: ``low_latency`` to decode, ``normal`` to prefill."""
    moe_runner: Literal["auto", "triton", "deep_gemm"] = "auto"
    attention: Literal["triton", "fa3", "flashinfer", "torch_native"] = "triton"
    sampling: Literal["pytorch", "flashinfer"] = "pytorch"
    quantization: Literal["none", "fp8", "fp8_blocks"] = "none"
    """``fp8``: SGLang rounds each version's weights as a server starts, with a scale for each tensor.
    ``fp8_blocks``: the worker rounds them first, with a scale for each 128 x 128, as DeepSeek-V3's are. With
    either every version starts the server anew."""
    cuda_graphs: bool = True
    """Worth 7x in decoding speed on an H200."""
    deterministic: bool = False
    """Tokens depend on a sample's seed alone, whatever shares its batch. CUDA only, and slower: by 34 %
    in its authors' measurements."""
    memory_share: float = Field(default=0.85, gt=0, lt=1)
    """Of the GPU's memory, for weights and key-value cache."""
    max_running_requests: int = Field(default=256, ge=1)
    """Sequences that one server decodes together; the client keeps a quarter more on their way."""
    max_total_tokens: int = Field(default=0, ge=0)
    """Key-value cache in tokens; 0 = what fits."""
    context_length: int = Field(default=0, ge=0)
    """Longest prompt and response; 0 = the policy's own."""
    startup_seconds: float = Field(default=900.0, gt=0)
    """Loading, compiling kernels and capturing graphs; apart from liveness."""
    request_seconds: float = Field(default=1800.0, gt=0)
    """A request that takes longer is aborted and named, and a failure of its server by itself."""
    max_failures: int = Field(default=3, ge=1)
    """Tries of a request, and failures in a row of a server, after which the one is an error and the other is
    out of service; the next version restarts it if it is ours."""
    in_flight: Literal["finish", "abort", "pause"] = "finish"
    """Requests that still run when another version is loaded: they ``finish`` on the old weights first, or
    ``abort`` and are resumed or redone under the new ones, or ``pause``, let go of their key-value cache and
    go on under the new ones, each token with its version. ``pause`` needs SGLang 0.5.21: older ones end at
    the flush of a cache that paused requests wait for, and 0.5.17 does not say which version sampled what."""

    @model_validator(mode="after")
    def _parallelism_is_one_sglang_has(self) -> Self:
        if self.urls:  # started by others, with arguments of their own
            return self
        if self.ep not in (1, self.tp):
            raise ValueError(
                "ep must be 1 or tp: where SGLang splits experts and their widths at once, its fused sum is "
                f"over one of the two and responses are garbage (sgl-project/sglang#32963), got ep={self.ep},"
                f" tp={self.tp}. Set ep to 1 or to {self.tp}."
            )
        if self.moe_a2a == "deepep" and self.ep != self.tp:
            raise ValueError(
                f"ep must equal tp with moe_a2a 'deepep' (SGLang sets it so), got ep={self.ep}, "
                f"tp={self.tp}. Set ep to {self.tp}."
            )
        if self.moe_a2a == "deepep" and not self._has_experts_for_deepep:
            raise ValueError(
                "moe_runner must be 'deep_gemm' with moe_a2a 'deepep', or 'auto' with FP8 weights: nothing "
                "else in SGLang (0.5.17) computes experts on rows that DeepEP brought, in any of its modes, "
                f"and 'auto' is 'triton' for 16-bit weights, got {self.moe_runner!r} with quantization "
                f"{self.quantization!r}. Set moe_runner to 'deep_gemm'."
            )
        if self.deepep_mode != "auto" and self.moe_a2a != "deepep":
            raise ValueError(
                f"deepep_mode goes with moe_a2a 'deepep' and only with it, got {self.deepep_mode!r}. "
                "Set it to 'auto' or moe_a2a to 'deepep'."
            )
        if self.moe_a2a == "deepep" and self.deepep_mode != "normal":
            self._check_deepep_room()
        if self.deepep_mode == "normal" and self.cuda_graphs:
            raise ValueError(
                "cuda_graphs must be off with deepep_mode 'normal', whose counts reach the host in every "
                "step. Set deepep_mode to 'auto' (graphs while decoding) or cuda_graphs to false."
            )
        if self.dp_attention and self.ep > 1 and self.moe_a2a == "none":
            raise ValueError(
                "dp_attention with ep above 1 needs moe_a2a 'deepep': over SGLang's own exchange its logits "
                f"were wrong (sgl-project/sglang#23729), got ep={self.ep}, moe_a2a='none'. Set ep to 1; or "
                "moe_a2a to 'deepep' and moe_runner to 'deep_gemm'."
            )
        if self.dp_attention and self.tp == 1:
            raise ValueError("dp_attention needs tp of at least 2, got tp=1. Raise tp or turn it off.")
        return self

    @property
    def _has_experts_for_deepep(self) -> bool:
        return self.moe_runner == "deep_gemm" or (self.moe_runner == "auto" and self.quantization != "none")

    def _check_deepep_room(self) -> None:
        """What DeepEP's low-latency kernels take in one step, all GPUs together."""
        given = self.environment.get(DEEPEP_ROOM, str(DEFAULT_ROOM))
        if not given.isdecimal() or not 1 <= int(given) <= LARGEST_ROOM:
            raise ValueError(
                f"{DEEPEP_ROOM} in environment must be a whole number from 1 to {LARGEST_ROOM}, got "
                f"{given!r}. Set it so, or leave it out for {DEFAULT_ROOM}."
            )
        room = int(given) * self.tp
        if self.max_running_requests > room:
            raise ValueError(
                f"max_running_requests must be at most {room}, what DeepEP's low-latency kernels take of "
                f"{self.tp} GPUs ({given} of each), got {self.max_running_requests}. Lower it, or set "
                f"{DEEPEP_ROOM}, to {LARGEST_ROOM} at most, in the section's environment, which alone is "
                "read here."
            )

    @model_validator(mode="after")
    def _choices_go_together(self) -> Self:
        if self.device == "cpu":
            wrong = {
                "attention": self.attention != "torch_native", "cuda_graphs": self.cuda_graphs,
                "deterministic": self.deterministic, "quantization": self.quantization != "none",
                "moe_a2a": self.moe_a2a != "none", "tp": self.tp > 1, "sampling": self.sampling != "pytorch",
            }  # fmt: skip
            if any(wrong.values()):
                raise ValueError(
                    "device 'cpu' serves attention 'torch_native', sampling 'pytorch', without CUDA graphs, "
                    f"determinism, FP8, DeepEP or tp; got other values of {[n for n in wrong if wrong[n]]}."
                )
        if self.deterministic and self.sampling != "pytorch":
            raise ValueError("deterministic needs sampling 'pytorch', which alone takes seeds. Set it so.")
        if self.deterministic and self.attention == "torch_native":
            raise ValueError(
                "deterministic needs attention 'triton', 'fa3' or 'flashinfer', got 'torch_native', whose "
                "sums depend on the batch. Set it to one of these."
            )
        if self.quantization != "none" and self.urls:
            raise ValueError(
                "quantization must be 'none' with urls: FP8 weights are not updated in place, and servers "
                "that others started cannot be restarted. Leave urls empty, or set quantization to 'none'."
            )
        if self.in_flight == "pause" and self.quantization != "none":
            raise ValueError(
                "in_flight must not be 'pause' with quantized weights, which a server takes at start, got "
                f"quantization={self.quantization!r}. Set in_flight to 'finish' or 'abort'."
            )
        if self.router_url and not self.urls:
            raise ValueError(
                "router_url needs urls: versions are loaded into each server, got "
                f"router_url={self.router_url}. List the router's workers in urls."
            )
        return self
