"""The laptop campaign learns, and its controls do not. Minutes a test: ``pytest -m learning``."""

import pytest
import yaml
from campaigns import ROOT, run

pytestmark = [pytest.mark.learning, pytest.mark.timeout(900)]

LAPTOP = yaml.safe_load((ROOT / "configs/campaigns/laptop.yaml").read_text())


def scores(folder, **changes):
    """Held-out exact match at temperature 1, mean of 4 samples a prompt: after the warm start, at the end."""
    metrics = run(folder, LAPTOP | changes).metrics()
    exact = [line["evaluation"]["exact_sampled"] for line in metrics if "evaluation" in line]
    return exact[0], exact[-1]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_laptop_campaign_learns_to_reverse_digits(tmp_path, seed):
    before, after = scores(tmp_path, seed=seed)
    assert before <= 0.4  # measured 0.000 to 0.002 in five seeds
    assert after >= 0.85  # the threshold; see the README for what was measured


@pytest.mark.parametrize("control", ["flipped", "shuffled"])
def test_a_reward_that_says_nothing_true_teaches_nothing(tmp_path, control):
    before, after = scores(tmp_path, reward={"control": control})
    assert after < 0.1 and before <= 0.4
