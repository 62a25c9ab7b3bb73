"""A campaign whose samples all earn the same reward: solved, it goes on; hopeless, it stops and says so."""

from __future__ import annotations

import pytest
from campaigns import SMALL, run, start

ENVIRONMENT = """
from tasks.environments.digits import DigitsEnvironment
from tasks.environments.protocol import Outcome


class Same(DigitsEnvironment):
    def verify(self, prompt_id, response, *, is_finished):
        return Outcome(kind="score", reward={reward}, is_exact={reward} == 1)


def make(*, held_out, seed, options):
    return Same(name="same", transform=reversed, num_digits=3, num_held_out=held_out, seed=seed)
"""


def config(reward: float) -> dict:
    return SMALL | {
        "environment": {"name": "module", "module": "same", "held_out": 8},
        "warm_start": {"steps": 1},
        "schedule": {"iterations": 2, "segment_iterations": 2, "evaluate_every": 2},
    }


@pytest.fixture
def folder(tmp_path, monkeypatch, request):
    (tmp_path / "same.py").write_text(ENVIRONMENT.format(reward=request.param))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return tmp_path


@pytest.mark.parametrize("folder", [1.0], indirect=True)
def test_a_solved_task_leaves_the_version_as_it_is_and_the_campaign_goes_on(folder):
    finished = run(folder, config(1.0))
    assert finished.output.count("every sample is right, nothing is left to learn") == 2
    iterations = [line for line in finished.metrics() if line["kind"] == "iteration"]
    assert [line["metrics"]["steps"] for line in iterations] == [0, 0]
    assert len(set(finished.digests()[-3:])) == 1  # the warm start's weights, twice again
    assert "total" in finished.output and "zero_variance: 768" in finished.output


@pytest.mark.parametrize("folder", [0.0], indirect=True)
def test_a_task_that_nobody_gets_right_stops_with_what_to_do(folder):
    process = start(folder, config(0.0))
    assert process.wait(300) != 0
    output = (folder / "log").read_text()
    assert "at least one group must have differing rewards" in output and "warm-start" in output
