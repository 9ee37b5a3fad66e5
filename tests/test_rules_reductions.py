"""Sums, statistics, softmax, sorts, norms: rules against execution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from autotp.placement import PARTIAL, REPLICATE, Deal, Layout, Shard, deal
from tests.rules import Case, cut, hold, tensor

Takes = tuple[tuple[Layout, ...], ...]
COLUMNS, ROWS = (cut(1),), (cut(0),)


def of(
    function: Callable[..., object],
    *inputs: torch.Tensor,
    few: int = 9,
    takes: Takes = (ROWS,),
    never: bool = False,
) -> Case:
    return Case(function, inputs or (tensor(6, 8),), few=few, takes=takes, never=never)


def along(name: str, **options: object) -> Case:
    op = getattr(torch, name)
    return of(lambda x: op(x, dim=1, **options), tensor(6, 4, 2), few=5, takes=(ROWS, (cut(2),)))


ALONG = {
    **{
        name: along(name, keepdim=True)
        for name in ("amax", "amin", "logsumexp", "var", "std", "mean", "prod", "argmax", "argmin")
    },
    **{
        name: along(name)
        for name in (
            "norm",
            "all",
            "any",
            "var_mean",
            "std_mean",
            "aminmax",
            "median",
            "nanmedian",
            "mode",
            "count_nonzero",
            "nansum",
            "nanmean",
            "max",
            "min",
            "softmax",
            "log_softmax",
            "sort",
            "argsort",
            "cumsum",
            "cumprod",
            "logcumsumexp",
            "cummax",
            "cummin",
        )
    },
    "kthvalue": along("kthvalue", k=2),
    "topk": along("topk", k=2),
    "norm of torch.ops": of(lambda x: torch.ops.aten.norm(x, 2, [1])),
    "linalg_vector_norm": of(lambda x: torch.linalg.vector_norm(x, dim=-1)),
    "_softmax": of(lambda x: torch.ops.aten._softmax(x, -1, False)),
    "_log_softmax": of(lambda x: torch.ops.aten._log_softmax(x, -1, False)),
}

SUMS = {
    "sum": of(lambda x: x.sum(-1), takes=(COLUMNS, ROWS, (PARTIAL,))),
    "sum, kept": of(lambda x: x.sum(0, keepdim=True), takes=(COLUMNS, ROWS, (PARTIAL,))),
    "sum of all": of(lambda x: x.sum(), takes=(COLUMNS, ROWS, (PARTIAL,))),
    "sum of two dims": of(
        lambda x: x.sum((0, -1)), tensor(4, 6, 3), takes=((cut(1),), (cut(0),), (PARTIAL,))
    ),
    "sum of whole numbers": of(lambda x: x.sum(-1), torch.arange(24).view(4, 6), takes=(COLUMNS, ROWS)),
    "count of a mask": of(lambda x: x.sum(-1), tensor(4, 6) > 0.7, takes=(COLUMNS, ROWS)),
    "sum in another dtype": Case(
        lambda x: x.sum(-1, dtype=torch.float64), (tensor(4, 6, dtype=torch.float32),), tolerance=1e-5
    ),
    "sum of squares": of(lambda x: x.square().sum(-1), takes=(COLUMNS, ROWS)),
    "mean of a sum": of(lambda x: x.mean(-1), takes=(ROWS, (PARTIAL,))),
    "cumsum of a sum": of(lambda x: x.cumsum(-1), takes=(ROWS, (PARTIAL,))),
    "mean of whole numbers": of(lambda x: x.mean(-1, dtype=torch.float64), torch.arange(24).view(4, 6)),
    "softmax in another dtype": Case(
        lambda x: F.softmax(x, -1, dtype=torch.float32), (tensor(4, 6),), tolerance=1e-5
    ),
    "max of two": of(torch.max, tensor(4, 6), tensor(6, seed=1), takes=((cut(1), cut(0)),)),
}

NORMS = {
    "layer_norm": of(
        lambda x, w, b: F.layer_norm(x, (4,), w, b),
        tensor(6, 4),
        tensor(4),
        tensor(4),
        few=4,
        takes=((cut(0), REPLICATE, REPLICATE),),
    ),
    "layer_norm of two dims": of(
        lambda x, w: F.layer_norm(x, (2, 4), w), tensor(6, 2, 4), tensor(2, 4), takes=((cut(0), REPLICATE),)
    ),
    "rms_norm": of(
        lambda x, w: F.rms_norm(x, (9,), w, 1e-5), tensor(6, 9), tensor(9), takes=((cut(0), REPLICATE),)
    ),
    "group_norm": of(
        lambda x, w, b: F.group_norm(x, 6, w, b),
        tensor(4, 12, 2),
        tensor(12),
        tensor(12),
        few=4,
        takes=((cut(1), cut(0), cut(0)), (cut(0), REPLICATE, REPLICATE)),
    ),
    "group_norm without weight": of(
        lambda x: F.group_norm(x, 4), tensor(4, 12, 2), takes=((cut(1),), (cut(1, 4),), (cut(1, groups=2),))
    ),
    "batch_norm": of(
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        tensor(4, 6, 3),
        tensor(6),
        tensor(6),
        few=3,
        takes=((cut(1), cut(0), cut(0)),),
    ),
    "batch_norm of an eval forward": of(
        lambda x, m, v: F.batch_norm(x, m.detach(), v.detach()),
        tensor(4, 6),
        tensor(6),
        tensor(6),
        few=3,
        takes=((cut(1), cut(0), cut(0)),),
    ),
}

# Over all elements: every cut and every sum is refused.
NEVER: dict[str, Callable[[torch.Tensor], object]] = {
    "max": torch.max,
    "min": torch.min,
    "prod": torch.prod,
    "std": torch.std,
    "var": torch.var,
    "median": torch.median,
    "argmax": torch.argmax,
    "norm": torch.norm,
    "any": torch.any,
    "all": torch.all,
    "histc": lambda x: x.histc(4, 0, 1),
}


@pytest.mark.parametrize("name", ALONG)
def test_along_a_dim(name: str) -> None:
    tally = hold(ALONG[name])
    assert not any(isinstance(x, Shard) and x.dim == 1 for (x,) in tally.taken), "each rank has only its part"


@pytest.mark.parametrize("name", SUMS)
def test_sums(name: str) -> None:
    hold(SUMS[name])


@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str) -> None:
    hold(NORMS[name])


@pytest.mark.parametrize("name", NEVER)
def test_statistics_of_all_elements_of_a_shard_are_refused(name: str) -> None:
    hold(Case(NEVER[name], (tensor(6, 8),), never=True))


def test_shared_units_and_whole_sections_are_summed_once() -> None:
    shared, part_whole = (
        Shard(1, Deal(2, ((0, 1), (0, 1), (1, 2)))),
        Shard(1, sections=((3, None), (3, deal(3, 3)))),
    )
    hold(
        Case(
            lambda x: x.sum(-1),
            (tensor(4, 6),),
            tps=(3,),
            choices=lambda tp: [[(shared, True), (part_whole, True)]],
            never=True,
        )
    )
    hold(
        Case(
            lambda x: x.sum(0),
            (tensor(4, 6),),
            tps=(3,),
            choices=lambda tp: [[(shared, True), (part_whole, True)]],
        )
    )


def test_group_norm_s_groups_are_not_cut() -> None:
    # Four groups of three channels: over three ranks a group would be on two of them.
    case = Case(
        lambda x: F.group_norm(x, 4),
        (tensor(2, 12, 2),),
        tps=(3,),
        choices=lambda tp: [[(cut(1, 3, tp=3), True)]],
        never=True,
    )
    assert hold(case).refused == 1
