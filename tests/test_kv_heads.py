"""kv heads that are fewer than the ranks, and groups that do not divide: exact, or refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import autotp
from autotp.checkpoint.load import from_pretrained
from autotp.checkpoint.optimizer import load_optimizer, save_optimizer
from autotp.checkpoint.save import save_pretrained
from autotp.comm import simulate
from autotp.slicing import take
from tests import models
from tests.checkpoints import llama, tree, write_checkpoint
from tests.grouped import PATHS, SIZES, Grouped, plan

INPUTS = torch.zeros(3, 7, 12)
QUICK = {(6, 2, 4, path) for path in PATHS} | {(q, kv, tp, "enable_gqa") for q, kv, tp in SIZES}


def verified(model: nn.Module, rules: Any, tp: int, inputs: Any = INPUTS) -> autotp.Verification:
    result = autotp.verify(model, rules, tp=tp, inputs=inputs)
    assert result.ok and result.max_grad_diff < 1e-10, str(result)
    return result


def rows() -> list[Any]:
    """Every size in every way; what is quick to try, in the fast set."""
    found = []
    for q, kv, tp in (*SIZES, (8, 2, 8), (8, 4, 8)):
        for path in PATHS:
            slow = [] if (q, kv, tp, path) in QUICK else [pytest.mark.slow]
            found.append(pytest.param(q, kv, tp, path, marks=slow, id=f"{q}-{kv}-tp{tp}-{path}"))
    return found


@pytest.mark.parametrize(("queries", "keys", "tp", "path"), rows())
def test_exact_without_an_edit(queries, keys, tp, path):
    verified(Grouped(queries, keys, path, scaled=True), plan(queries, keys), tp)


def test_tensors_with_a_number_for_each_kv_head_may_be_cut_by_the_plan():
    for keys in (2, 1):
        scale = {"scale": {"style": "column", "dim": 0, "heads": keys}}
        model = Grouped(6, keys, "enable_gqa", scaled=True)
        rules = {**plan(6, keys), **scale}
        verified(model, rules, 4)
        found = autotp.analyze(model, rules, tp=4, inputs=INPUTS)
        assert [read.name for read in found.reads if read.held] == ["scale"]


class Words(nn.Module):
    """Here the gradient of a kv head flows to parameters alone: to its layer, a norm and an embedding."""

    def __init__(self, queries, keys):
        super().__init__()
        self.words, self.norm = nn.Embedding(11, 12), nn.RMSNorm(12)
        self.attention = Grouped(queries, keys, "expand", scaled=True)

    def forward(self, ids):
        return self.attention(self.norm(self.words(ids)))


def test_a_head_that_every_rank_has_is_no_whole_value_to_copy():
    ids = torch.arange(10).view(2, 5)
    verified(Words(4, 1), plan(4, 1), 3, ids)
    found = autotp.analyze(Words(4, 1), plan(4, 1), tp=3, inputs=ids)
    assert {read.name for read in found.reads} == {"attention.scale", "attention.feature"}


def test_the_sums_over_the_ranks_of_a_head_are_told():
    result = verified(Grouped(6, 2, "enable_gqa"), plan(6, 2), 4)
    found = autotp.analyze(Grouped(6, 2, "enable_gqa"), plan(6, 2), tp=4, inputs=INPUTS)
    told: Counter[tuple[str, str]] = Counter()
    for one in found.collectives:
        told[one.direction, one.operation] += one.calls
    ran = {(way, op): n for way, counts in result.collectives[0].items() for op, n in counts.items()}
    assert told == ran == {("forward", "all-reduce"): 1, ("backward", "all-reduce"): 5}


def trained(group, steps=3):
    """Accumulated micro-batches, clipped, with an optimizer made before the model is sharded."""
    model = models.randomised(Grouped(6, 2, "enable_gqa", scaled=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if group is not None:
        autotp.shard(model, plan(6, 2), group, inputs=INPUTS.double())
    generator = torch.Generator().manual_seed(5)
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(2, 5, 12, generator=generator, dtype=torch.float64)
            model(x).square().sum().backward()
        norms.append(float(autotp.clip_grad_norm_(model, 0.5)))
        optimizer.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}, norms


def on_a_rank(rank, size):
    from autotp.comm import group_of

    return trained(group_of(None))


def compare_training(results, tp):
    whole, norms = trained(None)
    layouts = autotp.analyze(
        Grouped(6, 2, "enable_gqa", scaled=True), plan(6, 2), tp=tp, inputs=INPUTS
    ).layouts
    for rank, (parts, rank_norms) in enumerate(results):
        assert all(abs(a - b) < 1e-9 for a, b in zip(norms, rank_norms, strict=True))
        for name, tensor in whole.items():
            cut = layouts.get(name)
            wanted = tensor if cut is None else take(tensor, cut, rank)
            assert (parts[name] - wanted).abs().max() < 1e-10, (rank, name)


@pytest.mark.slow
def test_training_keeps_the_copies_equal():
    compare_training(simulate(4, trained), 4)


@pytest.mark.slow
def test_real_ranks_train_as_the_unsharded_model(ranks):
    compare_training(ranks(3)(on_a_rank), 3)


def test_shapes_alone_sum_the_gradients_too():
    rules = {**plan(6, 2), "scale": {"style": "column", "dim": 0, "heads": 2}}

    def rank(group):
        model = models.randomised(Grouped(6, 2, "enable_gqa", scaled=True))
        model.feature.requires_grad_(False)
        autotp.shard(model, rules, group, check="shapes")
        model(torch.linspace(-1, 1, 84, dtype=torch.float64).view(1, 7, 12)).square().sum().backward()
        return dict(model.named_parameters())["scale"].grad, model.k.weight.grad

    whole = models.randomised(Grouped(6, 2, "enable_gqa", scaled=True))
    whole(torch.linspace(-1, 1, 84, dtype=torch.float64).view(1, 7, 12)).square().sum().backward()
    for number, (scale, key) in enumerate(simulate(4, rank)):
        kv = number // 2
        assert torch.allclose(scale, whole.scale.grad[kv : kv + 1])
        assert torch.allclose(key, whole.k.weight.grad[5 * kv : 5 * kv + 5])


# -- what cannot be right


def heads(**changed: Any) -> dict[str, Any]:
    """The right plan of 6 query heads and 2 kv heads, with other heads; None takes a rule out."""
    rules = plan(6, 2)
    for name, number in changed.items():
        if number is None:
            del rules[name]
        else:
            rules[name] = {"style": rules[name]["style"], **({"heads": number} if number else {})}
    return rules


WRONG = {
    "k forgotten": heads(k=None),
    "v forgotten": heads(v=None),
    "k and v forgotten": heads(k=None, v=None),
    "q forgotten": heads(q=None),
    "o forgotten": heads(o=None),
    "k by features": heads(k=0),
    "k and v by features": heads(k=0, v=0),
    "q by features": heads(q=0),
    "q by other heads": heads(q=10),
    "k by features of query heads": heads(k=6, v=6),
    "one kv head of k": heads(k=1),
    "one kv head": heads(k=1, v=1),
    "kv heads on q": heads(q=2),
    "kv heads on q and o": heads(q=2, o=2),
    "other heads on o": heads(o=10),
}


@pytest.mark.parametrize("path", ["enable_gqa", "expand"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_heads_are_refused(name, path):
    for tp in (3, 4):
        assert not autotp.analyze(Grouped(6, 2, path), WRONG[name], tp=tp, inputs=INPUTS).ok


def test_an_attention_without_shared_heads_is_not_shared():
    for queries, keys, tp in ((3, 3, 4), (2, 1, 3), (2, 2, 4)):
        found = autotp.analyze(
            Grouped(queries, keys, "enable_gqa"), plan(queries, keys), tp=tp, inputs=INPUTS
        )
        assert {d.code for d in found.diagnostics if d.severity == "error"} == {"AT203"}


def test_dropout_on_a_shared_head_is_refused():
    def codes(tp):
        model = Grouped(6, 2, "enable_gqa", dropped=0.5)
        found = autotp.analyze(model, plan(6, 2), tp=tp, inputs=INPUTS)
        return {d.code for d in found.diagnostics if d.severity == "error"}

    assert codes(2) == set()
    assert codes(3) == codes(4) == {"AT316"}
    model = Grouped(6, 2, "enable_gqa", dropped=0.5)
    (told,) = autotp.analyze(model, plan(6, 2), tp=4, inputs=INPUTS).diagnostics
    assert told.message == (
        "dropout draws random numbers on elements that several ranks hold, and every rank draws others"
    )
    assert told.notes[0] == "shard(dim 1: 2 parts, held by 2+2 ranks)"


# -- files


def test_headers_cut_a_checkpoint_that_merges_and_loads(tmp_path):
    tensors, config = llama(hidden=24, heads=6, kv=2, layers=1)
    source = write_checkpoint(tmp_path / "in", tensors, config=config)
    autotp.convert(source, tmp_path / "ranks", tp=4, check="shapes")
    autotp.merge(tmp_path / "ranks", tmp_path / "back")
    assert tree(tmp_path / "back") == tree(source)

    def run(group):
        model = from_pretrained(tmp_path / "ranks", mesh=group, check="shapes")
        save_pretrained(model, tmp_path / "out")
        attention = model.model.layers[0].self_attn
        return [tuple(p.shape) for p in attention.parameters()], attention.k_proj.weight.detach()

    found = simulate(4, run)
    heads = [2, 1, 2, 1]
    for rank, (shapes, key) in enumerate(found):
        assert shapes == [(4 * heads[rank], 24), (4, 24), (4, 24), (24, 4 * heads[rank])]
        assert torch.equal(key, found[rank // 2 * 2][1])
    wanted = load_file(source / "model.safetensors")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == wanted.keys() and all(torch.equal(written[n], wanted[n]) for n in wanted)


@pytest.mark.slow
def test_optimizer_state_of_shared_heads_goes_to_other_ranks(tmp_path):
    x = torch.randn(2, 5, 12, dtype=torch.float64)

    def steps(model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    def made(group):
        model = models.randomised(Grouped(6, 2, "enable_gqa"))
        if group is not None:
            autotp.shard(model, plan(6, 2), group, inputs=x)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def first(group):
        model, optimizer = made(group)
        steps(model, optimizer)
        save_optimizer(model, optimizer, tmp_path / "state.safetensors")
        return autotp.gather_state_dict(model)

    state = simulate(4, first)[0]

    def second(group):
        model, optimizer = made(group)
        autotp.load_state_dict(model, state)
        load_optimizer(model, optimizer, tmp_path / "state.safetensors")
        steps(model, optimizer)
        return autotp.gather_state_dict(model)

    whole, optimizer = made(None)
    steps(whole, optimizer)
    steps(whole, optimizer)
    for found in simulate(2, second):
        for name, tensor in whole.state_dict().items():
            assert (found[name] - tensor).abs().max() < 1e-10, name
