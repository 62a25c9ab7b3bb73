"""Which way to a file takes this machine less time: whole, or as what changed since a content it has.

A patch is a few per cent of the bytes and costs its reader's processor; a fast network brings the whole file
before that is done. Which is faster depends on the network, the processor, who else uses both, so it is
measured: each transfer and each application of patches moves a mean, kept in a file of the cache for the next
process. Until both are known patches are fetched, which load the store least; and a way that was not taken
for ``FORGOTTEN`` files is taken once, since its mean may be of another day. Either way makes the same bits.
"""

import json
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Fetch = Literal["measured", "patches", "whole"]
LEAST_BYTES = 8 << 20
"""Of what is measured: a smaller transfer's time is the answer's and not the network's."""
WEIGHT = 0.3
"""Of a new measurement in the mean."""
FORGOTTEN = 20


@dataclass(kw_only=True, slots=True)
class Rate:
    """Bytes a second of one kind of work; 0 is unknown."""

    mean: float = 0.0
    unused: int = 0
    """Choices since it was measured last."""

    def measured(self, num_bytes: int, seconds: float) -> None:
        rate = num_bytes / seconds
        self.mean = rate if not self.mean else 1 / ((1 - WEIGHT) / self.mean + WEIGHT / rate)
        self.unused = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    is_whole: bool
    reason: str


class Rates:
    """Of one store, seen from one cache; threads share it."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self.transfer, self.apply = Rate(), Rate()
        """Of bytes that arrive, and of bytes that patches are applied to."""
        try:
            found = json.loads(path.read_text())
            self.transfer, self.apply = Rate(**found["transfer"]), Rate(**found["apply"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # none yet, or of a process that was killed: it is measured again

    def transferred(self, num_bytes: int, seconds: float) -> None:
        self._measured(self.transfer, num_bytes, seconds)

    def applied(self, num_bytes: int, seconds: float) -> None:
        self._measured(self.apply, num_bytes, seconds)

    def choose(self, fetch: Fetch, *, size: int, patch_bytes: int, num_patches: int) -> Choice:
        """The way to a file of which a base is here and some patches lead to it."""
        if fetch != "measured":
            return Choice(is_whole=fetch == "whole", reason="as checkpoint.fetch says")
        with self._lock:
            self.transfer.unused += 1
            self.apply.unused += 1
            if not self.transfer.mean or not self.apply.mean:
                return Choice(is_whole=False, reason="nothing measured yet")
            whole = size / self.transfer.mean
            patched = patch_bytes / self.transfer.mean + num_patches * size / self.apply.mean
            is_whole = whole < patched
            rates = f"{whole:.2f} s whole, {patched:.2f} s as patches expected"
            stale = self.apply if is_whole else self.transfer
            if stale.unused > FORGOTTEN:
                return Choice(is_whole=not is_whole, reason=f"to measure it again; {rates}")
        return Choice(is_whole=is_whole, reason=rates)

    def _measured(self, rate: Rate, num_bytes: int, seconds: float) -> None:
        if num_bytes < LEAST_BYTES or seconds <= 0:
            return
        with self._lock:
            rate.measured(num_bytes, seconds)
            text = json.dumps({"transfer": asdict(self.transfer), "apply": asdict(self.apply)})
            partial = self._path.with_suffix(f".{threading.get_ident()}.new")
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text)
            partial.replace(self._path)
