"""What a class declares of its checkpoints: which names may miss, and which may be too many."""

from pathlib import Path

import torch
from torch import nn

from autotp.checkpoint.fit import misfits, slots_of
from autotp.checkpoint.stored import Stored
from autotp.header import Entry


class Declares(nn.Module):
    base_model_prefix = "base"
    _keys_to_ignore_on_load_missing = (r"steps$", r"weight$")
    _keys_to_ignore_on_load_unexpected = (r"^old\.",)

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("table", torch.zeros(4), persistent=False)


def faults(*names, strict=True):
    model = Declares()
    entries = {"weight": ("F32", (2,)), "steps": ("I64", (3,)), "count": ("F32", ())}
    stored = {}
    for name in names:
        dtype, shape = entries.get(name, ("F32", (4,)))
        stored[name] = Stored(Path("x"), Entry(name, dtype, shape, 0, 0), shape)
    found = {name: name for name in entries if name in stored}
    return misfits(model, slots_of(model), stored, found, shapes={}, layouts={}, strict=strict)


def test_a_buffer_that_is_computed_may_miss_and_no_parameter_may():
    assert faults("weight", "steps", "count") == faults("weight", "count") == []
    assert faults("steps", "count") == ["  missing: weight"]
    assert faults("weight", "steps") == ["  missing: count"]


def test_what_the_model_computes_or_ignores_may_be_there():
    assert faults("weight", "steps", "count", "table", "old.thing") == []
    assert faults("weight", "steps", "count", "base.table") == []
    assert faults("weight", "steps", "count", "tables") == ["  unexpected: tables"]
    assert faults("weight", "steps", "count", "tables", strict=False) == []
