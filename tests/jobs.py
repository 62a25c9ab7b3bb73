"""An update as a file: what a test writes, and what each of torchrun's ranks reads, trains and answers."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tasks.records import CampaignRun, PolicyVersion, TrainBatch

Job = tuple[CampaignRun, TrainBatch, PolicyVersion]
NAMES = ("run", "batch", "policy")


def write_job(job: Job, path: Path) -> None:
    parts = {name: part.model_dump(mode="json") for name, part in zip(NAMES, job, strict=True)}
    path.write_text(json.dumps(parts))


def train_job(path: str, answer: str) -> None:
    """In a rank of torchrun; the first one writes the candidate."""
    from tasks.policy.training.update import update

    parts = json.loads(Path(path).read_text())
    candidate = update(
        CampaignRun.model_validate(parts["run"]),
        TrainBatch.model_validate(parts["batch"]),
        PolicyVersion.model_validate(parts["policy"]),
    )
    if os.environ["RANK"] == "0":
        Path(answer).write_text(candidate.model_dump_json())
