"""One architecture of the zoo: derive a plan, prove it, run every rank, compare outputs and gradients."""

from __future__ import annotations

import copy
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import transformers

from autotp.cost import collapsed
from autotp.decide import derive_with_proof
from autotp.diagnostic import AutotpError, errors
from autotp.trace.inputs import make
from autotp.verification import compare
from tests.zoo.build import build
from tests.zoo.tokens import tokens

__all__ = ["ENDS", "Result", "attempt", "from_data"]

# exact: the numbers are the unsharded model's · refused: with a message · wrong: other numbers
# foreign: another exception than autotp's · unbuilt: there is no tiny model of it · late: it took too long
PRECISE = 1e-9  # the tolerance of what is computed in float64 throughout
ROUNDED = 1e-4  # of what a model computes in float32 by hand, where sums in another order round otherwise
ENDS = ("exact", "refused", "wrong", "foreign", "unbuilt", "late")


@dataclass
class Result:
    """How one architecture ended on `tp` ranks.

    `fraction` is the share of matrix bytes that is sharded, `beyond` whether more than embeddings and heads
    is. `collectives` are those of one rank's forward and backward. `labels` says whether the loss of train
    mode was compared, too, `tokens` what greedy generation gave. `whole` are (collapsed name, bytes, why),
    `seconds` those of the processor, `commit` the state of the sources.
    """

    kind: str
    tp: int
    end: str
    why: str = ""
    fraction: float = 0.0
    beyond: bool = False
    collectives: dict[str, dict[str, int]] = field(default_factory=dict)
    output: float = 0.0
    gradient: float = 0.0
    tolerance: float = 0.0
    edits: int = 0
    labels: bool = False
    tokens: str = ""
    seconds: float = 0.0
    commit: str = ""
    whole: list[tuple[str, int, str]] = field(default_factory=list)

    def to_data(self) -> dict[str, Any]:
        """As plain data, for the cache."""
        return asdict(self)


def from_data(data: dict[str, Any]) -> Result:
    """The result that `to_data` gave."""
    return Result(**data | {"whole": [tuple(one) for one in data["whole"]]})


def attempt(kind: str, tp: int, *, generate: bool = True) -> Result:
    """Try an architecture; whatever is raised is in the result. `generate`: whether tokens are, too."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    started = time.process_time()
    try:
        model = build(kind)
    except Exception as error:
        return Result(kind, tp, "unbuilt", _said(error))
    result = Result(kind, tp, "foreign")
    try:
        _run(model, result, generate)
    except AutotpError as error:
        result.end, result.why = "refused", str(error)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        result.end = "foreign"
        result.why = f"{_said(error)} ({last.filename.rpartition('/')[2]}:{last.lineno})"
    result.seconds = round(time.process_time() - started, 1)
    return result


def _run(model: Any, result: Result, generate: bool) -> None:
    analysis, _, derived = derive_with_proof(model, tp=result.tp)
    found: dict[tuple[str, str], int] = {}
    for reason in derived.whole:
        where = f" ({reason.source})" if reason.source is not None else ""
        key = (collapsed(reason.name), reason.message + where)
        found[key] = found.get(key, 0) + reason.nbytes
    result.whole = [(name, nbytes, why) for (name, why), nbytes in sorted(found.items(), key=lambda i: -i[1])]
    result.fraction = analysis.sharded_fraction
    if not analysis.ok:
        first = errors(analysis.diagnostics)[0]
        result.end, result.why = "refused", first.render()
        return
    ends = {id(m) for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None}
    matrices = {name for name, cut in analysis.layouts.items()}
    result.beyond = any(
        id(owner) not in ends
        for path, owner in model.named_modules()
        for key in owner._parameters
        if f"{path}.{key}" in matrices
        and owner._parameters[key] is not None
        and owner._parameters[key].dim() > 1
    )
    result.edits = sum(
        line.startswith("+") and not line.startswith("+++") for line in analysis.edits.splitlines()
    )
    samples = make(model)
    if samples.crossed is not None and "eval with an encoder's states" in analysis.modes:
        samples = replace(samples.crossed, labels=samples.labels)
    inputs = {**samples.kwargs, **samples.labels}
    if samples.labels and _finite(model, inputs) is None:  # autotp's guess of the labels is none of its
        samples = replace(samples, labels={})
        inputs = dict(samples.kwargs)
    if not _finite(model, inputs):  # a row that is masked throughout: not a number, and nothing to compare
        inputs = {name: value for name, value in inputs.items() if name != "attention_mask"}
    checked = compare(model, analysis, inputs=inputs, weights="random", dtype=None)
    result.labels = bool(samples.labels) and "train" in checked.modes
    result.output, result.gradient = checked.max_output_diff, checked.max_grad_diff
    result.tolerance = checked.tolerance if checked.tolerance <= PRECISE else ROUNDED
    close = all(d <= result.tolerance for d in (result.output, result.gradient)) and checked.state_dict_equal
    result.end = "exact" if checked.ok or close else "wrong"
    result.why = "" if result.end == "exact" else str(checked)
    if result.end == "exact" and generate:
        result.tokens = tokens(model, analysis)
    if result.tokens == "different":
        result.end, result.why = "wrong", "generate() gives other tokens"
    if checked.collectives:
        result.collectives = {phase: dict(counts) for phase, counts in checked.collectives[0].items()}


def _finite(model: Any, inputs: dict[str, Any]) -> bool | None:
    """Whether the logits of the unsharded model are numbers, in the dtype that it is compared in; None where
    it does not run."""
    for dtype in (torch.float64, model.dtype):
        given = {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
                 for k, v in inputs.items()}  # fmt: skip
        try:
            with torch.no_grad():
                return bool(copy.deepcopy(model).to(dtype)(**given).logits.isfinite().all())
        except (RuntimeError, ValueError):
            continue
    return None


def _said(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"
