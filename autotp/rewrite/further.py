"""The proof of one more call of a sharded model, on the shapes alone.

The model is copied as it was before it was sharded, with tensors that take no memory, and the call is traced
as it will run. With the decisions that stand it must be proven as the traces were: the call is one mode more.
A call with a cache that is filled holds a rank's part of what an earlier call left there. The copy is run
with that call first, and the call follows on the cache that it fills.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autotp.analysis import Analysis
from autotp.diagnostic import errors
from autotp.proof import Proof
from autotp.propagate.propagation import Propagation
from autotp.propagate.size_guards import SizeGuard
from autotp.prove import prove_call
from autotp.rewrite.edits.text import NoSource
from autotp.rewrite.undo import Hooks, undo, without_later
from autotp.trace.copies import copied
from autotp.trace.graph import TraceError, is_cache
from autotp.trace.modes import Mode
from autotp.trace.recorder import Given
from autotp.trace.signature import is_filled

__all__ = ["CANNOT", "Call", "Further", "length_of", "only_calls", "proven_anew", "whole"]

NAME, CANNOT = "this call", "it cannot be traced"


def bare(value: Any, shape: Any = None) -> Any:
    """A tensor of that shape without memory; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.zeros((), dtype=value.dtype, device=value.device).expand(
        value.shape if shape is None else shape
    )


@dataclass(frozen=True)
class Call:
    """The arguments of one forward."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def caches(self) -> list[Any]:
        """The caches among the arguments."""
        return [v for v in (*self.args, *self.kwargs.values()) if is_cache(type(v))]

    def remembered(self) -> Call:
        """The same call, without its values and with caches of its own."""

        def kept(value: Any) -> Any:
            return copied(value, {}) if is_cache(type(value)) else bare(value)

        made = pytree.tree_map(
            kept, (self.args, dict(self.kwargs)), is_leaf=lambda value: is_cache(type(value))
        )
        return Call(*made)

    def with_argument(self, position: int | None, name: str, value: Any) -> Call:
        """The same call with another value for an argument."""
        if position is not None and position < len(self.args):
            return replace(self, args=(*self.args[:position], value, *self.args[position + 1 :]))
        return replace(self, kwargs={**self.kwargs, name: value})


@dataclass(frozen=True)
class Further:
    """What the proof of a call says: why it cannot be taken ("": it can), and what its trace showed."""

    reason: str
    proof: Proof | None = None

    @property
    def sizes(self) -> frozenset[SizeGuard]:
        """What comes out of what its code asks of sizes."""
        assert self.proof is not None
        return self.proof.sizes

    @property
    def propagation(self) -> Propagation:
        """The layouts of the call."""
        assert self.proof is not None
        return self.proof.propagations[NAME]


def proven_anew(
    twin: nn.Module,
    analysis: Analysis,
    call: Call,
    before: Call | None,
    *,
    training: bool,
    grad: bool,
    numbers: bool = False,
) -> Further:
    """The proof of a call of `twin`, the model as it was before it was sharded. `before` is an earlier call
    without a filled cache. As nothing traces it; where it asks for values then, as it is compiled.
    With `numbers` those among the arguments note what they are asked."""
    first: Further | None = None
    for compiling in (False, True):
        mode = Mode(
            NAME, call.args, call.kwargs, grad, training,
            exporting=False, compiling=compiling, as_given=True, numbers=numbers,
        )  # fmt: skip
        if any(map(is_filled, call.caches())):
            filling = _filling(twin, call, before)
            if filling is None:
                return Further("it is given a filled cache, and no earlier call is known that filled it")
            mode = replace(mode, args=filling.args, kwargs=filling.kwargs, then=_Then(call))
        found, values = _proof(twin, analysis, mode)
        if not found.reason:
            return found
        first = first or found
        if not values:
            break
    assert first is not None
    return first


def _proof(twin: nn.Module, analysis: Analysis, mode: Mode) -> tuple[Further, bool]:
    """The proof in one mode, and whether the forward asks for values in it."""
    try:
        proof = prove_call(twin, analysis, mode)
    except TraceError as error:
        return Further(f"{CANNOT}: {error}"), True
    except NoSource as error:
        return Further(f"the edits of the model's code do not fit: {error}"), False
    found = errors(proof.diagnostics)
    if found:
        return Further(found[0].render()), any(d.code == "AT326" for d in found)
    return Further(_differs(proof, analysis), proof), False


def _differs(proof: Proof, analysis: Analysis) -> str:
    """What would have to be carried out in another way than the model is."""
    first = analysis.inventory.aliases
    cuts = {first.get(name, name): cut for name, cut in analysis.layouts.items()}
    reads = {read.name: read for read in analysis.reads}
    borders = {region.path: (region.copied, region.reduced) for region in analysis.regions}
    drawn = {path for each in proof.propagations.values() for path in each.random_whole}
    inside = {p for p in drawn if any(_within(p, path) for path in analysis.random)}
    told = {
        "cut": proof.cuts != cuts,
        "read": proof.reads != reads,
        "mapped": {path: (r.copied, r.reduced) for path, r in proof.regions.items()} != borders,
        "copied": bool(proof.uncopied - {*analysis.uncopied} or proof.copied & {*analysis.uncopied}),
        "reduced": proof.unreduced != frozenset(analysis.unreduced),
        "random": bool(
            proof.random - {*analysis.random}
            or proof.random_in_eval - {*analysis.random_in_eval}
            or proof.resting - {*analysis.resting}
            or drawn & {*analysis.random}
            or inside - {*analysis.random_common}
        ),
        "left": analysis.given is not None and bool(proof.left - analysis.given.left),
    }
    other = [what for what, is_other in told.items() if is_other]
    return f"the model would have to be {_WHAT[other[0]]}" if other else ""


_WHAT = {
    "cut": "cut in another way for it",
    "read": "given other mappings of the tensors that it reads",
    "mapped": "given other mappings at the border of a module",
    "copied": "given other copies before its column layers",
    "reduced": "given other sums after its row layers",
    "random": "given other streams of random numbers",
    "left": "watched for other parts of tensors that it leaves on itself",
}


def _within(path: str, root: str) -> bool:
    return path != root and (not root or path.startswith(f"{root}."))


# -- the model as it was


def whole(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], hooks: Hooks) -> nn.Module:
    """The model as it was before it was sharded, with the hooks of then; a tensor is one number."""
    memo: dict[int, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None and id(tensor) not in memo:
                    shape = shapes.get(f"{path}.{key}" if path else key, tensor.shape)
                    new = bare(tensor, shape)
                    isolated = isinstance(tensor, nn.Parameter)
                    memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isolated else new
    twin = copy.deepcopy(model, memo)
    undo(twin, twin.__dict__.pop("_autotp").changes)  # the copy's own: a bound method is of a module
    without_later(twin, hooks)
    _refuse_living(twin, model)
    return twin


def _refuse_living(twin: nn.Module, model: nn.Module) -> None:
    """Raises ValueError where a forward closes over a module of the sharded model: a copy would run that."""
    living = set(model.modules())
    for path, module in twin.named_modules():
        forward = module.__dict__.get("forward")
        held = inspect.getclosurevars(forward).nonlocals.values() if isinstance(forward, FunctionType) else ()
        for value in held:
            if isinstance(value, nn.Module) and value in living:
                raise ValueError(
                    f"the forward of {path or type(twin).__name__} is a function that closes over a "
                    f"{type(value).__name__}, and would run that one; let it be a method"
                )


def only_calls(twin: nn.Module, path: str) -> None:
    """Let a model do nothing but call one of its parts."""
    part = twin.get_submodule(path)

    @functools.wraps(part.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return part(*args, **kwargs)

    twin.__dict__["forward"] = forward


# -- caches


def _filling(twin: nn.Module, call: Call, before: Call | None) -> Call | None:
    """A call that fills the cache as far as it is filled in `call`: as before, or with tokens alone."""
    (cache,) = call.caches()[:1]
    length = length_of(cache)
    tokens = before or Call(call.args[:1], dict(list(call.kwargs.items())[: not call.args]))
    ids = [v for v in (*tokens.args, *tokens.kwargs.values()) if isinstance(v, torch.Tensor) and v.dim() > 1]
    if not ids:
        return None
    was = ids[0].shape[1]

    def longer(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or type(length) is not int or length in (0, was):
            return value
        return bare(value, [length if size == was and dim else size for dim, size in enumerate(value.shape)])

    args, kwargs = pytree.tree_map(longer, (tuple(tokens.args), dict(tokens.kwargs)))
    names = inspect.signature(twin.forward).parameters
    kwargs = {name: value for name, value in kwargs.items() if name != "labels"}
    return Call(args, kwargs | ({"use_cache": True} if "use_cache" in names else {}))


def length_of(cache: Any) -> Any:
    """How many tokens a cache holds; None where it cannot tell: transformers' raises with states alone."""
    try:
        return cache.get_seq_length() if hasattr(cache, "get_seq_length") else None
    except ValueError:
        return None


@dataclass(frozen=True)
class _Then:
    """A call on the cache that another one filled."""

    call: Call

    def __call__(self, out: Any, before: Given) -> Given:
        given: Call = self.call
        (cache,) = given.caches()[:1]
        kept = _of_class((*before[0], *before[1].values()), type(cache))  # filled, and not given back
        filled = _of_class(out, type(cache))
        filled = kept if filled is None else filled
        if filled is None:
            raise ValueError(f"the earlier call gives back no {type(cache).__name__}")

        def fresh(value: Any) -> Any:
            if is_cache(type(value)):
                return filled
            if not isinstance(value, torch.Tensor):
                return value
            made = torch.empty(value.shape, dtype=value.dtype, device=value.device)
            return made.requires_grad_(value.requires_grad and torch.is_grad_enabled())

        args, kwargs = pytree.tree_map(
            fresh, (given.args, dict(given.kwargs)), is_leaf=lambda value: is_cache(type(value))
        )
        return args, kwargs


def _of_class(out: Any, kind: type) -> Any:
    found = list(vars(out).values()) if hasattr(out, "__dict__") else []
    found += list(out.values()) if isinstance(out, Mapping) else list(out) if isinstance(out, tuple) else []
    return next((value for value in found if type(value) is kind), None)
