"""The files that other trainers write for each rank: which there are, and the tensors in them.

    mp_rank_00/model_optim_rng.pt, …     Megatron-LM (https://github.com/NVIDIA/Megatron-LM)
    mp_rank_00_model_states.pt, …        DeepSpeed (https://github.com/deepspeedai/DeepSpeed)
    rank_0/model.safetensors, …          anyone's: rank_0, rank0, tp_rank_0; .safetensors, .pt, .pth, .bin

Nested dicts are joined by dots. Pickles are read as plain data, with numpy's arrays and argparse's Namespace,
which such files hold beside the tensors.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import torch

from autotp.checkpoint.fit import DTYPES
from autotp.checkpoint.folder import companions_of, regular_file
from autotp.checkpoint.nested import joined, weights_of
from autotp.checkpoint.pickled import load_pickle, plain
from autotp.checkpoint.rankcount import told_counts
from autotp.checkpoint.read import Part, open_to_read, read_exactly
from autotp.diagnostic import CheckpointError
from autotp.header import Entry, read_header
from autotp.slicing import rows

__all__ = ["files_beside", "files_of_ranks", "holds_rank_files", "open_rank"]

RANK = re.compile(r"(?:mp_|tp_)?rank[-_]?(\d+)(?:_model_states)?(\.\w+)?")
STAGES = re.compile(r"(?:mp|tp)_rank_\d+_(?:pp_rank_)?\d+")
SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")
PREFERRED = ("model_optim_rng.pt", "model_rng.pt", "model.safetensors", "pytorch_model.bin")
# What checkpoints hold beside tensors, and what only sets its own attributes when it is built.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
HARMLESS = [
    argparse.Namespace, np.ndarray, np.dtype, *(type(np.dtype(kind)) for kind in "bBhHiIlLqQefd?"),
    *((_RECONSTRUCT, f"numpy.{core}.multiarray._reconstruct") for core in ("_core", "core")),
]  # fmt: skip


def holds_rank_files(path: Path) -> bool:
    """Whether a folder holds files or folders of other trainers' ranks, or of their pipeline stages."""
    return path.is_dir() and any(_rank_of(e) is not None or STAGES.fullmatch(e.name) for e in path.iterdir())


def _rank_of(entry: Path) -> int | None:
    """The rank whose file or folder an entry is."""
    found = RANK.fullmatch(entry.name)
    if found is None or (found[2] or "") not in ("", *SUFFIXES) or bool(found[2]) == entry.is_dir():
        return None
    return int(found[1])


def files_of_ranks(path: Path) -> list[Path]:
    """The file of each rank, in the order of the numbers; a gap or a rank twice is named."""
    found: dict[int, Path] = {}
    for entry in sorted(path.iterdir()):
        if STAGES.fullmatch(entry.name):
            _refuse(
                path, f"{entry.name} is one of several pipeline stages; only tensor-parallel parts are read"
            )
        rank = _rank_of(entry)
        if rank is not None and rank in found:
            _refuse(path, f"{found[rank].name} and {entry.name} are the same rank")
        if rank is not None:
            found[rank] = entry
    missing = [str(rank) for rank in range(max(found) + 1) if rank not in found]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        _refuse(path, f"ranks are missing: {', '.join(missing[:8])}{more}")
    return [_weights(path, found[rank]) for rank in sorted(found)]


def _weights(path: Path, entry: Path) -> Path:
    """The weight file of a rank: the entry, or the one in its folder."""
    if not entry.is_dir():
        return regular_file(path, entry.name)
    inside = sorted(file.name for file in entry.iterdir() if file.suffix in SUFFIXES)
    chosen = [name for name in PREFERRED if name in inside] or inside
    if len(chosen) != 1:
        _refuse(entry, f"one file of weights is looked for, found {', '.join(inside[:4]) or 'none'}")
    return regular_file(path, f"{entry.name}/{chosen[0]}")


class RankFile(NamedTuple):
    """One rank's file: its tensors by dotted name, mapped or without memory, how one is had, and what the
    file says of the number of ranks."""

    tensors: dict[str, torch.Tensor]
    read: Callable[[str], torch.Tensor]
    told: dict[str, int]


def open_rank(file: Path) -> RankFile:
    """Open one rank's file."""
    if file.suffix == ".safetensors":
        entries = read_header(file).tensors
        unknown = next((name for name, entry in entries.items() if entry.dtype not in DTYPES), None)
        if unknown is not None:
            _refuse(file, f"{unknown!r} is {entries[unknown].dtype}, which torch has no dtype for")
        shapes = {
            name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
            for name, entry in entries.items()
        }
        return RankFile(shapes, lambda name: _read(file, entries[name]), {})
    content = load_pickle(file, HARMLESS)
    weights = weights_of(file, content)
    tensors = joined(file, weights) if isinstance(weights, Mapping) else {}
    if not any(isinstance(value, torch.Tensor) for value in tensors.values()):
        _refuse(file, "holds no weights, by themselves or under model, module or state_dict")
    tensors = {name: plain(file, name, tensor) for name, tensor in tensors.items()}
    return RankFile(tensors, tensors.__getitem__, told_counts(content))


def _read(file: Path, entry: Entry) -> torch.Tensor:
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    fd = open_to_read(file)
    try:
        part = Part(fd, file, entry.start, rows(entry.shape, entry.itemsize, None, 0))
        if entry.nbytes:
            read_exactly(part, tensor.reshape(-1).view(torch.uint8).numpy(), 0)
    finally:
        os.close(fd)
    return tensor


def files_beside(path: Path) -> tuple[str, ...]:
    """The other files: nothing of a rank's folder."""
    return tuple(name for name in companions_of(path) if not RANK.fullmatch(name.split("/")[0]))


def _refuse(path: Path, fault: str) -> NoReturn:
    raise CheckpointError(f"{path}: {fault}")
