"""Random numbers: alike where values are alike, different where they are sharded, and replayed."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autotp
from autotp.comm import Group, group_of, simulate
from autotp.diagnostic import UnprovenPath, UsageError
from autotp.random import Streams, rank_stream, synchronize, use_common_stream, use_rank_stream
from tests import models
from tests.test_mappings import randn


def draw(group: Group) -> list[Tensor]:
    torch.manual_seed(3)
    first = torch.rand(4)
    with rank_stream(group):
        own = torch.rand(4)
    second = torch.rand(4)
    with rank_stream(group):
        again = torch.rand(4)
    return [first, own, second, again, torch.rand(4)]


def test_the_common_stream_stays_common_and_ranks_differ(run) -> None:
    every = run(draw)
    for common in (0, 2, 4):
        assert all(torch.equal(found[common], every[0][common]) for found in every)
    for own in (1, 3):
        assert len({tuple(found[own].tolist()) for found in every}) == run.size
    assert not torch.equal(every[0][1], every[0][3])
    assert all(torch.equal(a, b) for a, b in zip(run(draw)[1], every[1], strict=True))  # reproducible


def drop(group: Group, how: str) -> list[Tensor]:
    """Two rounds of sharded and replicated dropout, with and without activation checkpointing."""
    torch.manual_seed(1)
    sharded, replicated = nn.Dropout(0.2), nn.Dropout(0.2)
    use_rank_stream(sharded, group)
    block = nn.Sequential(sharded, nn.Tanh(), replicated, nn.Tanh(), sharded)
    x = randn(1, 6, 8).requires_grad_()
    if how == "plain":
        y = block(block(x))
    else:
        reentrant = how == "reentrant"
        y = checkpoint(block, checkpoint(block, x, use_reentrant=reentrant), use_reentrant=reentrant)
    y.sum().backward()
    return [y.detach(), x.grad, torch.rand(3)]


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_checkpointing_replays_every_stream(run, how: str) -> None:
    plain, replayed = run(drop, "plain"), run(drop, how)
    for a, b in zip(plain, replayed, strict=True):
        assert torch.count_nonzero(a[1])
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert torch.equal(a[2], plain[0][2])
    assert not torch.equal(plain[0][0], plain[1][0])


def test_hooks_draw_only_in_training_and_survive_copies() -> None:
    def scenario(group: Group) -> list[Tensor]:
        module = nn.Dropout(0.5)
        use_rank_stream(module, group)
        module.eval()
        before = torch.get_rng_state()
        module(torch.ones(5))
        assert torch.equal(before, torch.get_rng_state())
        found = []
        for each in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            torch.manual_seed(2)
            found += [each.train()(torch.ones(64)), torch.rand(2)]
        return found

    a, b = simulate(2, scenario)
    assert torch.equal(a[0], a[2])
    assert not torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])


def dropped(group: Group, how: str) -> list[Tensor]:
    """A sharded dropout between two layers, in training: output, gradient, and what is drawn afterwards."""
    torch.manual_seed(4)
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5), nn.Dropout(0.5))
    use_rank_stream(module[1], group)
    use_rank_stream(module[4], group)
    x = torch.ones(8, 4, requires_grad=True)
    call = module if how == "eager" else torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    y = call(x)
    y.sum().backward()
    return [y.detach(), x.grad, torch.rand(3), module.eval()(x).detach()]


def dropped_on_a_rank(rank: int, size: int, how: str) -> list[Tensor]:
    torch._dynamo.reset()
    return dropped(group_of(None), how)


@pytest.mark.slow
def test_compiled_code_draws_as_eager_code_does_in_one_graph(ranks) -> None:
    eager, compiled = (ranks(2)(dropped_on_a_rank, how) for how in ("eager", "compiled"))
    for a, b in zip(eager, compiled, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(compiled[0][0], compiled[1][0])  # the ranks draw apart
    assert torch.equal(compiled[0][2], compiled[1][2])  # and the common stream stays common


class Drawing(nn.Module):
    """Drops out by a function, not by a module."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


@pytest.mark.slow
def test_other_random_modules_break_the_graph_in_training_only() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Drawing())
    use_rank_stream(module[1])
    x = torch.ones(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        whole = torch.compile(module.eval(), fullgraph=True, backend="aot_eager")
        assert torch.equal(whole(x), module(x))
        torch._dynamo.reset()
        found = []
        for call in (torch.compile(module.train(), backend="aot_eager"), module):
            torch.manual_seed(0)
            found.append([call(x), torch.rand(3)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_exception_in_the_module_brings_the_common_stream_back() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(100)
            raise KeyError("fault")

    module = Fails()
    use_rank_stream(module)
    torch.manual_seed(0)
    with rank_stream():
        pass
    want = torch.rand(3)
    torch.manual_seed(0)
    with pytest.raises(KeyError):
        module(torch.ones(1))
    assert torch.equal(torch.rand(3), want)


def test_named_streams() -> None:
    streams = Streams()
    streams.add("experts", 5)
    streams.add("noise", 6)
    for name, seed, text in (
        ("experts", 7, "the stream 'experts' is there already"),
        ("other", 6, "the seed 6 of the stream 'other' is that of the stream 'noise'"),
    ):
        with pytest.raises(UsageError) as caught:
            streams.add(name, seed)
        assert str(caught.value) == text
    with pytest.raises(UsageError) as caught:
        streams.fork("expert")
    assert str(caught.value) == "there is no stream 'expert'; there is: 'experts', 'noise'"

    def numbers(name: str) -> tuple[list[float], list[float]]:
        torch.manual_seed(0)
        with streams.fork(name):
            own = torch.rand(3).tolist()
        return own, torch.rand(3).tolist()

    experts, noise = numbers("experts"), numbers("noise")
    assert experts == numbers("experts")
    assert experts[0] != noise[0]
    assert experts[1] == noise[1]
    kept = streams.states
    streams.reset()
    with pytest.raises(UsageError, match="there is: none"):
        streams.fork("experts")
    streams.states = kept
    assert numbers("experts") == experts


def sampled(group: Group) -> tuple[list[int], list[int]]:
    torch.manual_seed(group.rank)
    weights = torch.ones(1000)
    apart = torch.multinomial(weights, 5).tolist()
    synchronize(group)
    return apart, torch.multinomial(weights, 5).tolist()


def test_sampling_is_equal_on_all_ranks_after_synchronize(run) -> None:
    every = run(sampled)
    assert len({tuple(apart) for apart, _ in every}) == run.size
    assert len({tuple(together) for _, together in every}) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_streams() -> None:
    def scenario(group: Group) -> list[Tensor]:
        torch.manual_seed(3)
        with rank_stream(group):
            own = torch.rand(4, device="cuda")
        return [own.cpu(), torch.rand(4, device="cuda").cpu()]

    a, b = simulate(2, scenario)
    assert not torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])


class Attention(nn.Module):
    """Draws by itself on a shard, and by a module inside on a whole value."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own = nn.functional.dropout(x, 0.5, self.training)
        shared = self.dropout(x)
        return own, shared, nn.functional.dropout(x, 0.5, self.training)


def test_a_module_inside_draws_what_all_ranks_share() -> None:
    def scenario(group: Group) -> list[Tensor]:
        module = Attention()
        use_rank_stream(module, group)
        use_common_stream(module.dropout, module)
        found = []
        for each in (module, copy.deepcopy(module)):
            torch.manual_seed(3)
            x = torch.ones(64, requires_grad=True)
            found += [*each(x), torch.rand(2)]
            torch.manual_seed(3)
            found += [*checkpoint(each, x, use_reentrant=False), torch.rand(2)]
            sum(part.sum() for part in found[-4:-1]).backward()
            assert torch.equal(
                x.grad, sum(found[-4:-1])
            )  # the masks of the second run are those of the first
        with pytest.raises(UnprovenPath, match="checkpoint the whole layer"):
            module.dropout(x)
        module.eval()
        assert torch.equal(module.dropout(x), x)
        return found

    a, b = simulate(2, scenario)
    assert all(torch.equal(x, y) for x, y in zip(a, a[4:], strict=False))
    for place in range(0, len(a), 4):
        own, shared, again, after = a[place : place + 4]
        assert not torch.equal(own, b[place]) and not torch.equal(again, b[place + 2])
        assert torch.equal(shared, b[place + 1]) and torch.equal(after, b[place + 3])
        assert not torch.equal(own, shared) and not torch.equal(own, again)


STATE = torch.Generator().manual_seed(9).get_state()


class Noisy(models.MLP):
    """Draws on a shard, from a generator that it may set itself; the layers below look alike."""

    way = "fork"

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        if self.way == "fork":
            with torch.random.fork_rng():
                torch.manual_seed(5)
                return self.fc2(h + torch.randn_like(h))
        if self.way == "state":
            torch.set_rng_state(STATE)
        elif self.way == "seed":
            torch.manual_seed(5)
            torch.rand(3)
        return self.fc2(h + torch.randn_like(h))


@pytest.mark.parametrize("way", ["fork", "seed", "state", "none"])
def test_a_generator_that_the_forward_sets_draws_nothing_for_a_shard(way: str) -> None:
    model = nn.Sequential(*(Noisy().double() for _ in range(3)))
    model[2].way = way
    for noisy in model[:2]:
        noisy.way = "none"
    before = torch.get_rng_state()
    found = autotp.analyze(model, {"fc1": "column", "fc2": "row"}, tp=2, inputs=randn(1, 5, 16)).diagnostics
    assert torch.equal(torch.get_rng_state(), before)
    assert [(d.code, d.module) for d in found if d.severity == "error"] == (
        [] if way == "none" else [("AT316", "2")]
    )
    assert way == "none" or "from a generator that the forward has set" in found[0].message


def test_a_generator_that_the_forward_sets_may_draw_for_whole_values() -> None:
    class Whole(models.MLP):
        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(5)
            return self.fc2(self.fc1(x + torch.randn_like(x)))

    model, x = Whole().double(), randn(1, 5, 16)
    assert autotp.verify(model, {"fc1": "column", "fc2": "row"}, tp=2, inputs=x).ok
