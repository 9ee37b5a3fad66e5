"""The sizes of a call's inputs, and whether what a proof asked of them comes out the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from autotp.propagate.input_sizes import LENGTH
from autotp.propagate.size_guards import NAMES, SizeGuard
from autotp.rewrite.further import length_of
from autotp.trace.graph import is_cache, named_place, tensors_in

__all__ = ["Check", "Sizes", "check_of", "sizes_of"]

Check = Callable[[tuple[Any, ...], Mapping[str, Any]], bool]
Sizes = Mapping[tuple[str, int], int]
"""The place of a tensor among the arguments and a dim of it -> its size."""

Parameters = tuple[tuple[str, Any], ...]


def sizes_of(parameters: Parameters, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sizes:
    """The sizes of every tensor among the arguments, and how many tokens a cache holds.

    >>> sizes_of((("x", None),), (torch.zeros(2, 3),), {})
    {('x', 0): 2, ('x', 1): 3}
    """
    found = {
        (named_place(parameters, place), dim): size
        for place, tensor, _ in tensors_in((args, dict(kwargs)), caches=False)
        for dim, size in enumerate(tensor.shape)
    }
    length = _length(args, kwargs)
    return found if type(length) is not int else {**found, (LENGTH, 0): length}


def _length(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    cache = next((v for v in (*args, *kwargs.values()) if is_cache(type(v))), None)
    return None if cache is None else length_of(cache)


def check_of(
    guards: Iterable[SizeGuard], parameters: Parameters, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Check:
    """Whether all of them hold for another call, which passes its arguments as this one does."""
    names = [name for name, _ in parameters]
    named = dict(zip(names, args, strict=False)) | dict(kwargs)
    nested = False

    def term(place: str, dim: int) -> str:
        nonlocal nested
        if isinstance(named.get(place), torch.Tensor):
            at = names.index(place) if place in names[: len(args)] else None
            return f"k[{place!r}].shape[{dim}]" if at is None else f"a[{at}].shape[{dim}]"
        nested = nested or place != LENGTH
        return "length(a, k)" if place == LENGTH else f"s[{place!r}, {dim}]"

    told = sorted({g.source([term(*size) for size in g.sizes]) for g in guards})
    if not told:
        return _always
    space = {**NAMES, "length": _length, "sizes": lambda a, k: sizes_of(parameters, a, k)}
    test = " and ".join(told)
    made: Check = eval(f"lambda a, k: {f'(lambda s: {test})(sizes(a, k))' if nested else test}", space)
    return made


def _always(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return True
