"""What a proof says beside the findings on a graph: modes that cannot be traced, layers that no trace ran."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from autotp.diagnostic import Diagnostic, Span
from autotp.match import Matches
from autotp.placement import INVARIANT, describe, is_whole
from autotp.propagate.diagnose import rule_line
from autotp.propagate.propagation import Propagation
from autotp.trace.consulted import Consulted
from autotp.trace.graph import Output, Trace, TraceError
from autotp.trace.inputs import Samples
from autotp.trace.modes import Captured
from autotp.trace.untouched import CLOSED_OVER

__all__ = [
    "copied_at_times", "handled", "left_parts", "not_run", "notes", "read_around", "reads_left",
    "unreached_layers", "untraceable",
]  # fmt: skip


def copied_at_times(path: str) -> Diagnostic:
    """A column layer whose input is a copy in one mode, and not in another."""
    return Diagnostic(
        "AT305",
        "in one mode its input has a part of its gradient on each rank, and in another the whole",
        module=path,
        help=("leave it whole",),
    )


def not_run(found: Captured) -> Iterator[Diagnostic]:
    """The run-time path is what users run; where it cannot be traced, that is said."""
    for mode, error in found.dropped:
        proven = "run time" in found.covered or any(d.name == "run time" for d, _ in found.traces)
        if mode.name == "run time" and not proven:
            yield Diagnostic(
                "AT320",
                f"the forward cannot be traced as it runs outside of a trace: {error}",
                severity="warning",
                module=error.module or None,
                source=error.source,
                notes=("what the model does only when nothing traces it is not proven",),
            )
            return


def left_parts(whole: Propagation) -> list[Output]:
    """What the forward leaves on the model of which each rank holds its own part."""
    return [s for s in whole.trace.stored if not is_whole(whole.layouts.get(s.node, [INVARIANT])[0])]


def read_around(trace: Trace, read: Consulted) -> Iterator[Diagnostic]:
    """What a module that was not looked into may change, and code around it reads, as no trace shows; and
    modules of which nobody knows what they read, change and give."""
    for path in sorted(trace.guessed):
        yield Diagnostic(
            "AT326",
            "its forward asks for a number of a tensor (`.item()`, `.tolist()`, `nonzero`), or gives what is "
            "unlike by the answers, so it is not known what it reads, changes and gives",
            module=path,
            help=(
                "let it decide by the truth of a tensor alone (`if x.max() > n:`), with results alike",
                "a branch that gives an argument itself is unlike one that gives a new tensor: `x.clone()`",
            ),
        )
    for path, names in trace.changed.items():
        known = read.names | read.asked | _words(read) | {CLOSED_OVER}
        for name in sorted(names if read.any_name else names & known):
            yield Diagnostic(
                "AT326",
                f"its forward asks for the value of a tensor, so it cannot be traced, and it sets {name}, "
                "which code around it reads",
                module=path,
                help=("return what is new as a result",),
            )


def _words(read: Consulted) -> set[str]:
    """Words of the globals that code names, by which it may ask attributes."""
    if "getattr" not in read.names:
        return set()
    values: list[Any] = [space.table.get(name) for space, names in read.globals for name in names]
    tables = (tuple, list, set, frozenset, dict)
    parts = [part for value in values for part in (value if type(value) in tables else (value,))]
    return {part for part in parts if type(part) is str}


def reads_left(whole: Propagation, left: frozenset[str]) -> Iterator[Diagnostic]:
    """What an earlier call `left`, a part on each rank, and this one reads: its trace takes it for whole."""
    for node in whole.trace.graph.nodes:
        if node.op == "get_attr" and node.users and node.meta["name"] in left:
            yield Diagnostic(
                "AT324",
                f"{node.meta['name']} is read, of which an earlier call left each rank its own part",
                source=next(iter(node.users)).meta.get("source"),
                help=("hand it from call to call as an argument and a result",),
            )


def notes(whole: Propagation) -> Iterator[Diagnostic]:
    """What a user should know of a proof that holds."""
    for stored in left_parts(whole):
        yield Diagnostic(
            "AT324",
            f"the forward leaves {stored.name} on the model, of which each rank holds its own part",
            severity="warning",
            source=stored.node.meta.get("source"),
            notes=(describe(whole.layouts[stored.node][0]),),
        )
    if whole.trace.opaque:
        yield Diagnostic(
            "AT325",
            f"not looked into, since their forward asks for values: {', '.join(whole.trace.opaque)}",
            severity="note",
            notes=("nothing sharded goes in or comes out; what they compute is the unsharded model's",),
        )


def unreached_layers(matches: Matches, reached: set[str], first: Mapping[str, str]) -> Iterator[Diagnostic]:
    """Layers that no trace ran, but those that only name tensors of layers that ran."""
    modules = [placed for placed in matches.placed.values() if placed.target == "module"]
    ran = {first.get(n, n) for placed in modules if placed.path in reached for n in placed.layouts}
    for placed in modules:
        alone = any(first.get(n, n) not in ran for n in placed.layouts)
        if alone and placed.path not in reached:
            yield Diagnostic(
                "AT322",
                "no traced forward runs this layer, so nothing is proven about it",
                module=placed.path,
                plan=placed.span,
                notes=() if placed.span else (f"the rule: {rule_line(placed.pattern, placed.rule)}",),
                help=("pass inputs= with which the forward runs it, or leave it whole",),
            )


def untraceable(error: TraceError, mode: str, samples: Samples, *, warning: bool) -> Diagnostic:
    """A mode that cannot be traced."""
    return Diagnostic(
        "AT320",
        f"the forward cannot be traced in {mode} mode: {error}",
        severity="warning" if warning else "error",
        module=error.module or None,
        source=error.source,
        notes=(f"the inputs of the trace were {samples.origin}: {_spoken(samples)}",),
        help=(
            (f"the sharded model will refuse to run in {mode} mode",)
            if warning
            else (
                "let a module of its own ask for the truth (`if x.max() > n:`), and return what follows"
                if error.dynamic
                else "pass inputs= with which the forward runs",
                'check="shapes" goes on without a proof, on names and shapes only',
            )
        ),
    )


def _spoken(samples: Samples) -> str:
    def one(value: object) -> str:
        shape = getattr(value, "shape", None)
        return (
            repr(value)
            if shape is None
            else f"{list(shape)} {str(getattr(value, 'dtype', '')).removeprefix('torch.')}"
        )

    named = [one(a) for a in samples.args] + [f"{k}={one(v)}" for k, v in samples.kwargs.items()]
    return ", ".join(named)


def handled(wholes: Iterable[Propagation]) -> Iterator[Span]:
    """The lines of the model that handle values which are not whole."""
    for whole in wholes:
        for node in whole.layouts:
            span = node.meta.get("source")
            if span is not None and any(
                not is_whole(whole.layouts.get(n, [INVARIANT])[0]) for n in (node, *node.all_input_nodes)
            ):
                yield span
