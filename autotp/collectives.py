"""The collectives that a plan runs: what each mapping runs, and what the styles imply.

This file knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotp.inventory import Inventory

if TYPE_CHECKING:
    from autotp.match import Matches, Placed

__all__ = ["OPERATIONS", "Collective", "collectives_of", "expected_collectives"]

# What each mapping runs: its collective in forward, and in backward.
OPERATIONS: Mapping[str, tuple[str | None, str | None]] = {
    "copy": (None, "all-reduce"),
    "reduce": ("all-reduce", None),
    "gather": ("all-gather", None),
    "scatter": (None, "all-gather"),
    "reduce_scatter": ("reduce-scatter", "all-gather"),
    "all_gather": ("all-gather", "reduce-scatter"),
    "share": (None, None),
    "slice": (None, None),
    "copy_shared": (None, "all-reduce"),
}


@dataclass(frozen=True)
class Collective:
    """`calls` runs of one mapping's collective at a module, in one forward or one backward pass.

    `mapping` is a key of `OPERATIONS`; `direction` is "forward" or "backward".
    """

    mapping: str
    module: str
    direction: str
    calls: int = 1

    @property
    def operation(self) -> str:
        """The collective that runs: all-reduce, all-gather or reduce-scatter."""
        found = OPERATIONS[self.mapping][self.direction == "backward"]
        assert found is not None, f"{self.mapping} runs nothing in {self.direction}"
        return found


def collectives_of(mapping: str, module: str, *, calls: int = 1) -> tuple[Collective, ...]:
    """The collectives that one mapping runs, forward and backward.

    >>> [f"{c.operation} {c.direction}" for c in collectives_of("copy", "fc1")]
    ['all-reduce backward']
    >>> [f"{c.operation} {c.direction}" for c in collectives_of("all_gather", "fc1")]
    ['all-gather forward', 'reduce-scatter backward']
    """
    pair = zip(("forward", "backward"), OPERATIONS[mapping], strict=True)
    return tuple(Collective(mapping, module, way, calls) for way, runs in pair if runs)


def expected_collectives(inventory: Inventory, matches: Matches) -> tuple[Collective, ...]:
    """The collectives that the styles imply, where no graph has shown the real ones.

    A column layer copies its input (one all-reduce backward), a row layer reduces its output and a
    vocab layer its rows (one all-reduce forward); `gather_output` adds an all-gather forward,
    `split_input` one backward. Column layers side by side in one module that read as many features are
    taken to read one value, and to share its copy: q, k and v, gate and up.
    """
    found: list[Collective] = []
    first = _first_readers(inventory, matches)
    for placed in matches.placed.values():
        if not any(len(_shape(inventory, name)) > 1 for name in placed.layouts):
            continue  # a per-head vector moves nothing
        if placed.style == "column":
            if placed.path in first:
                found += collectives_of("copy", placed.path)
            for shard in placed.layouts.values():
                found += collectives_of("copy_shared", placed.path) if shard.shared else ()
            if placed.rule.gather_output:
                found += collectives_of("gather", placed.path)
        elif placed.style in ("row", "vocab"):
            if placed.rule.split_input:
                found += collectives_of("scatter", placed.path)
            found += collectives_of("reduce", placed.path)
    return tuple(found)


def _first_readers(inventory: Inventory, matches: Matches) -> set[str]:
    """Of the column layers that read one value, the one whose rule comes first in the plan."""
    order = {pattern: place for place, pattern in enumerate(matches.plan.rules)}
    layers = [p for p in matches.placed.values() if p.style == "column" and p.target == "module"]
    first: dict[tuple[str, int | None], str] = {}
    for placed in sorted(layers, key=lambda placed: order[placed.pattern]):
        first.setdefault((placed.path.rpartition(".")[0], _features_read(inventory, placed)), placed.path)
    return set(first.values())


def _features_read(inventory: Inventory, placed: Placed) -> int | None:
    """The input features of a column layer: the dim of its weight that is not cut."""
    shapes = ((_shape(inventory, name), shard.dim) for name, shard in placed.layouts.items())
    return next((shape[1 - dim] for shape, dim in shapes if len(shape) == 2), None)


def _shape(inventory: Inventory, name: str) -> tuple[int, ...]:
    module = inventory.modules.get(name.rpartition(".")[0])
    local = name.rpartition(".")[2]
    return module.tensors[local].shape if module is not None and local in module.tensors else ()
