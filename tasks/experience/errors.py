"""What the experience buffer raises, beside ValueError for wrong arguments."""


class ExperienceError(RuntimeError):
    """The common base; raised only as one of the classes below."""


class LeaseLost(ExperienceError):
    """Another attempt holds the item: whatever this one made is discarded. A worker survives this."""


class IterationClosed(LeaseLost):
    """The iteration's quota is met or its scoring has begun: late groups are discarded and counted."""


class WorkerBarred(ExperienceError):
    """The worker published what nobody could read. It gets no more work; its items were given to others."""


class ShardMismatch(ExperienceError):
    """The list of servers differs from the one with which the iteration's work was put."""


class PolicyVersionMismatch(ExperienceError):
    """The iteration's items require another policy version. A worker loads ``required`` and asks again."""

    def __init__(self, iteration: int, required: int, got: int | None) -> None:
        super().__init__(iteration, required, got)  # all of them, or the error does not survive pickling
        self.iteration, self.required, self.got = iteration, required, got

    def __str__(self) -> str:
        return (
            f"policy_version of iteration {self.iteration} must be {self.required}, with which its work was "
            f"first put, got {self.got}. Load version {self.required}, or put all work of the iteration with "
            "one version."
        )


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
