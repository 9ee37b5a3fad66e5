"""The header of a .safetensors file, read with json and struct alone, and trusted only when checked.

The format (https://github.com/safetensors/safetensors): eight bytes, the little-endian length n; n bytes
of JSON, {name: {dtype, shape, data_offsets: [start, stop]}}, padded with spaces; then the data, which the
offsets cover without gap or overlap. Beyond what the safetensors library refuses, this reader refuses
duplicate names, names that could be paths out of a folder or hide control characters, data that is not
aligned to its item size, and anything that is not a regular file.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from autotp.diagnostic import CheckpointError

__all__ = [
    "BITS", "Entry", "Header", "bad_name", "encode_header", "parse_header", "parse_json", "read_header",
    "shown",
]  # fmt: skip

BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8}
BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
BITS |= {"I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32}
BITS |= {"F64": 64, "I64": 64, "U64": 64, "C64": 64}
LARGEST_HEADER = 100_000_000  # bytes, the library's own limit
LONGEST_NAME = 1000  # characters of a tensor's name: messages hold it
MOST_DIMS = 64  # numpy's and torch's limit
LFS = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: name, dtype (safetensors' name), shape, and its bytes start to stop."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def itemsize(self) -> float:
        """Bytes of one element; below one for sub-byte dtypes."""
        return BITS[self.dtype] / 8

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class Header:
    """A checked header: the tensors in the order of their data, and the raw bytes (length and JSON)."""

    path: Path
    size: int
    raw: bytes
    tensors: Mapping[str, Entry]
    metadata: Mapping[str, str]
    mtime_ns: int = 0


def read_header(path: str | Path) -> Header:
    """Read and check the header of a .safetensors file; the data itself is not read.

    Raises CheckpointError, which names the file, for anything that is not a whole, sound file.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before opening: opening a FIFO waits for a writer
            _refuse(path, "is not a regular file")
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                _refuse(path, "is not a regular file")
            head = file.read(8)
            if head == LFS[:8]:
                _refuse_pointer(path, head + file.read(1000))
            if len(head) < 8:
                _refuse(path, f"is {status.st_size} bytes long; a .safetensors file has at least 8")
            (length,) = struct.unpack("<Q", head)
            if length > LARGEST_HEADER and head.decode("latin-1").replace("\n", " ").isprintable():
                _refuse(path, f"begins with the text {head.decode('latin-1')!r}: it is no .safetensors file")
            if length > LARGEST_HEADER:
                _refuse(
                    path, f"says that its header is {length} bytes long; at most {LARGEST_HEADER} are read"
                )
            if length + 8 > status.st_size:
                _refuse(
                    path, f"is truncated: {status.st_size} bytes, and its header alone takes {length + 8}"
                )
            raw = head + file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_header(raw, size=status.st_size, path=path, mtime_ns=status.st_mtime_ns)


def parse_header(raw: bytes, *, size: int, path: Path, mtime_ns: int = 0) -> Header:
    """Check the raw header (length and JSON) of a file of `size` bytes; `path` is for messages.

    Raises CheckpointError as `read_header` does.
    """
    if raw[8:9] != b"{":
        _refuse(path, "its header does not begin with '{': is it a .safetensors file?")
    table = parse_json(raw[8:], path, "header")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _refuse(path, "its __metadata__ is not a table of strings")
    entries = [_entry(path, name, value, size, len(raw)) for name, value in table.items()]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    end = len(raw)
    for entry in entries:
        if entry.start != end:
            fault = "overlaps the tensor before it" if entry.start < end else "leaves a gap before it"
            at = f"starts at byte {entry.start - len(raw)} of the data, expected {end - len(raw)}"
            _refuse(path, f"tensor {entry.name!r} {fault}: it {at}")
        end = entry.stop
    if end != size:
        fault = "is truncated" if size < end else "has bytes that belong to no tensor"
        _refuse(path, f"{fault}: {size} bytes, and its header accounts for {end}")
    return Header(path, size, raw, {entry.name: entry for entry in entries}, metadata, mtime_ns)


def encode_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The raw header for tensors of {name: (dtype, shape, bytes)}, and where each one's data starts.

    Data is laid out from the largest item size to the smallest, in the given order within one, so that
    every tensor is aligned. The same input gives the same bytes.
    """
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets, end = {}, 0
    for name, (dtype, shape, nbytes) in sorted(tensors.items(), key=lambda item: -BITS[item[1][0]]):
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        offsets[name] = end
        end += nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    raw = struct.pack("<Q", len(text)) + text
    return raw, {name: start + len(raw) for name, start in offsets.items()}


def parse_json(text: bytes, path: Path, what: str) -> dict[str, Any]:
    """A JSON object from bytes that nobody vouches for; raises CheckpointError naming `path`.

    Refused beyond what json refuses: a key twice in one object, NaN and infinities, broken Unicode.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for key, value in pairs:
            if key in table:
                raise ValueError(f"{shown(key)} appears twice")
            table[key] = value
        return table

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        table = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
        if b"\\ud" in text.lower() and not _encodable(table):
            raise ValueError("half a surrogate pair in a string")
    except (ValueError, RecursionError) as error:
        reason = (
            "is nested too deeply" if isinstance(error, RecursionError) else f"is not sound JSON: {error}"
        )
        raise CheckpointError(f"{path}: its {what} {reason}") from error
    if not isinstance(table, dict):
        _refuse(path, f"its {what} is not a JSON object")
    return table


def _encodable(table: object) -> bool:
    """Whether all its strings are Unicode: JSON can spell half a surrogate pair, which no file name can."""
    try:
        json.dumps(table, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _entry(path: Path, name: str, value: object, size: int, begin: int) -> Entry:
    """One checked line of the header; offsets become positions in the file."""
    reason = bad_name(name)
    if reason:
        _refuse(path, f"the tensor name {shown(name)} {reason}")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        _refuse(path, f"tensor {name!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        _refuse(path, f"tensor {name!r} has the unknown dtype {dtype!r}; known are {', '.join(sorted(BITS))}")
    if not _counts(shape) or len(shape) > MOST_DIMS:
        _refuse(path, f"tensor {name!r} has an impossible shape (at most {MOST_DIMS} dims, each from 0)")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse(path, f"tensor {name!r} has impossible data_offsets")
    elements = 0 if 0 in shape else 1
    for length in shape if elements else ():
        elements *= length
        if elements > 8 * size:
            _refuse(path, f"tensor {name!r} of shape {shape} is larger than the file, {size} bytes")
    bits = math.prod((elements, BITS[dtype]))
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        expected = f"{dtype} {shape} takes {bits / 8:g} bytes"
        _refuse(path, f"tensor {name!r}: {expected}, its data_offsets span {offsets[1] - offsets[0]}")
    start = begin + offsets[0]
    if bits and start % max(1, BITS[dtype] // 8):
        _refuse(path, f"tensor {name!r} is not aligned: {dtype} data at byte {start}; save the file again")
    return Entry(name, dtype, tuple(shape), start, begin + offsets[1])


def _counts(value: object) -> bool:
    """Whether a JSON value is a list of whole numbers that fit 63 bits."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def shown(value: object) -> str:
    """A value of a file, for a message: a hostile one may be megabytes long."""
    text = repr(value)
    return text if len(text) <= LONGEST_NAME else f"{text[:60]}…"


def bad_name(name: str) -> str:
    """Why a tensor name is refused; empty when it is fine."""
    if not name:
        return "is empty"
    if len(name) > LONGEST_NAME:
        return f"is {len(name)} characters long, and at most {LONGEST_NAME} are taken"
    if any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in name):
        return "holds a control character"
    if name[0] in "/\\" or ".." in name.replace("\\", "/").split("/"):
        return "is a path that could leave a folder"
    return ""


def _refuse(path: Path, fault: str) -> NoReturn:
    raise CheckpointError(f"{path}: {fault}")


def _refuse_pointer(path: Path, text: bytes) -> NoReturn:
    size = [line[5:].decode("ascii", "replace") for line in text.split(b"\n") if line.startswith(b"size ")]
    says = f" for a file of {size[0]} bytes" if size else ""
    _refuse(path, f"is a git-lfs pointer{says}, not the file itself; run `git lfs pull`")
