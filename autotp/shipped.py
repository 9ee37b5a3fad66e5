"""Where the plans that autotp ships lie. This file knows nothing of torch.

A wheel carries them inside the package, as `autotp/plans`. A checkout, and so an editable install, has
them beside the package, as `plans/`.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["plans_folder"]


def plans_folder() -> Path:
    """The folder with the shipped plans, one `<name>.yaml` each.

    >>> (plans_folder() / "llama.yaml").is_file()
    True
    """
    package = Path(__file__).resolve().parent
    inside = package / "plans"
    return inside if inside.is_dir() else package.parent / "plans"
