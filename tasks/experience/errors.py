"""What the experience buffer raises, beside ValueError for wrong arguments."""


class ExperienceError(RuntimeError):
    """The common base; raised only as one of the classes below."""


class LeaseLost(ExperienceError):
    """Another attempt holds the item: whatever this one made is discarded. A worker survives this."""


class PolicyVersionMismatch(ExperienceError):
    """The iteration's items require another policy version. A worker loads ``required`` and asks again."""

    def __init__(self, *, iteration: int, required: int, got: int | None) -> None:
        super().__init__(
            f"policy_version of iteration {iteration} must be {required}, which its work was first put "
            f"with, got {got}. Load version {required}, or put all work of the iteration with one version."
        )
        self.required = required


class IterationDropped(ExperienceError):
    """Work was put into an iteration whose policy version is already committed."""


class BufferFull(ExperienceError):
    """No room appeared before the deadline."""


class BufferUnreachable(ExperienceError):
    """No server answered before the deadline."""


class BufferDamaged(ExperienceError):
    """Entries vanished that only the buffer may remove."""


class ServerUnfit(ExperienceError):
    """The server's version or eviction policy cannot keep the buffer's promises."""
