"""Ranks of one group that are given different batches, or draw other random numbers."""

from __future__ import annotations

import copy
import random

import numpy
import pytest
import torch
import transformers
from torch import nn

import autotp
from autotp.comm import group_of, simulate
from autotp.diagnostic import UsageError
from autotp.rewrite import same_inputs
from autotp.rewrite.same_inputs import SameInputs, forwards
from tests.ranks import pool

PLAN = {"0": "column", "3": "row"}


def mlp(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Identity(), nn.Linear(9, 6), nn.Dropout(dropout))


def compares(model):
    return any(isinstance(hook, SameInputs) for hook in model._forward_pre_hooks.values())


def llama(**sizes):
    torch.manual_seed(0)
    given = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, **sizes,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**given)).eval()


def ids(seed):
    return torch.randint(3, 96, (2, 8), generator=torch.Generator().manual_seed(seed))


def other_ids(rank, size):
    model = autotp.shard(llama())
    with pytest.raises(UsageError) as caught:
        model(input_ids=ids(rank))
    later = model(input_ids=ids(rank)).logits  # the first forward alone was compared
    return str(caught.value), later.shape


@pytest.mark.slow
def test_other_ids_are_found_in_the_first_forward(ranks):
    answers = ranks(2)(other_ids)
    assert answers[0] == answers[1]  # on all ranks, so none waits
    message, shape = answers[0]
    words = [same_inputs._word(ids(rank)) for rank in range(2)]
    assert message == (
        "the ranks of the group gave LlamaForCausalLM different inputs: "
        f"input_ids is {words[0]} on rank 0, and {words[1]} on rank 1\n"
        "  = help: every rank of a tensor-parallel group takes the same batch: let the sampler count by the "
        "data-parallel rank; before sampling, call autotp.random.synchronize(mesh)"
    )
    assert words[0].startswith("int64 [2, 8], checksum ") and shape == (2, 8, 96)


def sampled_tokens(rank, size):
    model = autotp.shard(llama(), check_inputs=True)
    options = {"do_sample": True, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": 97}
    torch.manual_seed(rank)
    with pytest.raises(UsageError, match="input_ids is int64"):
        model.generate(ids(0), **options)
    torch.manual_seed(rank)
    autotp.random.synchronize()
    return model.generate(ids(0), **options).tolist()


@pytest.mark.slow
def test_sampled_tokens(ranks):
    mine, theirs = ranks(2)(sampled_tokens)
    assert mine == theirs and len(mine[0]) == 20


def an_early_end(rank, size):
    same_inputs.TIMEOUT = 2.0
    model = autotp.shard(llama(), check_inputs=True)
    model.generate(ids(0), do_sample=False, max_new_tokens=2 + 3 * rank, pad_token_id=0, eos_token_id=97)


@pytest.mark.slow
def test_a_rank_that_stops_earlier_ends_in_an_error(ranks):
    with pytest.raises(UsageError, match="2 s"):
        ranks(2)(an_early_end)
    pool(2).stop()  # its ranks are out of step for good


@pytest.mark.parametrize(
    "options, told", [({}, True), ({"check_inputs": 0}, False), ({"check_inputs": 2}, True)]
)
def test_how_often(options, told):
    def here(group):
        model = autotp.shard(mlp(), PLAN, group, inputs=torch.zeros(2, 6), **options)
        model(torch.ones(2, 6))
        return model(torch.full((2, 6), float(group.rank)))

    if options.get("check_inputs") == 2:
        with pytest.raises(UsageError, match="input is float32"):
            simulate(2, here)
    else:
        assert len(simulate(2, here)) == 2
    assert simulate(2, lambda g: compares(autotp.shard(mlp(), PLAN, g, **options))) == [told] * 2


def test_plain_arguments_and_their_number():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp()

        def forward(self, x, scale=1.0, *more):
            return self.layers(x) * scale

    def here(group, *given):
        plan = {f"layers.{name}": rule for name, rule in PLAN.items()}
        return autotp.shard(Scaled(), plan, group, inputs=(torch.zeros(2, 6),))(*given[group.rank])

    x = torch.ones(2, 6)
    with pytest.raises(UsageError, match=r"scale is 1\.0 on rank 0, and 2\.0 on rank 1"):
        simulate(2, lambda g: here(g, (x, 1.0), (x, 2.0)))
    with pytest.raises(UsageError, match=r"scale is nothing on rank 0, and 2\.0 on rank 1"):
        simulate(2, lambda g: here(g, (x,), (x, 2.0)))
    with pytest.raises(UsageError, match=r"x is float32 .* on rank 0, and float64"):
        simulate(2, lambda g: here(g, (x,), (x.double(),)))


@pytest.mark.parametrize("rate, told", [(0.5, True), (0.0, False)])
def test_random_numbers_that_ranks_share(rate, told):
    def here(group):
        model = autotp.shard(mlp(rate), PLAN, group, inputs=torch.zeros(2, 6)).train()
        torch.manual_seed(group.rank)
        return model(torch.ones(2, 6)).detach()

    if told:
        with pytest.raises(
            UsageError, match="Sequential draws random numbers that all ranks of the group share"
        ):
            simulate(2, here)
    else:
        assert torch.equal(*simulate(2, here))


class Decides(nn.Module):
    """Draws a number that a layer is scaled by, or left out by; in train mode alone."""

    def __init__(self, draw):
        super().__init__()
        self.up, self.down, self.draw = nn.Linear(6, 9), nn.Linear(9, 6), draw

    def forward(self, x):
        number = self.draw() if self.training else 1.0
        return x if number < 0.1 else self.down(self.up(x)) * number


DRAWS = {
    "Python": (random.random, random.seed, "random state of Python and numpy"),
    "numpy": (numpy.random.rand, numpy.random.seed, "random state of Python and numpy"),
    "torch": (lambda: torch.rand(()).item(), torch.manual_seed, "random state"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAWS)
def test_numbers_that_a_forward_draws_are_drawn_alike(kind):
    draw, seed, told = DRAWS[kind]

    def here(group, *, alike=False, synchronized=False, training=True):
        torch.manual_seed(0)
        model = Decides(draw).train(training)
        autotp.shard(model, {"up": "column", "down": "row"}, group, inputs=torch.ones(2, 6))
        seed(1 if alike else group.rank)
        if synchronized:
            autotp.random.synchronize(group)
        return model(torch.ones(2, 6)).detach()

    with pytest.raises(
        UsageError, match=f"the generators differ: {told} is .* on rank 0, and .* on rank 1\n"
    ):
        simulate(2, here)
    for options in ({"alike": True}, {"synchronized": True}, {"training": False}):
        first, second = simulate(2, lambda group, options=options: here(group, **options))
        assert torch.equal(first, second)


def test_it_is_taken_back_and_copied():
    def here(group):
        model = autotp.shard(mlp(), PLAN, group, inputs=torch.zeros(2, 6))
        assert compares(copy.deepcopy(model))
        assert not autotp.unshard(model)._forward_pre_hooks

    simulate(2, here)
    assert not compares(autotp.shard(mlp(), PLAN, group_of(None)))  # one rank has no other


@pytest.mark.parametrize("forwards", [1, 2, True])
def test_nothing_is_left_of_it_on_the_model_after_its_last_forward(forwards):
    """A module with a hook is called more slowly than one without."""

    def here(group):
        model, ran = mlp(), []
        model.register_forward_pre_hook(lambda module, inputs: ran.append("first"))
        autotp.shard(model, PLAN, group, inputs=torch.zeros(2, 6), check_inputs=forwards)
        model.register_forward_pre_hook(lambda module, inputs: ran.append("last"))
        copied, found = copy.deepcopy(model), []
        ran.clear()  # of the traces
        for one in (model, copied):
            for _ in range(3):
                one(torch.ones(2, 6))
                found.append(compares(one))
            assert len(one._forward_pre_hooks_with_kwargs) == compares(one)
        assert ran == ["first", "last"] * 6
        return found

    left = [forwards is True or forwards > number for number in (1, 2, 3)]
    assert simulate(2, here) == [left * 2] * 2


def test_a_graph_compares_too():
    def here(group):
        graph = autotp.shard(mlp().eval(), PLAN, group, inputs=torch.zeros(2, 6), form="graph")
        return graph(torch.full((2, 6), float(group.rank)))

    with pytest.raises(UsageError, match="different inputs"):
        simulate(2, here)


def test_what_is_no_number_of_forwards():
    assert (forwards(True), forwards(False), forwards(3)) == (None, 0, 3)
    for wrong in (-1, "all", 1.5, None):
        with pytest.raises(UsageError) as caught:
            autotp.shard(mlp(), PLAN, check_inputs=wrong)
        assert str(caught.value) == f"check_inputs is a number of forwards, or True for all, not {wrong!r}"
