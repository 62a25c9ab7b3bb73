"""A standing rollout worker: keeps its engine resident and follows a campaign from version to version.

    python -m tasks.engine.standing --config configs/campaigns/laptop.yaml --store ./runs

It works for whatever run of the campaign's name was started last, with that run's configuration; the file
only says where the store is. It takes no portion of a policy version it has not loaded: when the campaign
requires another one, it loads that first. With ``rollout.follow: newest`` a portion's version is the oldest
that may sample it: the worker takes newer ones as they are published, also while it samples. Several of them
share the queue. SIGTERM or a Spot notice drains it (exit 143).
"""

import argparse
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from tasks.artifacts.store import PolicyStore
from tasks.artifacts.version import PolicyVersion
from tasks.engine.in_flight import newest_after, taking_newer
from tasks.engine.make import make_engine, make_workers
from tasks.engine.notices import Departure, departing
from tasks.engine.overlap import drain_together
from tasks.engine.protocol import Engine
from tasks.experience.buffer import ExperienceBuffer
from tasks.experience.errors import PolicyVersionMismatch
from tasks.records import CampaignRun
from tasks.say import say
from tasks.session import CURRENT_RUN, OPTIMIZER, open_store, other_code, read_config, run_buffer, run_store

POLL_SECONDS = 0.2
LOOK_SECONDS = 2.0
"""How often it looks for another run of the campaign."""


class StandingWorker:
    """One engine and the run it follows."""

    def __init__(self, root: PolicyStore, *, name: str, departure: Departure) -> None:
        self.root, self.name, self.departure = root, name, departure
        self.run: CampaignRun | None = None
        self._engine: Engine | None = None
        self._buffer: ExperienceBuffer | None = None
        self._store: PolicyStore | None = None
        self._folder = Path()
        self._refused = b""

    def look(self) -> None:
        """Follow the run that was started last; another one gets an engine and a buffer of its own."""
        found = self.root.find_object(CURRENT_RUN)
        if found is None:
            return
        if why := other_code(json.loads(found)["code_revision"]):
            self.run = None  # and wait: who upgrades a campaign and its pool does one after the other
            if found != self._refused:
                self._refused = found
                say("standing", f"{self.name} waits: {why}")
            return
        run = CampaignRun.model_validate_json(found)
        if run == self.run:
            return
        self._exchange(run_store(run), Path())
        self.run, self._buffer = run, run_buffer(run)
        self._engine = make_engine(run.config.rollout, dtype=run.config.model.dtype)
        say("standing", f"{self.name} follows {run.campaign}, configuration {run.config.digest()}")

    def work(self) -> int:
        """One pass over the open iterations, oldest first; returns the portions done."""
        if self.run is None or self._buffer is None or self._engine is None:
            return 0
        portions = 0
        for iteration, version in self._buffer.open_iterations().items():
            if self.departure.is_due or self._buffer.outstanding(iteration) == 0:
                continue
            try:
                portions += self._drain(self.run, self._engine, self._buffer, iteration, version)
            except PolicyVersionMismatch as error:  # put anew between two looks; the next pass loads it
                say("standing", str(error), iteration=iteration)
        return portions

    def _exchange(self, store: PolicyStore, folder: Path) -> None:
        """The folder that the engine holds from now on; the cache may evict the one before."""
        if self._store is not None and self._folder != folder:
            self._store.release(self._folder)
        self._store, self._folder = store, folder

    def _drain(
        self, run: CampaignRun, engine: Engine, buffer: ExperienceBuffer, iteration: int, version: int
    ) -> int:
        assert self._store is not None
        takes_newer = run.config.rollout.follow == "newest"
        if self._folder == Path() or not _may_sample(engine.version, version, takes_newer=takes_newer):
            newer = newest_after(self._store, version) if takes_newer else None
            self._load(engine, newer or self._store.reference(version))
        members = make_workers(
            run.config, engine, buffer, folder=self._folder, name=self.name, departure=self.departure,
            required_version=version if takes_newer else None,
        )  # fmt: skip
        beside = taking_newer(lambda: self._look_for_newer(engine), departure=self.departure)
        with beside if takes_newer else nullcontext():
            done = drain_together(members, iteration, waits=False)
        if done.num_portions or done.num_returned:
            rate = done.num_tokens / max(done.seconds, 1e-9)
            say(
                "standing",
                f"{self.name}: {done.num_portions} portions, {done.num_returned} returned, "
                f"{done.num_samples} samples, "
                f"{done.num_tokens} tokens of v{version}{' or newer' if takes_newer else ''}, "
                f"{rate:,.0f} tokens/s",
                iteration=iteration,
            )
        return done.num_portions

    def _look_for_newer(self, engine: Engine) -> None:
        assert self._store is not None and engine.version is not None
        if found := newest_after(self._store, engine.version):
            self._load(engine, found)

    def _load(self, engine: Engine, found: PolicyVersion) -> None:
        assert self._store is not None
        start, store = time.monotonic(), self._store
        folder = store.pull(found, without=OPTIMIZER)
        engine.load(folder, found.version)
        self._exchange(store, folder)
        say("standing", f"{self.name} loaded v{found.version} in {time.monotonic() - start:.1f} s")


def _may_sample(held: int | None, required: int, *, takes_newer: bool) -> bool:
    return held == required or (takes_newer and held is not None and held > required)


def follow(root: PolicyStore, *, name: str, departure: Departure) -> None:
    """Work until the departure."""
    worker, looked = StandingWorker(root, name=name, departure=departure), -LOOK_SECONDS
    say("standing", f"{name} waits for what a run of {root.campaign} puts on its queue")
    while not departure.is_due:
        if time.monotonic() - looked >= LOOK_SECONDS:
            worker.look()
            looked = time.monotonic()
        if not worker.work():
            time.sleep(POLL_SECONDS)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A standing rollout worker that follows a campaign.")
    parser.add_argument("--config", required=True, type=Path, help="the campaign's YAML")
    parser.add_argument("--store", help="replaces checkpoint.store")
    parser.add_argument("--campaign", help="replaces name")
    parser.add_argument("--worker", help="name of this worker; default: host, process and a random part")
    options = parser.parse_args(arguments)
    config = read_config(options.config, name=options.campaign, checkpoint__store=options.store)
    # random: a restarted container has the host and process number of the one that was barred
    name = options.worker or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(2)}"
    rollout = config.rollout
    with departing(
        grace_seconds=rollout.grace_seconds,
        metadata_url=rollout.metadata_url,
        poll_seconds=rollout.notice_poll_seconds,
    ) as departure:
        follow(open_store(config, config.name), name=name, departure=departure)
    say("standing", f"{name} leaves: {departure.reason}")
    departure.exit()


if __name__ == "__main__":
    main()
