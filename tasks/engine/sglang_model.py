"""What an SGLang server must be given of a policy's folder; reads headers, and a tied embedding.

Two things SGLang gets wrong without a word: it skips tensors that hold all experts at once and goes on with
the old ones, and it serves a mixture-of-experts policy whose output head is tied to its embedding with a head
of uninitialised memory.
"""

import json
import os
import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

FUSED_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
INDEX = "model.safetensors.index.json"
NUM_SAMPLES, SAMPLE_BYTES = 64, 4096


def vocabulary(folder: Path) -> int:
    """Token ids that the embedding has rows for."""
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def routing_shape(folder: Path) -> tuple[int, int]:
    """Layers, dense ones included, and experts a token: the inner shape of SGLang's routing records."""
    config = json.loads((folder / "config.json").read_text())
    return int(config["num_hidden_layers"]), int(config["num_experts_per_tok"])


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFiles:
    """What can be said of a folder's tensor files without reading them whole."""

    files: str
    """Equal for the same files, by whatever name: links into a cache have the file's identity."""
    samples: str
    """Differs only where contents do."""


def weight_files(folder: Path) -> WeightFiles:
    """Looks at ``NUM_SAMPLES`` places of each file: a step that moves one weight in a thousand shows."""
    parts, samples = [], sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            parts.append(f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}")
            for index in range(NUM_SAMPLES):
                file.seek(status.st_size * index // NUM_SAMPLES)
                samples.update(file.read(SAMPLE_BYTES))
    return WeightFiles(files="\n".join(parts), samples=samples.hexdigest())


def served_folder(folder: Path, scratch: Path) -> Path:
    """``folder`` itself, or, where the head is tied, links to it beside the head as a tensor of its own.

    Raises:
        FileNotFoundError: no weights or no ``config.json``.
        ValueError: all experts of a layer in one tensor.
    """
    files = _tensor_files(folder)
    config = json.loads((folder / "config.json").read_text())
    if HEAD in files or not config.get("tie_word_embeddings"):
        return folder
    target = scratch / f"untied-{folder.name}"
    target.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name not in ("config.json", INDEX):
            link = target / path.name
            link.unlink(missing_ok=True)
            link.symlink_to(path.absolute())
    (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with safe_open(folder / files[EMBEDDING], framework="pt") as file:
        save_file({HEAD: file.get_tensor(EMBEDDING)}, target / "model-head.safetensors")
    weight_map = files | {HEAD: "model-head.safetensors"}
    (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target


def _tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file of the folder that holds it."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
        fused = [name for name in names if FUSED_EXPERTS.search(name)]
        if fused:
            raise ValueError(
                f"{path} must name each expert's weights (experts.0.gate_proj.weight), got {fused[0]}, which "
                "SGLang would skip. Save the checkpoint in its original format."
            )
        found |= dict.fromkeys(names, path.name)
    if not found:
        raise FileNotFoundError(f"{folder} must hold model*.safetensors and a config.json, got none.")
    return found
