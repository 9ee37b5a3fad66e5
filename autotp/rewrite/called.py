"""A sharded model is called as in the traces, or what it is called with is proven first.

A flag, a number or a word that no trace was given may take another way through the forward
(`h.softmax(k)`, a table of functions), where nothing was proven. So the arguments of each call are compared
with those of the traces. For a new one the proof is made once more with it, on the shapes alone, as the
model was before it was sharded: it must end in the same decisions. Then the value is one of those that were
shown, and if nothing that is not whole depends on it, any number is. Else the call raises.

Tensors may be given for tensors, and where there were none. A call without a tensor that the traces had is
proven as it is.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autotp.analysis import Analysis
from autotp.diagnostic import AutotpError, UnprovenPath, errors
from autotp.placement import INVARIANT, Shard, is_whole
from autotp.propagate.call import normal_dim
from autotp.propagate.compared import decides
from autotp.propagate.given import TENSOR, flag, is_number
from autotp.propagate.ops import arguments_of, op_name
from autotp.propagate.propagation import Propagation
from autotp.rewrite.specialise import also_given
from autotp.rewrite.undo import Change, undo
from autotp.trace.graph import Val, called, given_in, parameters_of
from autotp.trace.inputs import Samples
from autotp.trace.noted import argument

__all__ = ["Called"]


class Called:
    """A forward pre-hook of the model."""

    def __init__(self, model: nn.Module, analysis: Analysis) -> None:
        assert analysis.given is not None and analysis.samples is not None
        self.guard = analysis.given
        self.free: set[str] = set(self.guard.free)  # where any number may stand
        self.passed: set[Any] = set()  # calls that need not be looked at again
        self.proven: set[frozenset[tuple[str, str]]] = set()  # values together that were proven anew
        self.decided = _decisions(analysis)
        self.samples = _shapes_of(analysis.samples)
        self.plan, self.tp = analysis.plan, analysis.tp
        self.shapes = {n: t.shape for n, t in analysis.inventory.tensors().items() if n in analysis.layouts}
        self.parameters = parameters_of(model.forward)
        self.takes = _names_of(model.forward)
        self.changes: Mapping[str, Change] = {}  # told when the model is sharded

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = _call(args, kwargs)
        if call is not None and call in self.passed:
            return
        self._look(model, args, kwargs)
        if call is not None and len(self.passed) < _REMEMBERED:
            self.passed.add(call)

    def _look(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises UnprovenPath for a call whose values are new and not proven."""
        new = {
            place: value
            for place, value in self.guard.unseen(given_in(called(self.parameters, args, kwargs))).items()
            # what it does not take, the forward refuses by itself
            if value is not torch.Tensor and (self.takes is None or _first(place) in self.takes)
            if not (is_number(value) and place in self.free)
        }
        together = frozenset((place, flag(value)) for place, value in new.items())
        if not together or together in self.proven:
            return
        reason = self._fails(model, new, self._samples(args, kwargs, new))
        if reason:
            told = " and ".join(
                f"{place}={flag(value)} (it was proven {self.guard.shown(place)})"
                for place, value in new.items()
            )
            raise UnprovenPath(
                f"{type(model).__name__} is called with {told}: {reason}\n  = help: shard the model with "
                "inputs= that call it this way, to see what the plan lacks"
            )
        self.proven.add(together)

    def _samples(self, args: tuple[Any, ...], kwargs: dict[str, Any], new: Mapping[str, Any]) -> Samples:
        """What is to be traced: the samples of before, or this call, if it gives no tensor where they do."""
        without = any(value is None and TENSOR in self.guard.seen.get(p, ()) for p, value in new.items())
        return _shapes_of(Samples(args, kwargs, "given")) if without else self.samples

    def _fails(self, model: nn.Module, new: Mapping[str, Any], samples: Samples) -> str:
        """Why values that no trace was given cannot be taken, after the proof with them."""
        if any(self._position(place) is None and _first(place) != place for place in new):
            return "a part of an argument is not proven anew"
        try:
            twin = _whole(model, self.changes, self.shapes)
        except Exception as error:
            return f"the model cannot be copied to be proven anew: {error}"
        found = self._proven(twin, samples, new, model)
        if isinstance(found, str):
            return found
        asked = {p for p in new for whole in found.values() if decides(whole, argument(p))}
        free = {place for place, value in new.items() if is_number(value)} - asked
        if free:
            beside = self._proven(
                twin, samples, {place: v + 1 if place in free else v for place, v in new.items()}
            )
            if isinstance(beside, str) or not _alike(found, beside):
                free = set()
        self.free |= free
        return ""

    def _position(self, place: str) -> int | None:
        """Where an argument stands that may be given by position."""
        names = [name for name, _ in self.parameters]
        further = re.fullmatch(r"\*\[(\d+)\]", place)
        return names.index(place) if place in names else None if further is None else int(further[1])

    def _proven(
        self, twin: nn.Module, samples: Samples, new: Mapping[str, Any], model: nn.Module | None = None
    ) -> dict[str, Propagation] | str:
        """The layouts of each mode; why there are none, or others than those that the model runs with. What
        they show of its regions holds for `model`, too."""
        from autotp.decide import decide_with_proof  # it decides what this file guards

        for place, value in new.items():
            samples = samples.with_argument(place, value, self._position(place))
        try:
            analysis, proof = decide_with_proof(twin, self.plan, tp=self.tp, inputs=samples, all_run=False)
        except AutotpError as error:
            return str(error)
        if not analysis.ok or proof is None:
            return errors(analysis.diagnostics)[0].render()
        if _decisions(analysis) != self.decided:
            return "the model would have to be sharded in another way for it"
        if model is not None:
            also_given(model, analysis.regions)
        return proof.propagations

    def __deepcopy__(self, memo: dict[int, Any]) -> Called:
        return self  # it learns, and what it learns holds for a copy, too


_REMEMBERED = 4096


def _call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What tells calls apart that are tensors and plain values; None where there is anything else."""
    words = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            words.append(TENSOR)
        elif value is None or isinstance(value, (bool, int, float, str)):
            words.append(f"{type(value)} {value!r}")
        else:
            return None
    return len(args), tuple(kwargs), tuple(words)


def _first(place: str) -> str:
    """The argument that a place is in."""
    return re.split(r"[.\[]", place)[0]


def _names_of(forward: Any) -> frozenset[str] | None:
    """The names that a forward takes; None where it takes any."""
    parameters = inspect.signature(forward).parameters.values()
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
        return None
    return frozenset(p.name for p in parameters)


def _decisions(analysis: Analysis) -> str:
    """All that carrying out an analysis depends on."""
    layouts = sorted((name, repr(cut)) for name, cut in analysis.layouts.items())
    regions = sorted((r.path, sorted(r.copied), sorted(r.reduced)) for r in analysis.regions)
    return repr(
        (layouts, sorted(map(repr, analysis.reads)), regions, analysis.shared, analysis.uncopied,
         analysis.random, analysis.random_in_eval, analysis.random_common, analysis.resting,
         analysis.unreduced, analysis.code)
    )  # fmt: skip


def _shapes_of(samples: Samples) -> Samples:
    """The samples without the memory of their tensors."""

    def bare(value: Any) -> Any:
        return value.detach().to("meta") if isinstance(value, torch.Tensor) else value

    args, kwargs, labels = pytree.tree_map(
        bare, (tuple(samples.args), dict(samples.kwargs), dict(samples.labels))
    )
    pair = None if samples.pair is None else _shapes_of(samples.pair)
    also = tuple(map(_shapes_of, samples.also))
    return replace(samples, args=args, kwargs=kwargs, labels=labels, pair=pair, also=also)


def _whole(
    model: nn.Module, changes: Mapping[str, Change], shapes: Mapping[str, tuple[int, ...]]
) -> nn.Module:
    """The model as it was before it was sharded, on the meta device."""
    memo: dict[int, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None and id(tensor) not in memo:
                    shape = shapes.get(f"{path}.{key}" if path else key, tensor.shape)
                    new = torch.empty(shape, dtype=tensor.dtype, device="meta")
                    isolated = isinstance(tensor, nn.Parameter)
                    memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isolated else new
    twin = copy.deepcopy(model, memo)
    undo(twin, changes)
    twin.__dict__.pop("_autotp", None)
    return twin


# -- whether anything that is not whole depends on a number


_SCALED = ("mul", "div")


def _alike(one: Mapping[str, Propagation], other: Mapping[str, Propagation]) -> bool:
    """Whether two numbers lead to the same ops, but for numbers of ops on whole values, factors, and bounds
    of slices of dims that are whole."""
    if one.keys() != other.keys():
        return False
    for mode, whole in one.items():
        ours, theirs = whole.trace.ops(), other[mode].trace.ops()
        if [op_name(n) for n in ours] != [op_name(n) for n in theirs]:
            return False
        if not all(_free(whole, a, b) for a, b in zip(ours, theirs, strict=True)):
            return False
    return True


def _free(whole: Propagation, ours: fx.Node, theirs: fx.Node) -> bool:
    mine, its = arguments_of(ours), arguments_of(theirs)
    differ = [name for name in mine.keys() | its.keys() if repr(mine.get(name)) != repr(its.get(name))]
    around = (*ours.all_input_nodes, ours)
    if not differ or all(is_whole(layout) for n in around for layout in whole.layouts.get(n, [INVARIANT])):
        return True
    name = op_name(ours)
    if name in _SCALED and set(differ) <= {"other"}:
        return True  # element by element; by a factor, of a sum as well
    source = ours.all_input_nodes[0]
    layout, val = whole.layouts.get(source, [INVARIANT])[0], source.meta["val"]
    if name != "slice" or not isinstance(layout, Shard) or not isinstance(val, Val):
        return False
    return set(differ) <= {"start", "end"} and normal_dim(mine.get("dim") or 0, len(val.shape)) != layout.dim
