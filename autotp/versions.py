"""Which versions of torch autotp is built for, checked where torch is first needed.

The recorder reads an order of operators that torch changes between releases, so another version is
said out loud once. The version comes from the installed metadata: nothing here imports torch.
"""

from __future__ import annotations

import functools
import re
import warnings
from importlib import metadata

from autotp.diagnostic import UsageError

__all__ = ["TESTED_TORCH", "TORCH_RANGE", "TorchVersionWarning", "check_torch"]

TESTED_TORCH = "2.13.0"
TORCH_RANGE = ((2, 13), (2, 15))  # from the first, up to and without the second; as in pyproject.toml


class TorchVersionWarning(UserWarning):
    """torch is newer than the versions that autotp is tested with."""


@functools.cache
def check_torch() -> None:
    """Check the installed torch against the supported range, once a process.

    Raises UsageError when torch is missing or older; warns `TorchVersionWarning` when it is newer,
    since newer versions mostly work and a plan is proved on the installed one in any case.
    """
    try:
        installed = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise UsageError(_remedy("torch is not installed")) from None
    first, beyond = TORCH_RANGE
    found = _release(installed)
    if found < first:
        raise UsageError(_remedy(f"torch {installed} is too old"))
    if found >= beyond:
        warnings.warn(_remedy(f"torch {installed} is newer than tested"), TorchVersionWarning, stacklevel=2)


def _remedy(fault: str) -> str:
    first, beyond = (".".join(map(str, end)) for end in TORCH_RANGE)
    return (
        f"{fault}: autotp supports torch >={first},<{beyond} and is tested with {TESTED_TORCH}\n"
        f"  = help: pip install torch=={TESTED_TORCH}"
    )


def _release(version: str) -> tuple[int, int]:
    """Major and minor of a version: "2.13.0+cpu" -> (2, 13)."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
