"""A standing trainer: keeps its ranks, and on them the policy and its optimizer, from update to update.

    torchrun --nproc-per-node 2 -m tasks.policy.standing --config configs/campaigns/laptop.yaml --store ./runs

It trains what a campaign of the configuration's name with ``train: {pool: standing}`` asks for, by that run's
configuration; the file only says where the store is. A version that it made itself is in its memory, one that
it did not make it loads. Every version is stored as whole as by a trainer of one update, so a trainer that is
killed, or a campaign that goes on without one, loses nothing and makes the same bits. Ranks wait without a
collective, which would time out between iterations.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from tasks.config import CampaignConfig
from tasks.policy.launch import require_topology
from tasks.policy.ranks.process_group import process_group
from tasks.policy.ranks.pulse import PULSE
from tasks.policy.ranks.stopping import StopRequest, exit_on_sigterm
from tasks.policy.training.request import UpdateAnswer, UpdateRequest, await_request, put_answer
from tasks.policy.training.resident import Resident
from tasks.policy.training.update import update_on_ranks
from tasks.say import say
from tasks.session import open_store, read_config, run_store


def is_common(token: str) -> bool:
    """Whether every rank saw the same request; a campaign may have asked anew between two looks."""
    tokens: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(tokens, token)
    return len(set(tokens)) == 1


def answer(request: UpdateRequest, resident: Resident) -> None:
    """Train what was asked for; the candidate, or the first failure of any rank, is the answer."""
    store = run_store(request.run)
    try:
        candidate = update_on_ranks(request.run, request.batch, request.policy, resident)
    except Exception as error:
        said = UpdateAnswer(error=f"{type(error).__name__} on rank {dist.get_rank()}: {error}")
        put_answer(store, request.token, said)
        raise
    if dist.get_rank() == 0:
        put_answer(store, request.token, UpdateAnswer(candidate=candidate))


def follow(campaign: CampaignConfig, stop: StopRequest, *, updates: int = 0) -> None:
    """Answer one request of the campaign after another; with ``updates``, only so many."""
    is_speaker = os.environ["RANK"] == "0"
    wait = partial(await_request, campaign, open_store(campaign, campaign.name), is_speaker=is_speaker)
    if is_speaker:
        say("trainer", f"waits for what a run of {campaign.name} asks for")
    first = wait(after="")
    config, done, count = first.run.config, "", 0
    require_topology(config)
    with process_group(config):
        resident = Resident(stop)
        if dist.get_rank() == 0:
            say("trainer", f"{dist.get_world_size()} ranks follow {config.name}")
        while not updates or count < updates:
            request = wait(after=done)
            if not is_common(request.token):
                continue
            if request.run.config.train != config.train:
                raise RuntimeError(
                    "a standing trainer must go on with the train section it began with, got another one "
                    f"from {request.run.campaign}. Start it again (torchrun --max-restarts does)."
                )
            answer(request, resident)
            done, count = request.token, count + 1


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="A standing trainer that follows a campaign.")
    parser.add_argument("--config", type=Path, required=True, help="the campaign's YAML")
    parser.add_argument("--store", help="replaces checkpoint.store")
    parser.add_argument("--campaign", help="replaces name")
    parser.add_argument("--pulse", type=Path, help="file that is touched whenever the ranks move")
    options = parser.parse_args(arguments)
    config = read_config(options.config, name=options.campaign, checkpoint__store=options.store)
    if "RANK" not in os.environ:
        raise SystemExit("tasks.policy.standing must be started by torchrun, got no RANK.")
    PULSE.path = options.pulse
    with exit_on_sigterm(grace_seconds=config.train.grace_seconds) as stop:
        follow(config, stop)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
