"""One module, value by value: what each op gives on a rank, which mapping stands there, and why.

`explain` makes an `Explanation` from the propagated trace that the proof rests on; `str()` is one screen,
`to_json()` holds every op.

This file knows nothing of torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotp.diagnostic import Diagnostic, Span, UsageError

if TYPE_CHECKING:
    from torch import nn

    from autotp.dry_run import PlanLike

__all__ = ["Explanation", "Mapped", "Step", "explain"]


@dataclass(frozen=True)
class Mapped:
    """A mapping at an op: of the value `of` "before" the op reads it, or of its result "after".

    "shared" is one that stands at the layer `of` beside it, which reads the same value.
    """

    mapping: str
    when: str
    of: str = ""


@dataclass(frozen=True)
class Step:
    """A value along the module: the result of an op, or what goes in or comes out.

    - `op`          the op's name; for what goes in or comes out, the value's name
    - `module`      the module that runs it, as seen from the one that is explained ("" is itself)
    - `shape`       of the (first) result in the unsharded model; () of a number
    - `results`     how many results there are
    - `placement`   in words: "replicate", "partial", "shard dim 2: 48 -> 24 + 24", "unknown"
    - `mappings`    what stands at the op, in order
    - `why`         the rule that decides it, or the values that it follows
    - `code`        of the finding at this op, or ""
    """

    op: str
    module: str
    source: Span | None
    shape: tuple[int, ...]
    results: int
    placement: str
    mappings: tuple[Mapped, ...] = ()
    why: str = ""
    code: str = ""


@dataclass(frozen=True)
class Explanation:
    """A module's values in one mode, in the order in which they are computed.

    - `model`, `module`, `kind`   the model's class, the module's path and class
    - `mode`, `modes`             the mode that is shown, and all modes that were traced
    - `covers`                    the modes that run just as it does
    - `calls`                     how often the module runs; its first call is shown
    - `entered`, `steps`, `left`  what goes in, the ops in order, what comes out
    - `unknown`                   how many ops stand behind a finding, and so are unknown
    - `diagnostics`               every finding about the plan
    """

    model: str
    module: str
    kind: str
    plan_name: str
    tp: int
    mode: str = ""
    modes: tuple[str, ...] = ()
    covers: tuple[str, ...] = ()
    calls: int = 0
    entered: tuple[Step, ...] = ()
    steps: tuple[Step, ...] = ()
    left: tuple[Step, ...] = ()
    unknown: int = 0
    diagnostics: tuple[Diagnostic, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no finding refuses the plan."""
        return all(finding.severity != "error" for finding in self.diagnostics)

    def to_json(self) -> str:
        """Every op as JSON, in a stable order."""
        from autotp.report.explanation import as_json

        return as_json(self)

    def __str__(self) -> str:
        from autotp.report.explanation import as_text

        return as_text(self)


def explain(
    model: nn.Module,
    module: str,
    plan: PlanLike | None = None,
    *,
    tp: int,
    inputs: Any = None,
    mode: str | None = None,
) -> Explanation:
    """Why the values along one module are where they are, op by op. Touches nothing.

    - `module`: the path of a module, or the end of one if that is unique: "layers.0.self_attn"
    - `mode`: one of those that are traced ("eval", "train", …); without it the first that runs the module,
      or one with a finding
    - the other arguments are those of `analyze`

    Of a refused plan the values up to the conflict are shown, and the conflict. Raises UsageError for a
    module or a mode that there is not, PlanError for a plan that cannot be read.

    >>> from torch import nn
    >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> found = explain(mlp, "2", {"0": "column", "2": "row"}, tp=2)
    >>> [(step.op, step.placement, [m.mapping for m in step.mappings]) for step in found.steps]
    [('linear', 'replicate', ['reduce'])]
    """
    from autotp.decide import decide_with_proof
    from autotp.propagate.along import along
    from autotp.report.table import plan_name

    paths = {path: type(owner).__name__ for path, owner in model.named_modules(remove_duplicate=False)}
    path = resolve(module, paths, type(model).__name__)
    analysis, proof = decide_with_proof(model, plan, tp=tp, inputs=inputs, every=True)
    found = Explanation(
        type(model).__name__,
        path,
        paths[path],
        plan_name(analysis.plan, analysis.plan_name),
        tp,
        diagnostics=analysis.diagnostics,
    )
    return found if proof is None else along(found, model.get_submodule(path), proof, mode)


def resolve(name: str, paths: Iterable[str], model: str) -> str:
    """The path that `name` means: itself, or the only one that ends with its segments.

    >>> resolve("1.fc", ["", "layers.0.fc", "layers.1.fc"], "MLP")
    'layers.1.fc'

    Raises UsageError, with the nearest names, for a name that is no path or the end of several.
    """
    known = list(paths)
    if name in known:
        return name
    ends = [path for path in known if name and path.endswith(f".{name}")]
    if len(ends) == 1:
        return ends[0]
    if ends:
        more = f" and {len(ends) - 3} more" if len(ends) > 3 else ""
        raise UsageError(f"{name} is the end of {len(ends)} modules of {model}: {', '.join(ends[:3])}{more}")
    length = name.count(".") + 1
    alike = {".".join(path.split(".")[-length:]): path for path in reversed(known) if path}
    near = [alike[end] for end in difflib.get_close_matches(name, alike, n=3)]
    hint = f"\n  = help: did you mean {' or '.join(near)}?" if near else ""
    raise UsageError(f"there is no module {name or repr(name)} in {model}{hint}")
