"""The result of the dry run: everything that was decided about a model, a plan and a number of ranks.

`analyze` makes an `Analysis`; `shard`, `verify`, `convert` and the command line only read it.

    Analysis ──► str()      a table for one screen       (autotp.report.text)
             ├─► to_json()  for programs                 (autotp.report.json)
             └─► to_html()  one self-contained page      (autotp.report.html)

This file knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autotp import cost
from autotp.collectives import Collective
from autotp.diagnostic import Diagnostic, Span, errors
from autotp.inventory import Inventory
from autotp.placement import Shard
from autotp.rewrite.edits.edit import Edits

if TYPE_CHECKING:
    from autotp.match import Matches
    from autotp.plan import Plan
    from autotp.propagate.given import Proven
    from autotp.propagate.reads import Read
    from autotp.propagate.regions import Region
    from autotp.trace.inputs import Samples

__all__ = ["LAYOUTS", "NAMES_AND_SHAPES", "Analysis", "Branch", "Collective"]

# How much is certain: the layouts were proven on the traced graph, or only names and shapes fit.
LAYOUTS = "layouts"
NAMES_AND_SHAPES = "names and shapes"


@dataclass(frozen=True)
class Branch:
    """A branch of the model's code that no traced mode took: the function, and the first line."""

    function: str
    span: Span


@dataclass
class Analysis:
    """What a plan does to a model on `tp` ranks, decided before anything is touched.

    - `plan`         the plan that was used or derived
    - `inventory`    the modules and tensors it was matched against
    - `matches`      which rule takes which module
    - `layouts`      tensor name -> how it is cut; a tensor that is absent is whole on every rank
    - `diagnostics`  every finding; the plan is refused when one of them is an error
    - `certainty`    "layouts" when they were proven on the traced graph, else "names and shapes"
    - `collectives`  what runs in one forward and one backward pass
    - `modes`        the paths that were proven, such as "eval" and "train"
    - `random`       the modules that draw random numbers on shards, on each rank from its own stream;
                     `random_in_eval` those of them that draw in evaluation, too, and
                     `random_common` modules inside of them that draw what all ranks share
    - `resting`      modules whose dropout on shards has the rate 0
    - `draws`        in which of "train" and "eval" it draws random numbers that all ranks share; "train by
                     Python" and "eval by Python" from Python's and numpy's generators
    - `reads`        whole tensors that are copied or sliced where they are read, found by the proof
    - `regions`      modules of raw sharded tensors, with mappings at their border, found by the proof
    - `shared`       groups of column layers that read one value and share its copy, found by the proof
    - `uncopied`     column layers whose input is a copy already, at the border of a module around them
    - `unreduced`    row layers whose sum is reduced with that of a parallel branch, in an edit of the code,
                     and the modules between
    - `forward`      a hash of the traced forwards, in which ranks must agree
    - `branches`     branches of functions that handle sharded values which no mode took: not proven
    - `handed`       cut weights of layers that code around them reads and does nothing with, by that
                     code's file and function: there it gets a stand-in
    - `at_use`       whether whole values are copied where they meet shards, since they are used whole as well
    - `gives`        what the modules give that the proof did not look into, in words
    - `edits`        the edits of the model's own code as a diff, found by the proof; `code` the same as data
    - `given`        the calls of the model that were traced, and later proven; `samples` with what
    - `plan_name`    how users know the plan: its shipped name or file; "" where it came from code
    """

    tp: int
    plan: Plan
    inventory: Inventory
    matches: Matches
    layouts: Mapping[str, Shard] = field(default_factory=dict)
    diagnostics: tuple[Diagnostic, ...] = ()
    certainty: str = NAMES_AND_SHAPES
    collectives: tuple[Collective, ...] = ()
    modes: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    random_in_eval: tuple[str, ...] = ()
    random_common: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()
    resting: tuple[str, ...] = ()
    reads: tuple[Read, ...] = ()
    regions: tuple[Region, ...] = ()
    shared: tuple[tuple[str, ...], ...] = ()
    branches: tuple[Branch, ...] = ()
    uncopied: tuple[str, ...] = ()
    unreduced: tuple[str, ...] = ()
    forward: str = ""
    handed: Mapping[str, frozenset[tuple[str, str]]] = field(default_factory=dict)
    at_use: bool = False
    gives: Mapping[str, frozenset[frozenset[tuple[str, str]]]] = field(default_factory=dict)
    edits: str = ""
    code: Edits = field(default_factory=Edits)
    plan_name: str = ""
    given: Proven | None = None
    samples: Samples | None = None

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not errors(self.diagnostics)

    @property
    def sharded_fraction(self) -> float:
        """The share of the bytes of matrices (two dims or more) that is cut, from 0.0 to 1.0."""
        return cost.sharded_fraction(self.inventory, self.layouts)

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """The bytes of parameters and buffers on each rank, exact to the byte, tied tensors once."""
        return cost.rank_bytes(self.inventory, self.layouts, self.tp)

    def to_json(self) -> str:
        """Everything as a JSON text in a stable order; its "plan" is a plan that loads again."""
        from autotp.report.json import render

        return render(self)

    def to_html(self) -> str:
        """Everything as one self-contained HTML page."""
        from autotp.report.html import render

        return render(self)

    def __str__(self) -> str:
        from autotp.report.text import render

        return render(self)
