"""Layers that repeat each other are recorded once; no layer that does anything else is left out."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autotp.trace.graph import REPEATED, Trace, TraceError
from autotp.trace.inputs import make
from autotp.trace.layers import Layers
from autotp.trace.modes import modes
from autotp.trace.recorder import record
from tests import architectures
from tests.stacks import Block, Stack

X = torch.randn(3, 4)


def both(model: nn.Module, inputs: Any = X, **options: Any) -> tuple[Trace, Trace]:
    """The whole trace, and the one in which repetitions are left out."""
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
    # On one line: it is the source of what torch computes by itself.
    whole, short = (record(model, args, kwargs, layers=ls, **options) for ls in (None, Layers.of(model)))
    return whole, short


def told(trace: Trace, path: str, call: int) -> list[Any]:
    """All that a call of a layer records, in names that do not depend on which layer it is."""
    inside = [
        n for n in trace.graph.nodes
        if n.op == "call_function" and n.target is not REPEATED and (path, call) in n.meta["stack"]
    ]  # fmt: skip
    numbers: dict[fx.Node, Any] = {n: i for i, n in enumerate(inside)}
    outside: dict[fx.Node, str] = {}

    def name(node: fx.Node) -> Any:
        if node in numbers:
            return f"%{numbers[node]}"
        known = str(node.meta.get("name", ""))
        if known.startswith(f"{path}."):
            return known[len(path) :]
        return outside.setdefault(node, f"outside {len(outside)} {node.meta['val']}")

    lines = []
    for node in inside:
        meta = node.meta
        arguments = repr(fx.map_arg((node.args, node.kwargs), name))
        stack = meta["stack"][meta["stack"].index((path, call)) + 1 :]
        rest = [(p[len(path) :], c) for p, c in stack]
        grads = sorted(str(name(n)) for n in meta["grads"])
        lines.append((str(node.target), arguments, meta["val"], grads, rest, str(meta["source"])))
    for table in (trace.entered, trace.left):
        for where in sorted(p for p in table if f"{p}.".startswith(f"{path}.")):
            # A module inside may run in the first forward alone.
            calls = [[(place, str(name(n))) for place, n in c] for c in table[where][call : call + 1]]
            lines.append((where[len(path) :], calls))
    return lines


def left_out(whole: Trace, short: Trace) -> list[str]:
    """The layers that are left out; each must be, in the whole trace, what it is said to repeat."""
    for repeat in short.repeats:
        assert told(whole, repeat.path, repeat.call) == told(whole, repeat.of, repeat.call)
        assert told(whole, repeat.of, repeat.call) == told(short, repeat.of, repeat.call)
    assert whole.calls == short.calls and whole.returned == short.returned and whole.kept == short.kept
    assert [o.name for o in whole.outputs] == [o.name for o in short.outputs]
    assert [o.name for o in whole.stored] == [o.name for o in short.stored]
    gone = sum(len([x for x in told(whole, r.path, r.call) if len(x) > 2]) for r in short.repeats)
    assert sum(n.op == "call_function" for n in whole.graph.nodes) - gone == sum(
        n.op == "call_function" and n.target is not REPEATED for n in short.graph.nodes
    )
    return [r.path.rpartition(".")[2] for r in short.repeats]


def test_a_stack_of_one_kind():
    model = Stack(Block(i) for i in range(9))
    assert left_out(*both(model)) == list("12345678")
    assert len(both(model)[1].ops()) == 4
    assert [layer.layer_idx for layer in model.layers] == list(range(9))


# -- layers that look alike, and are not


class Flagged(Block):
    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        h = self.fc(x)
        return x + self.out(h.softmax(-1) if flag else h)


class Zipped(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer, flag in zip(self.layers, [False, True, False, True, False], strict=True):
            x = layer(x, flag)
        return self.head(x)


class Sliced(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            x = layer(x)
        for layer in self.layers[3:]:
            x = layer(x, flag=True)
        return self.head(x)


class Calls(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.act(self.fc(x)))


class ByNumber(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.layer_idx != 3 else x.softmax(-1)


class Scaled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 / (1 + (self.layer_idx == 2)))


class Counting(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counting.calls += 1
        return super().forward(x) if Counting.calls % 5 != 4 else super().forward(x.tanh())


class WithoutGradient(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.layer_idx != 3):
            return super().forward(x)


class Autocast(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.layer_idx == 3):
            return super().forward(x).float()


class Twice(Block):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.fc(x) + self.out(y)


class Crossed(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, x.tanh()) if i != 3 else layer(x, x)
        return self.head(x)


class Turned(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            y = x.tanh()
            x = layer(x, y) if i != 3 else layer(y, x)
        return self.head(x)


class Strided(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x if i != 3 else x.T.contiguous().T)
        return self.head(x)


class Zero(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (-0.0 if self.layer_idx == 3 else 0.0)


class Numbered(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if self.layer_idx == 3 else 1.0)


def functions(*which: Any) -> list[Block]:
    return [Calls(i, act=act) for i, act in enumerate(which)]


def sharing() -> list[Block]:
    blocks = [Block(i) for i in range(5)]
    blocks[3].out.weight = blocks[0].fc.weight
    return blocks


def held() -> list[Block]:
    blocks = [Held(i) for i in range(5)]
    for block in blocks:
        block.other = [blocks[0 if block.layer_idx == 3 else block.layer_idx].fc]
    return blocks


class Held(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(F.linear(x, self.other[0].weight))


class Tables(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.table


def tables() -> list[Block]:
    return [Tables(i, table=torch.full((4,), float(i == 3))) for i in range(5)]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: Zipped(Flagged(i) for i in range(5)), "234"),
        (lambda: Sliced(Flagged(i) for i in range(5)), "124"),
        (lambda: Stack(functions(F.gelu, F.gelu, F.relu, F.gelu, F.gelu)), "134"),
        (lambda: Stack(functions(nn.GELU(), nn.GELU(), nn.GELU("tanh"), nn.GELU())), "13"),
        (lambda: Stack(functions(nn.GELU(), *[nn.GELU()] * 3)), "1"),  # a shared module has its first name
        (lambda: Stack(ByNumber(i) for i in range(5)), "124"),
        (lambda: Stack(Scaled(i) for i in range(5)), "134"),
        (lambda: Stack(WithoutGradient(i) for i in range(5)), "12"),
        (lambda: Stack(Autocast(i) for i in range(5)), "124"),
        (lambda: Crossed(Twice(i) for i in range(5)), "124"),
        (lambda: Turned(Twice(i) for i in range(5)), None),
        (lambda: Strided(Block(i) for i in range(5)), None),
        (lambda: Stack(Zero(i) for i in range(5)), "124"),
        (lambda: Stack(Numbered(i) for i in range(5)), "124"),
        (lambda: Stack(sharing()), "124"),
        (lambda: Stack(held()), "124"),
        (lambda: Stack(tables()), ""),
    ],
)
def test_a_layer_that_does_anything_else_stands(model, expected):
    found = left_out(*both(model()))
    assert expected is None or "".join(found) == expected


def test_a_counter_that_decides_is_counted_as_without():
    model = Stack(Counting(i) for i in range(5))
    assert "".join(left_out(*both(model))) == "124" and Counting.calls == 0


# -- what cannot be noted


class Mapped(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.func.vmap(lambda row: self.out(self.fc(row)))(x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


class Own(Block):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(super().forward(x))


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.out(self.fc(x)))


class Asks(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.where(x > 0)[0].shape[0]


class Random(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if torch.rand(1) < 0.9 else x


class Generated(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(x.shape, generator=self.generator)


class Afterwards(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x += 1
        return self.head(x)


@pytest.mark.parametrize(
    "model",
    [
        lambda: Stack(Mapped(i) for i in range(4)),
        lambda: Stack(Own(i) for i in range(4)),
        lambda: nn.Sequential(nn.Linear(4, 4), Stack(InPlace(i) for i in range(4))),
        lambda: Stack(Asks(i) for i in range(4)),
        lambda: Stack(Generated(i, generator=torch.Generator()) for i in range(4)),
        lambda: Afterwards(Block(i) for i in range(4)),
    ],
)
def test_what_cannot_be_noted_is_recorded(model):
    assert left_out(*both(model())) == []


# -- what layers leave and hand on


class Writes(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = x.new_empty(x.shape[0], 8)
        h[:, :4] = self.fc(x)
        h[:, 4:] = x
        h.mul_(2)
        return x + self.out(h[:, :4])


class Sized(Block):
    """Reads sizes in all the ways there are, of which is noted what they are compared with."""

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() < 2 or x.size(-1) < 2 or x.size()[0] > 90:
            return x
        return x + self.out(self.fc(x[: x.shape[0], : x.nelement()]))


class Keeps(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.last, self.count = self.fc(x), 3
        return self.out(self.last)


class Parts(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one, other = self.fc(x).chunk(2, -1)
        values, places = x.max(-1)
        return self.out(torch.cat([other, one], -1)) + values.unsqueeze(-1), places


class Collects(Stack):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        every = []
        for layer in self.layers:
            x, places = layer(x)
            every += [x, places]
        return self.head(torch.stack(every[::2]).sum(0)), *every


@pytest.mark.parametrize(
    "model",
    [
        lambda: Stack(Writes(i) for i in range(4)),
        lambda: Stack(Sized(i) for i in range(4)),
        lambda: Stack(Keeps(i) for i in range(4)),
        lambda: Stack(Random(i) for i in range(4)),
        lambda: Collects(Parts(i) for i in range(4)),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 4, enable_nested_tensor=False),
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8), 4, enable_nested_tensor=False
        ).eval(),
    ],
)
@pytest.mark.parametrize("grad", [True, False])
def test_layers_of_all_sorts(model, grad):
    assert left_out(*both(model(), grad=grad)) == list("123")


def test_a_failing_layer_is_reported_from_the_whole_model():
    model = Stack(Block(i) for i in range(5))
    model.layers[3].out = nn.Linear(5, 4)
    model.layers[4].out = nn.Linear(5, 4)
    with pytest.raises(TraceError, match="same reduction dim") as caught:
        record(model, (X,), {}, layers=Layers.of(model))
    assert caught.value.module == "layers.3.out"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("llama", {"num_hidden_layers": 5}, marks=pytest.mark.slow),
        ("bert", {"num_hidden_layers": 4}),
        pytest.param("gemma2", {"num_hidden_layers": 6}, marks=pytest.mark.slow),
        pytest.param("t5", {"num_layers": 4}, marks=pytest.mark.slow),
        pytest.param("mixtral", {"num_hidden_layers": 4}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"n_layer": 4}, marks=pytest.mark.slow),
        pytest.param("whisper", {"encoder_layers": 4, "decoder_layers": 4}, marks=pytest.mark.slow),
    ],
)
def test_every_mode_of_real_models(name, changes):
    model = architectures.build(name, device="meta", **changes)
    layers = Layers.of(model)
    seen = 0
    for mode in modes(model, make(model)):
        try:
            whole = mode.capture(model)
        except TraceError:  # the kernels of experts at run time take bfloat16 only
            assert mode.otherwise is not None or mode.optional
            continue
        assert left_out(whole, mode.capture(model, layers=layers))
        seen += 1
    assert seen >= 3 and not layers.apart


@pytest.mark.slow
def test_a_model_of_405_billion_parameters():
    """126 layers in the time of a few: processor time, as machines are shared."""
    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "vocab_size": 128256}
    heads = {"num_attention_heads": 128, "num_key_value_heads": 8}
    model = architectures.build("llama", device="meta", num_hidden_layers=126, **sizes, **heads)
    samples = make(model)
    before = time.process_time()
    trace = record(model, (), samples.kwargs, layers=Layers.of(model))
    assert time.process_time() - before < 3.0
    assert len(trace.repeats) == 125 and trace.calls["model.layers.125.mlp.down_proj"] == 1
