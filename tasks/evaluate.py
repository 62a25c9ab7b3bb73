"""Held-out score of a version, greedy and sampled; stored with the version's number."""

import contextlib
import time

from flytekit import task

from tasks import placement
from tasks.artifacts.catalogue import evaluation_key
from tasks.artifacts.errors import ObjectConflict
from tasks.records import CampaignRun, Evaluation, PolicyVersion
from tasks.say import say
from tasks.session import OPTIMIZER, run_store


@task(**placement.ROLLOUT.task_arguments())
def evaluate(run: CampaignRun, policy: PolicyVersion) -> Evaluation:
    """Exact match and reward on the environment's held-out prompts, none of which is ever trained on."""
    from tasks.engine.evaluation import held_out_score

    start, store = time.monotonic(), run_store(run)
    key = evaluation_key(policy.version, run.config.digest())
    if known := store.find_object(key):
        return Evaluation.model_validate_json(known)
    manifest = store.manifest(policy)
    with store.reading(policy, without=OPTIMIZER) as folder:
        evaluation = held_out_score(run, folder, policy.version, iteration=manifest.iteration)
    evaluation = evaluation.model_copy(update={"seconds": time.monotonic() - start})
    with contextlib.suppress(ObjectConflict):  # a retry or another run was first, and took other seconds
        store.put_object(key, evaluation.model_dump_json().encode())
    evaluation = Evaluation.model_validate_json(store.get_object(key))
    say(
        "evaluate",
        f"v{policy.version} held-out exact match {evaluation.exact_sampled:.3f} sampled, "
        f"{evaluation.exact_greedy:.3f} greedy on {evaluation.num_prompts} prompts, "
        f"{evaluation.seconds:.1f} s",
    )
    return evaluation
