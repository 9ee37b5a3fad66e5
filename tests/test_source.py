"""From a frame to the line that a person wrote."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from autotp.trace.recorder import record
from autotp.trace.source import caller_span, line_span, shown

X = torch.randn(3, 4)


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def sources(function, inputs=(X,)):
    return [n.meta["source"] for n in record(Layer(function), inputs, {}).ops()]


def marked(span):
    return span.text[span.column - 1 : span.column - 1 + span.length]


def test_file_line_and_column():
    def double(x):
        return 1 + (x * 2).relu()

    multiply, relu, add = sources(double)
    assert marked(multiply) == "x * 2" and marked(relu) == "(x * 2).relu()"
    assert marked(add) == "1 + (x * 2).relu()"
    assert multiply.file == "tests/test_source.py"
    assert multiply.line == double.__code__.co_firstlineno + 1
    assert multiply.text == "        return 1 + (x * 2).relu()"


def test_the_innermost_line_of_the_user_counts():
    def inner(x):
        return torch.nn.functional.gelu(x)

    def outer(x):
        return inner(x)

    (span,) = sources(outer)
    assert marked(span) == "torch.nn.functional.gelu(x)"


def test_a_module_of_torch_is_seen_where_it_is_called():
    layer = nn.Linear(4, 4)
    (span,) = sources(lambda x: layer(x))
    assert marked(span) == "layer(x)"


def test_calls_over_several_lines_start_at_their_first():
    def several(x):
        return torch.cat(
            [x, x],
            dim=-1,
        )

    (span,) = sources(several)
    assert marked(span) == "torch.cat("
    assert span.line == several.__code__.co_firstlineno + 1


def test_columns_count_characters():
    def accented(x):
        grüße = x; return grüße * 2  # noqa: E702  # fmt: skip

    assert marked(sources(accented)[0]) == "grüße * 2"


def test_indentation_with_tabs(tmp_path):
    path = tmp_path / "tabbed.py"
    path.write_text("def f(x):\n\treturn x * 3\n")
    span = sources(load(path).f)[0]
    assert marked(span) == "x * 3" and span.column == 9
    assert "\t       ^^^^^" in span.drawn()[-1]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_equal_functions_of_two_files_keep_their_own(tmp_path):
    spans = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.py"
        path.write_text("def f(x):\n    return x * 3\n")
        spans += sources(load(path).f)
    assert [span.file.rpartition("/")[2] for span in spans] == ["one.py", "two.py"]


def test_code_without_source():
    names: dict = {}
    exec(compile("def f(x):\n    return x * 3\n", "<made>", "exec"), names)
    (span,) = sources(names["f"])
    assert (span.file, span.line, span.column, span.length, span.text) == ("<made>", 2, 1, 1, "")
    assert span.drawn() == ["  --> <made>:2:1"]


def test_helpers_that_compute_for_their_caller_are_passed_over(tmp_path):
    folder = tmp_path / "site-packages" / "einops"
    folder.mkdir(parents=True)
    (folder / "made.py").write_text("def rearrange(x):\n    return x.reshape(-1)\n")
    helper = load(folder / "made.py")
    (span,) = sources(lambda x: helper.rearrange(x))
    assert marked(span) == "helper.rearrange(x)"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/x/lib/python3.11/site-packages/transformers/models/a.py", "transformers/models/a.py"),
        ("/x/dist-packages/y.py", "y.py"),
        ("/elsewhere/y.py", "/elsewhere/y.py"),
    ],
)
def test_paths_as_shown(path, expected):
    assert shown(path) == expected


def test_the_span_of_a_caller():
    assert marked(caller_span(1)) == "caller_span(1)"


def test_the_lines_that_call_the_trace_are_none_of_the_model():
    trace = record(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (X,), {})
    assert [node.meta["source"] for node in trace.ops()] == [None, None]


def test_whole_lines():
    line = test_whole_lines.__code__.co_firstlineno + 1
    span = line_span(__file__, line)
    assert marked(span) == "line = test_whole_lines.__code__.co_firstlineno + 1"
    assert line_span(torch.__file__, 1) is None
