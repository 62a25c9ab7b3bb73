"""What a report says about a lineage, read back from what was published."""

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tasks.artifacts.catalogue import evaluations
from tasks.artifacts.lineage import diff
from tasks.artifacts.manifest import Manifest
from tasks.experience.ledger import CampaignLedger, IterationLedger
from tasks.experience.set_aside import REASON, owners, set_aside_samples
from tasks.records import CampaignRun, Evaluation, TrainBatch
from tasks.session import run_buffer

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignRecord:
    run: CampaignRun
    manifests: list[Manifest]
    """Ascending by version."""
    evaluations: list[Evaluation]
    """Ascending by version; the newest of each version."""
    ledger: CampaignLedger
    batches: list[TrainBatch] = field(default_factory=list)
    """The sealed batch of each iteration, ascending."""
    differences: list[dict[str, Any]] = field(default_factory=list)
    """What the newest version changed: of its parent, and of the first one."""

    @property
    def iterations(self) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest.kind == "iteration"]

    def metrics_jsonl(self) -> str:
        """One JSON object a version: identity, metrics, seconds by stage, evaluation if there is one."""
        scores = {evaluation.version: evaluation for evaluation in self.evaluations}
        workers = {batch.iteration + 1: batch.workers for batch in self.batches}
        lines = []
        for manifest in self.manifests:
            line: dict[str, Any] = {
                "version": manifest.version,
                "kind": manifest.kind,
                "iteration": manifest.iteration - 1 if manifest.kind == "iteration" else None,
                "tensor_digest": manifest.tensor_digest,
                "config_digest": manifest.config_digest,
                "code_revision": manifest.code_revision,
                "num_samples": manifest.num_samples,
                "metrics": manifest.metrics,
                "seconds": manifest.seconds,
            }
            if manifest.kind == "iteration" and (shares := workers.get(manifest.iteration)):
                line["workers"] = {name: share.model_dump() for name, share in shares.items()}
            if score := scores.get(manifest.version):
                line["evaluation"] = score.model_dump(exclude={"version", "iteration"})
            lines.append(json.dumps(line, sort_keys=True))
        return "\n".join(lines) + "\n"


def collect(store: "PolicyStore", run: CampaignRun) -> CampaignRecord:
    """Read a lineage's manifests, evaluations and ledger."""
    manifests = store.history()
    scores = {found["version"]: Evaluation.model_validate(found) for found in evaluations(store)}
    return CampaignRecord(
        run=run,
        manifests=manifests,
        evaluations=[scores[version] for version in sorted(scores)],
        ledger=campaign_ledger(store, run, manifests),
        batches=[_batch(store, manifest) for manifest in manifests if manifest.kind == "iteration"],
        differences=_differences(store, manifests),
    )


def _differences(store: "PolicyStore", manifests: list[Manifest]) -> list[dict[str, Any]]:
    if not manifests or (parent := manifests[-1].parent) is None:
        return []
    return [diff(store, old, manifests[-1].version) for old in dict.fromkeys((parent, manifests[0].version))]


def campaign_ledger(store: "PolicyStore", run: CampaignRun, manifests: list[Manifest]) -> CampaignLedger:
    """Law 2, from three independent counts: workers counted what they produced, assembly what it rejected,
    and the trainer what it trained. Samples of iterations that are not published yet are pending."""
    buffer = run_buffer(run)
    entries: dict[int, IterationLedger] = {}
    for manifest in manifests:
        if manifest.kind != "iteration":
            continue
        batch = _batch(store, manifest)
        sampled_by = batch.behavior_version
        entries[batch.iteration] = IterationLedger(
            iteration=batch.iteration,
            produced=batch.produced,
            trained=manifest.num_samples,
            rejected=batch.rejected,
            pending=0,
            carried_in=batch.carried_in,
            carried_out=batch.carried_out,
            oldest_policy_version=sampled_by if batch.oldest_version is None else batch.oldest_version,
            newest_policy_version=sampled_by,
            unsampled=max(
                0, batch.offered - batch.produced - batch.handed_on + batch.rejected.get("refused", 0)
            ),
        )
    done = max(entries, default=-1) + 1
    for iteration in range(done, done + run.config.schedule.max_staleness + 1):
        if samples := buffer.produced(iteration).samples:
            entries[iteration] = _unpublished(iteration, pending=samples)
    for iteration, count in set_aside_samples(store, run, owners(manifests)).items():
        entry = entries.get(iteration) or _unpublished(iteration, pending=0)
        rejected = entry.rejected | {REASON: entry.rejected.get(REASON, 0) + count}
        entries[iteration] = entry.model_copy(
            update={"produced": entry.produced + count, "rejected": rejected}
        )
    return CampaignLedger(iterations=tuple(entries[iteration] for iteration in sorted(entries))).settled()


def _batch(store: "PolicyStore", manifest: Manifest) -> TrainBatch:
    return TrainBatch.model_validate_json(store.get_object(manifest.batch.replace(".arrow", ".json")))


def _unpublished(iteration: int, *, pending: int) -> IterationLedger:
    return IterationLedger(
        iteration=iteration, produced=pending, trained=0, pending=pending, oldest_policy_version=0,
        newest_policy_version=0, unsampled=0,
    )  # fmt: skip
