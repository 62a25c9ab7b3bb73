"""Every algorithm learns; what corrects for old samples does, and old samples without it cost.

One process, two digits, the laptop's policy (``loop.py``): ``pytest -m learning tests/test_algorithms.py``.
"""

import pytest
from loop import Curve, learn, two_digits

pytestmark = [pytest.mark.learning, pytest.mark.timeout(900)]

REACHED = 0.9
# advantages that keep the rewards' scale are a fifth of normalised ones here, and so is the bonus beside them
RAW_SCALE = {"normalize_by_std": False, "entropy_coefficient": 0.002}
ALGORITHMS = {
    "GRPO": {},
    "Dr. GRPO": {
        "algorithm": RAW_SCALE | {"aggregation": "fixed"},
        "schedule": {"iterations": 32},
    },
    "DAPO": {"rollout": {"refill_rounds": 2}, "schedule": {"iterations": 32}},
    "GSPO": {
        "algorithm": {
            "loss": "sequence_clip",
            "clip_low": 0.1,
            "clip_high": 0.15,
            "aggregation": "sequence_mean",
        }
    },
    "CISPO": {  # without a clip that stops a token, the rate has to
        "algorithm": {"loss": "clipped_weight", "clip_low": 1, "clip_high": 4},
        "train": {"learning_rate": 1e-3},
        "schedule": {"iterations": 32},
    },
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


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_learns(name):
    curve = learn(two_digits(**ALGORITHMS[name]), until=REACHED)
    print(f"{name}: {curve.samples_to(REACHED):,.0f} samples to {REACHED}")
    assert curve.exact[0] < 0.05 and max(curve.exact) >= REACHED, curve.exact


FINE = {"rollout": {"prompts_per_iteration": 32}, "schedule": {"iterations": 72}}
"""Iterations of a third of the samples: what a version's delay costs is one of them."""


def fine(algorithm: dict, *, max_staleness: int) -> Curve:
    schedule = FINE["schedule"] | {"max_staleness": max_staleness}
    algorithm = {"num_minibatches": 3} | algorithm
    return learn(two_digits(rollout=FINE["rollout"], schedule=schedule, algorithm=algorithm), until=REACHED)


def test_corrected_staleness_costs_few_samples_and_uncorrected_staleness_many():
    on_policy = fine({}, max_staleness=0).samples_to(REACHED)
    corrected = fine(
        {"correction": {"proximal": "recomputed", "weight": "truncate"}}, max_staleness=1
    ).samples_to(REACHED)
    stale = fine({}, max_staleness=4).samples_to(REACHED)
    print(f"samples to {REACHED}: {on_policy:,.0f}, staleness 1 {corrected:,.0f}, 4 uncorrected {stale:,.0f}")
    assert corrected <= 1.1 * on_policy < stale


def test_a_student_learns_from_a_teachers_log_probabilities_alone():
    teacher = learn(two_digits(), until=0.92)
    config = two_digits(
        algorithm={
            "advantage": "teacher",
            "teacher": {"campaign": "teacher.0001", "version": 1},
            "whiten": True,
            "entropy_coefficient": 0.0,  # the teacher says how sure to be
        }
    )
    student = learn(config, until=REACHED, teacher=teacher.weights)
    print(f"teacher {teacher.samples_to(REACHED):,.0f} samples, student {student.samples_to(REACHED):,.0f}")
    assert student.samples_to(REACHED) < teacher.samples_to(REACHED)
