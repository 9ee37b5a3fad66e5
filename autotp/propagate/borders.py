"""What the proof added by itself must be right in every call and every mode, not only where it was found.

A region's border maps each of its places on every call. So each reduced place must hand out a partial sum,
each copied place be given a value that is whole with its gradient, and no copied argument come out again
as it went in. A tensor that is read mapped must not be written, and what a forward leaves on the model or
returns must not carry a part of a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autotp.placement import INVARIANT, PARTIAL, REPLICATE, describe
from autotp.propagate.call import Conflict
from autotp.propagate.findings import finding_in
from autotp.propagate.ops import draws, op_name
from autotp.propagate.propagation import Finding, Propagation
from autotp.propagate.regions import border, first_op, reduced_twice

__all__ = ["borders", "mixed_random"]

_VIEWS = frozenset(
    [
        *("view", "reshape", "slice", "select", "transpose", "permute", "unsqueeze", "squeeze", "expand"),
        *("detach", "alias", "t"),
    ]
)


def borders(whole: Propagation) -> list[Finding]:
    """The places where what was added would be wrong."""
    return [*_regions(whole), *_written(whole), *_left(whole), *_columns(whole)]


def _columns(whole: Propagation) -> Iterator[Finding]:
    """A column layer copies its input in every call, or in none."""
    for path in sorted(whole.copied.keys() & whole.uncopied):
        conflict = Conflict(
            "AT305",
            "in one call its input has a part of its gradient on each rank, and in another the whole",
            help=("call it on one kind of value", "or leave it whole"),
        )
        yield Finding(next(n for n in whole.trace.ops() if n.meta["module"] == path), conflict, (path,))


def _regions(whole: Propagation) -> Iterator[Finding]:
    trace = whole.trace
    for path, region in whole.regions.items():
        calls = zip(trace.entered.get(path, []), trace.left.get(path, []), strict=False)
        for call, (entered, gone) in enumerate(calls):
            out = {node for _, node in gone}
            reader = first_op(trace, path, call)
            for place, node in entered:
                given = whole.layouts.get(node, [INVARIANT])[0]
                layout = border(trace, whole.regions, node, given, reader, until=(path, call))
                if place in region.copied and layout != INVARIANT:
                    yield _at(
                        whole, node, path, f"in one call, {place} is {describe(layout)} and in another whole"
                    )
                elif place in region.copied and node in out:
                    yield _at(
                        whole, node, path, f"{place} is copied at the border and comes out as it went in"
                    )
            missing = region.reduced - {p for p, _ in gone}
            if missing:
                yield _at(whole, None, path, f"one call has no tensor at {', '.join(sorted(missing))}")
            for place, node in gone:
                if place in region.reduced and whole.layouts.get(node, [PARTIAL])[0] != PARTIAL:
                    yield _at(
                        whole, node, path, f"what it returns at {place or 'its result'} is no sum in one call"
                    )
                elif place in region.reduced and reduced_twice(trace, whole.regions, node):
                    yield _at(whole, node, path, f"a module around it, too, at {place or 'its result'}")


def _at(whole: Propagation, node: fx.Node | None, path: str, what: str) -> Finding:
    inside = [n for n in whole.trace.ops() if any(p == path for p, _ in n.meta.get("stack", ()))]
    where = node if node is not None and node.op == "call_function" else (inside or whole.trace.ops())[0]
    conflict = Conflict(
        "AT319",
        f"{path or 'the model'} owns sharded tensors and would have mappings at its border, but {what}",
        help=("let the module do one thing in each call, or leave its tensors whole",),
    )
    return Finding(where, conflict, ())


def _written(whole: Propagation) -> Iterator[Finding]:
    for node in whole.trace.ops():
        for target in node.meta.get("mutates", ()):
            root = target
            while root.op == "call_function" and root.all_input_nodes and _is_view(root):
                root = root.all_input_nodes[0]
            name = root.meta.get("name")
            if root.op == "get_attr" and name in whole.reads:
                conflict = Conflict(
                    "AT317",
                    f"the forward writes into {name}, which is whole on the model and read in another form: "
                    "what is written would be lost",
                    help=(f"give {name} a rule of its own, with its dim",),
                )
                yield Finding(node, conflict, ())


def _is_view(node: fx.Node) -> bool:
    return bool(node.meta.get("mutates")) or op_name(node) in _VIEWS


def _left(whole: Propagation) -> Iterator[Finding]:
    for stored in whole.trace.stored:
        layout = whole.layouts.get(stored.node, [INVARIANT])[0]
        if stored.node.meta["val"].grad and layout in (PARTIAL, REPLICATE):
            what = "a part of a sum" if layout == PARTIAL else "a value with a part of its gradient"
            conflict = Conflict(
                "AT311", f"the forward leaves {stored.name} on the model, on each rank {what}"
            )
            yield Finding(stored.node, conflict, ())


def mixed_random(whole: Propagation) -> None:
    """Random numbers on a shard differ by rank: modules switch their stream, so one may not draw both."""
    for path in sorted(whole.random):
        if path in whole.random_whole:
            whole.findings.append(
                finding_in(
                    whole, path, "AT316",
                    "random numbers are drawn both on sharded values, where ranks must differ, and on whole "
                    "ones, where they must agree",
                    only=draws,
                )
            )  # fmt: skip
