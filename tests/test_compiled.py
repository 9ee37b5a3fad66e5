"""`torch.compile(fullgraph=True)` of sharded models: no graph break, and the same numbers."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import autotp
from tests import edited, models
from tests.whole import MODELS, build


def mlp() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    _, plan, inputs = MODELS["uneven"]
    return autotp.shard(build("uneven"), plan, inputs=inputs), inputs, {}


def llama_layer() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    model = autotp.shard(models.randomised(models.llama(num_hidden_layers=1)), "llama")
    x = torch.randn(2, 5, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(5).unsqueeze(0)
    rotary = model.model.rotary_emb(x, positions)
    return model.model.layers[0], (x,), {"position_embeddings": rotary, "position_ids": positions}


def nanogpt() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    _, plan, inputs = MODELS["edited"]
    return autotp.shard(build("edited"), plan, inputs=inputs), inputs, {}


def helpers() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    """A class method and a static one have edited copies."""
    x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plan = {"fc1": {"style": "column", "heads": 3}, "fc2": {"style": "row", "heads": 3}}
    return autotp.shard(models.randomised(edited.Static()), plan, inputs=x), (x,), {}


def stepped(call, model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> list[Tensor]:
    """The output and every gradient of one step."""
    model.zero_grad()
    args = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in args)
    out = call(*args, **kwargs)
    out = out if isinstance(out, Tensor) else out[0]
    out.square().sum().backward()
    leaves = [x for x in args if x.requires_grad] + list(model.parameters())
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def compiled(rank: int, size: int, name: str) -> int:
    model, args, kwargs = globals()[name]()
    if name != "nanogpt":  # a part by itself, and inputs with a gradient, are other calls than were given
        stepped(model, model, args, kwargs)
    torch._dynamo.reset()
    with warnings.catch_warnings():  # torch's own, when its compiler meets an autograd.Function
        warnings.filterwarnings("ignore", ".*should not be instantiated.*", DeprecationWarning)
        found = stepped(torch.compile(model, fullgraph=True, backend="aot_eager"), model, args, kwargs)
    found = [x.clone() for x in found]
    wanted = stepped(model, model, args, kwargs)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10 * max(1.0, float(b.abs().max())))
    return len(found)


def compiled_first(rank: int, size: int) -> str:
    model, (x,), _ = mlp()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        torch.compile(model, fullgraph=True, backend="aot_eager")(x[None, None])
    torch._dynamo.reset()
    model(x[None, None])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*should not be instantiated.*", DeprecationWarning)
        torch.compile(model, fullgraph=True, backend="aot_eager")(x[None, None])
    return str(caught.value)


@pytest.mark.slow
def test_a_new_call_is_made_once_before_it_is_compiled(ranks) -> None:
    says = "make such a call once before the model is compiled"
    assert all(says in message for message in ranks(2)(compiled_first))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tensors"), [("mlp", 6), ("llama_layer", 11), ("nanogpt", 15), ("helpers", 6)]
)
def test_one_graph_and_the_same_numbers(ranks, name: str, tensors: int) -> None:
    assert all(count >= tensors for count in ranks(2)(compiled, name))
