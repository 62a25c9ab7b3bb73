"""Alerts about an iteration's rewards: when each is up, and what it says. Metrics in a manifest; no torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

ALERTS = {
    "alert/all_floor": "every scored sample earned the floor of 0, as with a verifier that cannot score",
    "alert/all_equal": "every scored sample earned the same reward, so there is nothing to learn from",
    "alert/none_scored": "not one sample was scored",
}
"""Metric that is there when the alert is up -> what it says."""


def alerts_up(rewards: "pl.Series", *, num_samples: int) -> list[str]:
    """Of an iteration in which ``num_samples`` were made and those with ``rewards`` were scored."""
    is_up = {
        "alert/none_scored": num_samples > 0 and len(rewards) == 0,
        "alert/all_floor": len(rewards) > 1 and rewards.max() == 0.0,
        "alert/all_equal": len(rewards) > 1 and rewards.n_unique() == 1,
    }
    return [name for name, up in is_up.items() if up]
