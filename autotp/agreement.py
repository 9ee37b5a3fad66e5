"""Whether a row layer takes the features that the column layers before it give, as far as shapes tell.

A graph would say what feeds a row layer. Names say it nearly: the column layers beside it, or else in the
module around, that give as many features as it takes (a section of a fused layer, too). If each of these
deals them to the ranks in another way than the row layer, products would be of features that do not belong
together. This file knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from autotp.claims import Found, told
from autotp.diagnostic import Diagnostic
from autotp.inventory import Inventory
from autotp.match import Matches, Placed
from autotp.placement import Shard
from autotp.units import Fault

__all__ = ["disagreeing"]

Cut = tuple[tuple[tuple[int, int], ...], ...]
"""What each rank holds of each piece of a dim, as (start, stop) within the piece."""


def disagreeing(matches: Matches, inventory: Inventory) -> tuple[Diagnostic, ...]:
    """The row layers that are cut as none of the column layers before them."""
    return tuple(told(matches.plan, _found(matches, inventory)))


def _found(matches: Matches, inventory: Inventory) -> Iterator[Found]:
    tensors = inventory.tensors()

    def weight(placed: Placed) -> tuple[int, Shard] | None:
        """The size of the dim of a layer's weight that is cut, and how."""
        of = (n for n in placed.layouts if placed.target == "module" and n.rpartition(".")[2] == "weight")
        return next(((tensors[n].shape[s.dim], s) for n in of if (s := placed.layouts[n])), None)

    every = [(one, held) for one in matches.placed.values() if (held := weight(one)) is not None]
    columns = [(p, held) for p, held in every if p.style == "column" and not p.rule.gather_output]
    for row, (size, shard) in every:
        if row.style != "row" or row.rule.split_input or not row.declared:
            continue  # one that declares no heads is left to the proof, which a load makes, too
        wanted, around = _cut(shard, size), row.path
        given: list[tuple[Placed, Cut]] = []
        for _ in range(2):
            around = around.rpartition(".")[0]
            beside = f"{around}." if around else ""  # of a layer of the model itself, any layer is beside it
            inside = [(p, held) for p, held in columns if not given and p.path.startswith(beside)]
            given += [(p, cut) for p, (width, how) in inside for cut in _gives(how, width, size)]
        if given and all(cut != wanted for _, cut in given):
            column, cut = given[0]
            message = (
                f"its {size} input features are cut {_said(wanted)}, and the {size} that {column.path} gives "
                f"{_said(cut)}: each rank would multiply features that do not belong together"
            )
            help = f"cut it as the column layer before it: `{column.pattern}` says {column.rule.to_data()}"
            yield Found(row.pattern, row.path, Fault("AT204", message, help=(help,)))


def _cut(shard: Shard, size: int) -> Cut:
    return tuple(
        tuple((0, n) if dealt is None else dealt.bounds(n, rank) for rank in range(shard.tp))
        for n, dealt in shard.pieces(size)
    )


def _gives(shard: Shard, width: int, size: int) -> list[Cut]:
    """The cuts of `size` features that a column layer gives: all of its own, or those of a piece."""
    whole = _cut(shard, width)
    lengths = [n for n, _ in shard.pieces(width)]
    parts: list[Cut] = [(piece,) for n, piece in zip(lengths, whole, strict=True) if n == size]
    return parts if width != size else [whole, *parts]


def _said(cut: Cut) -> str:
    return " and ".join(" + ".join(str(stop - start) for start, stop in piece) for piece in cut)
