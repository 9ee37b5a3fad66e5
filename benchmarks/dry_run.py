"""How long a whole dry run takes from a checkpoint's headers: Llama 3.1 8B over 8 ranks, best of five.

The limit is 0.6 s from the start of the process to its end, on an idle machine, and torch stays out.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.llama_headers import write

LIMIT = 0.6  # seconds
RUNS = 5

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


def dry_run(folder: Path, tp: int) -> tuple[float, str, bool]:
    """One dry run in a fresh process: seconds, its output, whether torch was imported."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", AFTERWARDS, "plan", str(folder), "--tp", str(tp)],
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return seconds, done.stdout, done.stderr.splitlines()[-1] == "True"


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="autotp-bench-") as folder:
        checkpoint = write(Path(folder, "Llama-3.1-8B"))
        runs = [dry_run(checkpoint, tp=8) for _ in range(RUNS)]
    best = min(seconds for seconds, _, _ in runs)
    imported = any(torch for _, _, torch in runs)
    print("dry run, Llama 3.1 8B, tp=8, from headers:", " ".join(f"{run[0]:.2f}" for run in runs), "s")
    print(f"best of {RUNS}: {best:.2f} s (at most {LIMIT} s); torch imported: {'yes' if imported else 'no'}")
    return 1 if imported or best > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
