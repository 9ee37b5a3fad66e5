"""How long the proof of a plan takes: a tiny Llama, and one with the sizes of Llama 3.1 405B on the meta
device over 8 ranks. Best of three, each in a process of its own.

The limits are 1 s and 5 s of processor time (on an idle machine the clock says the same), and 700 MB at the
peak, with all imports. Sizes: https://huggingface.co/meta-llama/Llama-3.1-405B (config.json).

    python -m benchmarks.analyze
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NamedTuple

RUNS = 3
MEMORY = 700  # MB

TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96,
}  # fmt: skip
LARGE = {
    "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
CASES = (("tiny", TINY, 2, 1.0), ("405B", LARGE, 8, 5.0))  # name, sizes, tp, limit in seconds

# Runs one proof in this process, and prints what it took.
PROOF = """
import resource, sys, time
import torch, transformers
import autotp
sizes, tp = eval(sys.argv[1]), int(sys.argv[2])
with torch.device("meta"):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
before, started = time.process_time(), time.perf_counter()
analysis = autotp.analyze(model, "llama", tp=tp)
assert analysis.ok and analysis.certainty == "layouts", analysis
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
print(time.process_time() - before, time.perf_counter() - started, peak)
"""


class Run(NamedTuple):
    """What one proof took: seconds of the processor and of the clock, and the process's peak in MB."""

    processor: float
    clock: float
    peak: int


def prove(sizes: dict[str, int], tp: int) -> Run:
    """One proof in a fresh process, with Python's files compiled, as an installed package has them."""
    around = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", PROOF, repr(sizes), str(tp)],
        capture_output=True,
        text=True,
        env=around | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        check=True,
    )
    processor, clock, peak = done.stdout.split()
    return Run(float(processor), float(clock), int(peak))


def main() -> int:
    """Print the figures; 1 when a limit is missed."""
    missed = False
    for name, sizes, tp, limit in CASES:
        best = min(prove(sizes, tp) for _ in range(RUNS))
        ok = best.processor <= limit and best.peak <= MEMORY
        missed |= not ok
        print(
            f"analyze, {name} Llama, {sizes['num_hidden_layers']} layers, tp {tp}: "
            f"{best.processor:.2f} s of processor ({best.clock:.2f} s on the clock), limit {limit:.0f} s; "
            f"peak {best.peak} MB, limit {MEMORY} MB: {'ok' if ok else 'missed'}"
        )
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
