"""Every training option at once in a real campaign, and another mesh when it goes on."""

from campaigns import SMALL, run

OPTIONS = {
    "fsdp": 2,
    "compute_dtype": "bfloat16",
    "packing": "packed",
    "micro_batch_tokens": 256,
    "activation_checkpointing": True,
    "router_aux_loss_coefficient": 0.01,
}


def test_a_campaign_goes_on_with_another_mesh(tmp_path):
    model = SMALL["model"] | {"dtype": "bfloat16"}
    short = {"iterations": 1, "segment_iterations": 1, "evaluate_every": 2}
    config = SMALL | {"warm_start": {"steps": 2}, "model": model, "train": OPTIONS, "schedule": short}
    first = run(tmp_path, config)
    before, trained = first.digests(), first.metrics()[-1]["metrics"]
    assert trained["router_aux_loss_coefficient"] == 0.01 and trained["router_balance"] >= 0.99
    assert trained["skipped_steps"] == 0 and trained["kl_k3"] < 0.1

    whole = {"fsdp": 1, "compute_dtype": "float32"}
    second = run(tmp_path, config | {"train": whole, "schedule": short | {"iterations": 2}})
    assert "found version 2 after 1 iterations: continues with iteration 1" in second.output
    assert "train.fsdp changed since version 2: 2 -> 1" in second.output
    digests = second.digests()
    assert digests[:3] == before and len(set(digests)) == 4
    assert "router_balance" not in second.metrics()[-1]["metrics"]
