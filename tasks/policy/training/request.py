"""What a standing trainer is asked for and what it answers: objects in the store; no torch.

{name}/update.json                      the request that counts: the newest of a campaign's name
{name}.{lineage}/updates/<token>.json   its answer: a candidate, or why there is none
"""

import contextlib
import json
import secrets
import time
from typing import TYPE_CHECKING

from tasks.artifacts.errors import ObjectConflict
from tasks.config import CampaignConfig
from tasks.policy.ranks.pulse import PULSE
from tasks.records import CampaignRun, Candidate, PolicyVersion, TrainBatch
from tasks.say import say
from tasks.section import Section
from tasks.session import open_store, other_code, run_store

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore

REQUEST = "update.json"
POLL_SECONDS = 0.1
SAY_SECONDS = 30.0


def answer_key(token: str) -> str:
    return f"updates/{token}.json"


class UpdateRequest(Section):
    run: CampaignRun
    batch: TrainBatch
    policy: PolicyVersion
    token: str
    """Random: whoever asks again gets an answer of its own."""

    @property
    def answer_key(self) -> str:
        return answer_key(self.token)


class UpdateAnswer(Section):
    candidate: Candidate | None = None
    error: str = ""
    """Why there is no candidate."""


def await_request(
    config: CampaignConfig, root: "PolicyStore", *, after: str, is_speaker: bool
) -> UpdateRequest:
    """The next request of the campaign that is not ``after``, has no answer and is of this code; others are
    refused by the speaker, and the trainer waits on."""
    while True:
        PULSE.beat()
        if found := root.find_object(REQUEST):
            asked = json.loads(found)  # other code may have other fields
            if (token := asked["token"]) != after:
                after, run = token, asked["run"]
                store = open_store(config, f"{config.name}.{run['lineage']:04d}")
                if store.find_object(answer_key(token)) is None:
                    if not (why := other_code(run["code_revision"])):
                        return UpdateRequest.model_validate_json(found)
                    if is_speaker:
                        say("trainer", why)
                        put_answer(store, token, UpdateAnswer(error=why))
        time.sleep(POLL_SECONDS)


def put_answer(store: "PolicyStore", token: str, answer: UpdateAnswer) -> None:
    """The first answer of any rank counts."""
    with contextlib.suppress(ObjectConflict):
        store.put_object(answer_key(token), answer.model_dump_json().encode())


def await_candidate(run: CampaignRun, batch: TrainBatch, policy: PolicyVersion) -> Candidate:
    """Ask the standing trainer to train ``policy`` on ``batch``, and wait for what it made."""
    request = UpdateRequest(run=run, batch=batch, policy=policy, token=secrets.token_hex(8))
    root, store = open_store(run.config, run.config.name), run_store(run)
    root.replace_object(REQUEST, request.model_dump_json().encode())
    limit, start = run.config.train.standing_timeout_seconds, time.monotonic()
    spoke = start
    while (found := store.find_object(request.answer_key)) is None:
        if time.monotonic() - start > limit:
            raise RuntimeError(
                f"a standing trainer must answer within train.standing_timeout_seconds={limit:g}, got "
                f"nothing for version {policy.version} of {run.campaign}. Start one with `torchrun ... -m "
                "tasks.policy.standing --config ...`, this store and the code "
                f"{run.code_revision}, then run the campaign again."
            )
        if time.monotonic() - spoke > SAY_SECONDS:
            spoke = time.monotonic()
            text = f"waits for a standing trainer since {spoke - start:.0f} s, for at most {limit:g} s"
            say("train", text, iteration=batch.iteration)
        time.sleep(POLL_SECONDS)
    answer = UpdateAnswer.model_validate_json(found)
    if answer.candidate is None:
        raise RuntimeError(f"the standing trainer must train, got {answer.error}. Run the campaign again.")
    return answer.candidate
