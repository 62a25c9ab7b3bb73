"""A real campaign under torchrun whose trainer splits tensors, positions or layers, another each time."""

import pytest
from campaigns import SMALL, run

SHORT = {"iterations": 1, "segment_iterations": 1, "evaluate_every": 2}
AXES = [{"tp": 2, "ep": 2}, {"cp": 2, "ep": 2}, {"pp": 2, "ep": 1, "dispatcher": "local"}]


@pytest.mark.slow
def test_a_campaign_goes_on_over_tensor_context_and_pipeline_parallel_ranks(tmp_path):
    config = SMALL | {"warm_start": {"steps": 2}, "schedule": SHORT}
    options = {"packing": "packed", "micro_batch_tokens": 256, "activation_checkpointing": True}
    for done, axes in enumerate(AXES):
        schedule = SHORT | {"iterations": done + 1}
        finished = run(tmp_path, config | {"train": axes | options, "schedule": schedule})
        metrics = finished.metrics()[-1]["metrics"]
        # ratios of trained to sampled probabilities are 1 in the first steps: another policy would show here
        assert metrics["skipped_steps"] == 0 and 0 <= metrics["kl_k3"] < 0.1
    digests = finished.digests()
    assert len(digests) == len(set(digests)) == 2 + len(AXES)
