"""How tokens travel with DeepEP; read only where ``train.dispatcher`` is 'deepep'. No torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tasks.section import Section


class DeepEPConfig(Section):
    api: Literal["elastic", "legacy"] = "elastic"
    """``elastic`` is ``ElasticBuffer`` of version 2; ``legacy`` is ``Buffer``, which version 1 has alone."""
    layout: Literal["compact", "expanded"] = "compact"
    """``compact`` delivers a token once to a rank, ``expanded`` once to each of its experts there, grouped by
    expert; the latter trains with version 2.1 or newer."""
    fp8: bool = False
    """Send rows as 8-bit floats with a scale for each 128 features; halves what travels on the way out, and
    rounds every row to 4 significant bits. Gradients and results travel in bfloat16."""
    max_tokens: int = Field(default=16384, ge=1)
    """Tokens of one exchange on a rank at most. The buffer is sized for it once, and kernels are compiled for
    it, so every exchange of a run declares this number."""
    num_sms: int = Field(default=24, ge=2, multiple_of=2)
    """Multiprocessors that an exchange occupies."""
    num_qps: int = Field(default=17, ge=2)
    """Queue pairs to other nodes; 17 is enough without ``hybrid``, 65 to 129 with it."""
    hybrid: bool = False
    """Go between nodes first and then over NVLink, where the ranks of a group lie on several nodes."""

    @model_validator(mode="after")
    def _legacy_is_compact(self) -> Self:
        if self.api == "legacy" and (self.layout != "compact" or self.hybrid):
            raise ValueError(
                "deepep.api 'legacy' knows the compact layout only and finds its own way between nodes, got "
                f"layout={self.layout!r}, hybrid={self.hybrid}. Set them to 'compact' and false."
            )
        return self
