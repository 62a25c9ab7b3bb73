"""A policy's folder with its projections in 8 bits, in the format of DeepSeek-V3's checkpoints.

Shape key: O and I outputs and inputs of a projection, o and i blocks of 128 of them.

Each projection's ``weight`` is e4m3, with a float32 ``weight_scale_inv`` for each block of 128 x 128; the
rest (embedding, head, routers, norms) stays as it is. ``config.json`` tells the engine; no flag is needed.
Against one scale for a whole tensor, an outlier costs the precision of its own block only.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_kernels.fp8 import quant_fp8_128x128
from moe_kernels.reference import FP8_GROUP
from safetensors import safe_open
from safetensors.torch import save_file

from tasks.engine.sglang_model import weight_files

if TYPE_CHECKING:
    from torch import Tensor

PROJECTION = re.compile(r"\.layers\.\d+\..*\.(\w+_proj(_with_mqa)?|w[123])\.weight$")
INDEX = "model.safetensors.index.json"
PREFIX = "fp8-"


def quantised_folder(folder: Path, scratch: Path, *, device: str) -> Path:
    """``folder`` with 8-bit projections, below ``scratch``; what other folders gave is removed from there.

    Raises:
        ValueError: a projection whose inputs are no multiple of a block's.
    """
    identity = hashlib.sha256(weight_files(folder).files.encode()).hexdigest()[:8]
    target = scratch / f"{PREFIX}{folder.name}-{identity}"
    for other in scratch.glob(f"*{PREFIX}*"):
        if other != target:
            shutil.rmtree(other)
    if target.exists():
        return target
    part = scratch / f"part-{target.name}"
    part.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    kept: list[str] = []
    for path in sorted(folder.glob("model*.safetensors")):
        tensors = dict(_quantised(path, device))
        save_file(tensors, part / path.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, path.name)
        kept += [name for name, tensor in tensors.items() if tensor.ndim == 2 and not _is_8_bit(tensor, name)]
    (part / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    (part / "config.json").write_text(json.dumps(config | {"quantization_config": _description(kept)}))
    for path in folder.iterdir():
        if not (part / path.name).exists():
            (part / path.name).symlink_to(path.absolute())
    part.rename(target)
    return target


def _quantised(path: Path, device: str) -> "Iterator[tuple[str, Tensor]]":
    """Tensors of a file, projections as two, one at a time on the device."""
    with safe_open(path, framework="pt") as file:
        for name in list(file.keys()):
            tensor = file.get_tensor(name)
            if not (PROJECTION.search(name) and tensor.ndim == 2):
                yield name, tensor
                continue
            if tensor.shape[1] % FP8_GROUP:
                raise ValueError(
                    f"quantization 'fp8_blocks' needs projections with inputs in multiples of {FP8_GROUP}, "
                    f"got {name} of shape {list(tensor.shape)}. Set quantization to 'fp8' or 'none'."
                )
            bytes_OI, scale_oi = quant_fp8_128x128(tensor.to(device))
            yield name, bytes_OI.cpu()
            yield f"{name}_scale_inv", scale_oi.cpu()


def _is_8_bit(tensor: "Tensor", name: str) -> bool:
    return tensor.element_size() == 1 or name.endswith("_scale_inv")


def _description(kept: list[str]) -> dict[str, Any]:
    """What the format's readers find in ``config.json``."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_GROUP, FP8_GROUP],
        "modules_to_not_convert": sorted(name.removesuffix(".weight") for name in kept),
    }
