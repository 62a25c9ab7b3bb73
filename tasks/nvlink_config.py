"""How tokens travel between GPUs of one node that address each other's memory; read only where
``train.dispatcher`` is 'nvlink'. No torch."""

from pydantic import Field

from tasks.section import Section


class NVLinkConfig(Section):
    max_tokens: int = Field(default=16384, ge=1)
    """Tokens of one exchange on a rank at most. Each rank's memory is taken for it once: a row for each
    token, and one for each token and rank."""
    capacity: float = Field(default=0.0, ge=0)
    """Rows that a rank can receive, as a multiple of an even share of ``max_tokens`` on every rank. Its host
    then never waits for a count, and more rows than fit end the run. At 0 it waits, and takes the rows that
    there are."""
