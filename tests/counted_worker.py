"""A standing worker that counts each token its engine samples, in a file that outlives SIGKILL.

    python tests/counted_worker.py TOKENS_FILE <arguments of tasks.engine.standing>

The worker is the real one; only the engine's sampling function is watched.
"""

import mmap
import struct
import sys
from pathlib import Path
from typing import Any

from tasks.engine import embedded, standing

EMPTY = struct.pack("<q", 0)


def main() -> None:
    path = Path(sys.argv[1])
    path.write_bytes(EMPTY)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), len(EMPTY)) as counter:
        sample = embedded.sample

        def counted(*arguments: Any, **named: Any) -> Any:
            token_B, logprob_B = sample(*arguments, **named)
            total = struct.unpack("<q", counter[:])[0] + len(token_B)
            counter[:] = struct.pack("<q", total)  # the page belongs to the file, not to the process
            return token_B, logprob_B

        embedded.sample = counted
        standing.main(sys.argv[2:])


if __name__ == "__main__":
    main()
