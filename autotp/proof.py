"""What the traces of a model showed of a plan: what `prove` finds, and all that is decided from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from autotp.analysis import Branch
from autotp.diagnostic import Diagnostic
from autotp.placement import Shard
from autotp.propagate.given import Call, Traced
from autotp.propagate.propagation import Propagation
from autotp.propagate.reads import Read
from autotp.propagate.regions import Region
from autotp.propagate.size_guards import SizeGuard
from autotp.rewrite.edits.edit import Edits
from autotp.trace.consulted import Consulted
from autotp.trace.handed import Reader

__all__ = ["Proof"]


@dataclass
class Proof:
    """What the traces showed.

    `cuts` is how each tensor is cut, by its first name; `reads` the whole tensors that are transformed where
    they are read; `regions` the modules with mappings at their border; `calls` how often each module runs;
    `copied` the column layers whose input needs its gradient summed, `shared` those of them that read one
    value, in groups, `uncopied` those whose input comes as a copy; `random` the modules that draw random
    numbers on a shard, `random_in_eval` those of them that draw in evaluation, too. `propagations` are the
    layouts of each mode's trace (of one mode alone, where it has findings), `covered` the modes that run as
    another one does, `edits` the edits of the model's code, found and proven, `mapped` how often each of
    their mappings runs in a call of each module, `unreduced` the row layers that leave their outputs partial,
    `branches` those of the code that handles sharded values which no mode took. `random_common` are modules
    inside of those in `random` that draw what all ranks share, `resting` those whose dropout on a shard has
    the rate 0. `given` are the calls of the model that were traced, `read` what the code that ran reads,
    `carried` the attributes that a call may read as an earlier one left them, `left` those in which the
    forward leaves a part of a tensor on each rank,
    `handed` the cut weights of layers that code around them reads without an op on them, and which code;
    `at_use` whether whole values are copied where they meet shards, `gives` what the modules give that were
    not looked into, in words;
    `sizes`, of one more call, what comes out of what its code asks of the sizes of its inputs.
    """

    cuts: dict[str, Shard]
    reads: dict[str, Read] = field(default_factory=dict)
    regions: dict[str, Region] = field(default_factory=dict)
    diagnostics: list[Diagnostic] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    copied: set[str] = field(default_factory=set)
    shared: tuple[tuple[str, ...], ...] = ()
    uncopied: set[str] = field(default_factory=set)
    random: set[str] = field(default_factory=set)
    sizes: frozenset[SizeGuard] = frozenset()
    propagations: dict[str, Propagation] = field(default_factory=dict)
    covered: Mapping[str, str] = field(default_factory=dict)
    random_in_eval: set[str] = field(default_factory=set)
    branches: tuple[Branch, ...] = ()
    random_common: set[str] = field(default_factory=set)
    draws: set[str] = field(default_factory=set)
    resting: set[str] = field(default_factory=set)
    edits: Edits = field(default_factory=Edits)
    mapped: Counter[tuple[str, str]] = field(default_factory=Counter)
    unreduced: frozenset[str] = frozenset()
    given: frozenset[Traced] = frozenset()
    read: Consulted = field(default_factory=Consulted)
    carried: frozenset[str] = frozenset()
    left: set[str] = field(default_factory=set)
    handed: dict[str, frozenset[Reader]] = field(default_factory=dict)
    at_use: bool = False
    gives: dict[str, frozenset[Call]] = field(default_factory=dict)
