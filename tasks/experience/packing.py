"""How a command becomes bytes on the wire (RESP), in few pieces.

The client's own packer copies all that it has for every argument and sends every value above 6,000 bytes with
two system calls; for a batch of small samples that costs more than the samples. Results are the same bytes.
"""

_PIECE = 64 << 10
"""Bytes that are worth a copy to save a system call; a larger value is sent from where it is."""


def _text(value: str | int | float) -> bytes:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise TypeError(
            f"an argument must be bytes, text or a number, got {type(value).__name__}. Encode it."
        )
    return str(value).encode()


class Packer:
    """A ``command_packer`` of valkey's connections."""

    def pack(self, *args: str | bytes | int | float) -> list[bytes]:
        name, *rest = args
        words = (name if isinstance(name, bytes) else _text(name)).split()  # "SCRIPT LOAD" is two words
        parts, size, pieces = [b"*%d\r\n" % (len(words) + len(rest))], 0, []
        for value in (*words, *rest):
            data = value if isinstance(value, bytes) else _text(value)
            parts.append(b"$%d\r\n" % len(data))
            if len(data) > _PIECE:
                pieces += [b"".join(parts), data]
                parts, size = [b"\r\n"], 0
                continue
            parts += [data, b"\r\n"]
            size += len(data)
            if size > _PIECE:
                pieces.append(b"".join(parts))
                parts, size = [], 0
        return [*pieces, b"".join(parts)]
