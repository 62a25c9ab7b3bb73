"""Versions of PPO's critic: a lineage ``<campaign>.critic`` beside the policy's; no torch.

Version n belongs to the policy after n iterations. The policy's manifest names the critic's, which lies in
the policy's lineage before the policy is published and becomes a critic version right after: a run that is
killed between the two makes up for it when it goes on.
"""

from typing import TYPE_CHECKING

from tasks.artifacts.manifest import Manifest
from tasks.artifacts.owned import Checkpoint, checkpoint_of
from tasks.records import CampaignRun, PolicyVersion
from tasks.session import open_store

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore


def critic_store(run: CampaignRun) -> "PolicyStore":
    """The critics of a campaign's lineage, in the same store as its policies."""
    return open_store(run.config, f"{run.campaign}.critic")


def require_critic(policy: Manifest) -> None:
    """Refuse to go on with a critic where iterations were trained without."""
    if policy.iteration and not policy.critic:
        raise ValueError(
            f"policy version {policy.version} must have been trained with a critic to go on with one, got "
            f"{policy.iteration} iterations without. Restore algorithm.advantage, or start a new lineage "
            "with --fresh."
        )


def find_critic(
    run: CampaignRun, policies: "PolicyStore", policy: Manifest
) -> tuple[Checkpoint, Manifest] | None:
    """Checkpoint and manifest of the critic that goes on with ``policy``; None before the first iteration."""
    require_critic(policy)
    if not policy.critic:
        return None
    critics = critic_store(run)
    version = publish_critic(run, policies, policy)  # again, if a killed run did not come to it
    return checkpoint_of(critics, version), critics.manifest(version)


def keep_candidate(policies: "PolicyStore", manifest: Manifest, *, is_writer: bool) -> str:
    """Store a critic's manifest beside the policies until it is published; its key, the same however often
    it is trained alike."""
    key = f"critics/{manifest.version:06d}-{manifest.content_digest()[:16]}.json"
    if is_writer and policies.find_object(key) is None:
        policies.put_object(key, manifest.model_dump_json().encode())
    return key


def publish_critic(run: CampaignRun, policies: "PolicyStore", policy: Manifest) -> PolicyVersion:
    """Publish the critic that a published policy was trained with; safe to repeat."""
    return critic_store(run).commit(Manifest.model_validate_json(policies.get_object(policy.critic)))
