"""The inventory of a live module."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from autotp.trace.inventory import inventory, kind_of
from tests import architectures


class Named(nn.Linear):
    """Adds nothing."""


class Scaled(nn.Linear):
    """Computes otherwise, so it is no plain linear layer."""

    def forward(self, x):
        return super().forward(x) * 2


def test_kinds():
    from transformers.pytorch_utils import Conv1D

    kinds = {
        nn.Linear(2, 2): "linear",
        nn.Embedding(2, 2): "embedding",
        nn.LayerNorm(2): "norm",
        nn.RMSNorm(2): "norm",
        nn.GroupNorm(1, 2): "norm",
        Conv1D(2, 2): "conv1d",
        Named(2, 2): "linear",
        Scaled(2, 2): "other",
        nn.Conv2d(2, 2, 1): "other",
        nn.Bilinear(2, 2, 2): "other",
    }
    assert {type(m).__name__: kind_of(m) for m in kinds} == {type(m).__name__: k for m, k in kinds.items()}


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.block = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        self.again = self.block
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool), persistent=False)
        self.register_buffer("later", None)


def test_tensors_with_their_roles():
    stock = inventory(Mixed())
    tensors = stock.tensors()
    assert set(tensors) == {
        "scale", "steps", "mask", "embed.weight", "block.0.weight", "block.0.bias", "again.0.weight",
        "again.0.bias", "head.weight",
    }  # fmt: skip
    told = {n: (t.shape, t.dtype, t.itemsize, t.role, t.persistent) for n, t in tensors.items()}
    assert told["scale"] == ((3,), "BF16", 2, "parameter", True)
    assert told["steps"] == ((), "I64", 8, "buffer", True)
    assert told["mask"] == ((2,), "BOOL", 1, "buffer", False)
    assert stock.modules["block.0"].kind == "linear" and stock.modules["block.0"].class_name == "Linear"


def test_shared_tensors_are_aliases_of_their_first_name():
    assert inventory(Mixed()).aliases == {
        "head.weight": "embed.weight",
        "again.0.weight": "block.0.weight",
        "again.0.bias": "block.0.bias",
    }


def test_every_path_is_known():
    paths = inventory(Mixed()).paths
    assert set(paths) == {"", "embed", "block", "block.0", "block.1", "again", "again.0", "again.1", "head"}


def test_configs_answer_to_mapped_names():
    config = inventory(architectures.build("gpt2")).config
    assert config["n_head"] == config["num_attention_heads"] == 3 and config["model_type"] == "gpt2"


def test_plain_configs_tell_numbers_and_words():
    for config in (
        {"n_head": 6, "rope": [1], 3: 4},
        types.SimpleNamespace(n_head=6, device=torch.device("cpu")),
    ):
        model = nn.Linear(2, 2)
        model.config = config
        assert inventory(model).config == {"n_head": 6}


def test_a_model_without_config():
    stock = inventory(nn.Linear(2, 2))
    assert stock.config == {} and list(stock.tensors()) == ["weight", "bias"]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.complex64, torch.uint8])
def test_dtypes_are_those_of_safetensors(dtype):
    from safetensors import torch as safetensors

    layer = nn.Module()
    layer.register_buffer("x", torch.zeros(2, dtype=dtype))
    name = inventory(layer).tensors()["x"].dtype
    if dtype is not torch.complex64:
        assert safetensors._TYPES[name] is dtype
    assert name in ("F8_E4M3", "F16", "C64", "U8")


def test_a_meta_model():
    assert inventory(architectures.build("llama", device="meta")).tensors()["lm_head.weight"].shape == (
        97,
        24,
    )


def test_a_lazy_layer_has_no_shape_yet():
    assert inventory(nn.LazyLinear(4)).tensors()["weight"].shape == ()
