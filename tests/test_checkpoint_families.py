"""Every shipped plan's family, there and back at any number of ranks: the same files, header bytes too."""

import hashlib

import pytest

from autotp.checkpoint import convert, merge, reshard
from autotp.checkpoint.manifest import load_manifest
from tests.checkpoints import tree
from tests.test_shipped_plans import HEADS, MODELS, SOME, build, save


def hashes(folder):
    return {name: hashlib.sha256(data).hexdigest() for name, data in tree(folder).items()}


def eight_heads(name):
    """Sizes that 8 ranks can share, of which 3 ranks hold unequal parts."""
    sizes = MODELS[name][1]
    text = sizes.get("text_config", {})
    inside = {"text_config": {**text, **{key: 8 for key in HEADS if key in text}}} if text else {}
    return {key: 8 for key in HEADS if key in sizes} | inside


LARGEST = {"codegen": 4}  # its fused heads lie in four parts


@pytest.mark.parametrize("name", SOME)
def test_there_and_back(tmp_path, name):
    source = tmp_path / "in"
    source.mkdir()
    save(build(name, **eight_heads(name)), source)
    expected = hashes(source)
    largest = LARGEST.get(name, 8)
    for tp in sorted({2, 3, 4, largest}):
        convert(source, tmp_path / f"tp{tp}", plan=name, tp=tp, check="shapes")
        assert len(load_manifest(tmp_path / f"tp{tp}").layouts) > 3
        merge(tmp_path / f"tp{tp}", tmp_path / f"back{tp}")
        assert hashes(tmp_path / f"back{tp}") == expected
    before = tmp_path / "tp2"
    for tp in (3, largest, 1):
        after = tmp_path / f"again{tp}"
        reshard(before, after, tp=tp, check="shapes")
        if tp > 1:
            assert hashes(after) == hashes(tmp_path / f"tp{tp}")
        before = after
    merge(before, tmp_path / "back")
    assert hashes(tmp_path / "back") == expected


GROUPED = ("glm", "llama", "mixtral", "phi", "qwen2", "qwen3")


@pytest.mark.parametrize("name", [name for name in GROUPED if "num_key_value_heads" in MODELS[name][1]])
def test_with_fewer_kv_heads_than_ranks(tmp_path, name):
    """Ranks that share a kv head each have its weights: copies that a merge compares and writes once."""
    source = tmp_path / "in"
    source.mkdir()
    save(build(name, **eight_heads(name) | {"num_key_value_heads": 2}), source)
    expected = hashes(source)
    for tp in (4, 8):
        convert(source, tmp_path / f"tp{tp}", plan=name, tp=tp, check="shapes")
        shards = load_manifest(tmp_path / f"tp{tp}").layouts.values()
        assert any(shard.deal is not None and shard.deal.shared for shard in shards)
        merge(tmp_path / f"tp{tp}", tmp_path / f"back{tp}")
        assert hashes(tmp_path / f"back{tp}") == expected
    reshard(tmp_path / "tp8", tmp_path / "again", tp=4, check="shapes")
    assert hashes(tmp_path / "again") == hashes(tmp_path / "tp4")
