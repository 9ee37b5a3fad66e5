"""Greedy generation with a cache on edited decoders: every rank gives the tokens of the unsharded model."""

from __future__ import annotations

import copy

import pytest
import torch

import autotp
from autotp.comm import simulate
from tests.models import randomised
from tests.test_shipped_plans import build, three

NAMES = (
    "bloom",
    "codegen",
    "gpt2",
    "gpt_neo",
    "gptj",
    "mpt",
    "opt",
    "persimmon",
    "phi3",
    "stablelm",
    "t5",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_generate_gives_the_same_tokens(name):
    model = randomised(build(name, **three(name)))
    ids = torch.randint(4, 90, (2, 5), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": 96}
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def rank(group):
        sharded = autotp.shard(copies[group.rank], name, group)
        return sharded.generate(ids, attention_mask=torch.ones_like(ids), **options)

    for tokens in simulate(2, rank):
        assert torch.equal(tokens, wanted)
