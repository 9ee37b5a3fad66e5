"""A sharded model is called as in the traces, or the call is proven first.

A flag, a word, a tensor of other dims where no trace had it may take another way through the forward
(`h.softmax(k)`, a table of functions), where nothing was proven. So each call is compared with those of the
traces, in words (`trace/signature.py`): all of its arguments together. A new one is proven as it is, on the
shapes alone (`rewrite/further.py`), and remembered. Else it raises. The guard stands around the model's
`forward`, however that is called.

A number of which nothing sharded depends, and which the code never asks, is proven once for all.

A part of the model that is called by itself (`model.encoder(x)`) has a guard, too: such a call is proven as
one of a model that only calls this part. Within a call of the model, and when its activations are computed
again in backward, a part's guard only asks whether it is so.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from autotp.analysis import Analysis
from autotp.diagnostic import UnprovenPath
from autotp.propagate.given import Proven, Traced
from autotp.propagate.size_guards import SizeGuard, holds
from autotp.rewrite.attributes import Attributes
from autotp.rewrite.free_numbers import free_numbers
from autotp.rewrite.further import CANNOT, Call, only_calls, proven_anew, whole
from autotp.rewrite.sized_calls import Check, Sizes, check_of, sizes_of
from autotp.rewrite.specialise import edit_anew
from autotp.rewrite.undo import hooks
from autotp.trace.graph import is_cache, parameters_of
from autotp.trace.hooks import in_backward, outside_transforms
from autotp.trace.modes import takes_cache
from autotp.trace.signature import UNKNOWN, Words, described, is_filled, signature

__all__ = ["Called", "guard_calls"]

_REMEMBERED, _SHOWN = 4096, 6
_FIRST = (
    "autotp proves a call that is like none of the traced ones when it is first made, which torch cannot "
    "compile: make such a call once before the model is compiled, or pass such inputs to autotp.shard"
)


def guard_calls(model: nn.Module, analysis: Analysis) -> None:
    """Let `model` raise UnprovenPath in calls that are not proven, if it was traced."""
    if analysis.given is None:
        return
    guard = Called(model, analysis)
    within = _Within(model, guard)
    layers = {p.path for p in analysis.matches.placed.values() if p.target == "module"}
    for path, module in model.named_modules():
        holds = any(name.startswith(f"{path}.") for name in analysis.layouts)
        if path and holds and path not in layers and "_forward_unimplemented" not in str(module.forward):
            module.__dict__["forward"] = _Part(module, module.__dict__.get("forward"), within, path)
    given = analysis.given
    within.attributes = Attributes(model, given.read, given.written, given.left)
    model.__dict__["forward"] = _Forward(model, model.__dict__.get("forward"), within)
    if analysis.samples is not None:
        guard.expect(model, within.attributes, Call(analysis.samples.args, analysis.samples.kwargs))


class Called:
    """What is known of the calls of one sharded model, on one rank; or of one of its parts, by its `path`."""

    path = ""

    def __init__(self, model: nn.Module, analysis: Analysis) -> None:
        assert analysis.given is not None
        self.proven: Proven = analysis.given
        self.analysis = replace(analysis, diagnostics=(), branches=(), samples=None)
        self.shapes = {n: t.shape for n, t in analysis.inventory.tensors().items() if n in analysis.layouts}
        self.parameters = parameters_of(model.forward)
        self.passed: dict[Any, list[Check]] = {}  # calls that need not be looked at again, of these sizes
        self.fills = takes_cache(model) is not None
        self.before: Call | None = None  # the last call that may fill a cache
        self.hooks = hooks(model)

    def part(self, model: nn.Module, path: str) -> Called:
        """The guard of a part of the model, of which no call is proven yet."""
        module = model.get_submodule(path)
        new = copy.copy(self)
        new.path, new.passed, new.before = path, {}, None
        new.proven = replace(self.proven, calls=frozenset(), free=frozenset(), states={})
        new.parameters, new.fills = parameters_of(module.forward), takes_cache(module) is not None
        return new

    def expect(self, model: nn.Module, attributes: Attributes, given: Call) -> None:
        """Such calls as were proven need not be looked at: the first of them may be a compiled one."""
        state = attributes.look()
        words = signature(self.parameters, given.args, given.kwargs)
        if self.fills:
            self.before = given.remembered()
        for training, gradients in itertools.product((True, False), repeat=2):
            found = self._found(state, self.proven.call(training, gradients, words), given)
            if found is not None:
                self._pass(_key(state, training, gradients, given.args, given.kwargs), found, given)

    def look(
        self, model: nn.Module, attributes: Attributes, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raises UnprovenPath for a call that is not proven."""
        state = attributes.look()
        key = _key(state, model.training, torch.is_grad_enabled(), args, kwargs)
        for check in self.passed.get(key, ()):
            if check(args, kwargs):
                return
        self._look(model, key, state, attributes.replaced, args, kwargs)

    @torch.compiler.disable(reason=_FIRST)  # type: ignore[untyped-decorator,no-untyped-call]
    def _look(
        self,
        model: nn.Module,
        key: Any,
        state: str,
        replaced: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if self.path and in_backward():
            return  # what was called in the forward is computed again
        part = model.get_submodule(self.path)
        try:
            inspect.signature(part.forward).bind(*args, **kwargs)
        except TypeError:
            return  # the forward refuses it by itself
        words = signature(self.parameters, args, kwargs)
        if replaced:
            raise UnprovenPath(
                f"{type(model).__name__} is called with another module as {replaced} than it was sharded "
                "with\n  = help: put modules in the place of others before the model is sharded"
            )
        given = Call(args, kwargs)
        if any(UNKNOWN in word for word in words.values()):
            self._raise(model, words, state, "it cannot be told what that is, so it cannot be proven")
        call = self.proven.call(model.training, torch.is_grad_enabled(), words)
        found = self._found(state, call, given)
        if found is None:
            with outside_transforms():
                free, asked = self._prove(model, state, given, words, call)
            found = replace(call, sizes=asked)
            self.proven.learn(state, found, free)
        for edits in self.proven.reopened[-1:]:
            edit_anew(model, edits)
        self._pass(key, found, given)
        if self.fills and not any(map(is_filled, given.caches())):
            self.before = given.remembered()

    def _found(self, state: str, called: Traced, given: Call) -> Traced | None:
        """A proven call with these words, of which what its code asks of sizes comes out the same."""
        sizes = sizes_of(self.parameters, given.args, given.kwargs)
        known = self.proven.alike(state, called)
        return next((one for one in known if holds(one.sizes, sizes) is None), None)

    def _pass(self, key: Any, found: Traced, given: Call) -> None:
        if len(self.passed) < _REMEMBERED:
            check = check_of(found.sizes, self.parameters, given.args, given.kwargs)
            self.passed.setdefault(key, []).insert(0, check)

    def _prove(
        self, model: nn.Module, state: str, call: Call, words: Words, called: Traced
    ) -> tuple[frozenset[str], frozenset[SizeGuard]]:
        """Prove a call anew. Gives the arguments that may be any number, and what comes out of what its code
        asks of sizes."""
        how = {"training": model.training, "grad": torch.is_grad_enabled()}
        try:
            twin = whole(model, self.shapes, self.hooks)
        except Exception as error:
            self._raise(model, words, state, f"the model cannot be copied to be proven anew: {error}")
        if self.path:
            only_calls(twin, self.path)
        analysis = replace(self.analysis, code=[self.analysis.code, *self.proven.reopened][-1])
        further = proven_anew(twin, analysis, call, self.before, **how)
        if further.reason:
            sizes = sizes_of(self.parameters, call.args, call.kwargs)
            self._raise(model, words, state, further.reason, _sized(self.proven.alike(state, called), sizes))
        new = self.proven.unlike(words)
        free, noted = frozenset[str](), further
        if not self.path:
            free, noted = free_numbers(twin, analysis, call, further, self.parameters, new, **how)
        proofs = [each.proof for each in (further, noted) if each.proof is not None]
        self.proven.reopened += [proof.edits for proof in proofs[:1] if proof.edits != analysis.code]
        for proof in proofs:
            for region in self.analysis.regions:
                found = proof.regions[region.path].guard
                if region.guard is not None and found is not None:
                    region.guard.learn(found, free | self.proven.free)
        return free, further.sizes

    def _raise(self, model: nn.Module, words: Words, state: str, reason: str, sized: str = "") -> NoReturn:
        new = [] if sized else self.proven.unlike(words)
        was = "" if self.path else " (it was proven {})"
        shown = [f"{p}={words[p]}{was.format(self.proven.shown(p))}" for p in new]
        told = (
            _few(shown, " and ") or sized or _few([f"{p}={w}" for p, w in words.items()], ", ") + " together"
        )
        told += f" and {state} since it was sharded" if state else ""
        if self.path:
            raise UnprovenPath(
                f"{self.path} is called by itself with {told}: {reason}\n  = help: call the model, and not "
                "its parts; or shard this part, as a model of its own"
            )
        raised = "\n  = help: see whether the unsharded model takes such a call" if CANNOT in reason else ""
        raise UnprovenPath(
            f"{type(model).__name__} is called with {told}: {reason}{raised}\n  = help: shard "
            "the model with inputs= that call it this way, to see what the plan lacks"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Called:
        new = copy.copy(self)  # what is proven holds for a copy, too; its own edits may be older ones
        new.passed = {}
        return new

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"passed": {}, "before": None}


def _few(told: list[str], between: str) -> str:
    """As much as fits a line or two: a list of tokens has a place for each."""
    rest = [f"{len(told) - _SHOWN} more"] if len(told) > _SHOWN else []
    return between.join([*told[:_SHOWN], *rest])


def _sized(known: list[Traced], sizes: Sizes) -> str:
    """What of a call's sizes its code asks, where nothing else is new."""
    failed = [guard for one in known if (guard := holds(one.sizes, sizes)) is not None]
    if not failed:
        return ""
    guard = min(failed, key=lambda guard: (guard.where, guard.text))
    shown = [f"{place} of size {sizes[place, dim]} in dim {dim}" for place, dim in guard.sizes
             if (place, dim) in sizes]  # fmt: skip
    return f"{' and '.join(shown) or 'other sizes'}, which {guard.where} asks"


class _Within:
    """What the guards of a model share: the model, its attributes, and whether a call of it runs.

    A copy of a part alone, without its model, has no guard.
    """

    def __init__(self, model: nn.Module | None, guard: Called) -> None:
        self.model = None if model is None else weakref.ref(model)
        self.guard, self.inside = guard, False
        self.attributes: Attributes | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Within:
        model = None if self.model is None else self.model()
        new = memo[id(self)] = _Within(memo.get(id(model)), copy.deepcopy(self.guard, memo))
        new.attributes = copy.deepcopy(self.attributes, memo) if new.model is not None else None
        return new

    def __reduce__(self) -> Any:
        return _Within, (None, self.guard)  # `_Forward` puts the model and its attributes in


class _Forward:
    """A model's forward behind its guard. It stands on the instance, so that the class stays what it was."""

    def __init__(self, model: nn.Module, own: Any, within: _Within, attributes: Any = None) -> None:
        self.model, self.own, self.within = weakref.ref(model), own, within
        if attributes is not None:
            within.model, within.attributes = self.model, attributes
        self.guard, self.attributes = within.guard, within.attributes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model, within = self.model(), self.within
        assert model is not None and self.attributes is not None
        self.guard.look(model, self.attributes, args, kwargs)
        was, within.inside = within.inside, True
        try:
            own = self.own
            return type(model).forward(model, *args, **kwargs) if own is None else own(*args, **kwargs)
        finally:
            within.inside = was

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__wrapped__", "__name__", "__func__", "__self__"):
            raise AttributeError(name)
        inner = _inner(self.__dict__["model"](), self.__dict__["own"])
        return inner if name == "__wrapped__" else getattr(inner, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        model: Any
        model, own, within = copy.deepcopy((self.model(), self.own, self.within), memo)
        return _Forward(model, own, within)

    def __reduce__(self) -> Any:
        return _Forward, (self.model(), self.own, self.within, self.attributes)


class _Part(_Forward):
    """The forward of a part of a model."""

    def __init__(self, model: nn.Module, own: Any, within: _Within, path: str) -> None:
        self.model, self.own, self.within, self.path = weakref.ref(model), own, within, path
        self.called: Called | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.model()
        within, own = self.within, self.own
        model = None if within.inside or within.model is None else within.model()
        if model is None:  # the usual way, in every block: it is kept short
            return type(module).forward(module, *args, **kwargs) if own is None else own(*args, **kwargs)
        if self.called is None:
            self.called = within.guard.part(model, self.path)
        assert within.attributes is not None
        self.called.look(model, within.attributes, args, kwargs)
        within.inside = True
        try:
            return _inner(module, self.own)(*args, **kwargs)
        finally:
            within.inside = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Part) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Part:
        module: Any
        module, own, within = copy.deepcopy((self.model(), self.own, self.within), memo)
        return _Part(module, own, within, self.path)

    def __reduce__(self) -> Any:
        return _Part, (self.model(), self.own, self.within, self.path)


def _inner(model: nn.Module, own: Any) -> Any:
    return own if own is not None else type(model).forward.__get__(model)


def _key(
    state: str, training: bool, gradients: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """What tells calls apart, quickly."""
    words: list[Any] = [state, training, gradients, len(args), *kwargs]
    words += [_quick(value) for value in args]
    words += [_quick(value) for value in kwargs.values()]
    return tuple(words)


def _quick(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.requires_grad, tuple([n if n < 2 else 2 for n in value.shape])
    kind = type(value)
    if value is None or kind is bool or kind is int or kind is str:
        return kind, value
    if kind is float:
        return kind, repr(value)
    if kind is tuple and all([isinstance(part, torch.Tensor) for part in value]):  # noqa: C419
        return kind, tuple([_quick(part) for part in value])
    if is_cache(kind):
        return kind, is_filled(value)
    return tuple(described(value, "").items())
