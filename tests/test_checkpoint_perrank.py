"""Files that other trainers write for each rank: put together by a plan, cut again for any tp."""

import argparse
import json
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from autotp.checkpoint import convert, merge
from autotp.checkpoint.load import from_pretrained
from autotp.checkpoint.perrank import PerRank
from autotp.checkpoint.rankfiles import open_rank
from autotp.diagnostic import CheckpointError, PlanError, UsageError
from autotp.plan import as_plan
from tests.checkpoints import tree

VOCABULARY, PADDED, WIDTH, HEADS, INNER = 99, 128, 24, 4, 40
PLAN = {
    "word_embeddings": "vocab",
    "query_key_value": {"style": "column", "heads": HEADS},  # by head: q, k and v of each stand together
    "dense": {"style": "row", "heads": HEADS},
    "dense_h_to_4h": {"style": "column", "sections": [INNER, INNER]},  # gate|up
    "dense_4h_to_h": "row",
    "output_layer": "column",
}


def whole_model(seed=0):
    """A Megatron-like model of one layer, its vocabulary not padded."""
    torch.manual_seed(seed)
    shapes = {
        "embedding.word_embeddings.weight": (VOCABULARY, WIDTH),
        "encoder.layers.0.attention.query_key_value.weight": (3 * WIDTH, WIDTH),
        "encoder.layers.0.attention.query_key_value.bias": (3 * WIDTH,),
        "encoder.layers.0.attention.dense.weight": (WIDTH, WIDTH),
        "encoder.layers.0.attention.dense.bias": (WIDTH,),
        "encoder.layers.0.mlp.dense_h_to_4h.weight": (2 * INNER, WIDTH),
        "encoder.layers.0.mlp.dense_4h_to_h.weight": (WIDTH, INNER),
        "encoder.layers.0.mlp.dense_4h_to_h.bias": (WIDTH,),
        "encoder.norm.weight": (WIDTH,),
        "output_layer.weight": (VOCABULARY, WIDTH),
    }
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def parts_of(model, tp, *, padded=PADDED):
    """Each rank's tensors, cut by hand as Megatron does."""
    ranks = [{} for _ in range(tp)]
    for name, tensor in model.items():
        if tensor.shape[0] == VOCABULARY and padded:
            tensor = torch.cat([tensor, torch.randn(padded - VOCABULARY, WIDTH).double()])
        dim = 1 if name.endswith(("dense.weight", "4h_to_h.weight")) else 0
        if "h_to_4h" in name:
            gate, up = (half.chunk(tp) for half in tensor.chunk(2))
            pieces = [torch.cat(pair) for pair in zip(gate, up, strict=True)]
        elif "norm" in name or name.endswith(("dense.bias", "4h_to_h.bias")):
            pieces = [tensor] * tp
        else:
            pieces = tensor.chunk(tp, dim)
        for rank, piece in zip(ranks, pieces, strict=True):
            rank[name] = piece.clone()
    return ranks


def nested(tensors):
    table = {}
    for name, tensor in tensors.items():
        at, (first, rest) = table, name.split(".", 1)
        at.setdefault(first, {})[rest] = tensor
    return table


def megatron(folder, ranks):
    for rank, tensors in enumerate(ranks):
        home = folder / f"mp_rank_{rank:02}"
        home.mkdir(parents=True)
        rng = [{"np_rng_state": ("MT19937", np.arange(4, dtype=np.uint32), 1, 0, 0.0)}]
        state = {"args": argparse.Namespace(lr=1.0), "iteration": 7, "rng_state": rng}
        state["model"] = {"language_model": nested(tensors) | {"_extra_state": None}}
        torch.save(state, home / "model_optim_rng.pt")


def deepspeed(folder, ranks):
    folder.mkdir(parents=True)
    for rank, tensors in enumerate(ranks):
        torch.save({"module": tensors, "ds_version": "0.1"}, folder / f"mp_rank_{rank:02}_model_states.pt")
        torch.save({"optimizer_state_dict": {}}, folder / f"zero_pp_rank_0_mp_rank_{rank:02}_optim_states.pt")
    (folder / "latest").write_text("global_step7")


def plain(folder, ranks):
    order = list(enumerate(ranks))
    random.Random(0).shuffle(order)
    for rank, tensors in order:
        (folder / f"rank_{rank}").mkdir(parents=True)
        save_file(tensors, folder / f"rank_{rank}" / "model.safetensors")


def config(folder, **entries):
    (folder / "config.json").write_text(json.dumps(entries))


def there_and_back(at, tp, **options):
    """Convert for `tp` ranks and merge: the whole tensors."""
    convert(at / "in", at / "out", plan=PLAN, tp=tp, check="shapes", **options)
    merge(at / "out", at / "back")
    return load_file(at / "back" / "model.safetensors")


def assert_equal(found, expected, prefix=""):
    assert set(found) == {prefix + name for name in expected}
    for name, tensor in expected.items():
        assert torch.equal(found[prefix + name], tensor), name


@pytest.mark.parametrize("write", [megatron, deepspeed, plain])
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1), (1, 3)])
def test_whole_again_at_any_number_of_ranks(tmp_path, write, before, after):
    model = whole_model()
    write(tmp_path / "in", parts_of(model, before))
    config(tmp_path / "in", vocab_size=VOCABULARY)
    found = there_and_back(tmp_path, after)
    assert_equal(found, model, "language_model." if write is megatron else "")
    again = {name for name in tree(tmp_path / "back") if not name.endswith(".safetensors")}
    assert again == {"config.json"} | ({"latest"} if write is deepspeed else set())


def test_padding_is_removed_where_the_config_tells_the_size_and_recorded(tmp_path):
    from autotp.header import read_header

    model = whole_model()
    plain(tmp_path / "in", parts_of(model, 2))
    assert there_and_back(tmp_path, 2)["output_layer.weight"].shape == (PADDED, WIDTH)
    config(tmp_path / "in", vocab_size=VOCABULARY)
    (tmp_path / "again").mkdir()
    (tmp_path / "in").rename(tmp_path / "again" / "in")
    assert_equal(there_and_back(tmp_path / "again", 4), model)
    assert read_header(tmp_path / "again" / "back" / "model.safetensors").metadata == {
        "format": "pt",
        "merged": "from the files of 2 ranks",
        "padding": "removed: embedding.word_embeddings.weight had 128 rows, output_layer.weight had 128 rows",
    }


def test_a_layer_of_as_many_rows_as_the_padded_vocabulary_keeps_them(tmp_path):
    model = whole_model()
    name = "encoder.layers.0.mlp.dense_h_to_4h.weight"
    model[name] = torch.randn(PADDED, WIDTH).double()
    model["encoder.layers.0.mlp.dense_4h_to_h.weight"] = torch.randn(WIDTH, PADDED // 2).double()
    plain(tmp_path / "in", parts_of(model, 2))
    config(tmp_path / "in", vocab_size=VOCABULARY)
    plan = PLAN | {"dense_h_to_4h": {"style": "column", "sections": [PADDED // 2, PADDED // 2]}}
    found = PerRank(tmp_path / "in", as_plan(plan))
    assert set(found.kept) == {"embedding.word_embeddings.weight", "output_layer.weight"}
    tensors = found.folder.tensors()
    assert tensors[name][1].shape == (PADDED, WIDTH)
    assert tensors["output_layer.weight"][1].shape == (VOCABULARY, WIDTH)


def test_biases_of_row_layers_whole_or_parts_of_a_sum(tmp_path):
    """E1: the convention is said, and told in the metadata; copies that differ are an error."""
    from autotp.header import read_header

    model, ranks = whole_model(), parts_of(whole_model(), 2, padded=0)
    biases = [name for name in model if name.endswith(("dense.bias", "4h_to_h.bias"))]
    for name in biases:
        ranks[0][name], ranks[1][name] = model[name] - 0.25, torch.full((WIDTH,), 0.25).double()
    plain(tmp_path / "in", ranks)
    with pytest.raises(CheckpointError) as raised:
        there_and_back(tmp_path, 2)
    apart = {name: float((ranks[1][name] - ranks[0][name]).abs().max()) for name in biases}
    assert str(raised.value) in [  # tensors are read side by side: any may be the first
        f"{tmp_path / 'in'}/rank_1/model.safetensors: tensor {name!r} differs from that of "
        f"rank_0/model.safetensors: largest difference {apart[name]:g}; if it is a part of a sum, say "
        'biases="summed"'
        for name in biases
    ]
    assert not (tmp_path / "out").exists()
    first = there_and_back(tmp_path, 2, biases="summed")
    for name in model:
        torch.testing.assert_close(first[name], model[name], atol=1e-15 if name in biases else 0, rtol=0)
    told = read_header(tmp_path / "back" / "model.safetensors").metadata["biases"]
    assert told == f"sums of 2 parts: {', '.join(sorted(biases))}"
    (tmp_path / "again").mkdir()
    (tmp_path / "back").rename(tmp_path / "again" / "in")
    assert_equal(there_and_back(tmp_path / "again", 1), first)  # 2 -> 1 -> 2, bit for bit


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.float8_e4m3fn, torch.complex64, torch.int64]
)
def test_copies_of_any_dtype_that_differ(tmp_path, dtype):
    for rank in (0, 1):
        tensors = {
            "up.weight": torch.zeros(2, 2),
            "other": torch.tensor([1, rank]).to(dtype),
            "n": torch.tensor(7),
        }
        (tmp_path / "in" / f"rank_{rank}").mkdir(parents=True)
        torch.save(tensors, tmp_path / "in" / f"rank_{rank}" / "model.pt")
    with pytest.raises(CheckpointError, match=r"tensor 'other' differs from .*: largest difference 1$"):
        convert(tmp_path / "in", tmp_path / "out", plan={"up": "column"}, tp=2, check="shapes")


def test_summed_is_for_files_of_ranks(tmp_path):
    (tmp_path / "in").mkdir()
    save_file(whole_model(), tmp_path / "in" / "model.safetensors")
    with pytest.raises(
        UsageError, match=r"holds no files of other trainers' ranks, whose biases could be summed$"
    ):
        convert(tmp_path / "in", tmp_path / "out", plan=PLAN, tp=2, check="shapes", biases="summed")
    with pytest.raises(UsageError, match=r"^biases are 'equal' or 'summed', not 'x'$"):
        convert(tmp_path / "in", tmp_path / "out", plan=PLAN, tp=2, check="shapes", biases="x")


@pytest.mark.parametrize("name", ["rank_{}", "rank{}", "mp_rank_{:02}"])
def test_a_hundred_and_two_ranks_are_counted_as_numbers(tmp_path, name):
    """E4: no sorting of text, however many digits; a gap and a rank twice are named."""
    whole = torch.arange(102 * 3).double().reshape(102, 3)
    for rank in random.Random(1).sample(range(102), 102):
        (tmp_path / "in" / name.format(rank)).mkdir(parents=True)
        save_file(
            {"up.weight": whole[rank : rank + 1].clone()},
            tmp_path / "in" / name.format(rank) / "x.safetensors",
        )

    def run(target):
        convert(tmp_path / "in", tmp_path / target, plan={"up": "column"}, tp=2, check="shapes")

    run("out")
    merge(tmp_path / "out", tmp_path / "back")
    assert torch.equal(load_file(tmp_path / "back" / "model.safetensors")["up.weight"], whole)
    (tmp_path / "in" / name.format(5)).rename(tmp_path / "aside")
    with pytest.raises(CheckpointError, match=r"in: ranks are missing: 5$"):
        run("again")
    (tmp_path / "aside").rename(tmp_path / "in" / "tp_rank_0005")
    run("again")
    (tmp_path / "in" / "rank-5").mkdir()
    with pytest.raises(CheckpointError, match=r"in: rank-5 and tp_rank_0005 are the same rank$"):
        run("third")


def edit(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


QKV = "encoder.layers.0.attention.query_key_value.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("encoder.norm.weight"),
            "tensor 'encoder.norm.weight' is not both in it and in rank 0's file",
        ),
        (
            lambda t: t.update({QKV: t[QKV][:, :-1].clone()}),
            f"tensor {QKV!r} is torch.float64 [36, 23], and torch.float64 [36, 24] in rank 0's file: they do "
            "not fit together",
        ),
        (
            lambda t: t.update({QKV: t[QKV].float()}),
            f"tensor {QKV!r} is torch.float32 [36, 24], and torch.float64 [36, 24] in rank 0's file: they do "
            "not fit together",
        ),
        (
            lambda t: t["encoder.norm.weight"].add_(0.5),
            "tensor 'encoder.norm.weight' differs from that of rank_0/model.safetensors: largest "
            "difference 0.5",
        ),
    ],
)
def test_parts_that_do_not_fit_together(tmp_path, change, message):
    plain(tmp_path / "in", parts_of(whole_model(), 2))
    edit(tmp_path / "in" / "rank_1" / "model.safetensors", change)
    with pytest.raises(CheckpointError) as raised:
        there_and_back(tmp_path, 2)
    assert str(raised.value) == f"{tmp_path / 'in'}/rank_1/model.safetensors: {message}"
    assert not (tmp_path / "out").exists()


def test_a_plan_for_other_names_is_refused(tmp_path):
    plain(tmp_path / "in", parts_of(whole_model(), 2))
    with pytest.raises(PlanError, match="AT201"):
        convert(tmp_path / "in", tmp_path / "out", plan=PLAN | {"nothing": "row"}, tp=2, check="shapes")


def test_without_a_plan_it_is_not_known_how_they_were_cut(tmp_path):
    plain(tmp_path / "in", parts_of(whole_model(), 2))
    with pytest.raises(UsageError) as raised:
        convert(tmp_path / "in", tmp_path / "out", tp=2, check="shapes")
    assert str(raised.value) == (
        f"{tmp_path / 'in'}: holds the files of other trainers' ranks; give a plan, with patterns for the "
        "names in them, that says how they were cut"
    )


def test_a_cut_that_the_plan_does_not_tell_is_found(tmp_path):
    plain(tmp_path / "in", parts_of(whole_model(), 2))
    plan = {pattern: rule for pattern, rule in PLAN.items() if pattern != "dense_4h_to_h"}
    with pytest.raises(CheckpointError, match=r"tensor '.*4h_to_h.weight' differs from that of rank_0"):
        convert(tmp_path / "in", tmp_path / "out", plan=plan, tp=2, check="shapes")


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def cyclic(tensors):
    table = {"a": tensors[QKV]}
    table["model"] = table
    return table


def deep(tensors):
    table = dict(tensors)
    for _ in range(30):
        table = {"x": table}
    return table


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (cyclic, "is nested too deeply"),
        (deep, "is nested too deeply"),
        (lambda t: {"module": None}, "holds no weights, by themselves or under model, module or state_dict"),
        (
            lambda t: {"module": {"a.b": t[QKV], "a": {"b": t[QKV]}}},
            "the name 'a.b' is there twice, by keys with dots and by dicts in dicts",
        ),
        (
            lambda t: {"module": {"b": t[QKV]}, "head.weight": t[QKV]},
            "tensor 'head.weight' stands beside the weights under 'module', and would be lost; save the "
            "weights alone, in one dict",
        ),
        (
            lambda t: {"model0": {"b": t[QKV]}, "model1": {"c": t[QKV]}, "iteration": 5},
            "holds model0, model1: weights of several pipeline stages; only tensor-parallel parts are read",
        ),
        (lambda t: {"module": {"a": 1, "b": t[QKV]}}, "'a' is int, not a plain tensor under a name"),
        (
            lambda t: {"module": {"b": t[QKV].to_sparse()}},
            "'b' is torch.float64, not a plain tensor under a name",
        ),
    ],
)
def test_what_is_no_state_is_named(tmp_path, make, message):
    (tmp_path / "in").mkdir()
    torch.save(make(whole_model()), tmp_path / "in" / "rank_0.pt")
    with pytest.raises(CheckpointError) as raised:
        convert(tmp_path / "in", tmp_path / "out", plan=PLAN, tp=2, check="shapes")
    assert str(raised.value) == f"{tmp_path}/in/rank_0.pt: {message}"


def test_modules_named_like_a_dict_of_weights(tmp_path):
    path, tensor = tmp_path / "rank_0.pt", torch.ones(2)
    torch.save({"module": {"model": {"a": tensor}, "lm_head": {"weight": tensor}}}, path)
    assert set(open_rank(path)[0]) == {"model.a", "lm_head.weight"}


def test_code_is_never_run(tmp_path):
    (tmp_path / "in").mkdir()
    state = {"module": whole_model(), "x": Touch(str(tmp_path / "touched"))}
    torch.save(state, tmp_path / "in" / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="nothing else in it is run"):
        there_and_back(tmp_path, 2)
    assert not (tmp_path / "touched").exists()


def test_pipeline_stages_are_not_taken_for_ranks(tmp_path):
    megatron(tmp_path / "in", parts_of(whole_model(), 1))
    (tmp_path / "in" / "mp_rank_00_000").mkdir()
    with pytest.raises(CheckpointError, match=r"mp_rank_00_000 is one of several pipeline stages"):
        there_and_back(tmp_path, 2)


@pytest.mark.parametrize("name", ["tp_rank_00_pp_rank_000", "mp_rank_00_001"])
def test_stages_alone_are_named(tmp_path, name):
    (tmp_path / name).mkdir()
    torch.save(whole_model(), tmp_path / name / "model_optim_rng.pt")
    with pytest.raises(CheckpointError) as raised:
        convert(tmp_path, tmp_path.parent / "out", plan=PLAN, tp=2, check="shapes")
    says = f"{name} is one of several pipeline stages; only tensor-parallel parts are read"
    assert str(raised.value) == f"{tmp_path}: {says}"


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.down(self.up(x))


def test_biases_that_are_parts_of_a_sum_are_loaded_without_a_conversion(tmp_path):
    for rank in range(2):
        tensors = {"up.weight": torch.ones(2, 3), "up.bias": torch.ones(2), "down.weight": torch.ones(3, 2)}
        torch.save(tensors | {"down.bias": torch.full((3,), rank + 1.0)}, tmp_path / f"rank_{rank}.pt")
    options = {"plan": {"up": "column", "down": "row"}, "inputs": torch.ones(2, 3)}
    load = lambda **more: from_pretrained(tmp_path, model=TwoLayers(), **options, **more)  # noqa: E731
    with pytest.raises(CheckpointError, match=r'if it is a part of a sum, say biases="summed"$'):
        load()
    assert load(biases="summed").down.bias.tolist() == [3.0, 3.0, 3.0]
    convert(tmp_path, tmp_path.parent / "out", plan=options["plan"], tp=1, check="shapes", biases="summed")
    with pytest.raises(UsageError) as raised:
        from_pretrained(tmp_path.parent / "out", model=TwoLayers(), inputs=torch.ones(2, 3), biases="summed")
    assert str(raised.value) == (
        f"{tmp_path.parent / 'out'}: is converted: its biases are whole; leave `biases` out"
    )


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    plain(tmp_path / "in", parts_of(whole_model(), 2))
    outside = tmp_path / "outside"
    (tmp_path / "in" / "rank_1").rename(outside)
    (tmp_path / "in" / "rank_1").symlink_to(outside)
    with pytest.raises(CheckpointError, match="outside the folder"):
        there_and_back(tmp_path, 2)


LAST_MISSING = [  # what says how many ranks there were, beside the first two of three
    (
        lambda at: told(at, args=argparse.Namespace(tensor_model_parallel_size=3, world_size=6)),
        "{part} says args.tensor_model_parallel_size 3, and 2 ranks are found in {at}; missing: rank_2.pt",
    ),
    (
        lambda at: told(at, mp_world_size=12),
        "{part} says mp_world_size 12, and 2 ranks are found in {at}; missing: rank_2.pt, rank_3.pt, "
        "rank_4.pt, rank_5.pt, rank_6.pt, rank_7.pt, rank_8.pt, rank_9.pt and 2 more",
    ),
    (
        lambda at: told(at, args={"world_size": 3}),
        "{part} says args.world_size 3, which is no multiple of the number of ranks in {at}, 2: are ranks "
        "missing?",
    ),
    (
        lambda at: told(at, mp_world_size=1),
        "{part} says mp_world_size 1, and 2 ranks are found in {at}; some are of others",
    ),
    (
        lambda at: config(at, hidden_size=5, intermediate_size=9),
        "{at}: 2 ranks are found, and what they make up, of sizes 6, is 2 of 3 parts of what config.json "
        "says; missing: rank_2.pt; if these are all, correct or remove config.json",
    ),
    (
        lambda at: config(at, vocab_size=7),
        "{at}: 2 ranks are found, whose vocabulary makes up 6 rows, and config.json says vocab_size 7; "
        "missing: rank_2.pt, or more",
    ),
]


def told(at, **beside):
    for rank in range(2):
        state = torch.load(at / f"rank_{rank}.pt", weights_only=False)
        torch.save(state | beside, at / f"rank_{rank}.pt")


def first_two_of_three(at):
    """The rules of what is cut into parts of 3 rows: a layer of 9 rows, or a vocabulary, with 3 ranks."""
    at.mkdir()
    for rank in range(2):
        tensors = {
            "up.weight": torch.ones(3, 5),
            "down.weight": torch.ones(5, 3),
            "wte.weight": torch.ones(3, 5),
        }
        torch.save({"module": tensors}, at / f"rank_{rank}.pt")
    return {"up": "column", "down": "row", "wte": "vocab"}


@pytest.mark.parametrize(("change", "message"), LAST_MISSING)
def test_the_last_ranks_missing_are_found_by_what_the_files_say(tmp_path, change, message):
    plan = first_two_of_three(tmp_path / "in")
    if "vocab" not in message:
        plan.pop("wte")
    change(tmp_path / "in")
    with pytest.raises(CheckpointError) as raised:
        convert(tmp_path / "in", tmp_path / "out", plan=plan, tp=1, check="shapes")
    at = tmp_path / "in"
    assert str(raised.value) == message.format(at=at, part=f"{at / 'rank_0.pt'}:")


def test_where_nothing_says_how_many_ranks_there_were_that_is_said(tmp_path):
    plan = first_two_of_three(tmp_path / "in")
    run = lambda: convert(tmp_path / "in", tmp_path / "out", plan=plan, tp=1, check="shapes", dry_run=True)  # noqa: E731
    assert run().notes == ("2 ranks found; nothing in the files says how many there were",)
    config(tmp_path / "in", hidden_size=5, intermediate_size=6, vocab_size=6)
    assert run().notes == ()
    (tmp_path / "in" / "config.json").unlink()
    told(tmp_path / "in", mp_world_size=2)
    assert run().notes == ()


@pytest.mark.parametrize("name", ["mp_rank_{:02}_model_states.pt", "rank{}.pt", "tp_rank_{:03}.bin"])
def test_missing_ranks_are_named_as_the_others_are(tmp_path, name):
    from autotp.checkpoint.rankcount import check_told

    parts = [tmp_path / name.format(rank) for rank in range(9)]
    with pytest.raises(CheckpointError) as raised:
        check_told(tmp_path, parts, [{"mp_world_size": 11}] * 9)
    assert str(raised.value).endswith(f"missing: {name.format(9)}, {name.format(10)}")
