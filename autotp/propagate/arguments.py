"""What each argument of an op must be on a rank, so that the rank's run equals its part of the whole run.

A rank runs the same Python with smaller weights. Where the code reads sizes off live tensors it follows
by itself; a constant (`view(b, s, 12, 32)` with 6 local heads) does not, and often raises nothing. So
every argument that is no tensor has one right value on a rank: sizes and bounds on a sharded dim are the
rank's own, everything else is what the unsharded run used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autotp.placement import Joint, Layout, Shard
from autotp.propagate.call import normal_dim

__all__ = ["Local", "expected", "local_shape"]


def local_shape(shape: tuple[int, ...], layout: Layout, rank: int) -> tuple[int, ...]:
    """The shape of a rank's part of a value."""
    return layout.local_shape(shape, rank) if isinstance(layout, (Shard, Joint)) else shape


@dataclass(frozen=True)
class Local:
    """One call as a rank must see it: `source` is its first tensor argument, `results` its local results."""

    rank: int
    arguments: Mapping[str, Any]
    source: tuple[int, ...]
    layout: Layout
    results: tuple[tuple[int, ...], ...]

    def sharded_dim(self) -> int | None:
        """The dim of the source that is sharded, if the call's `dim` is that one."""
        if not isinstance(self.layout, Shard):
            return None
        dim = normal_dim(self.arguments.get("dim") or 0, len(self.source))
        return dim if dim == self.layout.dim else None


def _sizes(local: Local, got: Any) -> list[int] | None:
    """A view's sizes: the local shape, where -1 leaves a size open."""
    shape = list(local.results[0])
    if isinstance(got, list) and len(got) == len(shape):
        return [g if g == -1 else n for g, n in zip(got, shape, strict=True)]
    return shape


def _inner_sizes(local: Local, got: Any) -> list[int] | None:
    start = normal_dim(local.arguments["dim"], len(local.source))
    shape = list(local.results[0][start : start + len(local.arguments["sizes"])])
    return [g if g == -1 else n for g, n in zip(got, shape, strict=False)] if isinstance(got, list) else shape


def _split_size(local: Local, got: Any) -> Any:
    dim = local.sharded_dim()
    if dim is None:
        return local.arguments.get("split_size", local.arguments.get("split_sizes"))
    sizes = [shape[dim] for shape in local.results]
    return sizes if isinstance(got, list) else sizes[0]


def _before(shard: Shard, size: int, edge: int, rank: int) -> int:
    """How many local elements stand before the global position `edge`, a border between pieces."""
    held, offset = 0, 0
    for length, dealt in shard.pieces(size):
        if offset + length <= edge:
            low, high = (0, length) if dealt is None else dealt.bounds(length, rank)
            held += high - low
        offset += length
    return held


def _bound(name: str) -> Callable[[Local, Any], Any]:
    """A slice's bound on the sharded dim: the local elements before it. Beyond the end is the end."""

    def expect(local: Local, got: Any) -> Any:
        dim = local.sharded_dim()
        if dim is None:
            return local.arguments.get(name)
        assert isinstance(local.layout, Shard)
        size = local.source[dim]
        start, stop, _ = slice(local.arguments.get("start"), local.arguments.get("end"), 1).indices(size)
        if name == "start" and (local.arguments.get("step") or 1) != 1:
            return local.arguments.get("start")  # less than a step: every rank's part begins with a step
        want = _before(local.layout, size, start if name == "start" else stop, local.rank)
        here = local.layout.local_size(size, local.rank)
        first, last, _ = slice(got if name == "start" else None, got if name == "end" else None, 1).indices(
            here
        )
        return got if (first if name == "start" else last) == want else want

    return expect


def _split_places(local: Local, got: Any) -> Any:
    """tensor_split's borders: the local elements before each."""
    dim = local.sharded_dim()
    indices = local.arguments.get("indices")
    if dim is None or not isinstance(indices, list):
        return indices
    assert isinstance(local.layout, Shard)
    return [_before(local.layout, local.source[dim], edge, local.rank) for edge in indices]


def _output_size(local: Local, got: Any) -> Any:
    """repeat_interleave's size of the dim, where it is given."""
    dim = local.arguments.get("dim")
    if local.arguments.get("output_size") is None:
        return None
    return local.results[0][0 if dim is None else normal_dim(dim, len(local.source))]


def _repeats(local: Local, got: Any) -> list[int]:
    """How often each dim stands in a row: where a dim of one is expanded, as often as the rank has it."""
    times: list[int] = list(local.arguments.get("repeats", local.arguments.get("dims")))
    if isinstance(local.layout, Shard):
        return times
    front = len(local.results[0]) - len(times)  # `tile` may leave out the first dims
    sizes = [1] * (len(local.results[0]) - len(local.source)) + list(local.source)
    held = local.results[0][front:]
    return [
        n if n * size == here else here // size
        for n, size, here in zip(times, sizes[front:], held, strict=True)
    ]


def _interleaved(local: Local, got: Any) -> Any:
    """How often each element stands in a row: units that ranks share, as often as the rank has them."""
    times, dim = local.arguments.get("repeats"), local.arguments.get("dim")
    if not isinstance(times, int) or dim is None:
        return times
    dim = normal_dim(dim, len(local.source))
    held = local_shape(local.source, local.layout, local.rank)[dim]
    return local.results[0][dim] // max(1, held)


def _padding(local: Local, got: Any) -> Any:
    """A table whose rows are cut is a vocab layer's, which knows which rank has the row of padding."""
    cut = isinstance(local.layout, Shard) and local.layout.dim == 0
    return got if cut else local.arguments.get("padding_idx")


def _normalized(local: Local, got: Any) -> Any:
    """A norm over a dim that is cut is over the rank's own part of it."""
    shape: list[int] = local.arguments["normalized_shape"]
    front = len(local.source) - len(shape)
    cut = isinstance(local.layout, Shard) and local.layout.dim >= front
    return list(local.results[0][front:]) if cut else shape


def _groups(name: str, places: int) -> Callable[[Local, Any], Any]:
    """Depthwise convolutions and group norms: as many groups as the rank's channels make."""

    def expect(local: Local, got: Any) -> Any:
        groups: int = local.arguments[name]
        channels = len(local.source) - 1 - places if places else 1
        if not isinstance(local.layout, Shard) or local.layout.dim != channels or groups == 1:
            return groups
        size = local.source[channels]
        return groups * local.layout.local_size(size, local.rank) // size

    return expect


def _narrow_start(local: Local, got: Any) -> Any:
    dim = local.sharded_dim()
    if dim is None:
        return local.arguments.get("start")
    assert isinstance(local.layout, Shard)
    size = local.source[dim]
    return _before(local.layout, size, local.arguments["start"] % size, local.rank)


def _narrow_length(local: Local, got: Any) -> Any:
    dim = local.sharded_dim()
    return local.arguments.get("length") if dim is None else local.results[0][dim]


EXPECTED: dict[tuple[str, str], Callable[[Local, Any], Any]] = {
    **{(op, "size"): _sizes for op in ("view", "reshape", "_unsafe_view", "expand", "broadcast_to")},
    ("reshape", "shape"): _sizes,
    **{(op, "size"): _sizes for op in ("zeros", "ones", "full", "empty")},
    **{(op, "size"): _sizes for op in ("new_zeros", "new_ones", "new_full", "new_empty")},
    **{(op, "normalized_shape"): _normalized for op in ("layer_norm", "rms_norm")},
    ("embedding", "padding_idx"): _padding,
    ("repeat", "repeats"): _repeats,
    ("tile", "dims"): _repeats,
    ("repeat_interleave", "repeats"): _interleaved,
    ("unflatten", "sizes"): _inner_sizes,
    ("split", "split_size"): _split_size,
    ("split", "split_sizes"): _split_size,
    ("split_with_sizes", "split_sizes"): _split_size,
    ("slice", "start"): _bound("start"),
    ("slice", "end"): _bound("end"),
    **{(f"conv{places}d", "groups"): _groups("groups", places) for places in (1, 2, 3)},
    ("group_norm", "num_groups"): _groups("num_groups", 0),
    ("unsafe_split", "split_size"): _split_size,
    ("unsafe_split_with_sizes", "split_sizes"): _split_size,
    ("tensor_split", "indices"): _split_places,
    ("repeat_interleave", "output_size"): _output_size,
    ("narrow_copy", "start"): _narrow_start,
    ("narrow_copy", "length"): _narrow_length,
    ("narrow", "start"): _narrow_start,
    ("narrow", "length"): _narrow_length,
}


def expected(op: str, argument: str, local: Local, got: Any) -> Any:
    """The right value on a rank of an argument that is no tensor, given what the rank's run passed (`got`).

    Where several spellings mean the same (-1 in a view, a bound beyond the end), `got` itself comes back
    if it is one of them.
    """
    rule = EXPECTED.get((op, argument))
    return local.arguments.get(argument) if rule is None else rule(local, got)
