"""Branches of the model's code that no traced mode took."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

import autotp
from autotp.trace.branches import Watched, unreached, unwatched
from autotp.trace.source import line_span

FFN = {"fc1": "column", "fc2": "row"}
HERE = __file__


def lines(function, *marks):
    """The numbers of the lines of a function's class that end with a mark."""
    source = Path(HERE).read_text().splitlines()
    return [i + 1 for i, text in enumerate(source) for mark in marks if text.endswith(f"# {function} {mark}")]


class Branchy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)
        self.scale, self.mode = None, "a"

    def forward(self, x, mask=None):
        h = self.fc1(x)
        if self.scale is not None:
            h = h * self.scale  # forward scale
        if self.mode == "a":
            h = h.relu()
        elif self.mode == "b":
            h = h.tanh()  # forward b
        else:
            raise ValueError(self.mode)
        for _ in ():
            h = h + 1  # forward never
        try:
            h = h.view(h.shape)
        except RuntimeError:
            h = h.reshape(h.shape)  # forward except
        match self.mode:
            case "a":
                h = h * 2
            case "c":
                h = h * 3  # forward case
        if self.training:
            h = h * 1.5  # taken in train
        return self.whole(self.fc2(h))

    def whole(self, x):
        if self.mode == "z":
            x = x * 2  # whole values are none of it
        return x


def test_branches_are_listed_with_file_and_line():
    analysis = autotp.analyze(Branchy(), FFN, tp=2, inputs=torch.zeros(3, 16))
    assert analysis.ok and not analysis.diagnostics
    expected = sorted(lines("forward", "scale", "b", "never", "except", "case"))
    assert [(b.function, b.span.line) for b in analysis.branches] == [
        ("Branchy.forward", n) for n in expected
    ]
    assert len(expected) == 5
    text, page = str(analysis), analysis.to_html()
    where = f"tests/test_trace_branches.py:{', '.join(map(str, expected))}"
    assert f"not proven: branches that no traced mode took\n  Branchy.forward  {where}" in text
    assert where in page and "Not proven" in page
    assert [b["line"] for b in json.loads(analysis.to_json())["branches"]] == expected


def test_a_refused_plan_and_a_model_without_branches_list_none():
    assert autotp.analyze(Branchy(), {"fc1": "column"}, tp=2).branches == ()
    plain = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    analysis = autotp.analyze(plain, {"0": "column", "1": "row"}, tp=2)
    assert analysis.ok and analysis.branches == () and "not proven" not in str(analysis)


class Layer(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.fc1, self.fc2, self.index = nn.Linear(16, 32), nn.Linear(32, 16), index

    def forward(self, x):
        h = self.fc1(x)
        if self.index == 0:
            h = h * 2
        else:
            h = h * 2
        if self.index > 9:
            h = h * 3  # Layer far
        return self.fc2(h)


def test_layers_that_repeat_are_watched_too():
    stack = nn.Sequential(*(Layer(i) for i in range(4)))
    analysis = autotp.analyze(stack, {"*.fc1": "column", "*.fc2": "row"}, tp=2)
    assert [b.span.line for b in analysis.branches] == lines("Layer", "far")


def function(flag):
    if flag:
        return 1
    return 2  # after


def test_another_tracer_is_left_alone():
    def tracer(frame, event, arg):
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        with Watched() as watched:
            function(True)
            with unwatched():
                assert sys.gettrace() is tracer
        assert sys.gettrace() is tracer and watched.ran == []
    finally:
        sys.settrace(before)


def test_unwatched_notes_nothing():
    with Watched() as watched:
        with unwatched():
            function(True)
        ran = [code.co_name for code, _ in watched.ran]
    assert "function" not in ran and sys.gettrace() is None
    with watched:
        function(False)
    (seen,) = [seen for code, seen in watched.ran if code.co_name == "function"]
    handled = [line_span(HERE, n) for n in seen]
    assert [b.span.line for b in unreached(watched.ran, handled)] == [function.__code__.co_firstlineno + 2]
