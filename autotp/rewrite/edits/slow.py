"""torch's attention and encoder layers run one fused kernel in inference, past every mapping.

Where any of their tensors is cut, the question whether that kernel may run is answered with no:

    is_fastpath_enabled = slow(torch.backends.mha.get_fastpath_enabled())

The forward then does step by step what the kernel does at once, as in training. And an edited function of
torch does not hand its work to a mode (`with torch.device(…)`), which would call the function as it was.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import replace

from torch import nn

from autotp.rewrite.edits.compile import made_from
from autotp.rewrite.edits.edit import Edit, Edits, Function, Slow
from autotp.rewrite.edits.text import source_of
from autotp.trace.surroundings import FUSED

__all__ = ["by_itself", "slow"]


def slow(root: nn.Module, cut: Collection[str]) -> Iterator[Edit]:
    """The edits that keep fused kernels from the modules of `root` with `cut` tensors in them.

    Raises NoSource where the text of such a forward is another than what runs.
    """
    for path, module in root.named_modules():
        own = isinstance(module, FUSED) and any(name.startswith(f"{path}." if path else "") for name in cut)
        if not own:
            continue
        forward = made_from(next(vars(k)["forward"] for k in type(module).__mro__ if "forward" in vars(k)))
        code = forward.__code__
        function = Function(code.co_filename, code.co_firstlineno, code.co_qualname, forward)
        for start, stop in _calls(function, "get_fastpath_enabled"):
            yield Edit(path, "forward", (), function, start, stop, Slow())


def by_itself(edits: Edits) -> Iterator[Edit]:
    """The edits that keep edited functions of torch from calling themselves as they were."""
    for edit in edits.edits:
        if edit.function.name == "multi_head_attention_forward" and not isinstance(edit.wrapper, Slow):
            for start, stop in _calls(edit.function, "has_torch_function"):
                yield replace(edit, start=start, stop=stop, wrapper=Slow())


def _calls(function: Function, name: str) -> list[tuple[int, int]]:
    """Where a function calls another one of that name."""
    code = function.live.__code__
    source = source_of(code, function.live.__globals__)
    node = source.definition(code)
    every = [n for n in ast.walk(node) if isinstance(n, ast.Call)] if node is not None else []
    return [source.span(n) for n in every if ast.unparse(n.func).rpartition(".")[2] == name]
