"""The manifest: read back as written, and refused when anybody has tampered with it."""

import json

import pytest

from autotp.checkpoint import check_shards, convert, inventory, merge, reshard
from autotp.checkpoint.manifest import load_manifest
from autotp.checkpoint.stored import in_own_folder
from autotp.diagnostic import CheckpointError
from autotp.placement import Shard, deal
from tests.checkpoints import random_tensor, write_checkpoint

TENSORS = {
    "gate_up.weight": random_tensor("F32", (12, 4)),
    "qkv.weight": random_tensor("F32", (16, 4)),
    "down.weight": random_tensor("F32", (4, 6)),
    "norm.weight": random_tensor("F32", (4,)),
}
PLAN = {
    "gate_up": {"style": "column", "sections": 2},
    "qkv": {"style": "column", "sections": [8, 4, 4], "heads": 2},
    "down": "row",
}


@pytest.fixture
def shards(tmp_path):
    source = write_checkpoint(tmp_path / "in", TENSORS, config={"a": 1}, files=2)
    convert(source, tmp_path / "out", plan=PLAN, tp=2, check="shapes")
    return tmp_path / "out"


def test_read_back_as_written(shards):
    manifest = load_manifest(shards)
    assert (manifest.tp, manifest.proof, manifest.digest, manifest.config) == (2, "none", "xxh3", {"a": 1})
    assert manifest.layouts == {
        "gate_up.weight": Shard(0, deal(6, 2), groups=2),
        "qkv.weight": Shard(0, sections=((8, deal(2, 2)), (4, deal(2, 2)), (4, deal(2, 2)))),
        "down.weight": Shard(1, deal(6, 2)),
    }
    assert manifest.layouts["down.weight"].deal.declared == 6
    source = shards.parent / "in"
    assert [source.joinpath(f.path.name).read_bytes()[: len(f.raw)] for f in manifest.files] == [
        f.raw for f in manifest.files
    ]
    assert manifest.index == (source / "model.safetensors.index.json").read_bytes()
    assert manifest.dumps() == (shards / "autotp.json").read_text()


def test_it_holds_no_times_and_no_places(shards):
    text = (shards / "autotp.json").read_text()
    assert str(shards.parent) not in text and "time" not in text


def test_its_inventory_is_that_of_the_source(shards):
    for path in (shards, shards / "autotp.json"):
        assert inventory(path).modules == inventory(shards.parent / "in").modules
        assert inventory(path).config == {"a": 1}


def change(path, value):
    def edit(table):
        *way, last = path
        for step in way:
            table = table[step]
        if value is None:
            del table[last]
        else:
            table[last] = value

    return edit


def reindex(name, file):
    """Say in the index that a tensor is in another file, or in none."""

    def edit(table):
        index = json.loads(table["index"])
        index["weight_map"].pop(name, None)
        index["weight_map"] |= {name: file} if file else {}
        table["index"] = json.dumps(index)

    return edit


def header(text):
    return change(("files", 0, "header"), text)


QKV = ("tensors", "qkv.weight", "layout")
GATE = ("tensors", "gate_up.weight", "layout")
NO_DEAL = "tensor 'gate_up.weight': its deal does not give each unit to a rank"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change(("version",), 2), "is not a manifest of autotp in version 1"),
        (change(("format",), "other"), "is not a manifest of autotp in version 1"),
        (change(("tp",), 0), "tp: Input should be greater than or equal to 1"),
        (change(("tp",), 10**9), "tp: Input should be less than or equal to 65536"),
        (change(("tp",), "2"), "tp: Input should be a valid integer"),
        (change(("tp",), 3), "tensor 'gate_up.weight': its deal does not give each unit to a rank"),
        (change(("new",), 1), "new: Extra inputs are not permitted"),
        (change(("files",), None), "files: Field required"),
        (
            change(("files", 0, "name"), "../x.safetensors"),
            "'../x.safetensors' is not a plain .safetensors file name",
        ),
        (change(("files", 0, "name"), "config.json"), "'config.json' is not a plain .safetensors file name"),
        (change(("files", 1, "name"), "model-00001-of-00002.safetensors"), "names a file or a tensor twice"),
        (change(("companions",), {"../x": ""}), "'../x' is not the name of a file inside the folder"),
        (change(("companions",), {"/x": ""}), "'/x' is not the name of a file inside the folder"),
        (change(("companions",), {"a//x": ""}), "'a//x' is not the name of a file inside the folder"),
        (change(("companions",), {".x/y": ""}), "'.x/y' is not the name of a file inside the folder"),
        (change(("companions",), {"a/./x": ""}), "'a/./x' is not the name of a file inside the folder"),
        (
            change(("companions",), {"autotp.json": ""}),
            "'autotp.json' is not the name of a file inside the folder",
        ),
        (
            change(("companions",), {"model.safetensors": ""}),
            "'model.safetensors' is said to have travelled along, and may hold weights: none such does",
        ),
        (
            change(("companions",), {"sub/pytorch_model.bin": ""}),
            "'sub/pytorch_model.bin' is said to have travelled along, and may hold weights: none such does",
        ),
        (
            lambda table: table.update(index=None),
            "has 2 files and no index that tells which tensor is in which",
        ),
        (
            reindex("norm.weight", "other.safetensors"),
            "its index says that 'norm.weight' is in 'other.safetensors', which does not hold it",
        ),
        (
            reindex("norm.weight", None),
            "its index does not say that 'norm.weight' is in 'model-00002-of-00002.safetensors'",
        ),
        (
            reindex("new", "model-00001-of-00002.safetensors"),
            "its index says that 'new' is in 'model-00001-of-00002.safetensors', which does not hold it",
        ),
        (
            change(("plan",), {"rules": {"a": "colum"}}),
            "its plan is not sound: rule `a`: unknown style `colum`",
        ),
        (
            change(("tensors", "norm.weight"), None),
            "'norm.weight' is not both in its files and in its tensors",
        ),
        (change(("tensors", "new"), {"digest": ""}), "'new' is not both in its files and in its tensors"),
        (
            change((*GATE, "dim"), 2),
            "tensor 'gate_up.weight' of shape [12, 4] cannot be cut as "
            "shard(dim 2: 2 sections, each in 2 equal parts)",
        ),
        (
            change((*GATE, "dim"), -1),
            "tensors.gate_up.weight.layout.dim: Input should be greater than or equal to 0",
        ),
        (
            change((*GATE, "groups"), 1 << 40),
            "tensors.gate_up.weight.layout.groups: Input should be less than or equal to 65536",
        ),
        (
            change((*GATE, "deal"), None),
            "tensor 'gate_up.weight': its layout has neither a deal nor dealt sections, or both",
        ),
        (change((*GATE, "deal", "ranges"), [[0, 1], [0, 1]]), NO_DEAL),
        (change((*GATE, "deal", "ranges"), [[0, 2], [1, 2]]), NO_DEAL),
        (change((*GATE, "deal", "ranges"), [[0, 1], [1]]), NO_DEAL),
        (change((*GATE, "deal", "ranges"), [[0, 1], []]), NO_DEAL),
        (change((*GATE, "deal", "ranges"), [[], []]), NO_DEAL),
        (change((*GATE, "deal", "ranges"), [[-1, 1], [1, 2]]), NO_DEAL),
        (change((*GATE, "deal", "ranges"), [[0, 1], [1, 1], [1, 2]]), NO_DEAL),
        (change((*GATE, "deal", "ranges"), [[0, 1]]), NO_DEAL),
        (change((*GATE, "deal", "units"), 3), NO_DEAL),
        (
            change((*QKV, "sections"), []),
            "tensors.qkv.weight.layout.sections: List should have at least 1 item after validation, not 0",
        ),
        (
            change((*QKV, "sections"), [{"size": 16, "deal": None}]),
            "tensor 'qkv.weight': its layout has neither a deal nor dealt sections, or both",
        ),
        (
            change((*QKV, "sections", 0, "size"), 6),
            "tensor 'qkv.weight' of shape [16, 4] cannot be cut as "
            "shard(dim 0: sections 6 in 2 equal parts, 4 in 2 equal parts, 4 in 2 equal parts)",
        ),
        (
            change(("tensors", "gate_up.weight", "parts"), []),
            "tensor 'gate_up.weight' has 0 digests of parts",
        ),
        (
            change(("tensors", "norm.weight", "parts"), ["", ""]),
            "tensor 'norm.weight' has 2 digests of parts",
        ),
    ],
)
def test_a_manifest_that_was_tampered_with(shards, edit, message):
    path = shards / "autotp.json"
    table = json.loads(path.read_text())
    edit(table)
    path.write_text(json.dumps(table))
    with pytest.raises(CheckpointError) as raised:
        merge(shards, shards.parent / "back")
    assert str(raised.value) == f"{path}: {message}"
    assert not (shards.parent / "back").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "its header does not begin with '{'"),
        ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', "has bytes that belong to no tensor: "),
        ("\ud800", "autotp.json: its content is not sound JSON: half a surrogate pair in a string"),
    ],
)
def test_a_header_that_was_tampered_with(shards, text, message):
    path = shards / "autotp.json"
    table = json.loads(path.read_text())
    table["files"][0]["header"] = text if text != "{}" else ""
    path.write_text(json.dumps(table))
    with pytest.raises(CheckpointError) as raised:
        merge(shards, shards.parent / "back")
    assert message in str(raised.value) and str(shards) in str(raised.value)


def test_a_digest_that_was_tampered_with(shards):
    path = shards / "autotp.json"
    table = json.loads(path.read_text())
    table["tensors"]["qkv.weight"]["digest"] = "00"
    path.write_text(json.dumps(table))
    with pytest.raises(CheckpointError) as raised:
        merge(shards, shards.parent / "back")
    assert str(raised.value) == f"{path}: its digest of tensor 'qkv.weight' is not that of the shards"


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("not json", "its content is not sound JSON: Expecting value: line 1 column 1 (char 0)"),
        (
            '{"weight_map": {"a": "../outside.safetensors"}}',
            "'a' is said to be in '../outside.safetensors', which is not a plain .safetensors file name",
        ),
    ],
)
def test_an_index_that_was_tampered_with(shards, index, message):
    path = shards / "autotp.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"index": index}))
    for run in (check_shards, lambda folder: merge(folder, shards.parent / "back")):
        with pytest.raises(CheckpointError) as raised:
            run(shards)
        assert str(raised.value) == f"{path} (index): {message}"


def test_a_file_that_is_no_longer_listed(shards):
    path = shards / "autotp.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"companions": {}}))
    lost = [
        f"{shards / f'rank-{rank}-of-2'}: 'config.json' was not written there: autotp.json does not list it; "
        "remove it"
        for rank in range(2)
    ]
    assert check_shards(shards).findings == tuple(lost)
    for run in (
        lambda: merge(shards, shards.parent / "back"),
        lambda: reshard(shards, shards.parent / "again", tp=1, check="shapes"),
        lambda: in_own_folder(shards, load_manifest(shards), 0),
    ):
        with pytest.raises(CheckpointError) as raised:
            run()
        assert str(raised.value) == lost[0]


def test_a_folder_without_one(tmp_path):
    with pytest.raises(CheckpointError) as raised:
        merge(tmp_path, tmp_path / "back")
    assert str(raised.value) == f"{tmp_path}: holds no autotp.json: it is not a folder that autotp converted"
