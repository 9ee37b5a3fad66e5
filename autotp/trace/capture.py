"""The ways to a trace, in order: the recorder, the recorder around modules that it cannot look into, export.

    record ──► values decide ──► record with these modules opaque
       └─────► anything else ──► torch.export

A forward that fails on every way is reported with what the recorder met.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from autotp.trace import recorder
from autotp.trace.branches import unnoted
from autotp.trace.calls import Boundary
from autotp.trace.graph import Trace, TraceError
from autotp.trace.layers import Layers
from autotp.trace.recorder import Guide, Step

__all__ = ["capture"]

_RETRIES = 3


def capture(
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
    like: Trace | None = None,
    guide: Guide | None = None,
    layers: Layers | None = None,
    as_given: bool = False,
    numbers: bool = False,
) -> Trace:
    """The trace of one forward of `module`; the arguments are those of `recorder.record`.

    `like` is an earlier trace of the same module, whose way is taken again: a rank's trace is compared with
    the whole model's op by op. `Trace.route` and `Trace.opaque` say which way it was.

    Raises TraceError when the forward cannot be traced.
    """
    if like is not None and like.route == "export":
        return _exported(module, args, kwargs, grad=grad, shapes=shapes, before=before, after=after)
    opaque = frozenset(like.opaque if like is not None else ())
    first: TraceError | None = None
    for _ in range(_RETRIES):
        take_back = unnoted()
        try:
            return recorder.record(
                module, args, kwargs,
                grad=grad, shapes=shapes, before=before, after=after,
                exporting=exporting, compiling=compiling, then=then, opaque=opaque, guide=guide,
                layers=layers, as_given=as_given, numbers=numbers,
            )  # fmt: skip
        except TraceError as error:
            first = first or error
            more = _alike(module, error.module) - opaque if error.dynamic and like is None else frozenset()
            if not more:
                break
            take_back()  # of a module that is not looked into nothing is noted
            opaque |= more
    assert first is not None
    if like is None and exporting and then is None and not first.dynamic:
        try:
            return _exported(module, args, kwargs, grad=grad, shapes=shapes, before=before, after=after)
        except TraceError:
            pass
    raise first


def _exported(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], **options: Any) -> Trace:
    from autotp.trace.export import export  # few need it, and its ops take time to define

    return export(module, args, kwargs, **options)


def _alike(root: nn.Module, path: str) -> frozenset[str]:
    """The module that failed and all of its class; none where little would be left to look into.

    A module that holds a list of layers is the model's spine: opaque, nothing inside could be proven.
    """
    failed = root.get_submodule(path)
    if not path or any(isinstance(m, (nn.ModuleList, nn.Sequential)) for m in failed.modules()):
        return frozenset()
    return frozenset(p for p, m in root.named_modules() if type(m) is type(failed))
