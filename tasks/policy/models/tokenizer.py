"""A character tokenizer for randomly initialised policies; policies from a folder bring their own."""

import json
import string
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.rollout_config import RolloutConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS, USER, ASSISTANT = "<pad>", "<eos>", "<user>", "<assistant>"
CHARACTERS = string.digits + string.ascii_lowercase + " .,:;?!+-*/=()"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def character_tokenizer() -> "PreTrainedTokenizerFast":
    """One token a character; ``<eos>`` ends an assistant turn. Unknown characters are an error."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, USER, ASSISTANT, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=None))  # pyright: ignore[reportArgumentType]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, additional_special_tokens=[USER, ASSISTANT]
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerFast":
    """The tokenizer of a policy folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:  # tokenizers raises bare Exceptions, transformers KeyError for a field
        got = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder} must hold a tokenizer that can be loaded, got: {got}") from error


def prompt_ids(tokenizer: "PreTrainedTokenizerFast", text: str) -> list[int]:
    """Token ids of one user turn with the generation prompt. Raises if the text holds an unknown token."""
    messages = [{"role": "user", "content": text}]
    try:
        rendered = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # what Jinja and the template itself raise
        raise ValueError(f"a chat template must render a user's message, got: {error}") from error
    if text.strip() not in rendered:  # a policy would be asked nothing, or always the same
        raise ValueError(
            f"a chat template must have the user's message in it, got {rendered!r:.200} of {text!r:.80}. "
            "Give the policy's folder a chat_template.jinja that has."
        )
    return encode(tokenizer, rendered)


def encode(tokenizer: "PreTrainedTokenizerFast", text: str) -> list[int]:
    """Token ids without added special tokens; refuses text that the vocabulary cannot spell."""
    try:
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        spelled = tokenizer.decode(ids)
    except Exception as error:  # tokenizers raises bare Exceptions
        ids, spelled = [], str(error)
    if spelled != text:
        raise ValueError(
            f"the policy's vocabulary must spell the environment's text {text!r}, got {spelled!r}. "
            "Choose a policy whose tokenizer covers it, or another environment."
        )
    return ids


def stop_ids(folder: Path) -> frozenset[int]:
    """All end-of-sequence ids of ``generation_config.json``, else of ``config.json``; none is an error."""
    value, path = None, folder
    for path in (folder / "generation_config.json", folder / "config.json"):
        try:
            value = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        except ValueError as error:
            raise ValueError(f"{path} must be JSON, got: {error}. Copy it again.") from error
        if value is not None:
            break
    else:
        raise ValueError(
            f"{folder} must name an eos_token_id in generation_config.json or config.json, got none. Without "
            "one no response would ever end; add it to the checkpoint."
        )
    ids = value if isinstance(value, list) else [value]
    if not ids or not all(type(token) is int for token in ids):  # True is an int
        raise ValueError(f"eos_token_id in {path} must be a token's id or a list of them, got {value!r}.")
    return frozenset(ids)


def context_length(folder: Path) -> int:
    """Positions that the policy of a folder was made for; 0 where its config.json does not say."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config") or config
    positions = config.get("max_position_embeddings") or 0
    stretched = config.get("rope_scaling") or config.get("rope_parameters") or {}
    by_layer_type = [value for value in stretched.values() if isinstance(value, dict)]
    for rope in [stretched, *by_layer_type]:
        original = rope.get("original_max_position_embeddings") or config.get("max_position_embeddings") or 0
        positions = max(positions, int(original * (rope.get("factor") or 1)))
    return positions


def context_room(folder: Path, rollout: RolloutConfig) -> int:
    """Tokens that a prompt and all that follows may have."""
    bounds = list(filter(None, (context_length(folder), rollout.context_limit)))
    return min(bounds) - rollout.context_unused if bounds else sys.maxsize


def prompt_room(folder: Path, rollout: RolloutConfig) -> int:
    """Tokens that a prompt may have for its response to fit behind it."""
    return context_room(folder, rollout) - rollout.max_new_tokens


def require_room(folder: Path, prompts: Iterable[tuple[str, int]], rollout: RolloutConfig) -> None:
    """Positions behind a model's context are computed like any others, and what they say means nothing.

    Args:
        prompts: name and number of tokens of each.
    """
    name, longest = max(prompts, key=lambda prompt: prompt[1], default=("", 0))
    if longest <= prompt_room(folder, rollout):
        return
    own, served = context_length(folder), rollout.context_limit
    is_own = own and not 0 < served < own
    whose = f"the policy's {own:,}" if is_own else f"rollout.sglang.context_length={served:,}"
    unused = f", of which SGLang leaves {rollout.context_unused} unused" if rollout.context_unused else ""
    raise ValueError(
        f"a prompt and its response must fit into {whose} positions{unused}, got prompt {name} of "
        f"{longest:,} tokens and rollout.max_new_tokens={rollout.max_new_tokens:,}. Lower max_new_tokens, or "
        "leave such prompts out of the environment and start a new lineage with --fresh."
    )
