"""The guided trace: run the module as a rank, put every wrong number right as it comes, and note where it
came from.

Op i of the rank must be op i of the whole trace. Before it runs, each of its numbers is compared with what
the layouts demand (`arguments.expected`). A wrong one is replaced, so that the run goes on as the edited
model would: one pass finds every edit, with the frames alive in which expressions can be evaluated.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor, fx, nn

from autotp.placement import Joint, Shard
from autotp.propagate.alike import plain
from autotp.propagate.arguments import expected
from autotp.propagate.dual import local_call
from autotp.propagate.heads import GATHER
from autotp.propagate.mapped import MARK
from autotp.propagate.ops import SILENT, arguments_of, name_of, named_arguments, op_name, silent
from autotp.propagate.propagation import Propagation
from autotp.rewrite.edits.edit import Edit, Local, Mapped, Part, Size, Wrapper
from autotp.rewrite.edits.find import (
    Found,
    Wrong,
    find,
    find_operand,
    find_whole,
    in_arguments,
    in_check,
    mapped_at,
)
from autotp.rewrite.edits.locate import Site, located, method_of, number
from autotp.rewrite.edits.places import frames_of, placed, sites_of
from autotp.rewrite.edits.text import NoSource
from autotp.slicing import take
from autotp.trace.graph import OPAQUE
from autotp.trace.recorder import in_place_of
from autotp.trace.source import is_editable

__all__ = ["Guide", "Missing"]


class _Gathered(Exception):
    """What follows is another size: the run ends, and the next one has the edit."""


@dataclass(frozen=True)
class Missing:
    """A wrong number for which there is no edit, and why."""

    node: fx.Node
    why: str


@dataclass
class Guide:
    """The hook of one rank's recording, with the edits in `bound`. `edits` is what it found, `missing`
    what it found no edit for, `finished` whether the run came to its end, `stopped` the line and the
    instruction of the model that raised, if one did."""

    root: nn.Module
    whole: Propagation
    rank: int
    bound: tuple[Edit, ...] = ()
    edits: list[Edit] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    finished: bool = False
    stopped: tuple[str, int, int] | None = None

    def __post_init__(self) -> None:
        # What happens in a module that is not looked into is no op, and not guided.
        self._ops = [node for node in self.whole.trace.ops() if node.target is not OPAQUE]
        self._next = 0
        self._lost = self._gathers = False
        self._paths: dict[int, str] = {}
        for path, module in self.root.named_modules():
            self._paths.setdefault(id(module), path)
        self._tables = tables(self.whole)
        self._tp = next(iter(self.whole.cuts.values())).tp

    # -- the hook

    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
        """The op call as the rank should make it."""
        func, args, kwargs = self._sliced(func, args, kwargs)
        wanted = self._matching(func, args)
        if wanted is None:
            return func, args, kwargs
        given = named_arguments(func, args, kwargs)
        if wanted in self.whole.mapped:
            self._mapped(wanted, given)
        self._shared(wanted, given)
        if self._gathers:
            raise _Gathered
        mine = local_call(self.whole, wanted, self.rank)
        changed: dict[str, Any] = {}
        for name, whole in arguments_of(wanted).items():
            here = given.get(name)
            if name not in given:
                continue
            if _tensor_like(whole):
                new = self._parts(wanted, whole, here)
                if new is not here:
                    changed[name] = new
                continue
            want = expected(op_name(wanted), name, mine, plain(here))
            if plain(want) != plain(here):
                changed[name] = want
                self._wrong(wanted, name, plain(whole), plain(here), want)
        return func, *_replaced(func, args, kwargs, changed)

    def _sliced(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
        """A slice that takes all of a rank's smaller value is recorded as an alias: made the slice again."""
        wanted = next((n for n in self._ops[self._next :] if not silent(n)), None)
        if name_of(func) != "alias" or self._lost or wanted is None or op_name(wanted) != "slice":
            return func, args, kwargs
        dim, start, end, step = (arguments_of(wanted)[n] for n in ("dim", "start", "end", "step"))
        size = args[0].shape[dim]
        if start or step != 1 or end is None or end < size or args[0].dim() != len(wanted.meta["val"].shape):
            return func, args, kwargs
        return wanted.target, (args[0], dim, start, end, step), {}

    def _matching(self, func: Any, args: tuple[Any, ...]) -> fx.Node | None:
        """The op of the whole trace that this call is; None for one that may be there or not."""
        name = name_of(func)
        if name == MARK:
            return None
        while not self._lost and self._next < len(self._ops):
            wanted = self._ops[self._next]
            if op_name(wanted) == name:
                self._next += 1
                return wanted
            if silent(wanted):
                self._next += 1
                continue
            if name in SILENT or (name == "detach" and not args[0].requires_grad):
                return None
            if not any("Tensor" in str(r.type) for r in func._schema.returns):
                return None
            self._lost = True
        return None

    # -- a value of which the op is given a part

    def _parts(self, node: fx.Node, whole: Any, here: Any) -> Any:
        """The argument as the op is given it, with the edits that make it so."""
        if isinstance(whole, (list, tuple)) and isinstance(here, (list, tuple)):
            new = [self._parts(node, w, h) for w, h in zip(whole, here, strict=True)]
            return here if all(a is b for a, b in zip(new, here, strict=True)) else new
        shard = self.whole.parts.get((node, whole)) if isinstance(whole, fx.Node) else None
        if shard is None or not isinstance(here, Tensor):
            return here
        if here.shape == shard.local_shape(whole.meta["val"].shape, self.rank):
            return here  # an edit gives the part already
        assert shard.deal is not None
        how = Part(shard.dim, whole.meta["val"].shape[shard.dim] // shard.groups, shard.deal)
        self._operand(node, whole, here, how, sys._getframe(2))
        return in_place_of(here, lambda value: take(value, shard, self.rank))

    # -- a statistic

    def _mapped(self, node: fx.Node, given: Mapping[str, Any]) -> None:
        """Note the edit that maps the op's result where the model makes it."""
        try:
            frames = list(frames_of(sys._getframe(2)))
            level, site = next(sites_of(frames), (0, None))
            found = None if site is None else mapped_at(site, level, self.whole, node, given.get("self"))
            if found is None:
                self.missing.append(Missing(node, "no expression is known that gives its result alone"))
            else:
                self._edit(node, frames, found)
        except NoSource as error:
            self.missing.append(Missing(node, str(error)))

    # -- a whole value that is added to parts of a sum, or read by a head

    def _shared(self, node: fx.Node, given: Mapping[str, Any]) -> None:
        """Note the edits that share or copy what the op is given whole."""
        for name, argument in arguments_of(node).items():
            here = given.get(name)
            several = isinstance(argument, (list, tuple)) and isinstance(here, (list, tuple))
            for whole, value in zip(argument, here or (), strict=False) if several else [(argument, here)]:
                step = self._step(node, whole)
                if step and getattr(value, "autotp_mapped", "") != step:
                    self._operand(node, whole, value, Mapped((step,)), sys._getframe(2))

    def _step(self, node: fx.Node, whole: Any) -> str:
        """What a whole value goes through before an op."""
        if not isinstance(whole, fx.Node):
            return ""
        pair = (node, whole)
        return "copy" if pair in self.whole.copied_in else "share" if pair in self.whole.shared else ""

    def _operand(self, node: fx.Node, whole: fx.Node, here: Any, how: Wrapper, frame: FrameType) -> None:
        """Note the edit that puts a wrapper around the operand `whole`, here the tensor `here`."""
        try:
            frames = list(frames_of(frame))
            given = node.all_input_nodes
            found = find_operand(
                here,
                list(sites_of(frames)),
                lambda level: self._in_method(frames[level]),
                given.index(whole),
                len(given),
            )
            if found is None:
                self.missing.append(Missing(node, "no expression is known that gives the whole value"))
            else:
                level, site, expression = found
                self._edit(node, frames, Found(level, site, expression, how))
        except NoSource as error:
            self.missing.append(Missing(node, str(error)))

    def _in_method(self, frame: FrameType) -> bool:
        method = method_of(frame)
        return method is not None and id(method[0]) in self._paths

    # -- a wrong number

    def _wrong(self, node: fx.Node, name: str, whole: Any, here: Any, want: Any) -> None:
        """Note the edit for each number of an argument that is wrong."""
        if isinstance(here, (int, float)) and want == whole and not isinstance(whole, bool):
            self._own(node, name, here, want)
            return
        if number(here) and number(want):
            places: list[tuple[int | None, int, int]] = [(None, here, want)]
        elif isinstance(here, list) and isinstance(want, list) and len(here) == len(want):
            places = [(k, g, w) for k, (g, w) in enumerate(zip(here, want, strict=True)) if g != w]
        else:
            return
        try:
            frames = list(frames_of(sys._getframe(2)))
            sites = list(sites_of(frames))
        except NoSource as error:
            self.missing.append(Missing(node, str(error)))
            return
        # What follows from another number that is mended here needs no edit of its own.
        wrongs = [self._described(node, name, whole, place, got, need, len(here) if place is not None else 0)
                  for place, got, need in places]  # fmt: skip
        found_any = False
        for wrong in sorted(wrongs, key=lambda w: not w.constant):
            if not wrong.constant and found_any:
                continue
            found = find(wrong, sites, self._tables, self.rank)
            if found is None:
                self.missing.append(
                    Missing(node, f"the {wrong.got} in {name}={here} comes from no expression that is known")
                )
                continue
            found_any = True
            self._edit(node, frames, found)

    def _own(self, node: fx.Node, name: str, here: float, want: float) -> None:
        """A number that the op needs as the whole model has it, read off a rank's own part."""
        try:
            frames = list(frames_of(sys._getframe(3)))
            found = find_whole(here, want, list(sites_of(frames)), self._tables, self.rank)
        except NoSource as error:
            self.missing.append(Missing(node, str(error)))
            return
        if found is None:
            why = f"the {here} in {name} comes from no size of a rank's own part that is known"
            self.missing.append(Missing(node, why))
        else:
            self._edit(node, frames, found)

    def _described(
        self, node: fx.Node, name: str, whole: Any, place: int | None, got: int, need: int, length: int
    ) -> Wrong:
        said = whole if place is None else whole[place] if isinstance(whole, list) else None
        size = self._size(node, name, whole, place, said) if isinstance(said, int) else None
        return Wrong(op_name(node), name, place, length, got, need, said, size)

    def _size(self, node: fx.Node, name: str, whole: Any, place: int | None, said: int) -> Size | None:
        """The number with its part on every rank; without the factor of whole dims (batch · heads)."""
        parts = []
        for rank in range(self._tp):
            want = expected(op_name(node), name, local_call(self.whole, node, rank), whole)
            want = want if place is None else want[place]
            if not number(want):
                return None
            parts.append(want)
        layout = self.whole.computed[node][0]
        groups = layout.groups if isinstance(layout, Shard) and place is not None else 1
        if groups > 1 and said % groups == 0 and all(p % groups == 0 for p in parts):
            return Size(said // groups, tuple(p // groups for p in parts), times=True)
        return Size(said, tuple(parts))

    def _edit(self, node: fx.Node, frames: Sequence[FrameType], found: Found) -> None:
        try:
            edit = placed(frames, found.level, self._paths, found.site.source.span(found.node), found.wrapper)
        except NoSource as error:
            self.missing.append(Missing(node, str(error)))
            return
        self._gathers |= edit not in self.bound and getattr(found.wrapper, "how", ()) == GATHER
        if edit not in self.edits:
            self.edits.append(edit)

    # -- a forward that raises

    def raised(self, error: BaseException | None) -> list[Edit]:
        """The edits of which one may let a forward go on that raised: in the model's own check of a shape, or
        in the arguments of a call that failed before any op (einops' own checks)."""
        frames: list[FrameType] = []
        if isinstance(error, _Gathered):
            return []
        traceback = error.__traceback__ if error is not None else None
        while traceback is not None:
            frames.insert(0, traceback.tb_frame)
            traceback = traceback.tb_next
        if frames:
            self.stopped = (frames[0].f_code.co_filename, frames[0].f_lineno, frames[0].f_lasti)
        return [*self._in_check(frames), *self._in_call(frames)]

    @property
    def progress(self) -> int:
        """How many ops of the whole trace were reached."""
        return self._next

    def _in_check(self, frames: list[FrameType]) -> Iterator[Edit]:
        if not frames or not is_editable(frames[0].f_code):
            return
        site = located(frames[0], ast.Call, ast.Raise, ast.Assert)
        if site is None:
            return
        statement = site.node
        if not isinstance(statement, (ast.Raise, ast.Assert)):
            statement = next(
                (p for p in site.source.parents(statement) if isinstance(p, ast.Raise)), statement
            )
        for leaf, size in in_check(Site(site.frame, site.source, statement), self._tables, self.rank):
            yield placed(frames, 0, self._paths, site.source.span(leaf), Local((size,)))

    def _in_call(self, frames: list[FrameType]) -> Iterator[Edit]:
        level = next((k for k, f in enumerate(frames) if is_editable(f.f_code)), None)
        site = located(frames[level], ast.Call) if level is not None else None
        if level is None or site is None:
            return
        for leaf, wrapper in in_arguments(site, self._tables, self.rank):
            yield placed(frames, level, self._paths, site.source.span(leaf), wrapper)


def tables(whole: Propagation) -> list[Size]:
    """The sizes of the model that are cut, with their parts; then the bare ratios."""
    sizes: dict[tuple[int, tuple[int, ...]], None] = {}
    ratios: dict[tuple[int, tuple[int, ...]], None] = {}
    for node, layouts in whole.layouts.items():
        vals = node.meta.get("val")
        for val, layout in zip(vals if isinstance(vals, list) else [vals], layouts, strict=False):
            if isinstance(layout, Joint) and val is not None:
                local = [layout.local_shape(val.shape, rank) for rank in range(layout.tp)]
                for dim in layout.dims:  # the kv heads, and how often each is repeated
                    sizes.setdefault((val.shape[dim], tuple(shape[dim] for shape in local)))
            if not isinstance(layout, Shard) or val is None:
                continue
            size = val.shape[layout.dim] // (layout.groups if layout.sections is None else 1)
            parts = tuple(
                layout.local_size(val.shape[layout.dim], r)
                // (layout.groups if layout.sections is None else 1)
                for r in range(layout.tp)
            )
            sizes.setdefault((size, parts))
            if layout.deal is not None:
                ratios.setdefault((layout.deal.units, tuple(e - s for s, e in layout.deal.ranges)))
    return [Size(n, parts) for n, parts in sizes] + [Size(n, parts, times=True) for n, parts in ratios]


def _tensor_like(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_tensor_like(v) for v in value)
    return isinstance(value, fx.Node)


def _replaced(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], changed: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if not changed:
        return args, kwargs
    names = [p.name for p in func._schema.arguments]
    new = [changed.get(names[k], a) for k, a in enumerate(args)]
    given = set(names[: len(args)])
    return tuple(new), {**kwargs, **{n: v for n, v in changed.items() if n not in given}}
