"""The result of `autotp verify`, for people and for programs: numbers of a run, integrity of a folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from autotp.cost import collapsed
from autotp.report.json import FORM, dumps
from autotp.report.table import plan_name, written_plan_name
from autotp.report.text import paint
from autotp.report.words import bytes_words, count

if TYPE_CHECKING:
    from autotp.checkpoint.integrity import Integrity
    from autotp.plan import Plan
    from autotp.verification import Verification

__all__ = ["integrity_json", "integrity_text", "verification_json", "verification_text"]

SHOWN = 4  # names of zero gradients


def verification_text(
    found: Verification, *, target: str, plan: Plan, tp: int, weights: str, colour: bool = False
) -> str:
    """What was run, the collectives, and the verdict with its numbers."""
    words = {"random": "random weights", "own": "its own weights"}[weights]
    lines = [
        paint(f"{target}: plan {plan_name(plan)}, tp {tp}, {words} in {_dtype(found)}", "bold", colour),
        f"  collectives of a rank: {_collectives(found)}",
    ]
    if found.zero_gradients:
        names = list(dict.fromkeys(map(collapsed, found.zero_gradients)))
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        lines.append(f"  true gradients of zero: {', '.join(names[:SHOWN])}{more}")
    verdict = str(found)
    word = "ok" if found.ok else "WRONG"
    return "\n".join(
        [*lines, paint(word, "ok" if found.ok else "error", colour) + verdict.removeprefix(word)]
    )


def verification_json(found: Verification, *, target: str, plan: Plan, tp: int, weights: str) -> str:
    """Everything as JSON; a difference that cannot be a number (another shape, NaN) is null."""

    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return dumps(
        {
            "report": FORM,
            "target": target,
            "plan_name": plan_name(plan),
            "tp": tp,
            "ok": found.ok,
            "weights": weights,
            "dtype": _dtype(found),
            "modes": list(found.modes),
            "tolerance": found.tolerance,
            "max_output_diff": number(found.max_output_diff),
            "max_grad_diff": number(found.max_grad_diff),
            "worst_parameter": found.worst_parameter,
            "zero_gradients": list(found.zero_gradients),
            "state_dict_equal": found.state_dict_equal,
            "collectives": [{way: dict(runs) for way, runs in rank.items()} for rank in found.collectives],
        }
    )


def _dtype(found: Verification) -> str:
    return "no floating dtype" if found.dtype is None else str(found.dtype).removeprefix("torch.")


def _collectives(found: Verification) -> str:
    """Those of rank 0, or of every rank where they differ."""

    def words(rank: Mapping[str, Mapping[str, int]]) -> str:
        ways = []
        for way, runs in rank.items():
            ways.append(f"{', '.join(f'{n} {name}' for name, n in runs.items() if n) or 'none'} {way}")
        return "; ".join(ways)

    every = [words(rank) for rank in found.collectives]
    if len(set(every)) <= 1:
        return every[0] if every else "none"
    return "; ".join(f"rank {rank}: {said}" for rank, said in enumerate(every))


def integrity_text(found: Integrity, *, source: Path | None, colour: bool = False) -> str:
    """What was checked, every finding with its file, and the verdict."""
    manifest = found.manifest
    proof = "layouts proven" if manifest.proof == "layouts" else "layouts not proven"
    tensors = sum(len(file.tensors) for file in manifest.files)
    head = f"{found.folder}: plan {written_plan_name(manifest.plan)}, tp {manifest.tp}, {proof}"
    lines = [paint(head, "bold", colour)]
    lines += [paint("error", "error", colour) + f": {finding}" for finding in found.findings]
    if found.findings:
        return "\n".join(
            [*lines, paint("damaged", "error", colour) + f": {count(len(found.findings), 'finding')}"]
        )
    what = f"{count(tensors, 'tensor')}, {bytes_words(found.nbytes)} on {count(manifest.tp, 'rank')}"
    if manifest.digest == "none":
        how = "no digests were written, so names, shapes and equal copies were checked"
    else:
        how = f"every {manifest.digest} digest is what was written"
    against = "" if source is None else f", and what {source} holds"
    return "\n".join([*lines, paint("ok", "ok", colour) + f": {what}; {how}{against}"])


def integrity_json(found: Integrity, *, source: Path | None) -> str:
    """Everything as JSON."""
    manifest = found.manifest
    return dumps(
        {
            "report": FORM,
            "target": str(found.folder),
            "plan_name": written_plan_name(manifest.plan),
            "tp": manifest.tp,
            "ok": found.ok,
            "proof": manifest.proof,
            "digest": manifest.digest,
            "bytes": found.nbytes,
            "source": None if source is None else str(source),
            "findings": list(found.findings),
        }
    )
