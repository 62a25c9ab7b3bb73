"""Version 0 of a campaign."""

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tasks.artifacts.manifest import Manifest
from tasks.model_config import num_experts
from tasks.policy.checkpoint import weights
from tasks.policy.models.model import build_random, checkpoint_tensors
from tasks.policy.models.tokenizer import (
    EOS,
    PAD,
    character_tokenizer,
    load_tokenizer,
    prompt_ids,
    prompt_room,
    require_room,
    stop_ids,
)
from tasks.records import CampaignRun
from tasks.session import run_prompts

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore


def initial_manifest(store: "PolicyStore", run: CampaignRun) -> Manifest:
    """Store the files of version 0 and describe them; the policy must be able to read the prompts.

    A large checkpoint passes through tensor by tensor and file by file, never as a model.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(run.config.model.folder) if run.config.model.folder else _random_policy(run, Path(name))
        _require_trainable(folder, run)
        _require_fitting_prompts(folder, run)
        digest = weights.tensor_digest(_finite_tensors(folder))  # before anything is stored
        files = {path.name: store.put_file(path) for path in sorted(folder.iterdir()) if path.is_file()}
        return Manifest(
            campaign=run.campaign,
            version=0,
            parent=None,
            kind="init",
            iteration=0,
            files=files,
            tensor_digest=digest,
            config_digest=run.config.digest(),
            code_revision=run.code_revision,
        )


def _finite_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Weights that are no numbers make every loss none: steps are skipped, and what is sampled is refused
    far from the cause."""
    for name, tensor in checkpoint_tensors(folder):
        ends = tensor.aminmax() if tensor.numel() else ()  # one pass; NaN is both
        if not all(map(math.isfinite, ends)):
            raise ValueError(
                f"{name} in {folder} must be finite, got {int((~tensor.isfinite()).sum())} of "
                f"{tensor.numel()} values that are not. The checkpoint is damaged or diverged: take another."
            )
        yield name, tensor


def _random_policy(run: CampaignRun, folder: Path) -> Path:
    from transformers.utils import logging

    shape, tokenizer = run.config.model.random, character_tokenizer()
    model = build_random(
        **shape.model_dump(),
        vocab_size=len(tokenizer),
        seed=run.config.seed,
        eos_token_id=tokenizer.get_vocab()[EOS],
        pad_token_id=tokenizer.get_vocab()[PAD],
    )
    logging.disable_progress_bar()  # it would break up the lines that say where the campaign is
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _require_stated_experts(config: Any, run: CampaignRun) -> None:
    """The mesh was checked at launch against the number that the campaign states."""
    found = num_experts(config.to_dict())
    field, stated = run.config.model.experts
    if found != stated:
        raise ValueError(
            f"{field} must be that of the checkpoint, got {stated}, and {found} in its config.json. "
            f"Set it to {found}."
        )


def _require_trainable(folder: Path, run: CampaignRun) -> None:
    from transformers import AutoConfig

    if not (folder / "config.json").exists():
        raise ValueError(
            f"model.folder must be a Hugging Face checkpoint with a config.json, got {folder}, which "
            f"{'has none' if folder.is_dir() else 'is no folder here'}. Name a folder on this machine; a "
            "model of the hub is downloaded first (hf download NAME --local-dir FOLDER)."
        )
    whole = AutoConfig.from_pretrained(folder)
    if quantised := getattr(whole, "quantization_config", None):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ValueError(
            f"{folder} must hold weights of 16 or 32 bits, which can be trained, got quantization_config "
            f"{method!r} in its config.json. Convert it to bfloat16 first, and point model.folder at that."
        )
    config = whole.get_text_config()
    _require_stated_experts(config, run)
    run.config.train.grid.check_model(
        str(folder),
        num_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        num_layers=config.num_hidden_layers,
    )
    tokenizer, size = load_tokenizer(folder), config.vocab_size
    if len(tokenizer) > size:
        raise ValueError(
            f"the policy's vocab_size must cover its tokenizer, got vocab_size={size} and {len(tokenizer)} "
            f"tokens in {folder}. Use the tokenizer the policy was trained with."
        )
    ends, end = stop_ids(folder), tokenizer.eos_token_id
    if max(ends) >= size:
        raise ValueError(
            f"every eos_token_id must be in the policy's vocabulary of {size}, got {sorted(ends)} in "
            f"{folder}. Correct generation_config.json, or config.json."
        )
    if end not in ends and (run.config.warm_start.steps or run.config.environment.may_answer):
        raise ValueError(
            "the eos_token of the policy's tokenizer, with which a warm start and dialogues end a turn, must "
            f"be one of the ids {sorted(ends)} that end a response, got {tokenizer.eos_token!r} ({end}) in "
            f"{folder}. Set it in tokenizer_config.json, or add it to eos_token_id in generation_config.json."
        )


def _require_fitting_prompts(folder: Path, run: CampaignRun) -> None:
    """All that is known of the prompts while the environment may still be changed: later a lineage holds it.
    A token is a byte at least, so that of many prompts only long ones need be counted."""
    tokenizer, rollout = load_tokenizer(folder), run.config.rollout
    prompts = iter(run_prompts(run))
    around = len(prompt_ids(tokenizer, next(prompts).text))  # a template's tokens, and more
    room = prompt_room(folder, rollout) - around
    long = (prompt for prompt in prompts if len(prompt.text.encode()) > room)
    require_room(folder, ((p.prompt_id, len(prompt_ids(tokenizer, p.text))) for p in long), rollout)
