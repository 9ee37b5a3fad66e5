"""Heads that are no layers: the table of a vocab rule, read past its embedding by a product."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autotp
from autotp.comm import simulate
from tests.models import losses, randomised
from tests.whole import IDS, FunctionalHead

WORDS = 99  # 50 + 49 on two ranks, 25 + 25 + 25 + 24 on four
PLAN = {"fc1": "column", "fc2": "row", "table": "vocab"}


class Decoder(nn.Module):
    def __init__(self, **options: int) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 24, **options)
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(24), nn.Linear(24, 33), nn.Linear(33, 24)
        self.bias = nn.Parameter(torch.zeros(WORDS))

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.hidden(ids), self.table.weight)


class Turned(Decoder):
    """As in Whisper: cast and turned, and the hidden states are read by a layer, too."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        h = self.hidden(ids)
        return (h @ torch.transpose(self.table.weight.to(h.dtype), 0, 1)).float(), self.fc2(self.fc1(h))


class Einsum(Decoder):
    def forward(self, ids: Tensor) -> Tensor:
        return torch.einsum("vd,btd->bvt", self.table.weight, self.hidden(ids)).softmax(1)


class Biased(Decoder):
    """With a bias, which is cut as the table is, and without; what reads the logits looks at every word."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        inside = F.linear(self.norm(self.hidden(ids)), self.table.weight, self.bias)
        beside = torch.matmul(self.norm(self.hidden(ids)), self.table.weight.t())
        return F.cross_entropy(inside.view(-1, WORDS), ids.flatten()), beside.logsumexp(-1)


class Handed(Decoder):
    """The table is an argument of a module of its own."""

    class Head(nn.Module):
        def forward(self, h: Tensor, weight: Tensor) -> Tensor:
            return F.linear(h, weight)

    def __init__(self) -> None:
        super().__init__(padding_idx=3)
        self.head = self.Head()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids), self.table.weight)


@pytest.mark.parametrize(
    ("kind", "tp", "plan", "lines"),
    [
        (Decoder, 2, "auto", ["return gather(F.linear(copy(self.hidden(ids)), self.table.weight))"]),
        (Turned, 3, PLAN, [
            "return (gather(copy(h) @ torch.transpose(self.table.weight.to(h.dtype), 0, 1))).float(), "
            "self.fc2(self.fc1(h))"
        ]),
        (Einsum, 2, PLAN, [
            'return gather(torch.einsum("vd,btd->bvt", self.table.weight, copy(self.hidden(ids)))).softmax(1)'
        ]),
        (Biased, 4, PLAN, [
            "inside = gather(F.linear(copy(self.norm(self.hidden(ids))), self.table.weight, self.bias))",
            "beside = gather(torch.matmul(copy(self.norm(self.hidden(ids))), self.table.weight.t()))",
        ]),
        (Handed, 3, "auto", ["return gather(F.linear(copy(h), weight))"]),
    ],
)  # fmt: skip
def test_each_rank_has_the_logits_of_its_words(kind, tp, plan, lines):
    ids = torch.randint(0, WORDS, (2, 5), generator=torch.Generator().manual_seed(0))
    analysis = autotp.analyze(kind(), plan, tp=tp, inputs=ids)
    assert analysis.layouts["table.weight"].dim == 0
    assert [line[1:].strip() for line in analysis.edits.splitlines() if line.startswith("+ ")] == lines
    result = autotp.verify(randomised(kind()), plan, tp=tp, inputs=ids)
    assert result.ok and result.tolerance == 1e-9, str(result)


def greedy(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        for _ in range(4):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    return ids


def test_it_generates_and_trains_the_same_and_is_whole_again():
    whole = randomised(Decoder()).double()
    copies = [copy.deepcopy(whole) for _ in range(3)]
    ids = torch.tensor([[1, 98, 3], [50, 49, 51]])

    def rank(group):
        mine = autotp.shard(copies[group.rank], PLAN, group, inputs=ids)
        found = greedy(mine, ids), losses(mine, ids, 3)
        return *found, autotp.unshard(mine)(ids)

    tokens, told = greedy(whole, ids), losses(whole, ids, 3)
    for found in simulate(3, rank):
        assert torch.equal(found[0], tokens)
        assert found[1] == pytest.approx(told, abs=1e-10)
        torch.testing.assert_close(found[2], whole(ids), rtol=0, atol=1e-10)


@pytest.mark.slow
def test_as_a_graph():
    whole = randomised(Decoder()).double()
    copies = [copy.deepcopy(whole) for _ in range(2)]
    ids = torch.tensor([[1, 98, 3, 7], [50, 49, 51, 0]])
    for found in simulate(
        2,
        lambda group: autotp.shard(
            copies[group.rank], PLAN, group, inputs=ids[:, :3].contiguous(), form="graph"
        )(ids),
    ):
        torch.testing.assert_close(found, whole(ids), rtol=0, atol=1e-10)


class Aside(nn.Module):
    """A column layer that nobody reads, and one of which a rank reads its own part alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.aside = nn.Linear(24, 33), nn.Linear(33, 24), nn.Linear(24, 33)

    def forward(self, x: Tensor) -> Tensor:
        self.aside(x)
        return x + self.fc2(F.gelu(self.fc1(x)))


def _counted(rank, size, name):
    """What runs on two ranks, forward and backward, and what the analysis says."""
    ran: collections.Counter[str] = collections.Counter()
    plain = {"all-reduce": dist.all_reduce, "all-gather": dist.all_gather_single}
    generator = torch.Generator().manual_seed(0)
    if name == "a head":
        model, plan, given = Decoder(), PLAN, torch.randint(0, WORDS, (2, 5), generator=generator)
    else:
        model, plan = Aside(), {"fc1": "column", "fc2": "row", "aside": "column"}
        given = torch.randn(2, 24, generator=generator).requires_grad_()
    said = autotp.analyze(model, "auto" if name == "auto" else plan, tp=size, inputs=given).collectives
    autotp.shard(model, plan, inputs=given)
    model(given)  # the first forward compares the ranks' inputs

    def counting(operation):
        def run(*args, **kwargs):
            ran[operation] += 1
            return plain[operation](*args, **kwargs)

        return run

    dist.all_reduce, dist.all_gather_single = (counting(operation) for operation in plain)
    try:
        y = model(given)
        forward = collections.Counter(ran)
        y.square().sum().backward()
    finally:
        dist.all_reduce, dist.all_gather_single = plain.values()
    told: dict[str, collections.Counter[str]] = {
        "forward": collections.Counter(),
        "backward": collections.Counter(),
    }
    for c in said:
        told[c.direction][c.operation] += c.calls
    return [(dict(forward), dict(ran - forward)), tuple(map(dict, told.values()))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("a head", {"all-reduce": 2, "all-gather": 1}, {"all-reduce": 2}),
        ("read by nobody", {"all-reduce": 1}, {"all-reduce": 1}),
        ("auto", {"all-reduce": 1}, {"all-reduce": 1}),
    ],
)
def test_nothing_is_gathered_that_nobody_reads(ranks, name, forward, backward):
    assert ranks(2)(_counted, name) == [[(forward, backward)] * 2] * 2


# -- what cannot be edited, and what is no head


def test_without_source_it_is_told_how_to_be_a_layer():
    """`tests.whole.TiedLanguageModel` is such a model, and exact."""
    made: dict[str, type[nn.Module]] = {"FunctionalHead": FunctionalHead, "F": F}
    exec(
        "class Made(FunctionalHead):\n"
        "    def forward(self, ids):\n"
        "        return F.linear(self.embed(ids).tanh(), self.embed.weight)\n",
        made,
    )
    (found,) = autotp.analyze(made["Made"](), {"embed": "vocab"}, tp=2, inputs=IDS).diagnostics
    assert found.code == "AT312"
    assert (
        found.message == "linear with a table that is sharded by words: each rank has the logits of its own"
    )
    assert found.notes[0].endswith("has no source text (made by exec, or compiled): write it in a file that "
                                   "Python imports")  # fmt: skip
    assert found.help == (
        "a head that shares its weight may be a layer: in __init__ `self.head = nn.Linear(…, bias=False); "
        "self.head.weight = self.embed.weight`, with the rule `head: {style: column, gather_output: true}`",
    )


def _and_its_input(h: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(h, weight), h


class GivenBack(Decoder):
    """What the head reads as a copy comes back, and would be read as one: its gradient summed once more."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return _and_its_input(self.hidden(ids), self.table.weight)


class Penalised(Decoder):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.table.weight.pow(2).sum()


class Soft(Decoder):
    """The mean embedding of the words that it says: a sum over the words, which are whole there."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).softmax(-1) @ self.table.weight


@pytest.mark.parametrize(("kind", "code"), [(GivenBack, "AT303"), (Penalised, "AT312"), (Soft, "AT306")])
def test_other_uses_of_the_table_are_refused(kind, code):
    analysis = autotp.analyze(kind(), PLAN, tp=2, inputs=IDS)
    assert {d.code for d in analysis.diagnostics if d.severity == "error"} == {code}
