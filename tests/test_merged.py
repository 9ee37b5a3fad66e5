"""One reduce after the sum of parallel branches."""

from __future__ import annotations

import collections
import copy
import types

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import autotp
from autotp.comm import simulate
from autotp.diagnostic import UsageError
from tests import parallel

PLAN = {"a1": "column", "a2": "row", "b1": "column", "b2": "row"}
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("model", "edits"),
    [
        (parallel.Parallel(), ["return reduce(a + b) + x"]),
        (parallel.Parallel(dropout=0.3), ["return reduce(a + b) + x"]),
        (parallel.Written(), ["a += b; a = reduce(a)"]),
        (parallel.Aliased(), []),
        (parallel.WrittenInto(), []),
        (parallel.ReadTwice(), []),
        (parallel.Three(), []),
        (parallel.Sometimes(), ["return reduce(a + b) if self.training else reduce(a + (share(x) + b))"]),
        (parallel.Never(), []),
        (parallel.Between(), ["h = reduce(share(x) + a + b)"]),
        (parallel.Helped(), ["return reduce(summed(share(x), a) + b)"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else type(value).__name__,
)
def test_branches_that_meet_in_a_sum_have_one_reduce(model, edits):
    analysis = autotp.analyze(model, PLAN, tp=2, inputs=X)
    assert analysis.ok
    changed = [line[1:].strip() for line in analysis.edits.splitlines() if line.startswith("+ ")]
    assert changed == edits
    assert analysis.unreduced == (("a2", "b2", "dropout") if edits else ())
    result = autotp.verify(model, PLAN, tp=3, inputs=X)
    assert result.ok and result.tolerance == 1e-9, str(result)


def test_a_hook_does_not_see_a_part_of_a_sum():
    """Registered before, each layer reduces; after, the next forward raises."""
    seen = []

    def looked(group, before):
        torch.manual_seed(0)
        model, x = parallel.Parallel().double(), X.double()
        if before:
            model.a2.register_forward_hook(lambda layer, args, out: seen.append(out))
            want = model.a2(model.a1(x).tanh()).detach()
            autotp.shard(model, PLAN, group, inputs=x)
            model(x)
            return (seen[-1].detach() - want).abs().max().item()
        autotp.shard(model, PLAN, group, inputs=x)
        hook = model.a2.register_forward_hook(lambda layer, args, out: None)
        with pytest.raises(UsageError, match=r"^a2: a forward hook would see this rank's part of a sum"):
            model(x)
        hook.remove()
        return model(x).shape

    assert max(simulate(2, lambda group: looked(group, True))) < 1e-10
    assert simulate(2, lambda group: looked(group, False)) == [X.shape] * 2


@pytest.mark.parametrize("model", [parallel.Parallel(dropout=0.3), parallel.Between(dropout=0.3)])
def test_a_dropout_between_branches_is_that_of_the_unsharded_model(model):
    def run(model):
        torch.manual_seed(1)
        x = X.clone().requires_grad_()
        y = model.train()(x)
        (dx,) = torch.autograd.grad(y.square().sum(), x)
        return y, dx

    def rank(group):
        sharded = autotp.shard(copy.deepcopy(model), PLAN, mesh=group, inputs=X)
        assert sharded.a2.reduce_output is False
        return run(sharded)

    wanted = run(copy.deepcopy(model))
    for found in simulate(3, rank):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_hook_on_a_dropout_between_branches_sees_the_whole():
    model = parallel.Parallel(dropout=0.3)
    model.dropout.register_forward_hook(lambda layer, args, out: None)
    analysis = autotp.analyze(model, PLAN, tp=2, inputs=X)
    assert analysis.ok and not analysis.unreduced


def test_explain_shows_where_the_sum_is_reduced():
    found = autotp.explain(parallel.Parallel(), "", PLAN, tp=2, inputs=X)
    shown = [(step.op, step.placement, [m.mapping for m in step.mappings]) for step in found.steps]
    assert [one for one in shown if one[0] in ("linear", "add")] == [
        ("linear", "shard dim 1: 5 -> 3 + 2", ["copy"]),
        ("linear", "partial", []),
        ("linear", "shard dim 1: 5 -> 3 + 2", ["copy"]),
        ("linear", "partial", []),
        ("add", "replicate", ["reduce"]),
        ("add", "replicate", []),
    ]


def layer(kind):
    torch.manual_seed(0)
    sizes = {
        "gpt_neox": {
            "hidden_size": 24,
            "num_attention_heads": 3,
            "intermediate_size": 37,
            "num_hidden_layers": 1,
        },
        "gptj": {"n_embd": 24, "n_head": 3, "n_inner": 37, "n_layer": 1, "rotary_dim": 4},
        "cohere": {
            "hidden_size": 24,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "intermediate_size": 37,
            "num_hidden_layers": 1,
        },
        "falcon": {
            "hidden_size": 24,
            "num_attention_heads": 3,
            "num_hidden_layers": 1,
            "multi_query": False,
            "hidden_dropout": 0.1,
        },
    }[kind]
    config = transformers.AutoConfig.for_model(kind, vocab_size=61, **sizes)
    return transformers.AutoModel.from_config(config).eval()


def _counted(rank, size, kind):
    """The all-reduces of a model of one layer, forward and backward, and what the analysis says of them."""
    plain, ran = dist.all_reduce, collections.Counter()

    def all_reduce(*args, **kwargs):
        ran["all"] += 1
        return plain(*args, **kwargs)

    model = layer(kind).train()
    rules = {n: r for n, r in autotp.Plan.load(f"plans/{kind}.yaml").rules.items() if r.style != "vocab"}
    rules.pop("lm_head", None)
    said = autotp.analyze(model, rules, tp=size).collectives
    autotp.shard(model, rules)
    dist.all_reduce = all_reduce
    try:
        y = model(inputs_embeds=torch.randn(2, 5, 24, requires_grad=True)).last_hidden_state
        forward = ran["all"]
        y.square().sum().backward()
    finally:
        dist.all_reduce = plain
    told = tuple(sum(c.calls for c in said if c.direction == d) for d in ("forward", "backward"))
    return [(forward, ran["all"] - forward), told]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "backward"),
    # GPT-J's branches and Cohere's read one value and share its copy; the others have a norm before each
    [("gptj", 1), ("gpt_neox", 2), ("cohere", 1), ("falcon", 2)],
)
def test_one_all_reduce_forward_of_parallel_branches(ranks, kind, backward):
    assert ranks(2)(_counted, kind) == [[(1, backward)] * 2] * 2


def both(module, x):
    return module.a2(module.a1(x).tanh()) + module.b2(module.b1(x).sigmoid()) + x


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a1, self.a2, self.b1, self.b2 = (nn.Linear(*s) for s in ((8, 7), (7, 8), (8, 9), (9, 8)))
        self.run = both

    def forward(self, x):
        return self.run(self, x)


@pytest.mark.parametrize("patched", [False, True])
def test_code_of_one_object_is_not_edited_and_reduces_as_before(patched):
    model = Branches()
    if patched:
        model.forward = types.MethodType(both, model)
    plan = {"a1": "column", "a2": "row", "b1": "column", "b2": "row"}
    analysis = autotp.analyze(model, plan, tp=2, inputs=torch.randn(3, 8))
    assert analysis.ok and not analysis.edits and not analysis.unreduced
