"""Progress on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

from autotp.report.words import bytes_words

__all__ = ["progress"]


@contextlib.contextmanager
def progress(doing: str) -> Iterator[Callable[[int, int, str], None]]:
    """A callback for (bytes done, bytes in all, file at hand); at the end the rate is said.

    `doing` is the verb: "converted", "merged". The clock starts with the first byte: a proof comes before.
    """
    started, last = 0.0, 0
    show, close = _bar() if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else (_lines(), None)

    def tell(done: int, total: int, name: str) -> None:
        nonlocal started, last
        started, last = started or time.perf_counter(), done
        show(done, total, name)

    try:
        yield tell
    finally:
        if close is not None:
            close()
    if not last:
        return
    seconds = time.perf_counter() - started
    rate = bytes_words(int(last / max(seconds, 1e-9)))
    print(f"{doing} {bytes_words(last)} in {seconds:.1f} s, {rate}/s", file=sys.stderr)


def _lines() -> Callable[[int, int, str], None]:
    """A line for every file when it is begun, and at every tenth of the whole."""
    last: tuple[str, int] | None = None

    def show(done: int, total: int, name: str) -> None:
        nonlocal last
        at = (name, 10 * done // max(total, 1))
        if at != last:
            last = at
            print(f"{done / max(total, 1):4.0%}  {name}", file=sys.stderr, flush=True)

    return show


def _bar() -> tuple[Callable[[int, int, str], None], Callable[[], None]]:
    """A bar that vanishes when it is closed; NO_COLOR is honoured by rich."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    rest = (TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, *rest, console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=None)
    bar.start()

    def show(done: int, total: int, name: str) -> None:
        bar.update(task, completed=done, total=total, description=name.replace("[", "\\["))

    return show, bar.stop
