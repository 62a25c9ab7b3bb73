"""Progress lines: what a run says while it works."""


def say(stage: str, text: str, *, iteration: int = -1) -> None:
    """One progress line; the only way the project talks while it works. -1 is of no iteration."""
    where = "          " if iteration < 0 else f"iter {iteration:>4} "
    print(f"{where} {stage:<9} {text}", flush=True)
