"""What looks at parameters as a whole sees one rank's parts alone: where it is given any, it is refused.

torch's `clip_grad_norm_` and `get_total_norm` would give every rank a norm of its own, and optimizers that
take norms, products or line searches over a parameter (Adafactor, Muon, LBFGS) a step of its own; the ranks
would drift apart without a word. DistributedDataParallel over those ranks would average different parts.
The first cut layer puts a check before them: in `torch.nn.utils`, where training loops and trainers call it,
before every optimizer's step, and where a module is wrapped. A name that was imported from `torch.nn.utils`
before is the function without the check.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autotp.diagnostic import UsageError
from autotp.part_filled import watch_filling
from autotp.part_size import check_size

__all__ = ["refuse_other", "watch"]

_OWNERS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_HELP = "\n  = help: autotp.clip_grad_norm_(model, max_norm) takes the norm of the whole model"

ELEMENTWISE = frozenset({
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    "SparseAdam",
})  # fmt: skip
"""torch's optimizers that move each element by its own gradient and state: a part moves as in the whole."""
_WHOLE = {
    "Adafactor": "means of rows and columns and a root mean square of the parameter",
    "LBFGS": "products and a line search over all parameters",
    "Muon": "an orthogonalisation of the whole matrix",
}


def watch(module: nn.Module) -> None:
    """Refuse what would take the parts that `module` holds for whole parameters."""
    if not _OWNERS:
        utils = torch.nn.utils
        clip = _checked(utils.clip_grad.clip_grad_norm_, "parameters", lambda p: p)
        utils.clip_grad_norm_ = utils.clip_grad.clip_grad_norm_ = clip
        utils.get_total_norm = _checked(utils.get_total_norm, "gradients", lambda p: p.grad)
        _watch_optimizers()
    watch_filling(_part)
    _OWNERS.add(module)


def _checked(
    original: Callable[..., Tensor], what: str, of: Callable[[Tensor], Tensor | None]
) -> Callable[..., Tensor]:
    """The function, with the check before it; once. `of` gives what it takes of a parameter."""
    if hasattr(original, "checks_parts"):
        return original

    @functools.wraps(original)
    def checked(tensors: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        cut = {id(of(part.tensor)) for part in _cut().values()} & {id(t) for t in given if t is not None}
        if cut:
            name = original.__name__.lstrip("_")
            raise UsageError(
                f"torch's {name} is given {len(given)} {what}, {len(cut)} of which are this "
                f"rank's parts: each rank would take another norm, and scale its gradients differently{_HELP}"
            )
        return original(given, *args, **kwargs)

    checked.checks_parts = True  # type: ignore[attr-defined]
    return checked


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_module_module_registration_hook(_before_averages)


def _before_averages(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    """Raises UsageError for DistributedDataParallel over ranks that hold different parts of a parameter: it
    would give them all one rank's part, and average the gradients."""
    if name != "module" or module is None or not isinstance(wrapper, DistributedDataParallel):
        return
    from autotp.parts import parts_of

    ranks = torch.distributed.get_process_group_ranks(wrapper.process_group)
    for part in parts_of(module).values():
        group: Any = part.group
        others = [rank for rank in getattr(getattr(group, "group", group), "members", ()) if rank in ranks]
        if len(others) > 1:
            raise UsageError(
                f"DistributedDataParallel over the ranks {ranks} would make one of what the ranks {others} "
                f"hold: different parts of {part.name}\n"
                "  = help: give it the group of the data-parallel axis, "
                "process_group=mesh.get_group('dp') of autotp.initialize(tp=…)"
            )


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raises UsageError for an optimizer that looks at whole parameters; once a class, a warning for one
    that is not known."""
    known = _class_of_torch(type(optimizer))
    _refuse_whole_state(optimizer)
    if known in ELEMENTWISE or (known not in _WHOLE and type(optimizer) in _told):
        return
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if given.isdisjoint(_cut()):
        return
    name = type(optimizer).__name__
    if known in _WHOLE:
        raise UsageError(
            f"{name} takes {_WHOLE[known]}, and is given parameters of which this rank holds a part: each "
            "rank would take another step\n"
            "  = help: take an optimizer that moves each element on its own, such as AdamW or SGD"
        )
    _told.add(type(optimizer))
    warnings.warn(
        f"{name} is not an optimizer of torch: it is right on cut parameters if it moves each element by its "
        "own gradient and state, and wrong if it takes norms or means over a parameter",
        stacklevel=3,
    )


_told: set[type] = set()
_stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, int]] = weakref.WeakKeyDictionary()
"""The optimizers that were looked at, with the state that they had, and how many owners there were."""


def _refuse_whole_state(optimizer: torch.optim.Optimizer) -> None:
    """Raises UsageError where the state of a cut parameter is of the whole one: it was made before the model
    was sharded, or loaded as torch loads it. Looked at in the first step with that state."""
    seen, owners = _stepped.get(optimizer, (None, 0))
    if seen is optimizer.state and owners == len(_OWNERS):
        return
    parts = _cut()
    for parameter, state in optimizer.state.items():
        sizes = {tuple(t.shape) for t in state.values() if isinstance(t, Tensor)} - {tuple(parameter.shape)}
        part = parts.get(id(parameter)) if sizes else None
        if part is not None and part.shape in sizes:
            raise UsageError(
                f"{type(optimizer).__name__} has state of the whole {part.name}, of which this rank holds "
                f"{list(parameter.shape)}: it stepped before the model was sharded, or loaded a whole state"
                "\n  = help: save it before by autotp.checkpoint.optimizer's save_optimizer, and let "
                "load_optimizer take the parts of it"
            )
    _stepped[optimizer] = optimizer.state, len(_OWNERS)


def refuse_other(layer: Any, weight: Tensor) -> None:
    """Raises UsageError where `weight` is no longer this rank's part of its cut dim: a whole one stands there
    now (`functional_call`, `layer.weight = …`), or it was resized. And where a cut parameter of `layer` is
    made of this rank's part alone, by norms, products or a choice over the cut dim: by torch's
    parametrizations (weight_norm of the other dim, spectral_norm, orthogonal) and others that are not known
    to take each element by itself, by the hooks that are their older form, or by pruning."""
    check_size(_name(layer), "weight", weight, layer.shard.dim, layer.held, layer.group)
    if not (layer._modules or layer._forward_pre_hooks):
        return
    for name, kind, form in _makers(layer):
        raise UsageError(
            f"{_name(layer)}: its {name} is made by {kind.strip('_')} "
            f"from this rank's part of its dim {layer.layouts[name].dim} alone; take the {form} away, or "
            "leave the layer whole"
        )


def _name(layer: Any) -> str:
    return type(layer).__name__.removeprefix("Parametrized")


def _makers(layer: Any) -> Iterator[tuple[str, str, str]]:
    """(parameter, class, form) of what makes a cut parameter from more than its elements or other dims."""
    for name, makers in (layer._modules.get("parametrizations") or {}).items():
        for made in makers if name in layer.layouts else ():
            by_element = type(made).__module__ == _ACTIVATIONS and type(made).__name__ not in _OVER_A_DIM
            if not by_element and not _along(made, layer.layouts[name].dim):
                yield name, type(made).__name__, "parametrization"
    for hook in layer._forward_pre_hooks.values():
        if type(hook).__module__ not in (*_OLDER, _PRUNING):
            continue
        name = str(getattr(hook, "name", None) or getattr(hook, "_tensor_name", None))
        for made in getattr(hook, "_pruning_methods", [hook]) if name in layer.layouts else ():
            kind = type(made)
            harmless = (
                kind.__name__ in _NO_CHOICE
                if kind.__module__ == _PRUNING
                else _along(made, layer.layouts[name].dim)
            )
            if not harmless:
                yield name, kind.__name__, "hook"


_ACTIVATIONS = "torch.nn.modules.activation"
_OVER_A_DIM = ("GLU", "LogSoftmax", "MultiheadAttention", "PReLU", "RReLU", "Softmax", "Softmax2d", "Softmin")
_PRUNING = "torch.nn.utils.prune"
_OLDER = ("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm")
_NO_CHOICE = ("CustomFromMask", "Identity")


def _along(made: object, dim: int) -> bool:
    """Whether this is a norm of each slice of the cut dim, which lies whole on its rank."""
    return type(made).__name__ in ("WeightNorm", "_WeightNorm") and getattr(made, "dim", None) == dim


def _class_of_torch(kind: type[torch.optim.Optimizer]) -> str:
    """The name of torch's class whose step an optimizer takes; "" for a step of its own."""
    base: Any = next(c for c in kind.__mro__ if c.__module__.startswith("torch.optim"))
    same = inspect.unwrap(kind.step) is inspect.unwrap(base.step)
    return str(base.__name__) if same else ""


def _part(tensor: Tensor) -> Any:
    """The part that a tensor is; None for one that is whole, as most are of which this is asked."""
    own = (t for owner in list(_OWNERS) for t in chain(owner.parameters(), owner.buffers()))
    return _cut().get(id(tensor)) if any(tensor is t for t in own) else None


def _cut() -> dict[int, Any]:
    """The parts of everything that is watched and alive, by the `id` of the tensor."""
    from autotp.parts import parts_of

    every = (part for owner in list(_OWNERS) for part in parts_of(owner).values())
    return {id(part.tensor): part for part in every if part.group.size > 1}
