"""Run a module's real forward on fake tensors and record every aten op into a `torch.fx.Graph`.

The recorder is a dispatch mode on the PreDispatch key, above autograd and above decompositions, so it
sees the same op sequence as `torch.export` (a test holds the two equal), for any Python forward, any
input and output types, with caches, in train mode. What of torch is private to it is in `trace/hooks.py`;
where that is missing, `MISSING` says so and `capture` takes another route.

After a recording, succeeded or failed, the module is as it was.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from autotp.trace import hooks
from autotp.trace.asked import asked
from autotp.trace.branches import unwatched, watching
from autotp.trace.calls import RUNNING, Boundary, Calls, in_place_of
from autotp.trace.faked import Faked, faked
from autotp.trace.graph import (
    REPEATED,
    Output,
    Trace,
    TraceError,
    Val,
    numbers_in,
    parameters_of,
    tensors_in,
)  # fmt: skip
from autotp.trace.hooks import MISSING
from autotp.trace.layers import Layers
from autotp.trace.noted import plain
from autotp.trace.noting import noting, shape_name
from autotp.trace.operands import gives_number, tensors_of, written_by
from autotp.trace.overwritten import Overwritten
from autotp.trace.remembered import Forgotten, Remembered
from autotp.trace.sameness import Different
from autotp.trace.seeds import SEEDED, Seeds, may_draw
from autotp.trace.source import outermost
from autotp.trace.surroundings import functions, quiet, same_draws, step_by_step
from autotp.trace.unknown import unknown
from autotp.trace.untouched import only_forward_is_new, untouched
from autotp.trace.values import Known, val_of
from autotp.trace.walked import looks, rows_of

_TRIES = 6  # recordings in which layers are found not to be what they look like
DRAWN = 0.5
"""What a forward that draws one random number is given."""

__all__ = [
    "MISSING", "Given", "Guide", "Output", "Step", "Trace", "TraceError", "Val", "in_place_of", "record",
    "tensors_in",
]  # fmt: skip

Guide = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], tuple[Any, tuple[Any, ...], Mapping[str, Any]]]
Given = tuple[tuple[Any, ...], Mapping[str, Any]]
Step = Callable[[Any, Given], Given]


def record(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    grad: bool = True,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    before: Boundary | None = None,
    after: Boundary | None = None,
    exporting: bool = True,
    compiling: bool | None = None,
    then: Step | None = None,
    opaque: frozenset[str] = frozenset(),
    guide: Guide | None = None,
    layers: Layers | None = None,
    as_given: bool = False,
    numbers: bool = False,
) -> Trace:
    """Record one forward of `module` on `args` and `kwargs`, whose tensors only give shapes and dtypes.

    `shapes` replaces the shapes of named parameters and buffers (a rank's local ones). `before(path,
    args)` and `after(path, output)` may replace what goes into and comes out of a module (the mappings of
    parallel layers). With `grad`, every floating parameter and input counts as requiring a gradient; of the
    inputs `as_given` only those that do. `numbers` among the arguments note what they are asked.
    `exporting` tells the model that it is being exported, so that it takes its trace-safe branches;
    `compiling` (by default the same) that it is being compiled.
    `then(output, (args, kwargs))` gives the arguments of a second forward in the same trace (a decode step
    on the cache that the first one filled). The modules named in `opaque` are not looked into: each call is
    one node.
    `guide(op, args, kwargs)` sees each op call before it runs, and gives the one that runs in its place.
    `layers` are those that may repeat each other, and are recorded once where they do (`Trace.repeats`).

    Raises TraceError when the forward raises; with a guide Different, where a layer of `layers` is not what
    it looks like, and Forgotten, where it is to be recorded anew (`layers` say so).
    """
    if MISSING is not None:
        raise TraceError(f"this torch lacks a hook that the recorder needs ({MISSING})", "", None)

    def once(alike: Layers, remember: bool) -> Trace:
        return _record(
            module, args, kwargs, grad=grad, shapes=shapes or {}, before=before, after=after,
            flags=(exporting if compiling is None else compiling, exporting), then=then, opaque=opaque,
            guide=guide, layers=alike, remember=remember, as_given=as_given,
            numbers=numbers,
        )  # fmt: skip

    alike = layers if layers is not None else Layers()
    remember = alike.remember
    if guide is not None:  # it sees every op, once
        try:
            return once(alike, remember)
        except Forgotten:
            alike.remember = False
            raise
    for _ in range(_TRIES):
        try:
            trace = once(alike, remember)
        except Forgotten:
            remember = alike.remember = False  # nor in what is recorded after it
            continue
        except Different as different:
            if not different.path:
                break
            alike.apart.add(different.path)
            continue
        except TraceError as error:
            if not alike.groups and (error.dynamic or not remember):
                raise
            break  # what is said of it comes from the whole model, and from torch
        if not trace.repeats or not any(n.meta.get("origin") == "unknown" for n in trace.graph.nodes):
            return trace
        break
    return once(Layers(), False)


@outermost
def _record(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    grad: bool,
    shapes: Mapping[str, tuple[int, ...]],
    before: Boundary | None,
    after: Boundary | None,
    flags: tuple[bool, bool],
    then: Step | None,
    opaque: frozenset[str],
    guide: Guide | None,
    layers: Layers,
    remember: bool,
    as_given: bool,
    numbers: bool,
) -> Trace:
    with (
        unwatched() as tracer,
        untouched(module),
        faked(module, args, kwargs, grad=grad, shapes=shapes, as_given=as_given) as fakes,
    ):
        recorder = _Recorder(module, fakes, guide, layers, remember)
        with contextlib.ExitStack() as stack:
            stack.callback(recorder.overwritten.give_back)
            RUNNING.append(recorder)
            stack.callback(RUNNING.pop)
            stack.enter_context(quiet())
            stack.enter_context(same_draws(recorder))
            stack.enter_context(recorder.seeds.watched(recorder.repeats.break_off))
            # What the model compiles runs as it is written.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(fakes.fakes.mode)
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(hooks.flags(*flags))
            recorder.watch(before, after, opaque)
            recorder.trace.handed = fakes.handed
            recorder.place(fakes.args, fakes.kwargs)
            stack.enter_context(functions(recorder))
            stack.enter_context(step_by_step(module))
            args, kwargs = fakes.args, fakes.kwargs
            if guide is None:  # what a guide finds in frames are plain numbers
                notes = stack.enter_context(noting(recorder.size_owner))
                recorder.trace.compared, recorder.trace.asked = notes.compares, notes.asked
                if numbers:
                    names = [name for name, _ in parameters_of(module.forward)]
                    args, kwargs = notes.arguments(names, args, kwargs)
            stack.enter_context(asked(recorder.asked))
            stack.enter_context(unknown(recorder.raised))
            stack.enter_context(hooks.told(recorder.told))
            stack.enter_context(hooks.python_dispatcher())
            stack.enter_context(recorder)
            stack.enter_context(watching(tracer))
            try:
                out = module(*args, **kwargs)
                recorder.check()
                if then is not None:
                    recorder.finish(out)
                    recorder.trace.calls = {}
                    recorder.trace.asked.append({})
                    args, kwargs = recorder.paused(then, out, (args, kwargs))
                    recorder.place(args, kwargs, "step ")
                    out = module(*args, **kwargs)
                    recorder.check()
            except TraceError:
                raise
            except Exception as error:
                raise recorder.error(error) from error
        recorder.finish(out)
        recorder.close_graph()
        return recorder.trace


class _Recorder(Calls, hooks.OpMode):  # type: ignore[no-untyped-call]
    def __init__(
        self, root: nn.Module, fakes: Faked, guide: Guide | None, layers: Layers, remember: bool
    ) -> None:
        hooks.OpMode.__init__(self)
        known = Known(fakes.names, fakes.owned, hooks.is_fake, hooks.copied, hooks.Template, hooks.memory)
        Calls.__init__(self, root, layers, known)
        self._attributes = fakes.attributes
        self._guide = guide
        self._remembered = Remembered(fakes.fakes, on=remember)
        self.overwritten = Overwritten()
        self.seeds = Seeds()
        self._inside = False  # an op that runs
        self._walked: set[fx.Node] = set()  # rows of a loop that values decide, and what comes of them

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.recording and self.way is None:
            return func(*args, **kwargs)
        try:
            return self._on_a_way(func, args, kwargs) if self.way else self._recorded(func, args, kwargs)
        except BaseException as error:
            if self.way or isinstance(error, (_Refused, Different)) or hooks.of_fakes(error):
                self.raised(error)
            raise

    def _recorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._guide is not None:
            func, args, kwargs = self.paused(self._guide, func, args, kwargs)
        if not self.repeats.inside:
            self.repeats.break_off()
        inputs = [*tensors_of(args), *tensors_of(kwargs)]
        placed = self.argument(tuple(args)), self.argument(dict(kwargs))
        walked = bool(self._walked) and any(map(self._of_rows, inputs))
        if walked and self._guide is None and looks(func):
            raise _Refused("a loop over rows that values decide asks for the number of a row: data-dependent")
        written = written_by(func, args, kwargs)
        if self.given_on and any(
            key[0] in self.given_on for t in written if (key := self._key(t)) is not None
        ):
            raise _Refused(
                "it writes in place into what a module that cannot be looked into may have given on as it is"
            )
        mutated = [self.node(t) for t in written]
        if any(node.target is REPEATED for node in mutated):
            raise Different("")
        if written:
            self.repeats.written(written)
            self._remembered.written(written, inputs)
        # An input that is written gets its gradient from what is written, so this is asked before.
        node = self.create(func, *placed, inputs)
        if may_draw(func) and self.paused(self.seeds.were_set):
            node.meta[SEEDED] = True
        self.overwritten.keep(written)
        try:
            out = self._run(func, args, kwargs)
        except BaseException:
            self.trace.graph.erase_node(node)
            raise
        results = list(tensors_of(out))
        if not results and not mutated and not gives_number(func, out, inputs):
            self.trace.graph.erase_node(node)
            return out
        node.meta["mutates"] = mutated
        if walked:
            self._walked.add(node)
        if isinstance(out, torch.Tensor):
            node.meta["val"] = val_of(out)
            self.bind(out, node)
        elif not results and not mutated:
            node.meta["val"] = None
        else:
            self._several(node, out)
            for tensor in args if not results else ():
                if isinstance(tensor, torch.Tensor) and self.node(tensor) in mutated:
                    self._nodes[id(tensor)] = node
        return out

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op's results. A single random number is drawn to decide something by it, as layer drop
        does: it has a value then, so that the forward can go on."""
        if func is torch.ops.aten.rand.default and math.prod(args[0]) == 1:
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            return self.paused(lambda: torch.tensor(DRAWN, dtype=dtype).reshape(args[0]))
        rows = rows_of(func, args, self.node)
        if rows is not None:  # whose values are known, so that code may index by them
            self._walked.add(next(reversed(self.trace.graph.nodes)))
            return self.paused(lambda: [torch.tensor(row, device=args[0].device) for row in rows])
        return self._kernel(func, args, kwargs)

    def _kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        was, self.running, self._inside = (self.running, self._inside), True, True
        try:
            return self._remembered.run(func, args, kwargs)
        finally:
            self.running, self._inside = was

    def told(self, error: Exception) -> None:
        """A number that values decide is asked for, by the model's code or inside of an op."""
        if not self._inside:
            self.raised(error)

    def _on_a_way(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op of a module that is not looked into."""
        written = written_by(func, args, kwargs)
        if written:
            self._remembered.written(written, [*tensors_of(args), *tensors_of(kwargs)])
        assert self.way is not None
        return self.way.op(self._kernel, func, args, kwargs)

    def _of_rows(self, tensor: torch.Tensor) -> bool:
        node = self.node(tensor)
        return (node.all_input_nodes[0] if node.target is operator.getitem else node) in self._walked

    def size_owner(self, tensor: torch.Tensor) -> str | None:
        """What a size is said to come from."""
        if not self.recording:
            return None
        with hooks.aside():
            if self.repeats.following is not None:  # a layer that is only compared with another
                return shape_name(tensor)
            return self.place_of(tensor)

    def check(self) -> None:
        """Raise Forgotten, Different or TraceError where the forward ended well, but caught one."""
        self._remembered.check()
        Calls.check(self)

    def asked(self) -> None:
        """Code asks a tensor how autograd sees it."""
        if self.recording and not self.running:
            self._remembered.forget()

    def _several(self, node: fx.Node, out: Any) -> None:
        items = list(out) if isinstance(out, (list, tuple)) else []
        node.meta["val"] = [val_of(o) if isinstance(o, torch.Tensor) else None for o in items]
        for index, item in enumerate(items):
            if isinstance(item, torch.Tensor):
                part = self.trace.graph.create_node("call_function", operator.getitem, (node, index))
                part.meta.update(node.meta, val=val_of(item), grads=set(), mutates=[])
                self.bind(item, part)

    def finish(self, out: Any) -> None:
        """Note the tensors that a forward returned."""
        if isinstance(out, Iterator):
            raise TraceError("the forward is a generator, which runs after it has returned", "", None)
        for name, tensor, cached in tensors_in(out):
            self.trace.outputs.append(Output(name, self.node(tensor), cached))
        self.trace.returned |= numbers_in(out)
        self.trace.repeats = self.repeats.found

    def close_graph(self) -> None:
        """Note what the forward left on modules, and close the graph."""
        for path, module in self._modules:
            before = self._attributes.get(id(module), {})
            if only_forward_is_new(vars(module), before):
                continue
            new = (k for k, v in vars(module).items() if k not in _TABLES and not _is(before.get(k), v))
            left = {k: vars(module)[k] for k in new}
            self.trace.kept |= numbers_in(left, path)
            for name, tensor, _ in tensors_in(left, path):
                if self._is_fake(tensor) and id(tensor) not in self._names:
                    self.trace.stored.append(Output(name, self.node(tensor), True))
        self.trace.graph.output(tuple(o.node for o in self.trace.outputs))


def _is(one: Any, other: Any) -> bool:
    """Whether two values are one; a number that notes what it is compared with is the number."""
    value = plain(other)
    return one is other or (type(one) is type(value) and isinstance(value, (int, float)) and one == value)


class _Refused(RuntimeError):
    """What a recording cannot follow."""


_TABLES = ("_parameters", "_buffers", "_modules", "forward")
