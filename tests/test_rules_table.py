"""The table of rules: every name is an op, every rule is held against execution, unknown ops are refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from autotp.placement import INVARIANT
from autotp.propagate.ops import op_name
from autotp.propagate.rules import RULES
from tests import (
    test_rules_contract,
    test_rules_convolution,
    test_rules_creation,
    test_rules_experts,
    test_rules_indexing,
    test_rules_losses,
    test_rules_moving,
    test_rules_pointwise,
    test_rules_reductions,
    test_rules_shapes,
    test_rules_splitting,
)
from tests.rules import Case, cut, hold, tensor

HELD = [
    test_rules_contract, test_rules_convolution, test_rules_creation, test_rules_experts, test_rules_indexing,
    test_rules_losses, test_rules_moving, test_rules_pointwise, test_rules_reductions, test_rules_shapes,
    test_rules_splitting,
]  # fmt: skip


def cases() -> Iterator[Case]:
    """Every case that stands in a table of the test modules."""
    for module in HELD:
        for value in vars(module).values():
            for case in (
                value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            ):
                if isinstance(case, Case) and not case.never:
                    yield case


def test_every_rule_is_held_against_execution() -> None:
    held = {op_name(node) for case in cases() for node in case.recorded.trace.ops()}
    random = {"bernoulli", "rand_like", "randn_like", "randint_like"}  # test_random: no two draws are equal
    assert sorted(RULES.keys() - held - random) == []


def test_every_name_is_an_op() -> None:
    own = [name for name in RULES if "::" not in name]
    missing = [n for n in own if not hasattr(torch.ops.aten, n) and not hasattr(torch.ops.aten, f"{n}_")]
    assert missing == []


@pytest.mark.parametrize(
    "function", [torch.logdet, torch.matrix_exp, torch.trace, lambda x: torch.cdist(x, x), torch.linalg.det]
)
def test_an_op_without_a_rule_takes_whole_values_only(function: object) -> None:
    tally = hold(Case(function, (tensor(4, 4),), never=True))  # type: ignore[arg-type]
    assert tally.refused > 10
    assert (INVARIANT,) in tally.taken


def test_the_harness_finds_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_if_elementwise(call: object) -> object:
        return call["self"].layout  # type: ignore[index]

    wrong = [
        ("softmax", lambda x: x.softmax(-1)),
        ("cumsum", lambda x: x.cumsum(0)),
        ("exp", lambda x: x.exp()),
    ]
    for (name, function), layout in itertools.product(wrong, (cut(0), cut(1))):
        monkeypatch.setitem(RULES, name, as_if_elementwise)
        case = Case(function, (tensor(4, 6),), tps=(2,), choices=lambda tp, c=layout: [[(c, True)]])  # type: ignore[misc]
        mixes = {"softmax": 1, "cumsum": 0}.get(name) == layout.dim
        if mixes:
            with pytest.raises(AssertionError, match="off by"):
                hold(case)
        else:
            hold(case)


def test_the_harness_finds_a_missing_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are right, and the gradient of what was whole is a part: only the gradient shows it."""

    def without_copy(call: object) -> object:
        return next(v for v in call.values if v.shard is not None).layout  # type: ignore[attr-defined]

    monkeypatch.setitem(RULES, "mul", without_copy)
    inputs = (tensor(4, 6), tensor(4, 1))
    case = Case(torch.mul, inputs, tps=(2,), choices=lambda tp: [[(cut(1), True)], [(INVARIANT, True)]])
    with pytest.raises(AssertionError, match="gradient of input 1"):
        hold(case)
