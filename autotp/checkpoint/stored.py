"""Where a rank finds each tensor: in an unsharded checkpoint, its own rank folder, or those of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotp.checkpoint.assembled import Assembled, assembled, parts_of_layout, under_the_models_names
from autotp.checkpoint.folder import open_folder
from autotp.checkpoint.formats import other_format
from autotp.checkpoint.manifest import Manifest
from autotp.checkpoint.output import Output, rank_folder
from autotp.checkpoint.ranks import Ranks, checked_header
from autotp.diagnostic import CheckpointError
from autotp.header import Entry
from autotp.placement import Shard
from autotp.slicing import Rows

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Piece", "Stored", "as_the_model_names_them", "in_checkpoint", "in_own_folder", "in_rank_folders"]

SETTINGS = ("config.json", "generation_config.json")  # what a load reads beside the weights


@dataclass(frozen=True)
class Piece:
    """What one file holds of a tensor: from which byte on, and which rows of it."""

    path: Path
    start: int
    rows: Rows


@dataclass(frozen=True)
class Stored:
    """One tensor of the checkpoint: its file, where this rank finds it there, and its shape in whole.

    With `own` the file has this rank's part, cut as `shard` and with the digest told. Where another number of
    ranks wrote it, `pieces` are all their parts. `load` gives the whole of it where it has to be unpickled.
    What is `made` of several tensors has `parts`, by their names.
    """

    path: Path
    entry: Entry
    shape: tuple[int, ...]
    own: bool = False
    shard: Shard | None = None
    digest: str = ""
    kind: str = "none"
    pieces: tuple[Piece, ...] = ()
    load: Callable[[], torch.Tensor] | None = None
    made: Assembled | None = None
    parts: tuple[tuple[Stored, ...], ...] = ()

    def cuts(self, layout: Shard | None) -> list[Shard | None] | None:
        """How each of its parts is cut for a layout of the whole (assembled.parts_of_layout)."""
        assert self.made is not None, "only what is made of parts has them"
        shapes = {one.entry.name: one.shape for part in self.parts for one in part}
        return parts_of_layout(layout, self.made, shapes)

    def is_cut(self, layout: Shard | None) -> bool:
        """Whether what the files hold can be read as `layout`: a rank's own part is cut as it is."""
        if self.made is None:
            return not self.own or self.shard == layout
        cuts = self.cuts(layout)
        return cuts is not None and all(
            one.is_cut(cut) for part, cut in zip(self.parts, cuts, strict=True) for one in part
        )


def as_the_model_names_them(model: nn.Module, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The same tensors, those that transformers stores otherwise than the model has them put together."""
    entries = {name: replace(one.entry, shape=one.shape) for name, one in stored.items()}
    view, made = under_the_models_names(entries, assembled(model, stored))
    found = {name: stored[name] for name in view if name in stored}
    for name, one in made.items():
        if not one.stacked and len(one.parts) == 1:
            found[name] = stored[one.parts[0][0]]  # under another name, and nothing else
            continue
        parts = tuple(tuple(stored[spelled] for spelled in part) for part in one.parts)
        first = parts[0][0]
        found[name] = Stored(first.path, view[name], view[name].shape, first.own, made=one, parts=parts)
    return found


def in_checkpoint(
    home: Path, plan: Any, biases: str = "equal"
) -> tuple[dict[str, Stored], dict[str, Any], tuple[str, ...]]:
    """The tensors of an unsharded checkpoint, in any format that `convert` reads, its config, and what that
    was given that no file tells."""
    other = other_format(home, plan, biases)
    if other is not None:
        load = other.load()
        tensors = other.folder.tensors()
        return (
            {
                name: Stored(file.path, entry, entry.shape, load=lambda name=name: load(name))  # type: ignore[misc]
                for name, (file, entry) in tensors.items()
            },
            dict(other.folder.config),
            getattr(other, "assumed", ()),
        )
    folder = open_folder(home)
    return (
        {name: Stored(file.path, entry, entry.shape) for name, (file, entry) in folder.tensors().items()},
        dict(folder.config),
        (),
    )


def in_own_folder(folder: Path, manifest: Manifest, rank: int) -> dict[str, Stored]:
    """The tensors of this rank's own folder, which is checked against the manifest, its config.json too."""
    home = rank_folder(folder, rank, manifest.tp)
    for fault in (*manifest.changed_companions(home), *manifest.unlisted(home, SETTINGS)):
        raise CheckpointError(fault)
    stored, output = {}, Output(home, manifest.layouts, rank, manifest.tp)
    for file in manifest.files:
        header = checked_header(output.header(file))
        for name, entry in file.tensors.items():
            digests, shard = manifest.digests[name], manifest.layouts.get(name)
            digest = digests.parts[rank] if digests.parts else digests.whole
            local = header.tensors[name]
            stored[name] = Stored(header.path, local, entry.shape, True, shard, digest, manifest.digest)
    return stored


def in_rank_folders(ranks: Ranks, rank: int) -> dict[str, Stored]:
    """The tensors of the folders of another number of ranks; what is whole, from any one of them."""
    ranks.check_companions(SETTINGS)
    stored = {}
    for file in ranks.manifest.files:
        headers = ranks.headers[file.path.name]
        for name, entry in file.tensors.items():
            pieces = tuple(
                Piece(header.path, header.tensors[name].start, output.rows(entry))
                for header, output in zip(headers, ranks.outputs, strict=True)
            )
            if name not in ranks.manifest.layouts:
                pieces = (pieces[rank % len(pieces)],)
            stored[name] = Stored(pieces[0].path, entry, entry.shape, pieces=pieces)
    return stored
