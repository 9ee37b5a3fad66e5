"""Arguments of calls that are no plain tensors: caches that hold streams, locks."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import transformers
from torch import nn

import autotp
from autotp.comm import simulate
from autotp.trace.capture import capture
from autotp.trace.copies import copied
from autotp.trace.export import export
from autotp.trace.graph import TraceError
from tests import models

PLAN = {"fc1": "column", "fc2": "row"}


class Prefetched(transformers.DynamicCache):
    """As an offloaded cache is, without moving anything."""

    def __init__(self):
        super().__init__()
        self.prefetch_stream = torch.Stream()


def test_a_cache_with_a_stream_is_generated_with():
    model = models.llama().eval()
    ids = torch.tensor([[5, 9, 3, 7]])

    def tokens(model):
        return model.generate(ids, past_key_values=Prefetched(), max_new_tokens=6, do_sample=False)

    want = tokens(model)
    ranks = simulate(2, lambda group: tokens(autotp.shard(copy.deepcopy(model), "llama", group)))
    assert all(torch.equal(got, want) for got in ranks) and want.shape == (1, 10)


def test_tensors_are_replaced_and_streams_kept():
    cache, old, new = Prefetched(), torch.zeros(2), torch.ones(2)
    cache.held = old
    made, (again,) = copied((cache, [old]), {id(old): new})
    assert made is not cache and made.held is new is again
    assert made.prefetch_stream is cache.prefetch_stream and cache.held is old


class Locked:
    def __init__(self):
        self.lock = threading.Lock()


class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 10), nn.Linear(10, 5)

    def forward(self, x, holder=None):
        return self.fc2(torch.relu(self.fc1(x)))


@pytest.mark.parametrize("record", [capture, export])
def test_what_cannot_be_copied_is_a_trace_error(record):
    with pytest.raises(TraceError, match=r"argument of the call cannot be copied: TypeError: .*lock"):
        record(Takes().eval(), (torch.zeros(3, 6), Locked()), {})


def test_a_call_with_what_cannot_be_copied_is_refused_on_a_sharded_model():
    x = torch.randn(3, 6)
    analysis = autotp.analyze(Takes(), PLAN, tp=2, inputs=(x, Locked()))
    assert not analysis.ok and "cannot be copied" in str(analysis)

    def here(group):
        model = Takes().eval()
        want = model(x)
        autotp.shard(model, PLAN, group, inputs=x)
        torch.testing.assert_close(model(x), want)
        with pytest.raises(autotp.UnprovenPath, match="holder="):
            model(x, Locked())

    simulate(2, here)
