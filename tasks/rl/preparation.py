"""A sealed batch before its first step: advantages and weights that need what models say of its tokens.

Shape key: N rows, T response tokens of all rows, one row after another; B rows, L tokens of the longest.
Rows are dicts as in ``packing.py`` and may hold ``proximal_logprob``, ``reference_logprob``,
``teacher_logprob`` and ``value``, one number a response token. Every rank has all rows and computes the same,
in float64: statistics over the batch do not depend on how it is split. Pure.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tasks.algorithm_config import AlgorithmConfig
from tasks.rl.advantages import (
    discounted_returns,
    gae,
    group_advantages,
    teacher_advantages,
    token_rewards,
    whiten,
)
from tasks.rl.corrections import (
    importance_weight,
    keeps_near_sequences,
    keeps_useful_sequences,
    masked_weight,
    truncated_weight,
)
from tasks.rl.mismatch import mismatch_report, require_agreement
from tasks.rl.packing import Row
from tasks.rl.sequences import masked


def prepare_rows(rows: Sequence[Row], algorithm: AlgorithmConfig) -> tuple[list[Row], dict[str, float]]:
    """Rows with ``token_advantage``, ``return``, ``weight`` and a smaller ``loss_mask`` as far as the
    algorithm has them, and the batch's report. Nothing changes where it asks for nothing."""
    if rows:
        _require_columns(rows[0], algorithm)
    if not rows or not (algorithm.is_estimated_by_trainer or algorithm.correction.proximal == "recomputed"):
        return list(rows), {}
    lengths = [len(row["response_ids"]) for row in rows]
    token = {name: _flat(rows, name) for name in _TOKEN_COLUMNS if name in rows[0]}
    token["mask"] = _flat(rows, "loss_mask").bool()
    token["segment"] = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))
    sequence_N = torch.tensor([row["advantage"] for row in rows], dtype=torch.float64)
    token["advantage"], found, report = sequence_N[token["segment"]], {}, {}
    if algorithm.is_estimated_by_trainer:
        found = token_estimates(rows, token, lengths, algorithm)
        token["advantage"] = found["token_advantage"]
    if algorithm.correction.proximal == "recomputed":
        weight_T, keep_T, report = correct(token, algorithm)
        found |= {"weight": weight_T, "loss_mask": token["mask"] & keep_T}
    columns = {name: [part.tolist() for part in value_T.split(lengths)] for name, value_T in found.items()}
    return [
        {**row, **{name: column[index] for name, column in columns.items()}} for index, row in enumerate(rows)
    ], report


_TOKEN_COLUMNS = (
    "behavior_logprob", "proximal_logprob", "reference_logprob", "teacher_logprob", "value",
)  # fmt: skip


def token_estimates(
    rows: Sequence[Row], token: dict[str, Tensor], lengths: list[int], algorithm: AlgorithmConfig
) -> dict[str, Tensor]:
    """[T] ``token_advantage`` of the estimators that assembly cannot compute; with a critic ``return``."""
    mask_T, kl_T = token["mask"], torch.zeros_like(token["behavior_logprob"])
    if algorithm.kl == "reward":
        kl_T = token["behavior_logprob"] - token["reference_logprob"]
    found: dict[str, Tensor] = {}
    if algorithm.advantage == "teacher":
        advantage_T = teacher_advantages(token["behavior_logprob"], token["teacher_logprob"], mask_T)
    else:
        reward_N = torch.tensor([row["reward"] for row in rows], dtype=torch.float64)
        mask_BL, kl_BL = _rows_of(mask_T, lengths), _rows_of(kl_T, lengths)
        reward_BL = token_rewards(reward_N, mask_BL, kl_BL, kl_coefficient=algorithm.kl_coefficient)
        discount = algorithm.discount
        if algorithm.advantage == "gae":
            value_BL = _rows_of(token["value"], lengths)
            advantage_BL, return_BL = gae(
                reward_BL, value_BL, mask_BL, discount=discount, gae_lambda=algorithm.gae_lambda
            )
            found["return"] = _flat_of(return_BL, lengths)
        elif algorithm.advantage == "returns":
            advantage_BL = discounted_returns(reward_BL, mask_BL, discount=discount)
        else:
            advantage_N = _grouped(rows, reward_BL.sum(dim=1), algorithm)
            advantage_BL = masked(advantage_N[:, None], mask_BL)
        advantage_T = _flat_of(advantage_BL, lengths)
    if algorithm.whiten:
        advantage_T = whiten(advantage_T, mask_T)
    return found | {"token_advantage": advantage_T}


def correct(token: dict[str, Tensor], algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor, dict[str, float]]:
    """[T] weights and which tokens stay, with the report of the batch; stops where a bound is passed."""
    rules, mask_T, segment_T = algorithm.correction, token["mask"], token["segment"]
    pair = token["proximal_logprob"], token["behavior_logprob"]
    report = mismatch_report(pair[0][mask_T], pair[1][mask_T])
    require_agreement(
        report,
        max_k3=rules.stop_k3,
        max_difference=rules.stop_difference,
        min_effective_share=rules.stop_effective_share,
    )
    raw_T = importance_weight(*pair, mask_T, segment_T, level=rules.level)
    weight_T = {
        "none": torch.ones_like(raw_T),
        "truncate": truncated_weight(raw_T, high=rules.high),
        "mask": masked_weight(raw_T, low=rules.low, high=rules.high),
    }[rules.weight]
    keep_T = torch.ones_like(mask_T)
    if rules.reject_k3:
        keep_T &= keeps_near_sequences(*pair, mask_T, segment_T, max_k3=rules.reject_k3)
    if rules.reject_negative_k1:
        keep_T &= keeps_useful_sequences(
            *pair, token["advantage"], mask_T, segment_T, max_k1=rules.reject_negative_k1
        )
    report["changed_weight_share"] = (weight_T != raw_T)[mask_T].double().mean().item()
    report["rejected_share"] = (~keep_T)[mask_T].double().mean().item()
    return weight_T, keep_T, {f"mismatch/{name}": value for name, value in report.items()}


def _grouped(rows: Sequence[Row], score_N: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """[N] Advantages within the groups of one prompt; their rows may be anywhere in the batch."""
    members: dict[tuple[int, str], list[int]] = {}
    for index, row in enumerate(rows):
        members.setdefault((row["iteration"], row["prompt_id"]), []).append(index)
    advantage_N = torch.zeros_like(score_N)
    for group in members.values():
        advantage_N[group] = sequence_advantages(score_N[group][None], algorithm)[0]
    return advantage_N


def sequence_advantages(reward_NG: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """[N, G] The configuration's group estimator."""
    return group_advantages(
        reward_NG,
        normalize_by_std=algorithm.normalize_by_std,
        std_eps=algorithm.std_eps,
        leave_one_out=algorithm.advantage == "leave_one_out",
    )


def _require_columns(row: Row, algorithm: AlgorithmConfig) -> None:
    needed = {
        "proximal_logprob": algorithm.correction.proximal == "recomputed",
        "reference_logprob": algorithm.kl != "none",
        "teacher_logprob": algorithm.advantage == "teacher",
        "value": algorithm.advantage == "gae",
    }
    if missing := [name for name, is_needed in needed.items() if is_needed and name not in row]:
        raise ValueError(
            f"rows must hold {', '.join(missing)} for this algorithm, got {', '.join(row)}. Read the batch "
            "with the models in question before it is prepared."
        )


def _flat(rows: Sequence[Row], name: str) -> Tensor:
    return torch.tensor([value for row in rows for value in row[name]], dtype=torch.float64)


def _rows_of(value_T: Tensor, lengths: list[int]) -> Tensor:
    return pad_sequence(list(value_T.split(lengths)), batch_first=True)


def _flat_of(value_BL: Tensor, lengths: list[int]) -> Tensor:
    return torch.cat([row_L[:length] for row_L, length in zip(value_BL, lengths, strict=True)])
