"""The layouts of one recorded graph, and what speaks against them: the result of a walk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from autotp.diagnostic import Span
from autotp.match import Matches
from autotp.placement import Layout, Shard
from autotp.propagate.call import Conflict
from autotp.propagate.flexible import Grant
from autotp.propagate.heads import CopiedIn
from autotp.propagate.mapped import Mapped
from autotp.propagate.operands import Part
from autotp.propagate.reads import Read, Unshared
from autotp.propagate.regions import Region
from autotp.trace.graph import Trace

__all__ = ["Finding", "Propagation"]


@dataclass(frozen=True)
class Finding:
    """A conflict at a node, with the layers that its values come from; `source` if it is not the node's."""

    node: fx.Node
    conflict: Conflict
    origins: tuple[str, ...]
    source: Span | None = None


@dataclass
class Propagation:
    """The layouts of one trace.

    `layouts` holds what a node's value is for its readers, `computed` what the op itself gives on a rank
    (they differ where a layer gathers its output). A node that is in neither is unknown, because of a
    finding before it. `cuts` is how each tensor is cut, after row layers took the cut of their input.
    `reads` are the whole tensors that are transformed where they are read, `wanted` further ones that would
    resolve a finding, `regions` the modules with mappings at their border, `grants` the fresh or expanded
    values that take a layout for free, `parts` (reader, value) the whole values of which an op is given only
    a rank's part, `copied_in` (reader, value) those that it is given as a copy, `mapped` the statistics, sums
    and logits that go through mappings, `at_use` whether whole values are copied at each use on a shard and
    not where they are read, `unreduced` the row layers that
    leave their outputs partial, `shared` (reader, value) the whole values that are added to these, `dropouts`
    those of them that are dropped out alike on every rank. `random` and `random_whole` are the
    modules that draw random numbers on a shard and on whole values, `resting` those of
    dropout on a shard of rate 0, `reached` the layers of the plan that
    ran, `copied` the column layers whose input has a gradient to sum, with those inputs, `uncopied` those
    whose input's gradient is a part; `repeated` are the copied layers that repeat others, with their inputs'
    names.
    """

    trace: Trace
    matches: Matches
    cuts: dict[str, Shard]
    aliases: Mapping[str, str]
    reads: dict[str, Read] = field(default_factory=dict)
    regions: dict[str, Region] = field(default_factory=dict)
    grants: dict[fx.Node, Layout] = field(default_factory=dict)
    parts: dict[tuple[fx.Node, fx.Node], Shard] = field(default_factory=dict)
    mapped: dict[fx.Node, tuple[str, ...]] = field(default_factory=dict)
    unreduced: frozenset[str] = frozenset()
    shared: frozenset[tuple[fx.Node, fx.Node]] = frozenset()
    dropouts: frozenset[fx.Node] = frozenset()
    copied_in: frozenset[tuple[fx.Node, fx.Node]] = frozenset()
    at_use: bool = False
    wanted: list[Read | Unshared | Grant | Part | CopiedIn | Mapped | Region] = field(default_factory=list)
    layouts: dict[fx.Node, list[Layout]] = field(default_factory=dict)
    computed: dict[fx.Node, list[Layout]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    random: set[str] = field(default_factory=set)
    random_whole: set[str] = field(default_factory=set)
    resting: set[str] = field(default_factory=set)
    reached: set[str] = field(default_factory=set)
    copied: dict[str, list[fx.Node]] = field(default_factory=dict)
    uncopied: set[str] = field(default_factory=set)
    repeated: dict[str, tuple[str, ...]] = field(default_factory=dict)
