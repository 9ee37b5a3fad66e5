"""A folder that appears whole or not at all.

Everything is written into `.<name>.autotp-partial` beside the target, and renamed at the end. A journal
in it tells, file by file, what is finished: a run that was killed goes on there when it is started again
with the same source and options, and starts afresh with others. What the journal tells is read again and
compared with its digests, so that nothing has to wait for the disk. Two runs at once exclude each other.

This is for processes that end. A machine that loses power may lose what its disk had not written, under
names that are there: the digests tell, in `verify`, `merge`, `reshard` and every load.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from autotp.checkpoint.folder import JOURNAL
from autotp.checkpoint.unfinished import partial
from autotp.diagnostic import CheckpointError

__all__ = ["Staging", "check_target", "free_bytes"]


def check_target(target: Path, source: Path | None = None) -> None:
    """Raise CheckpointError unless `target` is absent or an empty folder, and not in the folder `source`."""
    if "\0" in str(target):
        _refuse(target, "no file can have this name; name a new one")
    if source is not None and source.is_dir():
        home, place = Path(os.path.realpath(source)), Path(os.path.realpath(target))
        if place.is_relative_to(home):
            _refuse(
                target, f"is inside the source {source}, of which it would become a part; name another place"
            )
    if not os.path.lexists(target):
        above = next((place for place in target.absolute().parents if os.path.lexists(place)), None)
        if above is not None and not above.is_dir():
            _refuse(target, f"cannot be made: {above} is not a folder; name another place")
        return
    if target.is_symlink() or not target.is_dir():
        _refuse(target, "exists and is not a folder; name a new one")
    entries = os.listdir(target)
    if entries:
        many = f"{len(entries)} entries, such as" if len(entries) > 1 else "1 entry,"
        _refuse(target, f"is not empty ({many} {min(entries)!r}); name a new folder")
    if target.samefile(os.getcwd()):  # it is replaced, and whoever stands in it would stand in nothing
        _refuse(target, "is the current folder; name a new one")


def free_bytes(target: Path) -> int:
    """Bytes for a run to write: what is free where `target` will stand, and what its own last run left."""
    place = Path(os.path.abspath(target))
    left = partial(place).rglob("*") if os.path.isdir(partial(place)) else ()
    while not os.path.isdir(place):
        place = place.parent
    return shutil.disk_usage(place).free + sum(entry.lstat().st_blocks * 512 for entry in left)


class Staging:
    """The temporary folder `path` of one run, which becomes `target` on `commit`.

    `job` tells what the run does, as JSON data; under "source" it describes the files that it reads. What
    an earlier run of the same job finished is in `finished`, {file: record}. As a context manager it
    removes the folder when an error ends the run; a killed or interrupted run leaves it, to go on, unless
    it is not `resumable`.
    Raises CheckpointError when the target is not free, another run holds the folder, or the source of a
    run that was interrupted has changed.
    """

    def __init__(self, target: Path, job: Mapping[str, Any], *, resumable: bool = True) -> None:
        check_target(target)
        self.target = target
        self.resumable = resumable
        self.path = partial(target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(exist_ok=True)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise CheckpointError(f"{target}: another run is writing it") from error
        except OSError:
            pass  # a file system without locks: nothing tells another run, and nothing is wrong
        try:
            check_target(target)  # the run that held the lock until now may have made it
            self.finished = self._resume(json.loads(json.dumps(job)))
        except BaseException:
            os.close(self._lock)
            raise

    def keep(self, files: Collection[Path]) -> None:
        """Of what an earlier run left, keep these files; links and all else would be put in place, and go."""
        kept = {self.path / JOURNAL, *files}
        for base, folders, names in os.walk(self.path, topdown=False):
            for path in (Path(base) / name for name in (*names, *folders)):
                if path.is_symlink() or (not path.is_dir() and path not in kept):
                    path.unlink()
                elif path.is_dir() and not os.listdir(path):
                    path.rmdir()

    def finish(self, name: str, record: Mapping[str, Any]) -> None:
        """Note that `name` is finished, with what a later run must know of it."""
        self._append({"file": name, "record": record})

    def commit(self) -> None:
        """Make the folder the target."""
        os.unlink(self.path / JOURNAL)
        try:
            os.rename(self.path, self.target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                _refuse(self.target, "was made by someone else meanwhile")
            raise CheckpointError(f"{self.target}: cannot be written: {error.strerror}") from error

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) or (error is not None and not self.resumable):
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def _resume(self, job: dict[str, Any]) -> dict[str, Any]:
        """What an earlier run of the same job finished; the folder is emptied when there was none."""
        lines = _journal(self.path / JOURNAL)
        earlier = lines[0] if lines else {}
        if self.resumable and {**earlier, "source": None} == {**job, "source": None}:
            if earlier["source"] != job["source"]:
                changed = _changed(earlier["source"], job["source"])
                _refuse(
                    self.path,
                    f"an interrupted run read other files: {changed} changed meanwhile; "
                    "remove this folder to start again",
                )
            os.unlink(self.path / JOURNAL)
            for line in lines:
                self._append(line)
            return {line["file"]: line["record"] for line in lines[1:]}
        for entry in os.scandir(self.path):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
        self._append(job)
        return {}

    def _append(self, line: Mapping[str, Any]) -> None:
        try:
            with open(self.path / JOURNAL, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {error.strerror}") from error


def _journal(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal; a last line that was cut off is left out."""
    try:
        text = "" if path.is_symlink() else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    lines = list[dict[str, Any]]()
    for line in text.split("\n")[:-1]:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(found, dict) or not (_is_record(found) if lines else _is_job(found)):
            break
        lines.append(found)
    return lines


def _is_job(line: Mapping[str, Any]) -> bool:
    """Whether a line describes a run: under "source" each file as [name, …]."""
    source = line.get("source")
    files = source if isinstance(source, list) else [None]
    return all(isinstance(file, list) and file and isinstance(file[0], str) for file in files)


def _is_record(line: Mapping[str, Any]) -> bool:
    """Whether a line tells of a finished file, as `finish` notes it."""
    return isinstance(line.get("file"), str) and isinstance(line.get("record"), dict)


def _changed(before: list[list[Any]], after: list[list[Any]]) -> str:
    """The names of the files that differ between two descriptions [[name, …], …]."""
    old, new = ({entry[0]: entry for entry in side} for side in (before, after))
    return ", ".join(sorted(name for name in old | new if old.get(name) != new.get(name)))


def _refuse(path: Path, fault: str) -> NoReturn:
    raise CheckpointError(f"{path}: {fault}")
