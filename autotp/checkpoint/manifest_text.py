"""The stored form of the manifest: which JSON is one at all, and how a layout is written in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field

from autotp.diagnostic import CheckpointError
from autotp.placement import Deal, Shard

__all__ = ["FileText", "ManifestText", "layout_of", "layout_text"]

MOST_PIECES = 1 << 16  # groups or sections of one dim


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class FileText(_Model):
    name: str
    size: Annotated[int, Field(ge=8, lt=1 << 63)]
    header: str


class _Deal(_Model):
    units: Annotated[int, Field(ge=1)]
    ranges: list[list[int]]
    declared: Annotated[int, Field(ge=0)] = 0


class _Section(_Model):
    size: Annotated[int, Field(ge=0)]
    deal: _Deal | None


class LayoutText(_Model):
    dim: Annotated[int, Field(ge=0, lt=64)]
    groups: Annotated[int, Field(ge=1, le=MOST_PIECES)] = 1
    deal: _Deal | None = None
    sections: Annotated[list[_Section], Field(min_length=1, max_length=MOST_PIECES)] | None = None


class _Tensor(_Model):
    digest: str
    layout: LayoutText | None = None
    parts: list[str] = []


class ManifestText(_Model):
    format: Literal["autotp"]
    version: Literal[1]
    tp: Annotated[int, Field(ge=1, le=1 << 16)]
    proof: Literal["layouts", "none"]
    digest: Literal["xxh3", "sha256", "none"]
    plan: dict[str, Any]
    files: Annotated[list[FileText], Field(min_length=1)]
    index: str | None
    companions: dict[str, str]
    tensors: dict[str, _Tensor]


def layout_of(path: Path, name: str, layout: LayoutText, tp: int) -> Shard:
    """A layout out of its stored form; every unit must have a holder, whole or shared as one."""

    def dealt(deal: _Deal) -> Deal:
        pairs = len(deal.ranges) == tp and all(len(pair) == 2 for pair in deal.ranges)
        held = sorted({(start, stop) for start, stop in deal.ranges}) if pairs else []
        edges = [0, *(stop for _, stop in held)]
        in_turn = [start for start, _ in held] == edges[:-1] and all(start < stop for start, stop in held)
        if not held or not in_turn or edges[-1] != deal.units:
            _refuse(path, f"tensor {name!r}: its deal does not give each unit to a rank")
        return Deal(deal.units, tuple((start, stop) for start, stop in deal.ranges), declared=deal.declared)

    sections = layout.sections
    if (layout.deal is None) == (sections is None) or (sections and all(s.deal is None for s in sections)):
        _refuse(path, f"tensor {name!r}: its layout has neither a deal nor dealt sections, or both")
    if layout.deal is not None:
        return Shard(layout.dim, dealt(layout.deal), groups=layout.groups)
    assert sections is not None
    pieces = tuple((piece.size, None if piece.deal is None else dealt(piece.deal)) for piece in sections)
    return Shard(layout.dim, sections=pieces)


def layout_text(shard: Shard) -> dict[str, Any]:
    """A layout as JSON data; the inverse of `layout_of`."""

    def dealt(deal: Deal) -> dict[str, Any]:
        ranges = [list(pair) for pair in deal.ranges]
        return {"units": deal.units, "ranges": ranges, "declared": deal.declared}

    if shard.sections is None:
        assert shard.deal is not None, "a Shard without sections has a deal"
        return {"dim": shard.dim, "groups": shard.groups, "deal": dealt(shard.deal)}
    pieces = [{"size": n, "deal": None if deal is None else dealt(deal)} for n, deal in shard.sections]
    return {"dim": shard.dim, "sections": pieces}


def _refuse(path: Path, fault: str) -> NoReturn:
    raise CheckpointError(f"{path}: {fault}")
