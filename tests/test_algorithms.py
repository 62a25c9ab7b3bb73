"""Every algorithm learns; what corrects for old samples does, and old samples without it cost.

One process, two digits, the laptop's policy (``loop.py``): ``pytest -m learning tests/test_algorithms.py``.
"""

import pytest

pytestmark = [pytest.mark.learning, pytest.mark.timeout(900)]

REACHED = 0.9
# advantages that keep the rewards' scale are a fifth of normalised ones here, and so is the bonus beside them
RAW_SCALE = {"normalize_by_std": False, "entropy_coefficient": 0.002}
ALGORITHMS = {
    "GRPO": {},
    "Dr. GRPO": {"algorithm": RAW_SCALE | {"aggregation": "fixed"}},
    "DAPO": {"rollout": {"refill_rounds": 2}},
    "GSPO": {
        "algorithm": {
            "loss": "sequence_clip",
            "clip_low": 0.1,
            "clip_high": 0.15,
            "aggregation": "sequence_mean",
        }
    },
    "CISPO": {"algorithm": {"loss": "clipped_weight", "clip_low": 1, "clip_high": 4}},
    "RLOO": {"algorithm": RAW_SCALE | {"advantage": "leave_one_out"}},
    "PPO": {
        "algorithm": {
            "advantage": "gae",
            "gae_lambda": 0.95,
            "whiten": True,
            "critic": {"learning_rate": 2e-3},
        }
    },
}
CORRECTED = {"correction": {"proximal": "recomputed", "weight": "truncate"}}
