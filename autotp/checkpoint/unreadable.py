"""Why torch cannot read a file of tensors: it is damaged, it is no such file, or it asks for code to run."""

from __future__ import annotations

import pickle
import pickletools
import zipfile
from pathlib import Path

from autotp.diagnostic import CheckpointError

__all__ = ["unreadable"]

ZIP, POINTER = b"PK\x03\x04", b"version https://git-lfs"
OLD_START, OLD = b"\x80\x02", 5  # before torch 1.6 it wrote so many pickles, and then the data
ASKS = ("GLOBAL", "safe_globals", "unrecognized function")  # of torch's refusals: what would be called
AGAIN = "\n  = help: it is damaged or not all there: fetch or copy it again, and compare sizes"


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """The error for a file at which `torch.load(…, weights_only=True)` raised `error`.

    That its code could be run is only said of a file that shows no damage.
    """
    said = str(error).rpartition("WeightsUnpickler error:")[2]  # before it torch tells how to run the code
    reason = (said.strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, OSError) and error.strerror:
        return CheckpointError(f"{path}: cannot be read: {error.strerror}")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(POINTER))
    if not size:
        return CheckpointError(f"{path}: is empty{AGAIN}")
    if start == POINTER:
        return CheckpointError(
            f"{path}: is a pointer of Git LFS, {size} bytes, and not the file\n  = help: git lfs pull"
        )
    if start.startswith(ZIP) and (damage := _in_archive(path)):
        return CheckpointError(f"{path}: {damage}; it has {size} bytes{AGAIN}")
    asks = isinstance(error, pickle.UnpicklingError) and any(word in said for word in ASKS)
    if start[:1] == pickle.PROTO:
        asks = _pickles_end(path, OLD if start.startswith(OLD_START) else 1) and (asks or start[1] > 2)
    if start[:1] in (pickle.PROTO, ZIP[:1]) and not asks:
        return CheckpointError(f"{path}: torch cannot read its {size} bytes ({reason}){AGAIN}")
    says = f"{path}: is not a file of plain tensors, and nothing else in it is run ({reason})"
    if asks:
        says += "\n  = help: if you trust it, torch.load(..., weights_only=False) it and save its state_dict"
    return CheckpointError(says)


def _pickles_end(path: Path, count: int) -> bool:
    """Whether the first pickles of a file are all there; they are looked at, and not run."""
    try:
        with path.open("rb") as file:
            for _ in range(count):
                for _ in pickletools.genops(file):
                    pass
    except Exception:  # whatever a damaged one makes of it
        return False
    return True


def _in_archive(path: Path) -> str:
    """What is wrong with the archive that torch.save wrote; its tensors' data are not read."""
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith("/data.pkl"):
                    archive.read(name)  # compares the checksum
    except zipfile.BadZipFile as error:
        if "CRC" in str(error):
            return "the names in it are damaged: their checksum is another"
        return "is cut off: the table of contents that ends it is missing"
    except (OSError, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        return f"is a damaged archive ({type(error).__name__})"
    return ""
