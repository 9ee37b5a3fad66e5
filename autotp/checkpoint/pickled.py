"""Checkpoints that torch.save wrote (pytorch_model.bin, .pth): read as plain tensors, never run as code.

A pickle can run any code when it is loaded; torch's `weights_only` loader builds tensors and containers
alone (https://docs.pytorch.org/docs/stable/notes/serialization.html). What it refuses is refused here. To
everything else such a file looks like the .safetensors file that it will be after a conversion.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autotp.checkpoint.digest import digest_of
from autotp.checkpoint.fit import NAMES
from autotp.checkpoint.folder import (
    Folder,
    check_index,
    companions_of,
    read_config,
    read_text,
    regular_file,
    weight_map,
)
from autotp.checkpoint.inventory import describe_tensors
from autotp.checkpoint.manifest import Digests
from autotp.checkpoint.nested import weights_of
from autotp.checkpoint.read import Memory
from autotp.checkpoint.supply import Ties
from autotp.checkpoint.unreadable import unreadable
from autotp.diagnostic import CheckpointError
from autotp.header import Entry, Header, encode_header, parse_header

__all__ = ["Pickled", "holds_pickles", "in_memory", "load_pickle", "load_tensors", "plain"]

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"


def holds_pickles(path: Path) -> bool:
    """Whether a folder has no .safetensors but a pytorch_model.bin or its index, or a file is such a one."""
    if path.is_file():
        return path.suffix in (".bin", ".pt", ".pth")
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").exists():
        return False
    return (path / SINGLE).exists() or (path / INDEX).exists()


class Pickled:
    """A `Supply` (supply.py) of the tensors in pickled files; `folder` shows them as .safetensors files."""

    def __init__(self, path: Path) -> None:
        home = path if path.is_dir() else path.parent
        table: dict[str, str] = {}
        if path.is_file():
            names = [path.name]
        elif (path / INDEX).exists():
            table = weight_map(path, INDEX, read_text(regular_file(path, INDEX)), ".bin")
            names = sorted(set(table.values()))
        else:
            names = [SINGLE]
        self.home = home
        self.sources: dict[str, Path] = {}
        files, held = [], {}
        for name in names:
            source = path if path.is_file() else regular_file(home, name)
            tensors = load_tensors(source)
            file = _as_header(source, tensors)
            before = self.sources.setdefault(file.path.name, source)
            if before != source:
                raise CheckpointError(
                    f"{home}: {before.name} and {name} would both become {file.path.name}; rename one, in "
                    f"{INDEX} too"
                )
            files.append(file)
            held[name] = tensors
        index = None
        if table:
            check_index(home, INDEX, table, held)
            index = _index({name: file.path.name for file in files for name in file.tensors}, files)
        config = read_config(home)
        companions = companions_of(home) if path.is_dir() else ("config.json",) if config else ()
        self.folder = Folder(home, tuple(files), config, index, companions)
        entries = [entry for file in files for entry in file.tensors.values()]
        self.ties = Ties(home, describe_tensors(entries, config).aliases)
        self.watched = self.ties.names

    def load(self) -> Callable[[str], torch.Tensor]:
        """The tensors, mapped from their files."""
        return {n: t for source in self.sources.values() for n, t in load_tensors(source).items()}.__getitem__

    def identity(self) -> list[list[Any]]:
        """See Supply."""
        known = [
            [source.name, status.st_size, status.st_mtime_ns, ""]
            for source in (*self.sources.values(), *self.companions().values())
            for status in [source.stat()]
        ]
        return [*known, *([file.path.name, 0, 0, digest_of(file.raw, "xxh3")] for file in self.folder.files)]

    def open(self, file: Header, stack: ExitStack) -> Callable[[Entry], Memory]:
        """See Supply."""
        tensors = load_tensors(self.sources[file.path.name])
        return lambda entry: in_memory(tensors[entry.name])

    def check(self, file: Header) -> None:
        """Raise CheckpointError when the file has changed since it was opened."""
        source = self.sources[file.path.name]
        if source.stat().st_mtime_ns != file.mtime_ns:
            raise CheckpointError(f"{source}: changed while it was read; start again")

    def check_digests(self, file: Header, digests: Mapping[str, Digests]) -> None:
        """Tied tensors that are both in the checkpoint must be equal."""
        self.ties.check(digests)

    def differs(self, file: Header, entry: Entry, rank: int) -> CheckpointError:
        """See Supply."""
        raise AssertionError("a pickled checkpoint has one copy of each tensor")

    def companions(self) -> Mapping[str, Path]:
        """The other files, by relative name."""
        return {name: self.home / name for name in self.folder.companions}


def in_memory(tensor: torch.Tensor) -> Memory:
    """A tensor as a source of blocks; its memory is used as it is where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return Memory(flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8))


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file that torch.save wrote, by name; the file is mapped where its format allows it.

    A state_dict may stand in a dict of its own, under "state_dict", "model" or "module". Raises
    CheckpointError for anything but plain tensors: nothing that a file asks to run is run.
    """
    found = weights_of(path, load_pickle(path))
    if not isinstance(found, Mapping) or not found:
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, not a state_dict of tensors")
    return {name: plain(path, name, tensor) for name, tensor in found.items()}


def load_pickle(path: Path, harmless: Sequence[Any] = ()) -> Any:
    """What torch.save wrote, if it is of tensors, containers and the `harmless` classes alone."""
    try:
        with torch.serialization.safe_globals(list(harmless)):
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # the format before torch 1.6 cannot be mapped
                return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise unreadable(path, error) from error


def plain(path: Path, name: object, tensor: object) -> torch.Tensor:
    """A strided tensor with its data, under a name; raises CheckpointError for anything else.

    A view that is conjugated, or negated, only when it is read is written out.
    """
    plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.dtype in NAMES
    if not isinstance(name, str) or not plain or not isinstance(tensor, torch.Tensor) or tensor.is_quantized:
        kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise CheckpointError(f"{path}: {name!r} is {kind}, not a plain tensor under a name")
    if tensor.is_meta:
        raise CheckpointError(f"{path}: {name!r} of shape {list(tensor.shape)} has no data (device meta)")
    if math.prod(tensor.shape) > 8 * max(1, tensor.untyped_storage().nbytes()):
        raise CheckpointError(f"{path}: {name!r} of shape {list(tensor.shape)} is larger than its data")
    return tensor.resolve_conj().resolve_neg()


def _as_header(path: Path, tensors: Mapping[str, torch.Tensor]) -> Header:
    """The header of the .safetensors file that holds these tensors."""
    described = {
        name: (NAMES[t.dtype], tuple(t.shape), t.numel() * t.element_size()) for name, t in tensors.items()
    }
    raw, _ = encode_header(described, {"format": "pt"})
    size = len(raw) + sum(nbytes for _, _, nbytes in described.values())
    name = path.with_suffix(".safetensors").name.replace("pytorch_model", "model")
    return parse_header(raw, size=size, path=path.with_name(name), mtime_ns=path.stat().st_mtime_ns)


def _index(weights: Mapping[str, str], files: list[Header]) -> bytes:
    total = sum(entry.nbytes for file in files for entry in file.tensors.values())
    table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()
