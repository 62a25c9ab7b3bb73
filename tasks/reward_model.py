"""A reward model from preference pairs, on the reward pool."""

import time

from flytekit import task

from tasks import placement
from tasks.config import CampaignConfig
from tasks.records import RewardModelReport
from tasks.say import say


@task(**placement.REWARD.task_arguments())
def train_reward_model(config: CampaignConfig) -> RewardModelReport:
    """Train ``reward.model`` and store it in its folder; one that ranks badly is not stored."""
    from pathlib import Path

    from tasks.environments import reward_training

    start, settings = time.monotonic(), config.reward.model
    if not settings.folder:
        raise ValueError("reward.model.folder must be given, got ''. It is where the reward model is stored.")
    training = reward_training.train_reward_model(config)
    folder = Path(settings.folder).expanduser()
    if training.accuracy < settings.min_accuracy:
        raise RuntimeError(
            f"the reward model must rank {settings.min_accuracy:.0%} of the pairs kept out as they were "
            f"given, got {training.accuracy:.1%} after {settings.steps} steps; nothing is stored. Raise "
            "reward.model.steps or pairs."
        )
    reward_training.save_reward_model(training, folder)
    report = RewardModelReport(
        folder=str(folder.resolve()),
        accuracy=training.accuracy,
        first_loss=training.losses[0],
        last_loss=training.losses[-1],
        seconds=time.monotonic() - start,
    )
    say(
        "reward",
        f"pair accuracy {report.accuracy:.3f} on pairs kept out, loss {report.first_loss:.3f} -> "
        f"{report.last_loss:.3f}, {settings.steps} steps, {report.seconds:.1f} s, {report.folder}",
    )
    return report
