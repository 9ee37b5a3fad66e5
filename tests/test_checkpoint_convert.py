"""Convert: the right slices in the right files, nothing lost, nothing half-written."""

import hashlib
import json
import os

import numpy as np
import pytest
import torch
from safetensors import safe_open

from autotp.checkpoint import convert, inventory, merge
from autotp.diagnostic import CheckpointError, PlanError, UsageError
from autotp.plan import Plan, plan_for
from tests.checkpoints import llama, minilm_folder, random_tensor, safetensors_bytes, tree, write_checkpoint

PLAIN = {"up": "column", "down": "row"}


def shards(folder, tp, name):
    """What the safetensors library reads of one tensor from every rank's folder."""
    found = []
    for rank in range(tp):
        home = folder / f"rank-{rank}-of-{tp}"
        for file in sorted(home.glob("*.safetensors")):
            with safe_open(file, "pt") as library:
                if name in library.keys():  # noqa: SIM118 - the library's object is no mapping
                    found.append(library.get_tensor(name))
    return found


@pytest.mark.parametrize("tp", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_the_real_minilm_and_back(tmp_path, tp):
    source = minilm_folder()
    written = convert(source, tmp_path / "out", tp=tp, check="shapes")
    assert (written.plan, written.plan_name, written.proof) == (plan_for("bert"), "bert", "none")
    with safe_open(source / "model.safetensors", "pt") as library:
        words = library.get_tensor("embeddings.word_embeddings.weight")
        query = library.get_tensor("encoder.layer.3.attention.self.query.weight")
        output = library.get_tensor("encoder.layer.3.attention.output.dense.weight")
        bias = library.get_tensor("encoder.layer.3.attention.output.dense.bias")
    vocabulary = [30522 // tp + (rank < 30522 % tp) for rank in range(tp)]
    for found, expected in (
        (shards(tmp_path / "out", tp, "embeddings.word_embeddings.weight"), words.split(vocabulary)),
        (shards(tmp_path / "out", tp, "encoder.layer.3.attention.self.query.weight"), query.chunk(tp, 0)),
        (shards(tmp_path / "out", tp, "encoder.layer.3.attention.output.dense.weight"), output.chunk(tp, 1)),
        (shards(tmp_path / "out", tp, "encoder.layer.3.attention.output.dense.bias"), [bias] * tp),
    ):
        assert len(found) == tp and all(map(torch.equal, found, expected))
    back = merge(tmp_path / "out", tmp_path / "back")
    there, here = tree(source), tree(tmp_path / "back")
    assert ".gitattributes" in here and here == there
    assert dict(back.files) == {name: len(content) for name, content in here.items()}


FUSED = {
    "wte.weight": random_tensor("BF16", (33, 8)),
    "gate_up.weight": random_tensor("BF16", (12, 8)),  # gate 6 | up 6
    "qkv.weight": random_tensor("BF16", (16, 8)),  # q 8 | k 4 | v 4, heads of 4: 2, 1, 1
    "down.weight": random_tensor("F16", (8, 7)),  # 7 features over 2
    "down.bias": random_tensor("F32", (8,)),
    "experts": random_tensor("F8_E4M3", (3, 6, 5)),
    "scale": random_tensor("F32", ()),
    "nothing": random_tensor("F64", (0, 4)),
    "mask": random_tensor("BOOL", (5, 3)),
    "position_ids": random_tensor("I64", (1, 9)),
    "packed": random_tensor("F4", (6, 3)),
    "complex": random_tensor("C64", (4,)),
}
FUSED_PLAN = {
    "wte": "vocab",
    "gate_up": {"style": "column", "sections": 2},
    "qkv": {"style": "column", "sections": [8, 4, 4], "heads": 2},
    "down": "row",
    "experts": {"style": "column", "dim": 1},
    "mask": {"style": "column", "dim": 0},
}


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("digest", ["xxh3", "sha256", "none"])
def test_every_dtype_fused_uneven_and_indexed(tmp_path, files, digest):
    source = write_checkpoint(
        tmp_path / "in", FUSED, config={"n": 1}, files=files, metadata={"format": "pt"}, pad=3 * 8
    )
    convert(source, tmp_path / "out", plan=FUSED_PLAN, tp=2, check="shapes", digest=digest)

    def raw(name, dtype=np.uint16):
        return np.frombuffer(FUSED[name][2], dtype).reshape(FUSED[name][1])

    def parts(name):
        return [part.reshape(-1).view(torch.uint8).numpy() for part in shards(tmp_path / "out", 2, name)]

    both = np.concatenate
    for name, expected in {
        "wte.weight": [raw("wte.weight")[:17], raw("wte.weight")[17:]],
        "gate_up.weight": [
            raw("gate_up.weight")[[0, 1, 2, 6, 7, 8]],
            raw("gate_up.weight")[[3, 4, 5, 9, 10, 11]],
        ],
        "qkv.weight": [
            both([raw("qkv.weight")[0:4], raw("qkv.weight")[8:10], raw("qkv.weight")[12:14]]),
            both([raw("qkv.weight")[4:8], raw("qkv.weight")[10:12], raw("qkv.weight")[14:16]]),
        ],
        "down.weight": [raw("down.weight")[:, :4], raw("down.weight")[:, 4:]],
        "down.bias": [raw("down.bias", np.uint32)] * 2,
        "experts": [raw("experts", np.uint8)[:, :3], raw("experts", np.uint8)[:, 3:]],
        "scale": [raw("scale", np.uint32)] * 2,
        "mask": [raw("mask", np.uint8)[:3], raw("mask", np.uint8)[3:]],
        "position_ids": [raw("position_ids", np.uint64)] * 2,
    }.items():
        assert [part.tobytes() for part in parts(name)] == [part.tobytes() for part in expected], name
    assert [part.shape for part in shards(tmp_path / "out", 2, "nothing")] == [(0, 4)] * 2
    merge(tmp_path / "out", tmp_path / "back")
    assert tree(tmp_path / "back") == tree(source)


@pytest.mark.parametrize(("heads", "kv", "tp"), [(6, 6, 2), (6, 6, 3), (8, 4, 4), (8, 8, 8), (14, 7, 4)])
def test_llama_by_the_shipped_plan(tmp_path, heads, kv, tp):
    tensors, config = llama(hidden=heads * 4, heads=heads, kv=kv, inter=37, vocab=101)
    source = write_checkpoint(tmp_path / "in", tensors, config=config, files=2, pad=8)
    assert convert(source, tmp_path / "out", tp=tp, check="shapes").plan_name == "llama"
    whole = torch.frombuffer(
        bytearray(tensors["model.layers.1.mlp.down_proj.weight"][2]), dtype=torch.float32
    )
    sizes = [37 // tp + (rank < 37 % tp) for rank in range(tp)]
    found = shards(tmp_path / "out", tp, "model.layers.1.mlp.down_proj.weight")
    assert all(map(torch.equal, found, whole.view(-1, 37).split(sizes, 1)))
    merge(tmp_path / "out", tmp_path / "back")
    assert tree(tmp_path / "back") == tree(source)


def big(seed=0):
    """Rows longer and shorter than a block, cut along each dim."""
    return {
        "up.weight": random_tensor("F32", (1030, 700), seed),  # dim 0: one row of 2.9 MB
        "down.weight": random_tensor("F32", (3, 600_001), seed),  # dim 1: rows of 2.4 MB, uneven
        "down.other": random_tensor("U8", (1 << 20, 3), seed),  # dim 1: rows of 3 bytes
        "gate_up": random_tensor("U8", (2, 1_500_001 * 2), seed),
    }


BIG_PLAN = {
    "up": "column",
    "down.weight": {"style": "column", "dim": 1},
    "down.other": {"style": "column", "dim": 1},
    "gate_up": {"style": "column", "dim": 1, "sections": 2},
}


def test_rows_of_every_length(tmp_path):
    tensors = big()
    source = write_checkpoint(tmp_path / "in", tensors)
    convert(source, tmp_path / "out", plan=BIG_PLAN, tp=3, check="shapes")
    for name, dim, sizes in (
        ("up.weight", 0, (344, 343, 343)),
        ("down.weight", 1, (200_001, 200_000, 200_000)),
        ("down.other", 1, (1, 1, 1)),
    ):
        dtype, shape, data = tensors[name]
        whole = torch.frombuffer(bytearray(data), dtype=torch.float32 if dtype == "F32" else torch.uint8)
        found = shards(tmp_path / "out", 3, name)
        for part, expected in zip(found, whole.view(shape).split(sizes, dim), strict=True):
            assert torch.equal(part.view(torch.uint8), expected.contiguous().view(torch.uint8))
    merge(tmp_path / "out", tmp_path / "back")
    assert tree(tmp_path / "back") == tree(source)


def test_two_runs_are_identical_and_the_source_is_left_alone(tmp_path):
    source = write_checkpoint(tmp_path / "in", FUSED, config={}, files=3)
    before = {name: (len(data), (source / name).stat().st_mtime_ns) for name, data in tree(source).items()}
    for out in ("one", "two"):
        convert(source, tmp_path / out, plan=FUSED_PLAN, tp=2, check="shapes")
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert {name: (len(d), (source / name).stat().st_mtime_ns) for name, d in tree(source).items()} == before
    assert sorted(os.listdir(tmp_path)) == ["in", "one", "two"]


def test_each_rank_folder_is_one_in_the_style_of_hugging_face(tmp_path):
    source = write_checkpoint(tmp_path / "in", FUSED, config={"model_type": "x"}, files=3)
    convert(source, tmp_path / "out", plan=FUSED_PLAN, tp=2, check="shapes")
    for rank in range(2):
        home = tmp_path / "out" / f"rank-{rank}-of-2"
        assert (home / "config.json").read_bytes() == (source / "config.json").read_bytes()
        index = json.loads((home / "model.safetensors.index.json").read_text())
        assert (
            index["weight_map"]
            == json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
        )
        data = [(home / name).stat().st_size for name in set(index["weight_map"].values())]
        headers = [
            8 + int.from_bytes((home / n).read_bytes()[:8], "little")
            for n in set(index["weight_map"].values())
        ]
        assert index["metadata"]["total_size"] == sum(data) - sum(headers)


def test_a_part_is_not_taken_for_the_whole(tmp_path):
    source = write_checkpoint(tmp_path / "in", FUSED, config={})
    options = {"plan": FUSED_PLAN, "tp": 2, "check": "shapes"}
    convert(source, tmp_path / "out", **options)
    part = tmp_path / "out" / "rank-1-of-2"
    expected = (
        f"{part / 'model.safetensors'}: holds the part of rank 1 of 2; give the folder with autotp.json"
    )
    assert refusal(CheckpointError, convert, part, tmp_path / "again", **options) == expected
    part.rename(tmp_path / "moved")
    assert "holds the part of rank 1 of 2" in refusal(CheckpointError, inventory, tmp_path / "moved")
    convert(source, tmp_path / "one", **options | {"tp": 1})  # the part of one rank is the whole
    assert inventory(tmp_path / "one" / "rank-0-of-1").tensors()


def test_a_dry_run_says_what_would_be_written_and_writes_nothing(tmp_path):
    source = write_checkpoint(tmp_path / "in", FUSED, config={}, files=3)
    options = {"plan": FUSED_PLAN, "tp": 2, "check": "shapes"}
    told = convert(source, tmp_path / "out", dry_run=True, **options)
    assert (told.dry_run, told.fits, os.listdir(tmp_path)) == (True, True, ["in"])
    done = convert(source, tmp_path / "out", **options)
    there = {name: len(data) for name, data in tree(tmp_path / "out").items() if name != "autotp.json"}
    assert dict(told.files) == dict(done.files) == there and told.nbytes == sum(there.values())
    assert merge(tmp_path / "out", tmp_path / "back", dry_run=True).nbytes == sum(
        map(len, tree(source).values())
    )
    assert not (tmp_path / "back").exists()


def test_progress_ends_at_the_total(tmp_path):
    source = write_checkpoint(tmp_path / "in", FUSED, files=3)
    told = []
    convert(
        source, tmp_path / "out", plan=FUSED_PLAN, tp=2, check="shapes", progress=lambda *at: told.append(at)
    )
    total = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert told[-1] == (total, total, "model-00003-of-00003.safetensors")


def refusal(error, call, *args, **kwargs):
    with pytest.raises(error) as raised:
        call(*args, **kwargs)
    return str(raised.value)


def test_only_an_absent_or_empty_target_is_written(tmp_path):
    source = write_checkpoint(tmp_path / "in", FUSED)
    options = {"plan": FUSED_PLAN, "tp": 2, "check": "shapes"}
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out", **options)
    before = tree(tmp_path / "out")
    message = refusal(CheckpointError, convert, source, tmp_path / "out", **options)
    assert (
        message == f"{tmp_path / 'out'}: is not empty (3 entries, such as 'autotp.json'); name a new folder"
    )
    assert tree(tmp_path / "out") == before
    (tmp_path / "file").touch()
    message = refusal(CheckpointError, convert, source, tmp_path / "file", **options)
    assert message == f"{tmp_path / 'file'}: exists and is not a folder; name a new one"
    message = refusal(CheckpointError, convert, source, tmp_path / "file" / "out", **options)
    says = f"cannot be made: {tmp_path / 'file'} is not a folder; name another place"
    assert message == f"{tmp_path / 'file' / 'out'}: {says}"
    message = refusal(CheckpointError, convert, tmp_path / "out", tmp_path / "again", **options)
    assert message == f"{tmp_path / 'out'}: is converted already; `reshard` it, or `merge` it first"


def test_wrong_options_are_named(tmp_path):
    source, out = write_checkpoint(tmp_path / "in", FUSED), tmp_path / "out"
    options = {"plan": FUSED_PLAN, "tp": 2, "check": "shapes"}
    message = refusal(UsageError, convert, source, out, **options | {"digest": "md5"})
    assert message == "there is no digest 'md5'; there are xxh3, sha256, none"
    message = refusal(UsageError, convert, source, out, **options | {"check": "all"})
    assert message == "check is 'layouts' or 'shapes', not 'all'"
    message = refusal(UsageError, convert, source, out, **options | {"tp": 0})
    assert message == "tp is a whole number of at least 1, not 0"
    for ranks in (1, "0-1", [1.0], [True]):
        message = refusal(UsageError, convert, source, out, **options | {"ranks": ranks})
        assert message == f"ranks are from 0 to 1 for tp=2, not {ranks!r}"
    message = refusal(UsageError, convert, source, out, **options | {"plan": "auto"})
    assert message == 'plan "auto" is derived from the traced graph, which check="shapes" leaves out'
    message = refusal(UsageError, convert, source, out, **options | {"plan": None})
    assert message.startswith(f"{source}: no config tells a model_type; give a plan, or one of ")
    assert " bert, " in message
    (source / "config.json").write_text('{"model_type": "nosuch"}')
    message = refusal(UsageError, convert, source, out, **options | {"plan": None})
    assert message.startswith(
        f"{source}: no plan is shipped for model_type 'nosuch'; give a plan, or one of "
    )
    assert os.listdir(tmp_path) == ["in"]


def test_a_refused_plan_writes_nothing(tmp_path):
    source = write_checkpoint(tmp_path / "in", FUSED)
    with pytest.raises(PlanError) as raised:
        convert(source, tmp_path / "out", plan={"gate_pu": "column", "down": "row"}, tp=2, check="shapes")
    assert [found.code for found in raised.value.diagnostics] == ["AT201"]
    message = refusal(
        CheckpointError,
        convert,
        source,
        tmp_path / "out",
        plan={"packed": {"style": "column", "dim": 0}},
        tp=2,
        check="shapes",
    )
    assert message == (
        f"{source}: tensor 'packed' has elements of 0.5 bytes (F4), "
        "which cannot be cut; leave it whole with `replicate`"
    )
    assert os.listdir(tmp_path) == ["in"]


def test_a_damaged_source_is_found_before_anything_is_written(tmp_path):
    source = write_checkpoint(tmp_path / "in", FUSED, files=3)
    last = source / "model-00003-of-00003.safetensors"
    size = last.stat().st_size
    os.truncate(last, size - 10)
    message = refusal(
        CheckpointError, convert, source, tmp_path / "out", plan=FUSED_PLAN, tp=2, check="shapes"
    )
    assert message == f"{last}: is truncated: {size - 10} bytes, and its header accounts for {size}"
    assert os.listdir(tmp_path) == ["in"]


def test_tied_names_with_different_values_are_an_error(tmp_path):
    tensors, config = llama()
    config["tie_word_embeddings"] = True
    for digest in ("xxh3", "none"):
        source = write_checkpoint(tmp_path / digest / "in", tensors, config=config, files=2)
        message = refusal(
            CheckpointError, convert, source, tmp_path / digest / "out", tp=2, check="shapes", digest=digest
        )
        assert message == (
            f"{source}: config.json ties 'lm_head.weight' to 'model.embed_tokens.weight', but their "
            'values differ; set "tie_word_embeddings": false, or remove the one that is wrong'
        )
        assert os.listdir(tmp_path / digest) == ["in"]
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    source = write_checkpoint(tmp_path / "same", tensors, config=config)
    convert(source, tmp_path / "out", tp=2, check="shapes")
    merge(tmp_path / "out", tmp_path / "back")
    assert tree(tmp_path / "back") == tree(source)


def test_a_source_that_changes_meanwhile_is_an_error(tmp_path):
    source = write_checkpoint(tmp_path / "in", FUSED, files=3)
    first = source / "model-00001-of-00003.safetensors"

    def change(done, total, name):
        os.utime(first, ns=(1, 1))

    message = refusal(
        CheckpointError,
        convert,
        source,
        tmp_path / "out",
        plan=FUSED_PLAN,
        tp=2,
        check="shapes",
        progress=change,
    )
    assert message == f"{first}: changed while it was read; start again"
    assert os.listdir(tmp_path) == ["in"]


def test_a_file_by_the_name_of_anything_of_ours_travels_too(tmp_path):
    source = write_checkpoint(tmp_path / "in", FUSED, config={})
    for name in ("journal.jsonl", "autotp.txt", "rank-0-of-2.json"):
        (source / name).write_text(name)
    convert(source, tmp_path / "out", plan=FUSED_PLAN, tp=2, check="shapes")
    merge(tmp_path / "out", tmp_path / "back")
    assert tree(tmp_path / "back") == tree(source)


def test_some_ranks_alone_write_the_same_manifest_and_the_same_shards(tmp_path):
    source = write_checkpoint(tmp_path / "in", FUSED, config={}, files=3)
    options = {"plan": FUSED_PLAN, "tp": 2, "check": "shapes"}
    convert(source, tmp_path / "all", **options)
    first = convert(source, tmp_path / "first", ranks=[0], **options)
    convert(source, tmp_path / "second", ranks=[1, 1], **options)
    everything = tree(tmp_path / "all")
    parts = tree(tmp_path / "first"), tree(tmp_path / "second")
    assert parts[0]["autotp.json"] == parts[1]["autotp.json"]
    assert parts[0] | parts[1] == everything and set(parts[0]) & set(parts[1]) == {"autotp.json"}
    assert dict(first.files) == {n: len(d) for n, d in parts[0].items() if n != "autotp.json"}
    message = refusal(CheckpointError, merge, tmp_path / "first", tmp_path / "back")
    assert message == f"{tmp_path / 'first'}: 1 of 2 rank folders are missing: rank-1-of-2; copy them here"
    message = refusal(UsageError, convert, source, tmp_path / "x", ranks=[2], **options)
    assert message == "ranks are from 0 to 1 for tp=2, not [2]"
    message = refusal(UsageError, convert, source, tmp_path / "x", ranks=[], **options)
    assert message == "ranks are from 0 to 1 for tp=2, not []"


def test_a_plan_object_and_a_file_do_the_same(tmp_path):
    source = write_checkpoint(tmp_path / "in", FUSED)
    plan = Plan(rules=FUSED_PLAN)
    plan.save(tmp_path / "plan.yaml")
    for name, given in (("a", plan), ("b", tmp_path / "plan.yaml"), ("c", {"rules": FUSED_PLAN})):
        assert convert(source, tmp_path / name, plan=given, tp=2, check="shapes").plan == plan
    assert tree(tmp_path / "a") == tree(tmp_path / "b") == tree(tmp_path / "c")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path):
    """Two blocks of a MiB in each lane, whatever the size: the peak of what Python allocates."""
    import tracemalloc

    peaks = []
    for rows in (1 << 12, 1 << 16):
        tensors = {
            "up.weight": ("F32", (rows, 256), bytes(rows * 1024)),
            "down.weight": ("F32", (256, rows), bytes(rows * 1024)),
        }
        source = write_checkpoint(tmp_path / f"in{rows}", tensors)
        tensors.clear()
        tracemalloc.start()
        convert(source, tmp_path / f"out{rows}", plan=PLAIN, tp=8, check="shapes")
        merge(tmp_path / f"out{rows}", tmp_path / f"back{rows}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 6 << 20 and peaks[1] < peaks[0] + (1 << 20)


def test_digests_are_those_of_the_bytes(tmp_path):
    source = write_checkpoint(tmp_path / "in", FUSED)
    convert(source, tmp_path / "out", plan=FUSED_PLAN, tp=2, check="shapes", digest="sha256")
    told = json.loads((tmp_path / "out" / "autotp.json").read_text())["tensors"]
    for name, (_, _, data) in FUSED.items():
        assert told[name]["digest"] == hashlib.sha256(data).hexdigest()
    for rank, part in enumerate(shards(tmp_path / "out", 2, "down.weight")):
        assert told["down.weight"]["parts"][rank] == hashlib.sha256(part.numpy().tobytes()).hexdigest()
    assert "parts" not in told["scale"]


def test_a_checkpoint_of_one_file_by_its_name(tmp_path):
    (tmp_path / "some.safetensors").write_bytes(safetensors_bytes(FUSED))
    (tmp_path / "other.txt").touch()
    convert(tmp_path / "some.safetensors", tmp_path / "out", plan=FUSED_PLAN, tp=2, check="shapes")
    merge(tmp_path / "out", tmp_path / "back")
    assert tree(tmp_path / "back") == {"some.safetensors": (tmp_path / "some.safetensors").read_bytes()}


@pytest.mark.slow
def test_a_derived_plan_goes_with_the_shards(tmp_path):
    tensors, config = llama(layers=1)
    source = write_checkpoint(tmp_path / "in", tensors, config=config)
    written = convert(source, tmp_path / "out", plan="auto", tp=2)
    assert written.plan_name == "auto" and written.proof == "layouts"
    assert {"self_attn.q_proj", "mlp.down_proj"} <= set(written.plan.rules)
    merge(tmp_path / "out", tmp_path / "back")
    assert tree(tmp_path / "back") == tree(source)
