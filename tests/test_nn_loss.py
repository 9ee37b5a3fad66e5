"""Vocabulary-parallel cross entropy against torch.nn.functional.cross_entropy of the whole logits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autotp import mappings
from autotp.comm import Group, simulate
from autotp.diagnostic import UsageError
from autotp.nn.functional import (
    vocab_parallel_cross_entropy,
    vocab_parallel_multi_label_cross_entropy,
)
from autotp.placement import Shard, deal, shared_deal
from tests.conftest import as_rank
from tests.test_mappings import quietly, randn
from tests.test_nn_linear import close

TOKENS, VOCABULARY = 7, 13
TARGET = [0, 12, -100, 6, 7, 3, 3]


def whole_logits(scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return (randn(1, TOKENS, VOCABULARY) * scale).to(dtype)


def own(x: Tensor, group: Group) -> Tensor:
    """This rank's columns, cut by hand."""
    bounds = [0]
    for rank in range(group.size):
        bounds.append(bounds[-1] + VOCABULARY // group.size + (rank < VOCABULARY % group.size))
    return x[..., bounds[group.rank] : bounds[group.rank + 1]].contiguous()


def joined(x: Tensor, group: Group) -> Tensor:
    return mappings.gather(x.detach(), group, dim=-1, shard=Shard(0, deal(VOCABULARY, group.size)))


def weighted(options: dict[str, Any]) -> dict[str, Any]:
    if options.pop("weight", False):
        options["weight"] = randn(9, VOCABULARY).abs() + 0.1
    return options


def scenario(group: Group, options: dict[str, Any], target: list[int], scale: float, dtype: Any) -> list[Any]:
    logits = own(whole_logits(scale, dtype), group).requires_grad_()
    kept = logits.detach().clone()
    loss = vocab_parallel_cross_entropy(
        logits, torch.tensor(target), group=group, vocab_size=VOCABULARY, **weighted(dict(options))
    )
    loss.backward(
        torch.ones_like(loss) if loss.ndim == 0 else randn(3, *loss.shape).to(loss), retain_graph=True
    )
    first = logits.grad.clone()
    logits.grad = None
    loss.backward(torch.ones_like(loss) if loss.ndim == 0 else randn(3, *loss.shape).to(loss))
    assert torch.equal(first, logits.grad)
    assert torch.equal(kept, logits.detach())
    return [loss.detach(), joined(first, group)]


def serial(options: dict[str, Any], target: list[int], scale: float) -> list[Tensor]:
    logits = whole_logits(scale).requires_grad_()
    loss = F.cross_entropy(logits, torch.tensor(target), **weighted(dict(options)))
    loss.backward(torch.ones_like(loss) if loss.ndim == 0 else randn(3, *loss.shape))
    return [loss.detach(), logits.grad]


OPTIONS = [
    {"reduction": reduction, "label_smoothing": smoothing, "weight": weight}
    for reduction, smoothing, weight in itertools.product(("none", "mean", "sum"), (0.0, 0.2), (False, True))
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_torchs_semantics(run, options: dict[str, Any]) -> None:
    for target, scale in ((TARGET, 1.0), ([5] * TOKENS, 3.0)):
        want = serial(options, target, scale)
        for found in run(scenario, options, target, scale, torch.float64):
            close(found, want)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_all_targets_ignored(run, reduction: str) -> None:
    options = {"reduction": reduction, "ignore_index": 4}
    want = serial(options, [4] * TOKENS, 1.0)
    for loss, gradient in run(scenario, options, [4] * TOKENS, 1.0, torch.float64):
        torch.testing.assert_close(loss, want[0], equal_nan=True)
        assert torch.count_nonzero(gradient) == 0


def test_logits_of_scale_1000_stay_finite_and_equal(run) -> None:
    want = serial({}, TARGET, 1000.0)
    assert torch.isfinite(want[0])
    for found in run(scenario, {}, TARGET, 1000.0, torch.float64):
        close(found, want)
    for loss, gradient in run(scenario, {"label_smoothing": 0.1}, TARGET, 1000.0, torch.float32):
        exact = serial({"label_smoothing": 0.1}, TARGET, 1000.0)
        torch.testing.assert_close([loss.double(), gradient.double()], exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_logits_are_computed_in_float32(run, dtype: torch.dtype) -> None:
    whole = whole_logits(4.0, dtype).float().requires_grad_()
    want = F.cross_entropy(whole, torch.tensor(TARGET))
    want.backward()
    for loss, gradient in run(scenario, {}, TARGET, 4.0, dtype):
        assert (loss.dtype, gradient.dtype) == (torch.float32, dtype)
        torch.testing.assert_close(loss, want.detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(gradient, whole.grad.to(dtype)) or (
            (gradient.float() - whole.grad).abs().max() <= torch.finfo(dtype).eps * whole.grad.abs().max()
        )


def shapes(group: Group) -> list[Tensor]:
    """Batch and sequence dims, targets [N, 1], softmax, and its gradient."""
    logits = own(randn(5, 2, 3, VOCABULARY), group).requires_grad_()
    target = torch.tensor([[0, 5, 12], [7, -100, 1]])
    options = {"group": group, "vocab_size": VOCABULARY}
    flat = vocab_parallel_cross_entropy(logits, target, reduction="none", **options)
    column, softmax = vocab_parallel_cross_entropy(
        logits, target.unsqueeze(-1), reduction="none", return_softmax=True, **options
    )
    assert (flat.shape, column.shape, softmax.shape) == ((2, 3), (2, 3, 1), logits.shape)
    assert torch.equal(flat, column.squeeze(-1))
    (softmax.square() * own(randn(6, 2, 3, VOCABULARY), group)).sum().backward()
    return [flat.detach(), joined(softmax, group), joined(logits.grad, group)]


def test_shapes_and_softmax(run) -> None:
    logits = randn(5, 2, 3, VOCABULARY).requires_grad_()
    target = torch.tensor([[0, 5, 12], [7, -100, 1]])
    softmax = logits.softmax(-1)
    (softmax.square() * randn(6, 2, 3, VOCABULARY)).sum().backward()
    loss = F.cross_entropy(logits.detach().flatten(0, 1), target.flatten(), reduction="none").view(2, 3)
    for found in run(shapes):
        close(found, [loss, softmax.detach(), logits.grad])


def multi(group: Group | None, sum_labels: bool, normal: bool) -> list[Tensor]:
    labels = torch.tensor([[0, 12, -100], [5, 5, 6], [-100, -100, -100], [7, 1, 2]])
    weights = randn(8, 4, 3).abs()
    if normal:
        weights = weights / weights.sum(-1, keepdim=True)
    weights.requires_grad_()
    logits = randn(7, 4, VOCABULARY)
    if group is None:
        logits.requires_grad_()
        logp = logits.log_softmax(-1).gather(-1, labels.clamp(min=0))
        loss = (-logp * weights).masked_fill(labels == -100, 0)
        loss = loss.sum(-1, keepdim=True) if sum_labels else loss
    else:
        logits = own(logits, group).requires_grad_()
        loss = vocab_parallel_multi_label_cross_entropy(
            logits, labels, weights, group=group, vocab_size=VOCABULARY, sum_labels=sum_labels
        )
    loss.backward(randn(3, *loss.shape))
    return [loss.detach(), logits.grad if group is None else joined(logits.grad, group), weights.grad]


@pytest.mark.parametrize("sum_labels", [True, False])
def test_several_labels_a_token(run, sum_labels: bool) -> None:
    for normal in (True, False):
        want = multi(None, sum_labels, normal)
        assert want[0].shape == ((4, 1) if sum_labels else (4, 3))
        for found in run(multi, sum_labels, normal):
            close(found, want)


def double_backward(group: Group | None) -> list[Tensor]:
    logits = whole_logits()
    options: dict[str, Any] = {"label_smoothing": 0.1, "weight": randn(9, VOCABULARY).abs()}
    target = torch.tensor(TARGET)
    if group is None:
        logits.requires_grad_()
        loss = F.cross_entropy(logits, target, **options)
        (first,) = torch.autograd.grad(loss, logits, create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), logits))
    logits = own(logits, group).requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, target, group=group, vocab_size=VOCABULARY, **options)
    (first,) = torch.autograd.grad(loss, logits, create_graph=True)
    return [joined(torch.autograd.grad(first.square().sum(), logits)[0], group)]


def test_double_backward(run) -> None:
    want = double_backward(None)
    for found in run(double_backward):
        close(found, want)


def test_the_vocabulary_is_never_whole_on_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small collective forward, none backward, and no tensor wider than this rank's part."""
    from torch.utils._python_dispatch import TorchDispatchMode

    widest, calls = [0], []

    class Widths(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, tuple | list) else [result]:
                if isinstance(x, Tensor):
                    widest[0] = max(widest[0], x.numel())
            return result

    def function(group: Group) -> None:
        logits = torch.randn(4, 500, requires_grad=True)
        gathered = group.all_gather

        def counted(x: Tensor, dim: int, sizes: Any) -> Tensor:
            calls.append(x.numel())
            return gathered(x, dim, sizes)

        monkeypatch.setattr(group, "all_gather", counted)
        with Widths():
            vocab_parallel_cross_entropy(
                logits, torch.tensor([0, 1999, 700, 5]), group=group, vocab_size=2000
            ).backward()

    simulate(4, function)
    assert calls == [(4 + 2) * 2] * 4  # two rows more, for what each rank takes its part for
    assert widest == [4 * 500]


def wrong(call: Any, error: type[Exception] = UsageError) -> str:
    with pytest.raises(error) as caught:
        simulate(2, call)
    return str(caught.value)


def test_mistakes_are_named() -> None:
    name = "vocab_parallel_cross_entropy"
    target = torch.zeros(3, dtype=torch.int64)
    for logits in (torch.ones(3, 4, dtype=torch.int64), torch.tensor(1.0)):
        with pytest.raises(UsageError) as caught:
            vocab_parallel_cross_entropy(logits, target)
        assert str(caught.value) == (
            f"{name}: logits of shape {list(logits.shape)} and {logits.dtype}: floating-point numbers are "
            "needed, with this rank's ids in the last dim"
        )
    assert wrong(lambda g: vocab_parallel_cross_entropy(torch.ones(3, 8), target, group=g, vocab_size=8)) == (
        f"{name}: the logits have 8 columns, but rank 0 of 2 holds 4 of vocab_size=8"
    )
    assert wrong(lambda g: vocab_parallel_cross_entropy(torch.ones(3, 4), target[:2], group=g)) == (
        f"{name}: targets of shape [2] do not go with logits of shape [3, 4]: [3] is needed"
    )
    assert wrong(lambda g: vocab_parallel_cross_entropy(torch.ones(3, 4), torch.ones(3), group=g)) == (
        f"{name}: targets are ids of an integer dtype, not torch.float32"
    )
    assert wrong(
        lambda g: vocab_parallel_cross_entropy(torch.ones(3, 4), target, group=g, label_smoothing=1.5)
    ) == (f"{name}: label_smoothing=1.5 is not between 0 and 1")
    assert wrong(
        lambda g: vocab_parallel_cross_entropy(torch.ones(3, 4), target, group=g, reduction="average")
    ) == (f"{name}: reduction='average' is not 'none', 'mean' or 'sum'")
    assert wrong(
        lambda g: vocab_parallel_cross_entropy(torch.ones(3, 4), target, group=g, weight=torch.ones(4))
    ) == (f"{name}: weight has shape [4], one number for each of 8 ids is needed")
    halves, same = Shard(0, deal(4, 2), groups=2), Shard(0, shared_deal(1, 2))
    for shard, width in ((halves, 4), (same, 8)):  # ids that several ranks hold would be counted twice
        ones = torch.ones(3, width)
        assert wrong(
            lambda g, x=ones, s=shard: vocab_parallel_cross_entropy(x, target, group=g, shard=s, vocab_size=8)
        ) == (f"{name}: {shard} does not give each of 2 ranks one range of ids of its own")
    assert wrong(
        lambda g: vocab_parallel_cross_entropy(torch.ones(3, 4), target, group=g, shard=Shard(0, deal(8, 2)))
    ) == (f"{name}: with a shard, vocab_size is needed")
    ones = torch.ones(3, 4)
    for options, text in (
        ({"label_smoothing": "0.1"}, "label_smoothing='0.1' is not between 0 and 1"),
        ({"weight": [1.0] * 8}, "weight must be a tensor, not list"),
        ({"ignore_index": 1.5}, "ignore_index=1.5 is no id"),
        ({"vocab_size": 8.0}, "vocab_size=8.0 is no number of ids"),
        ({"vocab_size": -8}, "vocab_size=-8 is no number of ids"),
        ({"shard": 2, "vocab_size": 8}, "shard=2 is no Shard"),
    ):
        found = wrong(lambda g, o=options: vocab_parallel_cross_entropy(ones, target, group=g, **o))
        assert found == f"{name}: {text}"
    for given, text in (
        ((None, target), "logits must be a tensor, not NoneType"),
        ((ones, [0, 0, 0]), "target must be a tensor, not list"),
        ((ones, target.to(torch.complex64)), "targets are ids of an integer dtype, not torch.complex64"),
    ):
        assert wrong(lambda g, x=given: vocab_parallel_cross_entropy(*x, group=g)) == f"{name}: {text}"
    labels = torch.zeros(3, 2, dtype=torch.int64)
    assert wrong(lambda g: vocab_parallel_multi_label_cross_entropy(ones, labels, None, group=g)) == (
        "vocab_parallel_multi_label_cross_entropy: weights must be a tensor, not NoneType"
    )
    assert wrong(
        lambda g: vocab_parallel_multi_label_cross_entropy(
            torch.ones(3, 4), labels, torch.ones(3, 1), group=g
        )
    ) == (
        "vocab_parallel_multi_label_cross_entropy: labels of shape [3, 2] and weights of shape [3, 1] do not "
        "go with logits of shape [3, 4]: [3, 'C'] is needed for both"
    )


WIDTHS = [4, 4, 3]


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ([None, None, None], "4 columns of 12, 4 columns of 12, 3 columns of 9"),
        ([11, 12, 11], "4 columns of 11, 4 columns of 12, 3 columns of 11"),
        ([12, 12, 11], "4 columns of 12, 4 columns of 12, 3 columns of 11"),
    ],
)
def test_ranks_that_do_not_agree_on_the_vocabulary(sizes: list[int | None], told: str) -> None:
    """Of uneven parts each alone may fit: other ids and another smoothing, silently, on one rank."""
    options = ({"label_smoothing": 0.1}, {"reduction": "sum"})

    def here(group: Group) -> list[str]:
        size, found = sizes[group.rank], []
        for given in options:
            with pytest.raises(UsageError) as caught:
                logits = torch.ones(2, WIDTHS[group.rank])
                vocab_parallel_cross_entropy(
                    logits, torch.tensor([0, 5]), group=group, vocab_size=size, **given
                )
            found.append(str(caught.value))
        with pytest.raises(UsageError) as caught:
            logits, labels = torch.ones(2, WIDTHS[group.rank]), torch.tensor([[0, 5]] * 2)
            vocab_parallel_multi_label_cross_entropy(
                logits, labels, torch.ones(2, 2), group=group, vocab_size=size
            )
        return [*found, str(caught.value)]

    for rank, found in enumerate(simulate(3, here)):
        whole = sizes[rank] or 3 * WIDTHS[rank]
        assert found == [
            f"cross entropy: the ranks' logits are not parts of one vocabulary of {whole}: from rank 0 on "
            f"they take them for {told}\n  = help: give every rank the same vocab_size, the whole one"
        ] * 3  # fmt: skip


@pytest.mark.parametrize("bad", [8, -1, 99])
def test_a_target_in_no_ranks_range_raises(ranks, bad: int) -> None:
    assert (
        ranks(2)(as_rank, out_of_range, bad) == [f"Target {bad} is out of bounds for a vocabulary of 8"] * 2
    )


def out_of_range(group: Group, bad: int) -> str:
    try:
        vocab_parallel_cross_entropy(torch.ones(2, 4), torch.tensor([1, bad]), group=group)
    except IndexError as error:
        return str(error)
    return "no error"


def compiled(group: Group) -> None:
    torch._dynamo.reset()
    mesh = group.process_group  # a process group itself is resolved while it is compiled

    def function(logits: Tensor, target: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(
            logits, target, group=mesh, vocab_size=VOCABULARY, label_smoothing=0.1
        )

    found = []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        logits = own(whole_logits(), group).requires_grad_()
        loss = call(logits, torch.tensor(TARGET))
        loss.backward()
        found.append([loss.detach(), logits.grad])
    close(found[1], found[0])


@pytest.mark.slow
def test_compiled_in_one_graph(ranks) -> None:
    ranks(2)(as_rank, quietly, compiled)


def test_label_smoothing_under_autocast_is_computed_as_without() -> None:
    def here(group: Group) -> Tensor:
        logits = torch.randn(16, 4096, generator=torch.Generator().manual_seed(0)) * 3 + 8
        target, half = torch.arange(16), 4096 // group.size
        part = logits[:, group.rank * half : (group.rank + 1) * half]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = vocab_parallel_cross_entropy(part, target, group=group, label_smoothing=0.1)
        wanted = F.cross_entropy(logits.double(), target, label_smoothing=0.1)
        return (found.double() - wanted).abs()

    assert max(simulate(2, here)) < 5e-6


def test_several_labels_of_no_tokens_and_no_labels_of_tokens() -> None:
    for tokens, count in ((0, 3), (2, 0), (0, 0)):
        logits, labels = torch.zeros(tokens, 4), torch.zeros(tokens, count, dtype=torch.long)
        weights = labels.float()
        for summed, last in ((True, 1), (False, count)):
            loss = simulate(2, lambda group, summed=summed, given=(logits, labels, weights): (
                vocab_parallel_multi_label_cross_entropy(*given, group=group, sum_labels=summed)
            ))[0]  # fmt: skip
            assert loss.shape == (tokens, last) and not loss.any()
