"""The dry run as JSON, for programs.

The keys and their order are stable; `"report": 1` numbers the form. `"plan"` is a plan:
`Plan.loads(json.dumps(document["plan"]))` gives the plan that was analysed, and the same result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from autotp.analysis import Analysis
from autotp.cost import left_whole
from autotp.diagnostic import Diagnostic, Span
from autotp.placement import Shard
from autotp.report.table import plan_name, unmatched

__all__ = ["FORM", "diagnostic_data", "dumps", "place_data", "render"]

FORM = 1
WIDTH = 110


def render(analysis: Analysis) -> str:
    """The whole analysis as JSON."""
    return dumps(document(analysis))


def dumps(data: Mapping[str, object]) -> str:
    """JSON in which a table or a list that is too long for a line has a line for each entry.

    >>> print(dumps({"tp": 2, "modes": ["eval", "train"]}), end="")
    {
      "tp": 2,
      "modes": ["eval", "train"]
    }
    """
    return _broken(data, 2) + "\n"


def _written(value: object, indent: int) -> str:
    line = json.dumps(value, ensure_ascii=False)
    return line if indent + len(line) <= WIDTH else _broken(value, indent + 2)


def _broken(value: object, indent: int) -> str:
    """A value over several lines, each entry at `indent`."""
    if isinstance(value, Mapping):
        entries = [
            f"{json.dumps(key, ensure_ascii=False)}: {_written(v, indent)}" for key, v in value.items()
        ]
    elif isinstance(value, list):
        entries = [_written(entry, indent) for entry in value]
    else:
        return json.dumps(value, ensure_ascii=False)
    brackets = "{}" if isinstance(value, Mapping) else "[]"
    pad = " " * indent
    return f"{brackets[0]}\n{pad}" + f",\n{pad}".join(entries) + f"\n{pad[2:]}{brackets[1]}"


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
        "plan_name": plan_name(analysis.plan, analysis.plan_name),
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
        "reads": [
            {
                "name": read.name,
                "copied": read.copied,
                "shared": read.shared,
                "layout": None if read.shard is None else layout_data(read.shard, tensors[read.name].shape),
            }
            for read in analysis.reads
        ],
        "regions": [
            {"module": region.path, "copied": sorted(region.copied), "reduced": sorted(region.reduced)}
            for region in analysis.regions
        ],
        "branches": [
            {"function": branch.function, "file": branch.span.file, "line": branch.span.line}
            for branch in analysis.branches
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
        "plan": place_data(finding.plan),
        "source": place_data(finding.source),
        "notes": list(finding.notes),
        "help": list(finding.help),
    }


def place_data(span: Span | None) -> dict[str, object] | None:
    """A place in a file as plain data."""
    if span is None:
        return None
    return {"file": span.file, "line": span.line, "column": span.column, "length": span.length}
