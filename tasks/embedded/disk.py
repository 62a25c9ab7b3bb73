"""Room on the disk, checked before work starts: a server that runs out of it fails every write."""

import shutil
from pathlib import Path


def require_free_space(folder: Path, min_bytes: int) -> None:
    """Refuse a folder whose disk has less than ``min_bytes`` free; the folder need not exist yet."""
    folder = folder.expanduser().resolve()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < min_bytes:
        raise ValueError(
            f"the disk of {folder} must have at least {min_bytes / 2**30:.2f} GiB free, got "
            f"{free / 2**30:.2f} GiB. Free some space, choose a folder on another disk, or lower "
            "checkpoint.min_free_gb."
        )
