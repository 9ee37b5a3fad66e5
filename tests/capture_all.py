"""Trace every causal language model of transformers, and say of each what stops it.

    python -m tests.capture_all results.json [architecture …]

Goes on where it stopped: what stands in the file is not done again. Each architecture is built, run once as
it is, and traced in the mode eval with samples that autotp makes itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autotp.trace.inputs import make
from autotp.trace.modes import modes
from tests.zoo.build import architectures, build


def outcome(architecture: str) -> dict[str, Any]:
    """What becomes of one architecture: "not built", "traced" or "not traced", and why or how."""
    try:
        model = build(architecture)
        with torch.no_grad():
            model(input_ids=torch.randint(6, 76, (2, 8)))
    except Exception as error:
        return {"is": "not built", "why": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    return traced(model)


def traced(model: nn.Module) -> dict[str, Any]:
    """What becomes of a model."""
    started = time.process_time()
    try:
        trace = modes(model, make(model))[0].capture(model)
    except Exception as error:
        where = f" (in {getattr(error, 'module', '')}, {getattr(error, 'source', None)})"
        return {"is": "not traced", "why": f"{type(error).__name__}: {error}".splitlines()[0][:300] + where}
    return {
        "is": "traced", "route": trace.route, "opaque": list(trace.opaque), "ops": len(trace.ops()),
        "seconds": round(time.process_time() - started, 2),
    }  # fmt: skip


def main(target: Path, chosen: list[str]) -> None:
    """Do what is left, one after the other, and print the counts."""
    warnings.filterwarnings("ignore")
    done: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}
    for architecture in chosen or architectures():
        if architecture not in done:
            done[architecture] = outcome(architecture)
            print(architecture, done[architecture], flush=True)
            aside = target.with_suffix(".part")
            aside.write_text(json.dumps(done, indent=1))
            os.replace(aside, target)
    counts = Counter(found["is"] for found in done.values())
    runs = counts["traced"] + counts["not traced"]
    print(f"{counts['traced']} of {runs} that run are traced; {counts['not built']} cannot be built")
    for architecture, found in done.items():
        if found["is"] != "traced" or found["opaque"] or found["route"] != "recorder":
            print(
                f"  {architecture}: {found.get('why') or found['route'] + ' ' + ', '.join(found['opaque'])}"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
