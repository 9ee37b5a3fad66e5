"""Whether what is raised here may be caught by the model's code on its way out.

Read off the bytecode of the functions that run: one with an `except`, a `finally` or a `with` may go on. The
frames end where the recording begins.
"""

from __future__ import annotations

import dis
import sys
from functools import lru_cache
from types import CodeType

from autotp.trace.source import is_library

__all__ = ["may_be_caught"]


def may_be_caught() -> bool:
    """Whether a function of the model, on the stack, has code for what is raised."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_record":
        if not is_library(frame.f_code.co_filename) and _handles(frame.f_code):
            return True
        assert frame.f_back is not None
        frame = frame.f_back
    return False


@lru_cache(maxsize=1024)
def _handles(code: CodeType) -> bool:
    return any(each.opname == "PUSH_EXC_INFO" for each in dis.get_instructions(code))
