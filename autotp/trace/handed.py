"""Weights that code reads off a layer, past the layer's own forward.

`fused(x, weight=self.out_proj.weight)` gives a layer's weight to a function that may use it, or may not: the
kernels of mixers take all weights of a block and give its finished result where they are installed, and
None where they are not. A trace of the second way has no op on the weight, so nothing is proven about the
first. The reads are noted while a module is traced, with the function that does it; reads of what a tensor
is like (`.dtype`, `.device`) are not.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import CodeType
from typing import Any

from torch import nn

from autotp.cost import collapsed
from autotp.trace.graph import Trace

__all__ = ["Noting", "Reader", "handed", "reader_of"]

Reader = tuple[str, str]
"""The file and the name of a function."""

_LIKE = frozenset([
    "device", "dtype", "dim", "element_size", "is_cuda", "is_meta", "layout", "ndim", "ndimension", "numel",
    "requires_grad", "shape", "size", "stride",
])  # fmt: skip
_GETATTR = nn.Module.__getattr__.__code__


class Noting(dict[str, Any]):
    """The parameters of a module, which note in `found` what other code reads of them, by name."""

    def __init__(
        self, table: Mapping[str, Any], module: nn.Module, path: str, found: dict[str, set[Reader]]
    ) -> None:
        super().__init__(table)
        self.module, self.prefix, self.found = module, f"{path}." if path else "", found

    def __getitem__(self, name: str) -> Any:
        if sys._getframe(1).f_code is _GETATTR:
            frame = sys._getframe(2)
            code, names = frame.f_code, frame.f_code.co_varnames
            own = bool(names) and frame.f_locals.get(names[0]) is self.module
            if not own and not _asks_what_it_is_like(code, frame.f_lasti):
                self.found.setdefault(self.prefix + name, set()).add(reader_of(code))
        return super().__getitem__(name)


def reader_of(code: CodeType) -> Reader:
    """How a function is known; an edited copy of it is known as the function."""
    return code.co_filename, code.co_name


def _asks_what_it_is_like(code: CodeType, instruction: int) -> bool:
    return instruction in _places(code)


@lru_cache(maxsize=4096)
def _places(code: CodeType) -> frozenset[int]:
    """Where a function loads a value of which it then only asks an attribute of `_LIKE`."""
    found, last = set(), -1
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD") and each.argval in _LIKE:
            found.add(last)
        last = each.offset
    return frozenset(found)


def handed(
    traces: Iterable[Trace], names: Iterable[str], first: Mapping[str, str]
) -> dict[str, frozenset[Reader]]:
    """Of the weights `names` of layers, those that other code reads without an op on them in any trace, and
    the functions that do."""
    known, owners = set(names), _owners(first)
    found: dict[str, set[Reader]] = {}
    used: set[str] = set()
    for trace in traces:
        for name, readers in trace.handed.items():
            if name in known:
                found.setdefault(name, set()).update(readers)
        for node in trace.graph.nodes:
            if node.op == "get_attr" and node.users:
                name = node.meta["name"]
                own = owners.get(name, {name.rpartition(".")[0]})
                if any(user.meta.get("module") not in own for user in node.users if user.op != "output"):
                    used.add(name)
    proven = {collapsed(name) for name in used}  # of layers that repeat one is recorded
    return {name: frozenset(readers) for name, readers in found.items() if collapsed(name) not in proven}


def _owners(first: Mapping[str, str]) -> dict[str, set[str]]:
    """The modules that own each tensor of several names."""
    found: dict[str, set[str]] = {}
    for name, one in first.items():
        found.setdefault(one, {one.rpartition(".")[0]}).add(name.rpartition(".")[0])
    return found
