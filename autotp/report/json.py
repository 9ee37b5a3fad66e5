"""The dry run as JSON, for programs.

The keys and their order are stable; `"report": 1` numbers the form. `"plan"` is a plan:
`Plan.loads(json.dumps(document["plan"]))` gives the plan that was analysed, and the same result.
"""

from __future__ import annotations

import json

from autotp.analysis import Analysis
from autotp.cost import left_whole
from autotp.diagnostic import Diagnostic, Span
from autotp.placement import Shard
from autotp.report.table import plan_name, unmatched

__all__ = ["FORM", "diagnostic_data", "render"]

FORM = 1


def render(analysis: Analysis) -> str:
    """The whole analysis as indented JSON, with a line feed at its end."""
    return json.dumps(document(analysis), indent=2, ensure_ascii=False) + "\n"


def document(analysis: Analysis) -> dict[str, object]:
    """The analysis as plain data."""
    inventory, layouts = analysis.inventory, analysis.layouts
    tensors = inventory.tensors()
    matched: dict[str, list[str]] = {}
    for placed in analysis.matches.placed.values():
        matched.setdefault(placed.pattern, []).append(placed.path)
    return {
        "report": FORM,
        "target": inventory.name,
        "plan_name": plan_name(analysis),
        "plan": analysis.plan.to_data(),
        "tp": analysis.tp,
        "ok": analysis.ok,
        "certainty": analysis.certainty,
        "modes": list(analysis.modes),
        "random": list(analysis.random),
        "matched": {pattern: matched[pattern] for pattern in analysis.plan.rules if pattern in matched},
        "unmatched": unmatched(analysis),
        "tensors": {
            name: {
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "tied_to": inventory.aliases.get(name),
                "layout": None if name not in layouts else layout_data(layouts[name], tensor.shape),
            }
            for name, tensor in tensors.items()
        },
        "whole": [
            {"name": r.name, "tensors": r.tensors, "bytes": r.nbytes, "reason": r.why}
            for r in left_whole(inventory, analysis.matches, layouts)
        ],
        "collectives": [
            {
                "module": one.module,
                "mapping": one.mapping,
                "direction": one.direction,
                "operation": one.operation,
                "calls": one.calls,
            }
            for one in analysis.collectives
        ],
        "bytes": {
            "whole": sum(t.nbytes for name, t in tensors.items() if name not in inventory.aliases),
            "ranks": list(analysis.rank_bytes),
        },
        "sharded_fraction": round(analysis.sharded_fraction, 6),
        "edits": analysis.edits,
        "diagnostics": [diagnostic_data(finding) for finding in analysis.diagnostics],
    }


def layout_data(shard: Shard, shape: tuple[int, ...]) -> dict[str, object]:
    """A cut as the dim and the [start, stop] ranges of it that each rank holds, in rank order."""
    size = shape[shard.dim]
    ranges = [[list(r) for r in shard.ranges(size, rank)] for rank in range(shard.tp)]
    return {"dim": shard.dim, "ranges": ranges}


def diagnostic_data(finding: Diagnostic) -> dict[str, object]:
    """A finding as plain data."""
    return {
        "code": finding.code,
        "severity": finding.severity,
        "module": finding.module,
        "message": finding.message,
        "plan": _place(finding.plan),
        "source": _place(finding.source),
        "notes": list(finding.notes),
        "help": list(finding.help),
    }


def _place(span: Span | None) -> dict[str, object] | None:
    if span is None:
        return None
    return {"file": span.file, "line": span.line, "column": span.column, "length": span.length}
