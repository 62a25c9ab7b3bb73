"""What a standing trainer is asked for and what it answers: objects in the store; no torch.

{name}/update.json                      the request that counts: the newest of a campaign's name
{name}.{lineage}/updates/<token>.json   its answer: a candidate, or why there is none
"""

import secrets
import time
from typing import TYPE_CHECKING

from tasks.records import CampaignRun, Candidate, PolicyVersion, TrainBatch
from tasks.section import Section
from tasks.session import open_store, run_store

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore

REQUEST = "update.json"
POLL_SECONDS = 0.1


class UpdateRequest(Section):
    run: CampaignRun
    batch: TrainBatch
    policy: PolicyVersion
    token: str
    """Random: whoever asks again gets an answer of its own."""

    @property
    def answer_key(self) -> str:
        return f"updates/{self.token}.json"


class UpdateAnswer(Section):
    candidate: Candidate | None = None
    error: str = ""
    """Why there is no candidate."""


def find_request(root: "PolicyStore") -> UpdateRequest | None:
    """What the campaign of a name asked for last."""
    found = root.find_object(REQUEST)
    return UpdateRequest.model_validate_json(found) if found else None


def await_candidate(run: CampaignRun, batch: TrainBatch, policy: PolicyVersion) -> Candidate:
    """Ask the standing trainer to train ``policy`` on ``batch``, and wait for what it made."""
    request = UpdateRequest(run=run, batch=batch, policy=policy, token=secrets.token_hex(8))
    root, store = open_store(run.config, run.config.name), run_store(run)
    root.replace_object(REQUEST, request.model_dump_json().encode())
    limit, start = run.config.train.standing_timeout_seconds, time.monotonic()
    while (found := store.find_object(request.answer_key)) is None:
        if time.monotonic() - start > limit:
            raise RuntimeError(
                f"a standing trainer must answer within train.standing_timeout_seconds={limit:g}, got "
                f"nothing for version {policy.version} of {run.campaign}. Start one with `torchrun ... -m "
                "tasks.policy.standing --config ...` and this store, then run the campaign again."
            )
        time.sleep(POLL_SECONDS)
    answer = UpdateAnswer.model_validate_json(found)
    if answer.candidate is None:
        raise RuntimeError(f"the standing trainer must train, got {answer.error}. Run the campaign again.")
    return answer.candidate
