"""What stands where a rank's part stood, and is of another size, is refused before a number is computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autotp
from autotp.comm import simulate
from autotp.diagnostic import UsageError
from tests import models
from tests.test_regions import PLAN as RAW
from tests.test_regions import Net

X = torch.randn(5, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
MLP = {"fc1": "column", "fc2": "row"}


def called(group, model, plan, change):
    """What a model gives after a change of the weights that it was sharded with."""
    model = models.randomised(model)
    full = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    autotp.shard(model, plan, group, inputs=X)
    return change(model, full)


def by_functional_call(model, full):
    return torch.func.functional_call(model, full, (X,))


def by_data(model, full):
    for name, parameter in model.named_parameters():
        parameter.data = full[name]
    return model(X)


def by_new_parameters(model, full):
    for name, value in full.items():
        path, _, key = name.rpartition(".")
        setattr(model.get_submodule(path), key, nn.Parameter(value))
    return model(X)


@pytest.mark.parametrize("change", [by_functional_call, by_data, by_new_parameters])
@pytest.mark.parametrize(("model", "plan", "where"), [
    (models.MLP, MLP, "ColumnParallelLinear: its weight has 33 elements in dim 0, and rank . of 2 holds 1."),
    (Net, RAW, r"\S+: its \S+ has \d+ elements in dim \d, and rank . of 2 holds \d+"),
])  # fmt: skip
def test_whole_weights_in_the_place_of_parts(model, plan, where, change):
    with pytest.raises(UsageError, match=f"^{where}: it was put in the place of this rank's part"):
        simulate(2, lambda group: called(group, model(), plan, change))


def test_an_embedding_that_is_resized():
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=10, hidden_size=8, intermediate_size=8, **sizes)

    def resized(group):
        model = LlamaForCausalLM(config)
        autotp.shard(model, {"embed_tokens": "vocab"}, group, check="shapes")
        model.resize_token_embeddings(12, mean_resizing=False)
        return model(torch.tensor([[1, 2]]))

    torch.manual_seed(0)
    with pytest.raises(UsageError, match=r"^VocabParallelEmbedding: its weight has 12 elements in "):
        simulate(2, resized)


def test_own_parts_under_torch_func():
    """The parts themselves may be given, and a transform may see the first forward."""

    def here(group):
        model = models.randomised(models.MLP())
        autotp.shard(model, MLP, group, inputs=X)
        parts = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def loss(x):
            return torch.func.functional_call(model, parts, (x,)).square().sum()

        return torch.func.vmap(torch.func.grad(loss))(X)

    whole = models.randomised(models.MLP())
    x = X.clone().requires_grad_()
    whole(x).square().sum().backward()
    for found in simulate(2, here):
        torch.testing.assert_close(found, x.grad, rtol=0, atol=1e-10)
