"""What a conversion wrote, or would write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotp.checkpoint.folder import INDEX
from autotp.checkpoint.output import Output
from autotp.diagnostic import CheckpointError
from autotp.header import Header
from autotp.plan import Plan

__all__ = ["Progress", "Written", "files_of", "kept_words", "size_of"]

Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, the file at hand


@dataclass(frozen=True)
class Written:
    """What was written, or would be in a dry run.

    `files` are (relative name, bytes) without the manifest; `free` the bytes that were free on the disk
    before. `tp` is 1 and `proof` that of the shards for a merged folder. `plan_name` names the shipped
    plan that was chosen by the config, and is empty for one that was given. `proof` is "layouts" or "none".
    `left_out` are the files of the source folder that were neither read nor copied, `notes` what is not known
    of the source. `kept` are the files that an earlier run, which was killed, had finished.
    """

    target: Path
    tp: int
    plan: Plan
    plan_name: str
    proof: str
    files: tuple[tuple[str, int], ...]
    free: int
    dry_run: bool
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(size for _, size in self.files)

    @property
    def fits(self) -> bool:
        """Whether it fits the disk."""
        return self.nbytes <= self.free

    def check_room(self) -> None:
        """Raise CheckpointError when it does not fit the disk."""
        if not self.fits:
            raise CheckpointError(f"{self.target}: needs {self.nbytes} bytes, and {self.free} are free")


def files_of(
    sources: Sequence[Header],
    index: bytes | None,
    companions: Mapping[str, Path | bytes],
    outputs: Sequence[Output],
) -> tuple[tuple[str, int], ...]:
    """Every file that the outputs will hold, (relative name, bytes), without the manifest."""
    files = []
    for output in (output for output in outputs if output.written):
        headers = [output.header(file) for file in sources]
        files += [(str(header.path), header.size) for header in headers]
        if index is not None:
            files.append((str(output.home / INDEX), len(output.index(headers, index))))
        files += [(str(output.home / name), size_of(content)) for name, content in companions.items()]
    return tuple(files)


def kept_words(names: Sequence[str]) -> str:
    """What is said of the files that were kept."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"kept from the run before: {', '.join(names[:4])}{more}"


def size_of(content: Path | bytes) -> int:
    """Bytes of a companion."""
    return len(content) if isinstance(content, bytes) else content.stat().st_size
