"""A reward model from preference pairs, before the campaign that is rewarded by it; both read one file.

pyflyte run workflows/reward_model.py reward_model --config configs/campaigns/learned_reward.yaml
"""

# pyright: reportReturnType=false
# Inside a workflow a task call returns a promise of its declared type.

from flytekit import workflow

from tasks.command_line import says_what_is_wrong
from tasks.config import CampaignConfig
from tasks.records import RewardModelReport
from tasks.reward_model import train_reward_model


@says_what_is_wrong
@workflow
def reward_model(config: CampaignConfig) -> RewardModelReport:
    """Train the model that ``reward.model`` describes on the pairs of the environment, or of a file."""
    return train_reward_model(config=config)
