"""Which files make up a checkpoint, decided and checked before any of them is used.

A folder holds `model.safetensors.index.json` and the files that it names, or `model.safetensors`, or
exactly one other .safetensors file. The index decides: files that it does not name are left alone.
Nothing outside the folder is read: an index names plain files, and a link may not lead out of the folder
(but into the `blobs` of the Hugging Face cache that the folder is a snapshot of).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from autotp.checkpoint.unfinished import absent
from autotp.diagnostic import CheckpointError
from autotp.header import Entry, Header, bad_name, parse_json, read_header, shown

__all__ = [
    "INDEX",
    "JOURNAL",
    "LARGEST_JSON",
    "MANIFEST",
    "PART",
    "RANK_FOLDER",
    "SINGLE",
    "WEIGHTS",
    "Folder",
    "check_index",
    "companions_of",
    "is_plain_name",
    "left_out",
    "open_folder",
    "parse_weight_map",
    "read_config",
    "read_text",
    "regular_file",
    "weight_map",
]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MANIFEST = "autotp.json"
JOURNAL = ".autotp-journal.jsonl"  # of a run that has not ended: no file of that name travels along
PART = "autotp"  # the key in the metadata of a file that holds one rank's part
RANK_FOLDER = re.compile(r"rank-\d+-of-\d+")
FORMS = (INDEX, SINGLE, "one *.safetensors", "pytorch_model.bin", "consolidated.00.pth", "mp_rank_00")
MOST_NAMED = 5  # names in a message
LONGEST_FILE_NAME = 255  # bytes, Linux's own limit
ODD_NAME = "it has a backslash, a control character or bytes that are no UTF-8; rename it"
LARGEST_JSON = 200_000_000  # bytes of an index, a config or a manifest
LARGEST_COMPANION = 64 << 20  # bytes
WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")


@dataclass(frozen=True)
class Folder:
    """A checkpoint: its weight files with their checked headers, in the order of their names.

    `index` is the text of its index file. `companions` are the other files, which travel along: relative
    names of every file up to 64 MiB that holds no weights, in no hidden folder; of one file, config.json.
    """

    path: Path
    files: tuple[Header, ...]
    config: Mapping[str, Any]
    index: bytes | None = None
    companions: tuple[str, ...] = ()

    def tensors(self) -> dict[str, tuple[Header, Entry]]:
        """Every tensor, with the file that holds it, in the order of the data."""
        return {name: (file, entry) for file in self.files for name, entry in file.tensors.items()}

    @property
    def nbytes(self) -> int:
        """Size of all weight files together."""
        return sum(file.size for file in self.files)


def open_folder(path: str | Path) -> Folder:
    """Find and check the files of a checkpoint folder, or of one .safetensors file (config.json beside it).

    Raises CheckpointError naming the folder, file, key or value that is wrong. What `convert` wrote for one
    rank is refused: it is a part, and would be taken for the whole.
    """
    found = _open(Path(path))
    for file in found.files:
        if PART in file.metadata:
            _refuse(file.path, f"holds the part of {file.metadata[PART]}; give the folder with {MANIFEST}")
    return found


def _open(path: Path) -> Folder:
    if path.is_file() or path.suffix == ".safetensors":
        if path.suffix == ".json":
            _refuse(path, f"holds no weights; give the folder {path.parent}")
        if not is_plain_name(path.name):
            _refuse(path.parent, f"the name {path.name!r} cannot be kept: {ODD_NAME}")
        config = read_config(path.parent)
        return Folder(
            path.parent, (read_header(path),), config, companions=("config.json",) if config else ()
        )
    if not path.is_dir():
        if path.exists():
            _refuse(path, "is no folder and no file")
        raise CheckpointError(absent(path, "there is no such folder or file"))
    files, index = _weights(path)  # first: a folder without any is refused before it is walked through
    return Folder(path, files, read_config(path), index, companions_of(path))


def _weights(path: Path) -> tuple[tuple[Header, ...], bytes | None]:
    """The weight files of a folder, and the text of its index if it has one."""
    if (path / INDEX).exists():
        text = read_text(_inside(path, INDEX))
        table = weight_map(path, INDEX, text, ".safetensors")
        files = tuple(read_header(path / name) for name in sorted(set(table.values())))
        check_index(path, INDEX, table, {file.path.name: file.tensors for file in files})
        return files, text
    if (path / SINGLE).exists():
        return (read_header(_inside(path, SINGLE)),), None
    single = sorted(path.glob("*.safetensors"))
    if len(single) != 1:
        found = f"found {', '.join(file.name for file in single)}" if single else _others(path)
        _refuse(path, f"holds no checkpoint: looked for {', '.join(FORMS)}; {found}")
    if not is_plain_name(single[0].name):
        _refuse(path, f"the name {single[0].name!r} cannot be kept: {ODD_NAME}")
    return (read_header(_inside(path, single[0].name)),), None


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder; empty when there is none."""
    path = folder / "config.json"
    return parse_json(read_text(_inside(folder, path.name)), path, "content") if path.exists() else {}


def read_text(path: Path) -> bytes:
    """The bytes of a small regular file that is not trusted."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            _refuse(path, "is not a regular file")
        if status.st_size > LARGEST_JSON:
            _refuse(path, f"is {status.st_size} bytes long; at most {LARGEST_JSON} are read")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def regular_file(folder: Path, name: str) -> Path:
    """The path of a file of the folder, which must be a regular one and no link out of the folder."""
    path = _inside(folder, name)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            _refuse(path, "is not a regular file")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return path


def companions_of(folder: Path) -> tuple[str, ...]:
    """Every other file up to 64 MiB, sub-folders too, as sorted relative names."""
    found = []
    for base, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "." and not RANK_FOLDER.fullmatch(name)]
        for name in files:
            if not name.endswith(WEIGHTS) and name not in (MANIFEST, JOURNAL):
                relative = str((Path(base) / name).relative_to(folder))
                if not all(map(is_plain_name, relative.split("/"))):
                    _refuse(folder, f"the name {relative!r} cannot travel along: {ODD_NAME}")
                if regular_file(folder, relative).stat().st_size <= LARGEST_COMPANION:
                    found.append(relative)
    return tuple(sorted(found))


def left_out(folder: Path, kept: Collection[str]) -> tuple[str, ...]:
    """Files of a folder that neither travel along nor are read, `kept`, and links to folders: sorted names.

    Hidden folders are passed over.
    """
    found = []
    for base, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "."]
        links = [name for name in folders if os.path.islink(os.path.join(base, name))]
        found += [os.path.relpath(os.path.join(base, name), folder) for name in (*files, *links)]
    return tuple(sorted(name for name in found if name not in kept))


def parse_weight_map(path: Path, text: bytes, suffix: str) -> dict[str, str]:
    """{tensor: file} as the index `path` tells it; the files are plain names."""
    table = parse_json(text, path, "content").get("weight_map")
    if not isinstance(table, dict) or not table:
        _refuse(path, "has no weight_map of tensor names to file names")
    for key, value in table.items():
        if reason := bad_name(key):
            _refuse(path, f"the tensor name {shown(key)} {reason}")
        if not isinstance(value, str) or not value.endswith(suffix) or not is_plain_name(value):
            _refuse(path, f"{key!r} is said to be in {shown(value)}, which is not a plain {suffix} file name")
    return table


def weight_map(folder: Path, index: str, text: bytes, suffix: str) -> dict[str, str]:
    """{tensor: file} as an index tells it; the files are plain names, inside the folder, and all there."""
    path = folder / index
    table = parse_weight_map(path, text, suffix)
    names = sorted(set(table.values()))
    missing = [name for name in names if not os.path.lexists(folder / name)]
    if missing:
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        some = ", ".join(missing[:MOST_NAMED]) + more
        _refuse(path, f"{len(missing)} of its {len(names)} files are missing: {some}")
    for name in names:
        _inside(folder, name, path, table)
    return table


def check_index(
    folder: Path, index: str, table: Mapping[str, str], held: Mapping[str, Collection[str]]
) -> None:
    """Each file must hold just the tensors that the index tells; `held` are the names in every file."""
    for file, tensors in held.items():
        for name in tensors:
            if table.get(name) != file:
                where = f"says that it is in {table[name]!r}" if name in table else "does not list it"
                _refuse(folder / file, f"holds {name!r}, but {index} {where}")
    absent = [name for name, file in table.items() if name not in held[file]]
    if absent:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        first = ", ".join(f"{name!r} (said to be in {table[name]})" for name in absent[:3])
        _refuse(folder / index, f"tensors that no file holds: {first}{more}")


def is_plain_name(name: str) -> bool:
    """Whether a name is one of a file in this very folder, without control characters, and is Unicode."""
    odd = any(c in "/\\" or ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000 for c in name)
    return name not in ("", ".", "..") and not odd and len(os.fsencode(name)) <= LONGEST_FILE_NAME


def _inside(
    folder: Path, name: str, index: Path | None = None, table: Mapping[str, str] | None = None
) -> Path:
    """The path of a file of the folder; a link that leads out of the folder is refused."""
    real, home = Path(os.path.realpath(folder / name)), Path(os.path.realpath(folder))
    allowed = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(real.is_relative_to(place) for place in allowed):
        key = next((key for key, value in (table or {}).items() if value == name), None)
        says = f"{key!r} is said to be in {name!r}, a link" if key else f"{name!r} is a link"
        _refuse(index or folder, f"{says} to {real}, outside the folder")
    return folder / name


def _others(folder: Path) -> str:
    """What a folder without safetensors holds instead, for the message."""
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pth", ".pt"))
    return f"found {', '.join(pickled[:4])}" if pickled else "found none"


def _refuse(path: Path, fault: str) -> NoReturn:
    raise CheckpointError(f"{path}: {fault}")
