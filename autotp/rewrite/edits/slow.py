"""torch's attention and encoder layers run one fused kernel in inference, past every mapping.

Where any of their tensors is cut, the question whether that kernel may run is answered with no:

    is_fastpath_enabled = slow(torch.backends.mha.get_fastpath_enabled())

The forward then does step by step what the kernel does at once, as in training.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from torch import nn

from autotp.rewrite.edits.compile import made_from
from autotp.rewrite.edits.edit import Edit, Function, Slow
from autotp.rewrite.edits.text import source_of
from autotp.trace.surroundings import FUSED

__all__ = ["slow"]


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
        source = source_of(code, forward.__globals__)
        function = Function(code.co_filename, code.co_firstlineno, code.co_qualname, forward)
        node = source.definition(code)
        for call in ast.walk(node) if node is not None else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("mha.get_fastpath_enabled"):
                yield Edit(path, "forward", (), function, *source.span(call), Slow())
