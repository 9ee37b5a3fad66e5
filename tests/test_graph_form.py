"""`shard(form="graph")`: one graph with the mappings as nodes, equal to the model, and lasting."""

from __future__ import annotations

import copy
import io
import operator
import pickle
import warnings

import pytest
import torch
from torch import Tensor, fx, nn

import autotp
from autotp import mappings
from autotp.comm import Group, simulate
from tests import models
from tests.conftest import as_rank
from tests.whole import MODELS, build, outcome

PLAN = {"fc1": "column", "fc2": "row"}
KINDS = set(mappings.MAPPINGS)


def mappings_of(graph: fx.GraphModule) -> list[str]:
    """The names of the mappings that are nodes, in order."""
    return [n.target.__name__ for n in graph.graph.nodes if getattr(n.target, "__name__", "") in KINDS]


def graph_of(name: str, group: Group | None, seed: int = 0) -> fx.GraphModule:
    _, plan, inputs = MODELS[name]
    graph = autotp.shard(build(name, seed), plan, group, inputs=inputs, form="graph")
    assert isinstance(graph, fx.GraphModule)
    return graph


def same(found: tuple[Tensor, dict], wanted: tuple[Tensor, dict], cut: set[str]) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-10)
    assert set(found[1]) == set(wanted[1])
    for name, gradient in found[1].items():
        if name not in cut:
            torch.testing.assert_close(gradient, wanted[1][name], rtol=0, atol=1e-10)


def numbers(group: Group, name: str) -> None:
    graph = graph_of(name, group)
    model = autotp.shard(build(name), MODELS[name][1], group, inputs=MODELS[name][2])
    wanted = outcome(model, name)
    same(outcome(graph, name), wanted, set())
    same(outcome(graph, name), outcome(build(name), name), set(model.__dict__["_autotp"].layouts))
    for rows in (1, 2):  # batches that it was not made with
        fewer = tuple(x[:rows] for x in MODELS[name][2])
        torch.testing.assert_close(graph(*fewer), build(name)(*fewer), rtol=0, atol=1e-10)
    whole = autotp.gather_state_dict(graph)
    assert set(whole) == set(build(name).state_dict()) == set(graph.state_dict())
    assert all(torch.equal(whole[n], value) for n, value in build(name).state_dict().items())


@pytest.mark.parametrize(
    "name", [n if n == "reads" else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_numbers_are_those_of_the_model(ranks, name: str) -> None:
    ranks(2)(as_rank, numbers, name)
    simulate(3, lambda group: numbers(group, name))


def test_every_mapping_is_a_node_with_its_group_and_cut() -> None:
    def rank(group: Group) -> str:
        graph = graph_of("uneven", group)
        assert mappings_of(graph) == ["copy", "reduce"]
        for node in graph.graph.nodes:
            if node.target in (mappings.copy, mappings.reduce):
                assert node.kwargs["group"].op == "get_attr"
                assert operator.attrgetter(node.kwargs["group"].target)(graph) is group
        assert mappings_of(graph_of("reads", group)) == ["copy", "copy", "slice", "slice", "reduce"]
        return graph.code

    code, *_ = simulate(2, rank)
    assert "autotp_mappings_reduce(linear_1, group = autotp_group)" in code


def test_the_model_is_untouched() -> None:
    def rank(group: Group) -> None:
        model = build("tied, vocabulary")
        before = {n: (id(p), p.detach().clone()) for n, p in model.named_parameters()}
        classes = [type(m) for m in model.modules()]
        graph = autotp.shard(model, MODELS["tied, vocabulary"][1], group, form="graph")
        assert {n: id(p) for n, p in model.named_parameters()} == {n: i for n, (i, _) in before.items()}
        assert all(torch.equal(p, before[n][1]) for n, p in model.named_parameters())
        assert [type(m) for m in model.modules()] == classes and "_autotp" not in model.__dict__
        assert graph.get_parameter("embed.weight") is graph.get_parameter("head.weight")
        assert graph.get_parameter("embed.weight").shape[0] in (18, 19)
        with pytest.raises(autotp.UsageError, match=r"a graph is not made whole\n.*gather_state_dict\(graph"):
            autotp.unshard(graph)
        with torch.no_grad():
            graph.get_parameter("embed.weight").fill_(3)
        model.load_state_dict(autotp.gather_state_dict(graph))
        assert bool((model.embed.weight == 3).all()) and model.head.weight is model.embed.weight
        with pytest.raises(autotp.UsageError, match="sharded already"):
            autotp.shard(graph, PLAN, group)

    simulate(2, rank)


def lasting(rank: int, size: int, name: str) -> None:
    """Copied, pickled, saved and compiled: the same bits."""
    graph = graph_of(name, None)
    wanted = outcome(graph, name)
    file = io.BytesIO()
    torch.save(graph, file)
    file.seek(0)
    others = [copy.deepcopy(graph), pickle.loads(pickle.dumps(graph)), torch.load(file, weights_only=False)]
    others.append(pickle.loads(pickle.dumps(others[1])))
    for other in others:
        found = outcome(other, name)
        assert torch.equal(found[0], wanted[0])
        assert all(torch.equal(found[1][n], g) for n, g in wanted[1].items())
        assert mappings_of(other) == mappings_of(graph)
        assert set(other.state_dict()) == set(graph.state_dict())
        assert all(
            torch.equal(v, build(name).state_dict()[n]) for n, v in autotp.gather_state_dict(other).items()
        )
        with pytest.raises(autotp.UnprovenPath):
            other.train()(*MODELS[name][2])
        graph.print_readable(print_output=False)
    with warnings.catch_warnings():  # torch's own, when its compiler meets an autograd.Function
        warnings.filterwarnings("ignore", ".*should not be instantiated.*", DeprecationWarning)
        found = outcome(torch.compile(graph, fullgraph=True, backend="aot_eager"), name)
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-12)
    for n, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][f"_orig_mod.{n}"], gradient, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["uneven", "reads", "tied, vocabulary"])
def test_it_is_copied_saved_loaded_and_compiled(ranks, name: str) -> None:
    ranks(2)(lasting, name)


def trained(group: Group) -> list[Tensor]:
    """The graph of a model in training draws what the model draws: by rank on the shard, alike elsewhere."""
    _, plan, inputs = MODELS["random"]
    model = build("random").train()
    graph = autotp.shard(model, plan, group, inputs=inputs, form="graph")
    autotp.shard(model, plan, group, inputs=inputs)
    found = []
    for call in (graph, copy.deepcopy(graph), model):
        torch.manual_seed(7)
        found.append(outcome(call, "random"))
        same(found[-1], found[0], set())
    return [found[0][0]]


def test_dropout_of_a_graph_in_training() -> None:
    (first,), (second,) = simulate(2, trained)
    assert torch.equal(first, second)


def llama(rank: int, size: int) -> None:
    model = models.randomised(models.llama(num_hidden_layers=1)).eval()
    graph = autotp.shard(model, "llama", form="graph")
    for batch, sequence in ((2, 5), (1, 1), (3, 11)):
        ids = torch.randint(0, 97, (batch, sequence), generator=torch.Generator().manual_seed(batch))
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        out = graph(**given)
        wanted = model(**given, use_cache=False)
        assert type(out) is type(wanted)
        torch.testing.assert_close(out.logits, wanted.logits, rtol=0, atol=1e-10)
    assert mappings_of(graph).count("copy") == 3  # one for q, k and v, one for gate and up, one for the head
    again = pickle.loads(pickle.dumps(graph))
    assert torch.equal(again(**given).logits, out.logits)
    with pytest.raises(autotp.UsageError) as caught:
        graph(input_ids=ids, attention_mask=torch.ones(3, 7, dtype=torch.long))
    assert str(caught.value) == "dim 1 of attention_mask is 7, the graph is for 11"


@pytest.mark.slow
def test_a_llama_of_any_batch_and_sequence(ranks) -> None:
    ranks(2)(llama)


# -- refusals


def refused(model: nn.Module, inputs=None, plan=PLAN, tp: int = 2, **options) -> str:
    before = [p.detach().clone() for p in model.parameters()]

    def rank(group: Group) -> None:
        autotp.shard(model, plan, group, inputs=inputs, form="graph", **options)

    with pytest.raises(autotp.UsageError) as caught:
        simulate(tp, rank)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    return str(caught.value)


class Rounded(torch.autograd.Function):
    """Rounds, and lets the gradient pass."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        return dy


class Straight(models.MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Rounded.apply(x))


class Dropping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


class Drawing(models.MLP):
    """Drops out a shard, by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = Dropping()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(self.fc1(x)))


class Hooked(models.MLP):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: 2 * gradient)
        return y


class Listed(models.MLP):
    def forward(self, xs: list[Tensor]) -> Tensor:
        return super().forward(xs[0])


X = torch.zeros(3, 16)


def test_what_a_graph_cannot_express_is_named() -> None:
    assert refused(Straight(), X) == (
        'shard(form="graph"): Straight: it has Rounded in its backward, code of its own that would be lost '
        "in a graph\n  = help: shard in place"
    )
    assert "Hooked: fc2 has a gradient hook in its backward" in refused(Hooked(), X)
    said = refused(models.randomised(Drawing()).train(), X.double())
    assert said == (
        'shard(form="graph"): Drawing: drop draws random numbers on a sharded value, from each rank\'s own '
        "stream, which is no node of a graph\n  = help: call model.eval() before, or shard in place"
    )
    assert refused(Listed(), ([X],)) == (
        'shard(form="graph"): Listed: its forward is called with xs, a list; a graph takes tensors, and '
        "numbers and flags that stay as they are\n  = help: pass inputs= without it, or shard in place"
    )
    with torch.device("meta"):
        model = models.MLP()
    with pytest.raises(autotp.UsageError, match=r"fc1\.weight is on the meta device"):
        autotp.shard(model, PLAN, inputs=X, form="graph")


@pytest.mark.slow
def test_a_cache_is_named() -> None:
    model = models.llama(num_hidden_layers=1).eval()
    said = refused(model, {"input_ids": torch.zeros(2, 5, dtype=torch.long), "use_cache": True}, plan="llama")
    assert said.startswith('shard(form="graph"): LlamaForCausalLM: ') and "DynamicCache" in said


def test_words() -> None:
    for options, text in (
        ({"form": "file"}, "form is one of module, graph, not 'file'"),
        (
            {"form": "graph", "check": "shapes"},
            'form="graph" needs the proof of check="layouts", not \'shapes\'',
        ),
    ):
        with pytest.raises(autotp.UsageError) as caught:
            autotp.shard(models.MLP(), PLAN, **options)
        assert str(caught.value) == text


def test_a_graph_is_made_with_a_slice_and_called_with_one() -> None:
    """The number of columns that were left away is no size of the graph."""
    torch.manual_seed(0)
    model, sample = models.MLP().eval(), torch.randn(3, 7, 16)[:, :5]

    def rank(group: Group) -> None:
        graph = autotp.shard(model, PLAN, group, inputs=sample, form="graph")
        for x in (sample, torch.randn(2, 7, 16), torch.randn(6, 2, 16).transpose(0, 1)):
            torch.testing.assert_close(graph(x), model(x))

    simulate(2, rank)


def test_the_graph_checks_what_it_is_given() -> None:
    graph = autotp.shard(models.MLP().eval(), PLAN, inputs=X, form="graph")
    for given, text in (
        (torch.zeros(3, 2, 16), "x has 3 dims, the graph is for 2"),
        (torch.zeros(3, 16).double(), "x is torch.float64, the graph is for torch.float32"),
        (torch.zeros(3, 17), "dim 1 of x is 17, the graph is for 16"),
    ):
        with pytest.raises(autotp.UsageError) as caught:
            graph(given)
        assert str(caught.value) == text
    graph.train()
    with pytest.raises(autotp.UnprovenPath) as caught:
        graph(X)
    assert str(caught.value) == (
        "this graph was made in eval mode, and is in train mode now; set the mode of the model before shard"
    )


class Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor, twice: bool = True) -> Tensor:
        return self.fc2(self.fc1(x).relu()) * (2 if twice else 1)


def test_flags_are_those_that_it_was_made_with() -> None:
    model, given = Flagged(), {"x": torch.randn(5, 4), "twice": False}

    def rank(group: Group) -> None:
        graph = autotp.shard(model, PLAN, group, inputs=given, form="graph")
        for each in (graph, copy.deepcopy(graph)):
            torch.testing.assert_close(each(**given), model(**given))
            torch.testing.assert_close(each(given["x"]), model(**given))
            with pytest.raises(
                autotp.UsageError,
                match=r"^twice is True, the graph is for False: pass it in inputs= of shard",
            ):
                each(given["x"], twice=True)
            with pytest.raises(autotp.UsageError, match=r"^z is no input of the graph, which takes x$"):
                each(given["x"], z=1)

    simulate(2, rank)
