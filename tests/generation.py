"""Greedy generation with a cache: every rank of a proven plan gives the tokens of the unsharded model."""

from __future__ import annotations

import copy
from typing import Any

import torch

from autotp.analysis import Analysis
from autotp.comm import Group, simulate
from autotp.rewrite.apply import apply

__all__ = ["generates_the_same"]


def generates_the_same(model: Any, analysis: Analysis) -> None:
    """Five tokens after a prompt of five; what `shard` does after its proof stands before."""
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "input_features":
        given = {"input_features": torch.randn(2, 8, 20, dtype=torch.float64, generator=generator)}
    else:
        ids = torch.randint(4, 60, (2, 5), generator=generator)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": 60}
    wanted = model.generate(**given, **options)
    copies = [copy.deepcopy(model) for _ in range(analysis.tp)]

    def rank(group: Group) -> torch.Tensor:
        tokens: torch.Tensor = apply(copies[group.rank], analysis, group).generate(**given, **options)
        return tokens

    for tokens in simulate(analysis.tp, rank):
        assert torch.equal(tokens, wanted)
