"""The manifest of a converted folder, `autotp.json`: all that is needed to load, check and merge it.

    out/autotp.json                          plan, tp, proof; of each source file its name, size and header
                                             text; of each tensor its layout and digests
    out/rank-0-of-2/model.safetensors        rank 0's slices: the source's file names, tensor names, dtypes
    out/rank-0-of-2/config.json, …           what came with the source
    out/rank-1-of-2/…

It holds no times and no paths of the machine: two conversions of the same checkpoint are identical. The
header text is the source's own, byte for byte, so that a merged file is too.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NoReturn

from pydantic import ValidationError

from autotp.checkpoint.digest import digest_of
from autotp.checkpoint.folder import (
    INDEX,
    JOURNAL,
    MANIFEST,
    WEIGHTS,
    is_plain_name,
    parse_weight_map,
    read_config,
    read_text,
    regular_file,
)
from autotp.checkpoint.manifest_text import FileText, ManifestText, layout_of, layout_text
from autotp.checkpoint.output import rank_folder
from autotp.checkpoint.unfinished import absent
from autotp.diagnostic import CheckpointError, PlanError
from autotp.header import Header, parse_header, parse_json
from autotp.placement import Shard
from autotp.plan import Plan, as_plan

__all__ = ["PUT_BACK", "Digests", "Manifest", "load_manifest"]

PUT_BACK = "put back what was there, or convert again"


@dataclass(frozen=True)
class Digests:
    """The digest of a tensor's bytes in the source, and those of the ranks' parts where it is cut."""

    whole: str
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """What was converted and how.

    `proof` is "layouts" when the layouts were proven on the model, "none" when only names and shapes were
    matched. `digest` is the kind of the digests. `files` are the source's headers; `layouts` and `digests`
    go by tensor name. `companions` are the digests of the other files. `config` is the ranks' config.json.
    """

    tp: int
    plan: Plan
    proof: Literal["layouts", "none"]
    digest: Literal["xxh3", "sha256", "none"]
    files: tuple[Header, ...]
    layouts: Mapping[str, Shard]
    digests: Mapping[str, Digests] = field(default_factory=dict)
    companions: Mapping[str, str] = field(default_factory=dict)
    index: bytes | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def changed_companions(self, home: Path) -> Iterator[str]:
        """What is wrong with the files that travelled along to the folder `home`, a line each."""
        for name, digest in self.companions.items():
            try:
                path = regular_file(home, name)
                if digest_of(path.read_bytes(), self.digest) != digest:
                    says = f"is not what was written (its digest differs from {MANIFEST}'s)"
                    yield f"{path}: {says}; {PUT_BACK}"
            except CheckpointError as error:
                yield str(error)

    def unlisted(self, home: Path, among: Collection[str] | None = None) -> Iterator[str]:
        """Files of the folder `home`, `among` these names, that were not written there, a line each.

        Hidden folders are left alone.
        """
        known = {*self.companions, *(file.path.name for file in self.files)}
        known |= set() if self.index is None else {INDEX}
        for base, folders, files in os.walk(home):
            folders[:] = [name for name in folders if name[0] != "."]
            links = [name for name in folders if os.path.islink(os.path.join(base, name))]
            for name in sorted((*files, *links)):
                relative = os.path.relpath(os.path.join(base, name), home)
                if relative not in known and (among is None or relative in among):
                    says = f"was not written there: {MANIFEST} does not list it; remove it"
                    yield f"{home}: {relative!r} {says}"

    def dumps(self) -> str:
        """The text of the manifest; the same decisions give the same text."""
        tensors: dict[str, Any] = {}
        for file in self.files:
            for name in file.tensors:
                digests = self.digests.get(name, Digests("", ("",) * self.tp))
                tensors[name] = {"digest": digests.whole}
                if name in self.layouts:
                    tensors[name] |= {
                        "layout": layout_text(self.layouts[name]),
                        "parts": list(digests.parts),
                    }
        table = {
            "format": "autotp",
            "version": 1,
            "tp": self.tp,
            "proof": self.proof,
            "digest": self.digest,
            "plan": self.plan.to_data(),
            "files": [
                {"name": file.path.name, "size": file.size, "header": file.raw[8:].decode("utf-8")}
                for file in self.files
            ],
            "index": None if self.index is None else self.index.decode("utf-8"),
            "companions": dict(self.companions),
            "tensors": tensors,
        }
        return json.dumps(table, indent=1, ensure_ascii=False) + "\n"


def load_manifest(folder: str | Path) -> Manifest:
    """Read and check the manifest of a converted folder.

    Raises CheckpointError naming the file and the place in it.
    """
    path = Path(folder) / MANIFEST
    if not Path(folder).exists():
        raise CheckpointError(absent(Path(folder)))
    if not path.is_file():
        _refuse(Path(folder), f"holds no {MANIFEST}: it is not a folder that autotp converted")
    table = parse_json(read_text(path), path, "content")
    if table.get("format") != "autotp" or table.get("version") != 1:
        _refuse(path, "is not a manifest of autotp in version 1")
    try:
        text = ManifestText.model_validate(table)
        plan = as_plan(text.plan)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        _refuse(path, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
    except PlanError as error:
        _refuse(path, f"its plan is not sound: {error.diagnostics[0].message}")
    files = tuple(_header(path, file) for file in text.files)
    layouts, digests = _tensors(path, text, files)
    _check_index(path, text.index, files)
    for name in text.companions:
        if not _is_relative_name(name):
            _refuse(path, f"{name!r} is not the name of a file inside the folder")
        if name.endswith(WEIGHTS):
            _refuse(path, f"{name!r} is said to have travelled along, and may hold weights: none such does")
    return Manifest(
        tp=text.tp,
        plan=plan,
        proof=text.proof,
        digest=text.digest,
        files=files,
        layouts=layouts,
        digests=digests,
        companions=text.companions,
        index=None if text.index is None else text.index.encode("utf-8"),
        config=read_config(rank_folder(Path(folder), 0, text.tp)),
    )


def _header(path: Path, file: FileText) -> Header:
    """A source file's header out of its stored text."""
    if not is_plain_name(file.name) or not file.name.endswith(".safetensors"):
        _refuse(path, f"{file.name!r} is not a plain .safetensors file name")
    text = file.header.encode("utf-8", "surrogatepass")
    return parse_header(
        struct.pack("<Q", len(text)) + text, size=file.size, path=path.parent / "(source)" / file.name
    )


def _tensors(
    path: Path, text: ManifestText, files: tuple[Header, ...]
) -> tuple[dict[str, Shard], dict[str, Digests]]:
    """The layouts and digests by tensor, checked against the headers."""
    entries = {name: entry for file in files for name, entry in file.tensors.items()}
    names = [file.path.name for file in files]
    if len(entries) != sum(len(file.tensors) for file in files) or len(set(names)) != len(names):
        _refuse(path, "names a file or a tensor twice")
    if set(entries) != set(text.tensors):
        odd = min(set(entries) ^ set(text.tensors))
        _refuse(path, f"{odd!r} is not both in its files and in its tensors")
    layouts, digests = {}, {}
    for name, tensor in text.tensors.items():
        if tensor.layout is not None:
            shard = layout_of(path, name, tensor.layout, text.tp)
            shape = entries[name].shape
            if shard.dim >= len(shape) or not shard.fits(shape[shard.dim]):
                _refuse(path, f"tensor {name!r} of shape {list(shape)} cannot be cut as {shard}")
            if entries[name].itemsize < 1:
                _refuse(path, f"tensor {name!r} of {entries[name].dtype} cannot be cut")
            layouts[name] = shard
        if len(tensor.parts) != (0 if tensor.layout is None else text.tp):
            _refuse(path, f"tensor {name!r} has {len(tensor.parts)} digests of parts")
        digests[name] = Digests(tensor.digest, tuple(tensor.parts))
    return layouts, digests


def _check_index(path: Path, index: str | None, files: tuple[Header, ...]) -> None:
    """The source's index, which `merge` writes again, must tell the files and tensors that were converted."""
    if index is None:
        if len(files) > 1:
            _refuse(path, f"has {len(files)} files and no index that tells which tensor is in which")
        return
    table = parse_weight_map(path.with_name(f"{path.name} (index)"), index.encode("utf-8"), ".safetensors")
    held = {file.path.name: file.tensors for file in files}
    for name, file in table.items():
        if name not in held.get(file, ()):
            _refuse(path, f"its index says that {name!r} is in {file!r}, which does not hold it")
    for file, tensors in held.items():
        absent = next((name for name in tensors if table.get(name) != file), None)
        if absent is not None:
            _refuse(path, f"its index does not say that {absent!r} is in {file!r}")


def _is_relative_name(name: str) -> bool:
    """Whether a name is one of a file in the folder or its sub-folders, and none of autotp's own."""
    path = PurePosixPath(name)
    parts = name.split("/")
    plain = all(map(is_plain_name, parts)) and not any(part[0] == "." for part in parts[:-1])
    ours = parts[-1] in (MANIFEST, JOURNAL)
    return plain and not ours and str(path) == name


def _refuse(path: Path, fault: str) -> NoReturn:
    raise CheckpointError(f"{path}: {fault}")
