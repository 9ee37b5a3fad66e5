"""How long a whole dry run takes from a checkpoint's headers: Llama 3.1 8B over 8 ranks, best of five.

The limit is 0.6 s of processor time (on an idle machine the clock says the same), and torch stays out.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.llama_headers import write

LIMIT = 0.6  # seconds
RUNS = 5


class Run(NamedTuple):
    """What one dry run took in seconds, what it printed, and whether torch was imported."""

    processor: float
    clock: float
    output: str
    torch: bool


# Runs the command line in this process, then says on stderr whether torch came in.
AFTERWARDS = """
import runpy, sys
sys.argv[0] = "autotp"
try:
    runpy.run_module("autotp", run_name="__main__", alter_sys=False)
except SystemExit as end:
    if end.code:
        raise
print("torch" in sys.modules, file=sys.stderr)
"""


def dry_run(folder: Path, tp: int) -> Run:
    """One dry run in a fresh process."""
    started, before = time.perf_counter(), processor_time()
    done = subprocess.run(
        [sys.executable, "-c", AFTERWARDS, "plan", str(folder), "--tp", str(tp)],
        capture_output=True,
        text=True,
    )
    clock, processor = time.perf_counter() - started, processor_time() - before
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return Run(processor, clock, done.stdout, done.stderr.splitlines()[-1] == "True")


def processor_time() -> float:
    """Seconds of user and system time of the processes that have ended so far."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="autotp-bench-") as folder:
        checkpoint = write(Path(folder, "Llama-3.1-8B"))
        runs = [dry_run(checkpoint, tp=8) for _ in range(RUNS)]
    best = min(run.processor for run in runs)
    imported = any(run.torch for run in runs)
    print("dry run, Llama 3.1 8B, tp=8, from headers, processor time and clock:")
    print(*(f"{run.processor:.2f} s ({run.clock:.2f} s)" for run in runs), sep=", ")
    print(f"best of {RUNS}: {best:.2f} s (at most {LIMIT} s); torch imported: {'yes' if imported else 'no'}")
    return 1 if imported or best > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
