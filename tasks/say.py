"""Progress lines: what a run says while it works."""


def say(stage: str, text: str, *, iteration: int | None = None) -> None:
    """One progress line; the only way the project talks while it works."""
    where = "          " if iteration is None else f"iter {iteration:>4} "
    print(f"{where} {stage:<9} {text}", flush=True)
