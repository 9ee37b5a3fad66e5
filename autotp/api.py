"""What a user does with a live model: shard it, or verify the plan. Both carry out what `decide` decided."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import torch
from torch import nn

from autotp.analysis import Analysis
from autotp.checkpoint.together import together
from autotp.comm import Group, group_of
from autotp.decide import decide, decide_with_proof
from autotp.diagnostic import PlanError, UsageError
from autotp.dry_run import PlanLike
from autotp.fingerprint import sampled
from autotp.rewrite.apply import apply
from autotp.rewrite.graph_form import graph_form
from autotp.rewrite.same_inputs import compare_inputs, forwards
from autotp.trace.inputs import make
from autotp.verification import Verification, compare

__all__ = ["FORMS", "shard", "verify"]

FORMS = ("module", "graph")
EXPORT_TIMEOUT = 600.0  # seconds that ranks wait for the slowest one's export


def shard(
    model: nn.Module,
    plan: PlanLike | None = None,
    mesh: Any = None,
    *,
    inputs: Any = None,
    check: str = "layouts",
    form: str = "module",
    check_inputs: int | bool = 1,
) -> nn.Module:
    """Make `model` tensor-parallel in place, and return it. Call it on every rank of the group.

    - `mesh`: a DeviceMesh (1-D, or with an axis "tp"), a process group, or None for the default group;
      without torch.distributed it is a group of one: the plan is checked, and the model stays whole.
    - `plan`, `inputs`, `check`: as `analyze` takes them.
    - `form`: "module", or "graph": a new `torch.fx.GraphModule`, in which every mapping is a node, of any
      batch and sequence, in the mode (train or eval) that the model is in; the model stays as it was.
    - `check_inputs`: in how many forwards the ranks compare what they are given, by checksums (a few
      milliseconds each); True for all. Ranks with other inputs raise UsageError, all of them. In the first
      one a data loader is caught that counts by the wrong rank, and in all of them also ranks that sample
      other tokens, or stop earlier.

    The class, the forward, hooks, dtypes, `requires_grad` and the names of the state_dict stay; each
    parameter object stays and holds this rank's part. Everything is checked before anything is touched.

    Raises PlanError, with every finding, for a refused plan, and UsageError when the ranks' plans, models
    or groups differ, on all of them, when the model is sharded already, and for what a graph cannot express.

    >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> shard(mlp, {"0": "column", "2": "row"}) is mlp
    True
    """
    group = group_of(mesh)
    try:
        if form not in FORMS or (form == "graph" and check != "layouts"):
            raise UsageError(
                f"form is one of {', '.join(FORMS)}, not {form!r}"
                if form not in FORMS
                else f'form="graph" needs the proof of check="layouts", not {check!r}'
            )
        compared = forwards(check_inputs)
        analysis, proof = decide_with_proof(model, plan, tp=group.size, inputs=inputs, check=check)
        if not analysis.ok:
            raise PlanError(analysis.diagnostics)
        mine: Any = _fingerprint(model, analysis) | {
            "compared": str(compared),
            "sums": str(getattr(group, "dtype", None)),
        }
    except BaseException as error:  # an interrupt, too: the other ranks wait
        told = error if isinstance(error, Exception) else UsageError(f"stopped by {type(error).__name__}")
        with contextlib.suppress(type(told)):
            group.exchange(told)  # raises it here, and says so on the other ranks
        raise
    _agree(group, mine)
    if form == "module":
        return apply(model, analysis, group, check_inputs=compared)
    assert proof is not None
    with together(group, timeout=EXPORT_TIMEOUT):
        graph: nn.Module = graph_form(model, analysis, proof, group, make(model, inputs))
    compare_inputs(graph, group, compared, analysis.draws)
    return graph


def verify(
    model: nn.Module,
    plan: PlanLike | None = None,
    *,
    tp: int,
    inputs: Any = None,
    weights: str = "random",
    dtype: torch.dtype | None = None,
) -> Verification:
    """Run every rank of a plan in this process and compare with the unsharded model; `model` is untouched.

    Outputs, every gradient and the merged state_dict are compared. `weights` is "random" (every weight is
    drawn anew, since zero biases and norms of one hide faults) or "own". `dtype` is what the comparison
    runs in; without it float64 where the model runs in it, else the model's own. The other arguments are
    those of `analyze`.

    Raises PlanError for a refused plan. Wrong numbers are not raised: `Verification.ok` is False.

    >>> mlp = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 4))
    >>> verify(mlp, {"0": "column", "2": "row"}, tp=2).ok
    True
    """
    analysis = decide(model, plan, tp=tp, inputs=inputs)
    if not analysis.ok:
        raise PlanError(analysis.diagnostics)
    return compare(model, analysis, inputs=inputs, weights=weights, dtype=dtype)


def _fingerprint(model: nn.Module, analysis: Analysis) -> dict[str, str]:
    """What the ranks must agree on before anything moves, each as a word to compare."""
    tensors = analysis.inventory.tensors()
    described = repr([(t.name, t.shape, t.dtype) for t in tensors.values()])
    layouts = repr(
        sorted((n, str(cut), cut.ranges(tensors[n].shape[cut.dim], 0)) for n, cut in analysis.layouts.items())
    )
    return {
        "plan": analysis.plan.dumps(),
        "tp": str(analysis.tp),
        "model": f"{type(model).__qualname__} {hashlib.sha256(described.encode()).hexdigest()}",
        "layouts": hashlib.sha256(layouts.encode()).hexdigest(),
        "edits": hashlib.sha256(repr(analysis.code).encode()).hexdigest(),
        "check": analysis.certainty,
        "forward": analysis.forward,
        "weights": sampled((*model.parameters(), *model.buffers())),
    }


_TOLD = {
    "plan": "different plans",
    "tp": "a different tp",
    "model": "different models (class, or the names, shapes and dtypes of the tensors)",
    "layouts": "different layouts",
    "edits": "different edits of the model's code",
    "check": "different checks",
    "compared": "a different check_inputs",
    "sums": "sums in a different dtype",
    "forward": "different forwards (a hook on one rank, another version of a library)",
    "weights": "different weights: build the model from the same seed or checkpoint on every rank",
}


def _agree(group: Group, mine: dict[str, str]) -> None:
    everyone = group.exchange(mine)
    for what, told in _TOLD.items():
        values = [theirs[what] for theirs in everyone]
        if len(set(values)) > 1:
            odd = [rank for rank, value in enumerate(values) if value != values[0]]
            raise UsageError(
                f"shard: the ranks of the group have {told}. Rank 0 differs from rank{'s' * (len(odd) > 1)} "
                f"{', '.join(map(str, odd))}; nothing was changed on any rank"
            )
