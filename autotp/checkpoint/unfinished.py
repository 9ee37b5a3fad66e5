"""Where a run writes aside until it has ended, and what to say of a target that is not there yet."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["absent", "partial"]


def partial(target: Path) -> Path:
    """The temporary folder beside a target."""
    place = Path(os.path.abspath(target))
    return place.with_name(f".{place.name}.autotp-partial")


def absent(path: Path, says: str = "there is no such folder") -> str:
    """What is wrong with a path where there is nothing: perhaps a run that should make it has not ended."""
    if not partial(path).is_dir():
        return f"{path}: {says}"
    return (
        f"{path}: {says}\n  = help: an unfinished run stands in {partial(path)}: give the same command again "
        "and it goes on where it stopped, or remove that folder"
    )
