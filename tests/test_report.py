"""The report page, from records made by hand: what it says, that it stands alone.

How it looks, no test can see.
"""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from tasks.artifacts.manifest import Manifest
from tasks.config import CampaignConfig
from tasks.environments.alerts import ALERTS
from tasks.experience.ledger import CampaignLedger, IterationLedger
from tasks.records import CampaignRun, Evaluation
from tasks.reporting import charts, page, rollouts
from tasks.reporting.agreement import agreement_section
from tasks.reporting.collect import CampaignRecord
from tasks.reporting.operations import means_section
from tasks.reporting.rewards import idle_section
from tasks.schema import TrainFrame, make_frame

if TYPE_CHECKING:
    import polars as pl

    from tasks.artifacts.store import PolicyStore

HOSTILE = "<script>alert('x')</script><img src=http://evil.example/a.png>"
START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
HEALTHY = {
    "reward": 0.1, "exact_match": 0.05, "kl_k3": 0.03, "entropy": 2.0, "clip_share": 0.1, "grad_norm": 0.4,
    "zero_variance": 0.02, "response_tokens": 5.5, "staleness": 0.0, "skipped_steps": 0.0, "failures": 0.0,
    "generated_tokens": 6000.0, "trained_tokens": 5000.0,
}  # fmt: skip


class StoreWithoutBatches:
    """A store whose lifecycle rule removed the batches."""

    def find_object(self, key: str) -> None:
        return None


def manifest(version: int, **changes: Any) -> Manifest:
    """Version 0 is the beginning; iteration k makes version k + 1, with a growing reward, 10 s later."""
    fields: dict[str, Any] = {
        "campaign": "unit.0001", "version": version, "parent": version - 1 if version else None,
        "kind": "iteration" if version else "init", "iteration": version, "files": {},
        "created": START + timedelta(seconds=10 * version), "tensor_digest": f"{version:02d}" * 32,
        "config_digest": "c0ffee", "code_revision": "abc1234",
    }  # fmt: skip
    if version:
        metrics = HEALTHY | {"reward": 0.1 * version}
        seconds = {"start_up": 4.0, "generate": 3.0, "train": 2.0, "publish": 1.0}
        fields |= {"batch": f"batches/{version - 1:06d}.arrow", "metrics": metrics, "seconds": seconds}
    return Manifest.model_validate(fields | changes)


def record(
    num_iterations: int = 6, *, reason: str = "zero_variance", metrics: dict[str, float] | None = None
) -> CampaignRecord:
    """A campaign; ``metrics`` replace those of its newest iteration."""
    manifests = [manifest(version) for version in range(num_iterations + 1)]
    if metrics:
        manifests[-1] = manifest(num_iterations, metrics=manifests[-1].metrics | metrics)
    ledgers = tuple(
        IterationLedger(
            iteration=i, produced=1234, trained=1230, rejected={reason: 4}, pending=0,
            oldest_policy_version=i, newest_policy_version=i,
        )
        for i in range(num_iterations)
    )  # fmt: skip
    scores = [(0, 0.0123, 0.0456), (num_iterations, 0.7891, 0.8912)] if num_iterations else []
    return CampaignRecord(
        run=CampaignRun(config=CampaignConfig(name="unit"), lineage=1, code_revision="abc1234"),
        manifests=manifests,
        evaluations=[
            Evaluation(
                version=version, iteration=version, num_prompts=77, exact_sampled=sampled,
                exact_greedy=greedy, reward_sampled=0.5, seconds=1.0,
            )
            for version, sampled, greedy in scores
        ],
        ledger=CampaignLedger(iterations=ledgers),
    )  # fmt: skip


def render(campaign: CampaignRecord) -> str:
    return page.html_page(campaign, cast("PolicyStore", StoreWithoutBatches()))


def frame(advantages: dict[str, list[float]]) -> pl.DataFrame:
    """One prompt a key; its prompt token is 7, response i is token 100 + i."""
    rows = [
        {
            "iteration": 3, "prompt_id": prompt, "sample_index": i, "policy_version": 41, "prompt_ids": [7],
            "response_ids": [100 + i], "behavior_logprob": [-0.5], "loss_mask": [True],
            "reward": 0.25, "advantage": advantage, "minibatch": 0,
        }
        for prompt, values in advantages.items()
        for i, advantage in enumerate(values)
    ]  # fmt: skip
    return make_frame(rows, TrainFrame)


def test_the_page_names_the_numbers_of_the_record() -> None:
    html = render(record())
    shown = (
        "unit.0001",
        "version 6",
        "0.012 &rarr;",
        "<b>0.789</b>",
        "0.046 &rarr;",
        "<b>0.891</b>",
        "77 held-out",
    )
    for text in (
        *shown,
        "7,380",
        "60 s",
        "zero_variance: 24",
        "c0ffee",
        "abc1234",
        "06" * 32,
    ):  # 6 * 1230 trained
        assert text in html, text
    for name in (
        "kl_k3",
        "entropy",
        "clip_share",
        "grad_norm",
        "zero_variance",
        "response_tokens",
        "staleness",
    ):
        title = next(title for key, title, _ in page.HEALTH if key == name)
        assert f"{escape(title)}</b><span>{charts.number(HEALTHY[name])}</span>" in html
    assert "Generation tokens/s</b><span>2,000<" in html  # 6000 tokens in 3 s
    assert "Training tokens/s</b><span>2,500<" in html  # 5000 tokens in 2 s


def test_the_page_loads_nothing_from_elsewhere_and_is_small() -> None:
    html = render(record())
    assert not re.search(r"<script|<link|<iframe|@import|url\(|\ssrc=|\shref=|https?://", html)
    assert len(html) < 100_000 and html.isascii()


def test_hostile_text_of_a_record_is_escaped() -> None:
    campaign = record(reason=HOSTILE)
    campaign.manifests[-1] = manifest(
        6,
        code_revision=HOSTILE,
        batch=HOSTILE,
        config_digest=HOSTILE,
        tensor_digest=HOSTILE,
        seconds={HOSTILE: 9.0},
    )
    html = render(campaign)
    assert escape(HOSTILE) in html
    assert "<script" not in html and "<img" not in html


def test_hostile_rollouts_are_escaped() -> None:
    _, html = rollouts.group_columns(frame({"p": [1.0, -1.0]}), lambda _: HOSTILE, iteration=3)
    assert escape(HOSTILE) in html and "<script" not in html and "<img" not in html


def test_a_campaign_without_iterations_renders() -> None:
    html = render(record(0))
    assert "No iteration is published yet" in html and "not evaluated" in html and "Healthy" not in html


def test_a_campaign_without_versions_renders() -> None:
    empty = record(0)
    empty.manifests.clear()
    assert "no version published" in render(empty)


def test_one_iteration_is_enough_for_charts() -> None:
    html = render(record(1))
    assert html.count("<svg") == 10 and "nan" not in html


def test_a_healthy_campaign_has_no_problem() -> None:
    assert page.problems(record()) == []
    assert "<strong>Healthy</strong>" in render(record())


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"clip_share": 0.31}, "Clip share above 0.3 in 1 of 6 iterations, up to 0.31"),
        ({"kl_k3": 0.2}, "KL to the sampling policy is rising"),  # thirds: 0.03 and (0.03 + 0.2) / 2
        ({"skipped_steps": 2.0}, "2 optimizer steps skipped"),
        ({"failures": 3.0}, "3 samples could not be scored"),
        ({"grad_norm": float("nan")}, "Not finite in some version: grad_norm"),
    ],
)
def test_bad_health_is_flagged(metrics: dict[str, float], says: str) -> None:
    (problem,) = page.problems(record(metrics=metrics))
    assert problem.startswith(says)
    assert f"<li>{escape(problem)}</li>" in render(record(metrics=metrics))


def test_equal_rewards_are_flagged() -> None:
    campaign = record()
    campaign.manifests[1:] = [manifest(version, metrics=HEALTHY) for version in range(1, 7)]
    assert "rewards do not differ" in " ".join(page.problems(campaign))


def test_a_lost_sample_and_a_worse_policy_are_flagged() -> None:
    campaign = record()
    entry = campaign.ledger.iterations[0].model_copy(update={"trained": 1229})
    scores = list(reversed(campaign.evaluations))
    broken = CampaignRecord(
        run=campaign.run,
        manifests=campaign.manifests,
        evaluations=scores,
        ledger=CampaignLedger(iterations=(entry,)),
    )
    assert page.problems(broken) == [
        "Ledger of iteration 0 is off by 1 samples.",
        "Held-out exact match (sampled) fell from 0.789 to 0.012.",
    ]  # fmt: skip


def test_time_shares_sum_to_one_whatever_the_stages_are_called() -> None:
    seconds = charts.stage_seconds(
        [{"train": 3.0, "start_up": 4.0}, {"start_up": 2.0, "new_stage": 1.0, "train": -9.0}]
    )
    assert list(seconds) == ["start_up", "train", "new_stage"]
    assert sum(charts.shares(seconds).values()) == pytest.approx(1.0, abs=1e-12)
    assert charts.shares(seconds)["start_up"] == pytest.approx(
        0.6
    )  # 6 of 10; a negative clock reading is none


def test_the_share_lost_to_start_up_is_stated() -> None:
    assert "40.0% of the measured time is lost to start-up" in render(record())  # 4 of 10 s


def test_rollouts_show_hard_and_easy_groups_with_advantages() -> None:
    groups = {"even": [1.0, -1.0] * 2, "hard": [3.0, -1.0, -1.0, -1.0], "easy": [1.0, 1.0, 1.0, -3.0]}
    _, html = rollouts.group_columns(
        frame(groups | {"also hard": groups["hard"], "also easy": groups["easy"]}),
        lambda ids: f"token{ids[0]}", iteration=3,
    )  # fmt: skip
    assert re.findall(r"(\d) of 4 above", html) == ["1", "1", "3", "3"]  # the even group is between
    assert "+3.00" in html and "-3.00" in html and "token7" in html and "sampled by version 41" in html
    assert "<td>0.25</td>" in html


def test_a_single_group_is_shown_once_and_equal_responses_share_a_line() -> None:
    one = frame({"p": [1.0, 1.0, -2.0]})
    same = one.with_columns(response_ids=one["response_ids"].gather([0, 0, 2]))
    _, html = rollouts.group_columns(same, str, iteration=3)
    assert html.count("<article>") == 1 and html.count("<tr>") == 2 and "&times;2" in html


def test_a_long_campaign_stays_below_a_megabyte() -> None:
    assert len(render(record(2000))) < 1_000_000


def test_end_labels_keep_their_distance_and_order() -> None:
    moved = charts.spread([10.0, 100.0, 99.0, 98.0], gap=20.0, highest=105.0)
    assert moved == [10.0, 105.0, 85.0, 65.0]


def test_ticks_are_round_and_inside() -> None:
    assert charts.ticks(0.0, 1.0, count=5) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert charts.ticks(0.0, 0.0324, count=3) == [0.0, 0.02]  # 0.0108 apart is rough, 0.02 round


def test_a_value_that_is_not_finite_is_a_gap_in_the_line() -> None:
    line = charts.Line(label="x", points=[(0, 1.0), (1, float("nan")), (2, 3.0), (3, 4.0)])
    (path,) = re.findall(r' d="([^"]*)"|$', charts.line_chart([line], title="x", width=300, height=100))[:1]
    assert path.count("M") == 2 and path.count("L") == 1 and "nan" not in path


def test_the_reward_curve_is_a_png_1200_wide(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page.reward_curve_png(record(), tmp_path / "curve.png")
    content = (tmp_path / "curve.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">I", content[16:20]) == (1200,)


def test_what_routers_and_mismatch_did_is_shown_where_it_was_measured():
    measured = {"router/drift": 0.125, "mismatch/k3": 0.0625, "age/0": 30.0, "age/1": 12.0}
    found = agreement_section([manifest(version, metrics=HEALTHY | measured) for version in (1, 2)])
    assert "Router drift" in found and "0.125" in found and "0.0625" in found
    assert "60 of age 0, 24 of age 1" in found
    assert "Effective sample size" not in found and agreement_section([]) == ""


def test_the_gap_between_a_learned_reward_and_the_truth_is_plotted_and_said() -> None:
    campaign = record(2)
    grown = ({"reward": 0.25, "truth/value": 0.125, "truth/gap": 0.125, "truth/correlation": 0.75,
              "part/verifier": 0.125, "part/reward_model": -1.5, "part_failure/reward_model": 3.0},
             {"reward": 0.875, "truth/value": 0.5, "truth/gap": 0.375, "truth/correlation": 0.25,
              "part/verifier": 0.5, "part/reward_model": 2.5})  # fmt: skip
    manifests = [manifest(0), *(manifest(v + 1, metrics=HEALTHY | grown[v]) for v in (0, 1))]
    html = render(replace(campaign, manifests=manifests))
    assert "verifier's word went from 0.125 to 0.5" in html
    assert "gap (reward less truth) from 0.125 to 0.375" in html
    assert "correlate by 0.75 to 0.25" in html
    chart = re.search(r'<svg[^>]*aria-label="reward, truth and gap".*?</svg>', html)
    assert chart and all(re.search(rf">{name}\b", chart.group(0)) for name in ("reward", "truth", "gap"))
    assert re.search(r"<b>reward model</b><span>2\.5</span><small>3 failures", html)
    assert re.search(r"<b>verifier</b><span>0\.5</span><small>0 failures", html)


def test_a_verifier_that_is_the_reward_has_no_gap_and_no_parts() -> None:
    html = render(record(metrics={"part/verifier": 0.5}))
    assert "Reward and truth" not in html and "Reward parts" not in html


def test_stages_that_waited_are_named_with_their_share() -> None:
    measured = {"busy/generate": 30.0, "idle/generate": 10.0, "busy/score": 2.0, "idle/score": 6.0}
    metrics = HEALTHY | {"generated_tokens": 2469.0}
    found = idle_section(
        [manifest(n, metrics=metrics).model_copy(update={"waiting": measured}) for n in (1, 2)]
    )
    cells = re.findall(r"<td[^>]*>(.*?)</td>", found)
    assert cells == ["generate", "60.0", "20.0", "25.0%", "score", "4.0", "12.0", "75.0%"]
    assert "1,234 tokens/s" in found and idle_section([manifest(1)]) == ""


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_about_rewards_is_a_problem_of_its_iteration(name: str) -> None:
    assert any(
        found == f"Iterations 5: {ALERTS[name]}." for found in page.problems(record(metrics={name: 1.0}))
    )


def test_the_page_says_what_each_version_was_trained_with():
    first = {"dispatcher": "local, 1 rank", "kernels": "logprob torch"}
    versions = [manifest(0), manifest(1, means=first), manifest(2, means=first)]
    versions += [manifest(3, means=first | {"kernels": "logprob fused <b>"})]
    found = re.sub("<[^>]+>", "|", means_section(versions))
    for row in ("local, 1 rank||1 to 3", "logprob torch||1 to 2", "logprob fused &lt;b&gt;||3"):
        assert row in found, found
    assert means_section([manifest(0)]) == ""
    assert "Dispatcher, kernels, libraries" in render(replace(record(), manifests=versions))
