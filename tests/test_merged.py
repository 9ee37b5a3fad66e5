"""One reduce after the sum of parallel branches."""

from __future__ import annotations

import collections
import copy
import types

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.comm import group_of, simulate
from autotp.diagnostic import UsageError
from autotp.rewrite.apply import apply
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


@pytest.mark.parametrize(
    ("first", "line", "forward"),
    [
        (True, "return reduce(self.one(x) + self.two(x) + self.three(x)) + x", 1),
        (False, "return self.one(x).tanh() * x + (reduce(self.two(x) + self.three(x)))", 2),
    ],
)
def test_branches_that_repeat_each_other_have_one_reduce(first, line, forward):
    """A trace leaves out layers that are like others: what they give is a branch as well."""
    model, plan = parallel.Twins(first), {"a1": "column", "a2": "row"}
    analysis = autotp.analyze(model, plan, tp=2, inputs=X)
    changed = [line[1:].strip() for line in analysis.edits.splitlines() if line.startswith("+ ")]
    assert analysis.ok and line in changed
    result = autotp.verify(model, plan, tp=3, inputs=X)
    assert result.ok and result.tolerance == 1e-9, str(result)
    assert result.collectives[0] == {"forward": {"all-reduce": forward}, "backward": {"all-reduce": 1}}


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


BLOCKS = {
    "gpt_neox": {"intermediate_size": 37, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "gptj": {"n_inner": 37, "rotary_dim": 4, "resid_pdrop": 0.1, "attn_pdrop": 0.1},
    "cohere": {"intermediate_size": 37, "num_key_value_heads": 3},
    "falcon": {"multi_query": False, "hidden_dropout": 0.1},
    "llama": {"intermediate_size": 37, "num_key_value_heads": 3},
}


def built(kind):
    """A language model of the kind, in training: of those that have it, with dropout in each branch."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2}
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=61, tie_word_embeddings=False, **sizes, **BLOCKS[kind]
    )
    return transformers.AutoModelForCausalLM.from_config(config).train()


class Moved(TorchDispatchMode):
    """Counts whatever torch.distributed moves."""

    def __init__(self):
        super().__init__()
        self.ran = collections.Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ran[op.__name__] += "c10d" in op.namespace
        return op(*args, **(kwargs or {}))


def moved(model, ids):
    """What a forward and a backward move."""
    found = []
    with Moved() as forward:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with Moved() as backward:
        loss.backward()
    for ran in (forward.ran, backward.ran):
        found.append({name.partition(".")[0]: count for name, count in ran.items() if count})
    return found


def _counted(rank, size, kind):
    """What a forward and a backward of two layers move, and whether the analysis says as many."""
    model, ids = built(kind), torch.arange(10).view(2, 5) + 3
    analysis = autotp.analyze(model, kind, tp=size)
    ran = moved(apply(model, analysis, group_of(None)), ids)
    told = [sum(c.calls for c in analysis.collectives if c.direction == d) for d in ("forward", "backward")]
    return ran, [sum(counts.values()) for counts in ran] == told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    # GPT-J's branches and Cohere's read one value and share its copy; NeoX and Falcon have a norm before each
    [("llama", 2, 2), ("gptj", 1, 1), ("gpt_neox", 1, 2), ("cohere", 1, 1), ("falcon", 1, 2)],
)
def test_what_each_layer_moves(ranks, kind, forward, backward):
    """Beside the two layers the embedding is summed, the head gathered, and its input's gradient summed."""
    ran = [{"allreduce_": 2 * forward + 1, "_allgather_base_": 1}, {"allreduce_": 2 * backward + 1}]
    assert ranks(2)(_counted, kind) == [(ran, True)] * 2


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
