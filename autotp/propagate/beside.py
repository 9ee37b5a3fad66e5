"""What a rank's run has besides its ops: tensors made of numbers, raw reads, borders, and what it leaves.

Each must be as the whole run has it, or pass by the place that is mapped.
"""

from __future__ import annotations

from torch import fx

from autotp.propagate.alike import NOTHING, equal, said, shown
from autotp.propagate.findings import CONSTANT, finding_of
from autotp.propagate.ops import op_name
from autotp.propagate.propagation import Finding, Propagation
from autotp.trace.graph import Trace

__all__ = ["left", "taken"]


def taken(whole: Propagation, local: Trace, rank: int) -> Finding | None:
    """The first tensor of numbers, parameter, or value at a region's border that a rank's run takes in
    another way."""
    return _constants(whole, local, rank) or _raw_reads(whole, local) or _past_borders(whole, local)


def _constants(whole: Propagation, local: Trace, rank: int) -> Finding | None:
    """Tensors that the forward makes of numbers must be the same numbers on a rank."""
    theirs = {n.meta["name"]: n.meta.get("constant") for n in local.graph.nodes if n.op == "get_attr"}
    for node in whole.trace.graph.nodes:
        value = node.meta.get("constant") if node.op == "get_attr" else None
        if value is None or node.meta["name"] not in theirs:
            continue
        other = theirs[node.meta["name"]]
        if other is None or not equal(value, other):
            user = next(iter(node.users), node)
            return finding_of(
                whole,
                user,
                "AT313",
                f"a tensor of numbers is {shown(other)} on rank {rank}, and {shown(value)} unsharded",
                help=CONSTANT,
            )
    return None


def _raw_reads(whole: Propagation, local: Trace) -> Finding | None:
    for node in local.graph.nodes:
        if node.op == "get_attr" and node.meta["name"] in whole.reads:
            past = next((u for u in node.users if u.op != "output" and op_name(u) != "alias"), None)
            if past is not None:
                name = node.meta["name"]
                short = name.rpartition(".")[2]
                found = next(n for n in whole.trace.graph.nodes if n.meta.get("name") == name)
                message = (
                    f"{name} meets shards, so it is mapped where its module reads it "
                    f"(`self.{short}`); here it is read past that"
                )
                return finding_of(whole, next(iter(found.users)), "AT312", message, source=past)
    return None


def _past_borders(whole: Propagation, local: Trace) -> Finding | None:
    """What a region maps at its border must go in and come out by it alone."""
    for path, region in whole.regions.items():
        calls = zip(local.entered.get(path, []), local.left.get(path, []), strict=False)
        for here, (entered, gone) in (((path, call), both) for call, both in enumerate(calls)):
            for place, node in entered:
                inside = [u for u in node.users if here in u.meta.get("stack", ())]
                past = next((u for u in inside if op_name(u) != "alias"), None)
                if place in region.copied and past is not None:
                    return _past(whole, path, f"is given {place}", past)
            for place, node in gone:
                if place in region.reduced and op_name(node) == "alias":
                    others = (u for u in node.all_input_nodes[0].users if u is not node)
                    past = next((u for u in others if here not in u.meta.get("stack", ())), None)
                    if past is not None:
                        return _past(whole, path, f"returns {place or 'its result'}", past)
    return None


def _past(whole: Propagation, path: str, does: str, past: fx.Node) -> Finding:
    message = (
        f"{path or 'the model'} owns sharded tensors and has a mapping at its border where it {does}; "
        "here that value is read past the border"
    )
    return finding_of(whole, past, "AT319", message, help=("hand it over as an argument or a result",))


def left(whole: Propagation, local: Trace, rank: int) -> Finding | None:
    """What a forward gives back besides tensors, and leaves on the model, must be the same on a rank."""
    for does, ours, theirs in (
        ("returns", whole.trace.returned, local.returned),
        ("leaves on the model", whole.trace.kept, local.kept),
    ):
        for place in dict.fromkeys([*ours, *theirs]):
            want, got = ours.get(place, NOTHING), theirs.get(place, NOTHING)
            if said(want) != said(got):
                return finding_of(
                    whole,
                    whole.trace.ops()[-1],
                    "AT313",
                    f"the forward {does} {said(got)}{f' at {place}' if place else ''} on rank "
                    f"{rank}, and {said(want)} unsharded",
                    help=("take it from a value that is whole on every rank",),
                )
    return None
