"""A real campaign under torchrun whose trainer splits tensors, positions or layers, another each time."""

import pytest
from campaigns import SMALL, run

SHORT = {"iterations": 1, "segment_iterations": 1, "evaluate_every": 2}
AXES = [{"tp": 2, "ep": 2}, {"cp": 2, "ep": 2}, {"pp": 2, "ep": 1, "dispatcher": "local"}]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_campaign_goes_on_over_tensor_context_and_pipeline_parallel_ranks(tmp_path):
    config = SMALL | {"warm_start": {"steps": 2}, "schedule": SHORT}
    options = {"packing": "packed", "micro_batch_tokens": 256, "activation_checkpointing": True}
    for done, axes in enumerate(AXES):
        schedule = SHORT | {"iterations": done + 1}
        finished = run(tmp_path, config | {"train": axes | options, "schedule": schedule})
        metrics = finished.metrics()[-1]["metrics"]
        # of the trained to the sampling policy over four steps; measured 0.003, 0.000, 0.000 (2026-11-30)
        assert metrics["skipped_steps"] == 0 and 0 <= metrics["kl_k3"] < 0.03
    digests = finished.digests()
    assert len(digests) == len(set(digests)) == 2 + len(AXES)
