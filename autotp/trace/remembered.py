"""Ops of torch whose results are known: on tensors like those of an earlier call they are like those then.

What the result of an op is like (sizes, strides, dtype, device, whether it requires a gradient, which of the
op's tensors it views) depends on the op, on what its arguments are like, and on torch's state. So an op that
was run on fake tensors once is not run again: fake tensors are made that are like its results. A model's
layers, modes and ranks ask for few different ops, and running one takes far longer than all else.

Remembered are torch's own ops that write into nothing, where nothing but the fake tensors' mode sees them.
What is made so has no history in autograd. Whether it requires a gradient is right, and so is the memory that
it sees; what else of that a forward could notice is noticed here, and the forward is recorded anew without
(`Forgotten`): code that asks for it (`x.grad_fn`, `torch.autograd.grad`), and a write, while gradients are
recorded, into memory of which a view was made so, since a write gives all its views a history.
"""

from __future__ import annotations

from typing import Any

import torch

from autotp.trace import hooks
from autotp.trace.kernels import by_kernel
from autotp.trace.made import made_like
from autotp.trace.sameness import state

__all__ = ["Forgotten", "Remembered"]

_LIMIT = 10_000  # results that are remembered at once
_PLAIN = frozenset(
    [bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format]
)
# Their results are of a form that depends on more than their arguments: on which kernels are switched on, or
# on how much memory there is.
_NOT = ("attention", "conv", "batch_norm", "rnn", "lstm", "gru", "as_strided", "set_", "resize")
# Their results are of one form whether gradients are recorded or not, and require one where any argument
# does: what is known with gradients is known without.
_SIMPLE = frozenset(
    [
        *(
            "view",
            "reshape",
            "transpose",
            "permute",
            "unsqueeze",
            "squeeze",
            "slice",
            "select",
            "expand",
            "t",
        ),
        *("alias", "cat", "add", "sub", "mul", "div", "neg", "pow", "rsqrt", "sqrt", "cos", "sin", "mean"),
        *("sum", "silu", "gelu", "relu", "tanh", "sigmoid"),
    ]
)
_KNOWN: dict[Any, Any] = {}
_SORTS: dict[Any, str] = {}


class Forgotten(BaseException):
    """The forward notices what is made without a run. No Exception: a model might catch it."""


class Remembered:
    """The ops of one recording."""

    def __init__(self, fakes: hooks.Fakes, *, on: bool) -> None:
        self._fakes, self._on = fakes, on
        fakes.remembered_elsewhere(on)
        self._made: list[torch.Tensor] = []
        self._memory: set[int] = set()  # what the first of them see
        self._looked = 0
        self._forgotten = False

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op's results."""
        tensors: list[torch.Tensor] = []
        key = self._key(func, args, kwargs, tensors) if self._on else None
        if key is None:
            return func(*args, **kwargs)
        needs = None
        if _SORTS[func] == "simple":
            needs = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        known = _KNOWN.get(key)
        if known is not None:
            return self._again(known, tensors, needs)
        found = by_kernel(func, args, kwargs, tensors)
        if found is not None:
            self._know(key, found)
            return self._again(found, tensors, needs)
        out = func(*args, **kwargs)
        found = self._found(out, tensors, needs)
        if found is not None:
            self._know(key, found)
        return out

    def _know(self, key: Any, found: Any) -> None:
        if len(_KNOWN) > _LIMIT:
            _KNOWN.clear()
        _KNOWN[key] = found

    def written(self, written: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        """An op writes into these, which may change which of its views have a history."""
        if not self._made or not torch.is_grad_enabled() or not any(t.requires_grad for t in inputs):
            return
        self._memory |= {hooks.storage(tensor) for tensor in self._made[self._looked :]}
        self._looked = len(self._made)
        if any(hooks.storage(tensor) in self._memory for tensor in written):
            self.forget()

    def forget(self) -> None:
        """Something is noticed."""
        if self._made:
            self._forgotten = True
            raise Forgotten

    def check(self) -> None:
        """Raise Forgotten if something was noticed, and the model caught it."""
        if self._forgotten:
            raise Forgotten

    def _key(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        """All that the results depend on; None where that is not known. `tensors` takes the op's own."""
        sort = _SORTS.get(func)
        if sort is None:
            sort = _SORTS[func] = _sort(func)
        if sort in ("other", "negative") or not hooks.only_fakes():
            # Tensors of inference mode, and those that are to be read as their negatives, look like others.
            self._on = self._on and sort != "negative" and not torch.is_inference_mode_enabled()
            return None
        last = hooks.REQUIRES_GRAD if sort == "simple" else None
        try:
            given = tuple([self._spec(value, tensors, last) for value in args])
            named = tuple([(name, self._spec(value, tensors, last)) for name, value in kwargs.items()])
        except (_Unknown, hooks.Symbolic, RuntimeError):  # a tensor without strides
            return None
        return func, given, named, state()[0 if last is None else 1 :]

    def _spec(self, value: Any, tensors: list[torch.Tensor], last: int | None) -> Any:
        kind = type(value)
        if kind is hooks.FAKE:
            if value.dtype.is_complex:
                self._on = False  # complex numbers may be conjugates, and their parts the negative of others
                raise _Unknown
            tensors.append(value)
            found = hooks.like(value)
            if not found[hooks.NO_CONSTANT]:
                raise _Unknown
            return found[:last]
        if kind in _PLAIN:
            return kind, value
        if kind is tuple or kind is list or kind is torch.Size:
            return kind, *[self._spec(part, tensors, last) for part in value]
        raise _Unknown

    def _found(self, out: Any, tensors: list[torch.Tensor], needs: bool | None) -> Any:
        if type(out) is tuple or type(out) is list:
            parts = [self._found(part, tensors, needs) for part in out]
            return None if not parts or None in parts else (type(out), parts)
        if not isinstance(out, torch.Tensor):
            return None
        if needs is not None and out.requires_grad != (needs and out.is_floating_point()):
            return None
        return made_like(out, tensors, self._fakes)

    def _again(self, known: Any, tensors: list[torch.Tensor], needs: bool | None) -> Any:
        if type(known) is int:
            return tensors[known]
        if type(known) is tuple:
            kind, parts = known
            return kind([self._again(part, tensors, needs) for part in parts])
        made = known(self._fakes, tensors, needs)
        self._made.append(made)
        return made


class _Unknown(Exception):
    """An argument of which is not known what a result depends on."""


def _sort(func: Any) -> str:
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable or getattr(func, "namespace", "") != "aten":
        return "other"
    name, _, overload = func.__name__.partition(".")
    if name == "_neg_view":
        return "negative"
    if any(part in name for part in _NOT):
        return "other"
    # Numbers that are read as those of another dtype have no gradient.
    return "simple" if name in _SIMPLE and overload != "dtype" else "known"
