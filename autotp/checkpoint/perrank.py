"""Other trainers' files of each rank, put together by a plan that says how they were cut.

The plan's patterns are for the names in these files. What no rule cuts must be equal in all of them. A
vocabulary that was padded to a rounder number loses the padding where config.json tells its size. The weights
alone are read; what was done is told in the header's metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from autotp.checkpoint.fit import NAMES
from autotp.checkpoint.folder import Folder, read_config
from autotp.checkpoint.inventory import OUTPUT_EMBEDDINGS, describe_tensors
from autotp.checkpoint.joined import Joined, as_single, check_equal
from autotp.checkpoint.rankcount import check_sizes, check_told
from autotp.checkpoint.rankfiles import files_beside, files_of_ranks, open_rank
from autotp.checkpoint.supply import Ties
from autotp.diagnostic import CheckpointError, PlanError, errors
from autotp.header import Entry
from autotp.match import match
from autotp.placement import Shard
from autotp.plan import Plan
from autotp.slicing import merge

__all__ = ["PerRank"]


class PerRank(Joined):
    """A `Supply` (supply.py) of the ranks' files; `folder` shows them as one unsharded file.

    `biases` tells what a row layer's bias is on each rank: "equal", the whole one, or "summed", a part of a
    sum. Raises PlanError for a plan that does not fit the names and shapes, and CheckpointError for ranks
    that are missing, tensors that do not fit together, and copies that differ, with the largest difference.
    """

    def __init__(self, path: Path, plan: Plan, *, biases: Literal["equal", "summed"] = "equal") -> None:
        self.path = path
        self.config = read_config(path)
        self.parts = files_of_ranks(path)
        opened = [open_rank(part) for part in self.parts]
        held = [part.tensors for part in opened]
        self.tp = len(held)
        sure = check_told(path, self.parts, [part.told for part in opened])
        first = held[0]
        for part, tensors in zip(self.parts, held, strict=True):
            odd = next(iter(sorted(set(first) ^ set(tensors))), None)
            if odd is not None:
                _refuse(part, f"tensor {odd!r} is not both in it and in rank 0's file")
        self.summed = frozenset[str]()
        dims = self._dims(plan, first)
        shapes = {name: self._shape(name, dims.get(name), held) for name in first}
        self.layouts = self._layouts(plan, shapes, first)
        for name, shard in self.layouts.items():
            for rank, tensors in enumerate(held):
                here, needed = list(tensors[name].shape), list(shard.local_shape(shapes[name], rank))
                if here != needed:
                    _refuse(self.parts[rank], f"tensor {name!r} is {here}; the plan gives this rank {needed}")
        self.notes = self._count_ranks(sure, plan, shapes, first)
        if biases == "summed":
            self.summed = self._row_biases(plan, shapes, first)
        self.kept = self._kept(plan, shapes, first)
        described = {
            name: (tensor.dtype, (self.kept[name], *shapes[name][1:]) if name in self.kept else shapes[name])
            for name, tensor in first.items()
        }
        file = as_single(path, described, {"format": "pt", **self._notes(shapes)})
        self.folder = Folder(path, (file,), self.config, companions=files_beside(path))
        self.ties = Ties(path, describe_tensors(file.tensors.values(), self.config).aliases)
        self.watched = self.ties.names

    def load(self) -> Callable[[str], torch.Tensor]:
        """See Joined."""
        readers = [open_rank(part).read for part in self.parts]
        return lambda name: self._whole(name, [read(name) for read in readers])

    def companions(self) -> Mapping[str, Path]:
        """The other files beside the ranks', by relative name."""
        return {name: self.path / name for name in self.folder.companions}

    def _whole(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """One tensor put together: merged by its cut, summed, or the one that all ranks hold."""
        shard = self.layouts.get(name)
        if shard is not None:
            try:
                whole: torch.Tensor = merge(parts, shard, check=True)
            except CheckpointError as error:
                raise CheckpointError(f"{self.path}: tensor {name!r}: {error}") from None
            return whole.narrow(0, 0, self.kept[name]) if name in self.kept else whole
        if name in self.summed:
            return torch.stack([part.double() for part in parts]).sum(0).to(parts[0].dtype)
        what = "" if name.rpartition(".")[2] != "bias" else '; if it is a part of a sum, say biases="summed"'
        check_equal(name, parts, self.parts, what)
        return parts[0]

    def _dims(self, plan: Plan, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The dim that each cut tensor was cut on: by the styles alone, heads and sections left aside."""
        plain = {
            key: rule
            if rule.style == "replicate"
            else rule.model_copy(update={"heads": None, "sections": None})
            for key, rule in plan.rules.items()
        }
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        found = match(plan.model_copy(update={"rules": plain}), self._inventory(shapes, tensors), 1)
        if errors(found.diagnostics):
            raise PlanError(found.diagnostics)
        return {name: shard.dim for name, shard in found.layouts.items() if name in tensors}

    def _layouts(
        self, plan: Plan, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, Shard]:
        """How the whole tensors were cut, heads and sections and all."""
        found = match(plan, self._inventory(shapes, tensors), self.tp)
        if errors(found.diagnostics):
            raise PlanError(found.diagnostics)
        return {name: shard for name, shard in found.layouts.items() if name in tensors}

    def _inventory(self, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor]) -> Any:
        entries = [Entry(n, NAMES[tensors[n].dtype], shape, 0, 0) for n, shape in shapes.items()]
        return describe_tensors(entries, self.config, name=self.path.name)

    def _shape(
        self, name: str, dim: int | None, held: Sequence[Mapping[str, torch.Tensor]]
    ) -> tuple[int, ...]:
        """The whole shape of a tensor: what is cut adds up."""
        shape, dtype = list(held[0][name].shape), held[0][name].dtype
        for rank, tensors in enumerate(held):
            here = list(tensors[name].shape)
            apart = [
                at
                for at, pair in enumerate(zip(here, shape, strict=False))
                if pair[0] != pair[1] and at != dim
            ]
            if tensors[name].dtype != dtype or len(here) != len(shape) or apart:
                says = f"is {tensors[name].dtype} {here}, and {dtype} {shape} in rank 0's file"
                _refuse(self.parts[rank], f"tensor {name!r} {says}: they do not fit together")
        if dim is not None:
            shape[dim] = sum(tensors[name].shape[dim] for tensors in held)
        return tuple(shape)

    def _count_ranks(
        self,
        sure: bool,
        plan: Plan,
        shapes: Mapping[str, tuple[int, ...]],
        tensors: Mapping[str, torch.Tensor],
    ) -> tuple[str, ...]:
        """What is to be said of the number of ranks where neither the files nor config.json tell it."""
        placed = match(plan, self._inventory(shapes, tensors), self.tp).placed.values()
        rows = {shapes[n][0] for one in placed if one.style == "vocab" for n in one.layouts if n in shapes}
        cut = {shapes[name][shard.dim] for name, shard in self.layouts.items()} - rows
        if check_sizes(self.path, self.parts, self.config, cut, rows) or sure:
            return ()
        found = f"{self.tp} rank{'s' * (self.tp > 1)} found"
        return (f"{found}; nothing in the files says how many there were",)

    def _row_biases(
        self, plan: Plan, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor]
    ) -> frozenset[str]:
        found = match(plan, self._inventory(shapes, tensors), self.tp).placed.values()
        biases = {f"{placed.path}.bias" for placed in found if placed.style == "row"}
        return frozenset(biases & set(tensors))

    def _kept(
        self, plan: Plan, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, int]:
        """How many rows are kept of embeddings, and heads by their names, with a padded vocabulary."""
        size = self.config.get("vocab_size")
        placed = tuple(match(plan, self._inventory(shapes, tensors), self.tp).placed.values())
        padded = {shapes[n][0] for one in placed if one.style == "vocab" for n in one.layouts if n in shapes}
        if type(size) is not int or size < 1 or len(padded) != 1 or not size < max(padded):
            return {}
        tables = {name for one in placed if one.style == "vocab" for name in one.layouts}
        heads = (*OUTPUT_EMBEDDINGS, "output_layer")  # the last is Megatron's
        return {
            name: size
            for name, shard in self.layouts.items()
            if shard.dim == 0
            and shapes[name][0] in padded
            and (name in tables or name.rpartition(".")[0].rpartition(".")[2] in heads)
        }

    def _notes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
        """What was done, for the header's metadata."""
        notes = {"merged": f"from the files of {self.tp} ranks"}
        if self.summed:
            notes["biases"] = f"sums of {self.tp} parts: {', '.join(sorted(self.summed))}"
        if self.kept:
            told = (f"{name} had {shapes[name][0]} rows" for name in sorted(self.kept))
            notes["padding"] = f"removed: {', '.join(told)}"
        return notes


def _refuse(path: Path, fault: str) -> NoReturn:
    raise CheckpointError(f"{path}: {fault}")
