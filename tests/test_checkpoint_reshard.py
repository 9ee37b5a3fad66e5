"""Reshard: the same bytes that convert would have written for the other number of ranks."""

import pytest

from autotp.checkpoint import convert, merge, reshard
from autotp.diagnostic import CheckpointError, PlanError
from autotp.header import read_header
from tests.checkpoints import llama, random_tensor, tree, write_checkpoint


def test_two_three_eight_one(tmp_path):
    tensors, config = llama(hidden=32, heads=8, kv=8, inter=37, vocab=101)
    source = write_checkpoint(tmp_path / "in", tensors, config=config, files=3, pad=8)
    convert(source, tmp_path / "tp2", tp=2, check="shapes")
    before = 2
    for tp in (3, 8, 1):
        written = reshard(tmp_path / f"tp{before}", tmp_path / f"tp{tp}", tp=tp, check="shapes")
        convert(source, tmp_path / f"direct{tp}", tp=tp, check="shapes")
        assert tree(tmp_path / f"tp{tp}") == tree(tmp_path / f"direct{tp}")
        there = {
            name: len(data) for name, data in tree(tmp_path / f"tp{tp}").items() if name != "autotp.json"
        }
        assert dict(written.files) == there
        before = tp
    merge(tmp_path / "tp1", tmp_path / "back")
    assert tree(tmp_path / "back") == tree(source)


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_of_99_is_never_padded(tmp_path, tied):
    """E2: over 1, 2, 4 and 1 ranks again, the rows are the 99 that there were."""
    tensors, config = llama(hidden=24, heads=4, kv=4, inter=36, vocab=99, tied=tied)
    source = write_checkpoint(tmp_path / "in", tensors, config=config)
    convert(source, tmp_path / "0", tp=1, check="shapes")
    for step, tp in enumerate((2, 4, 1)):
        reshard(tmp_path / str(step), tmp_path / str(step + 1), tp=tp, check="shapes")
        names = ["model.embed_tokens.weight"] + ([] if tied else ["lm_head.weight"])
        for name in names:
            rows = [
                read_header(home / "model.safetensors").tensors[name].shape[0]
                for home in sorted((tmp_path / str(step + 1)).glob("rank-*"))
            ]
            assert rows == [99 // tp + (rank < 99 % tp) for rank in range(tp)]
    merge(tmp_path / "3", tmp_path / "back")
    assert tree(tmp_path / "back") == tree(source)


def test_long_rows_cut_in_sections(tmp_path):
    tensors = {"gate_up": random_tensor("U8", (2, 1_500_001 * 2)), "down": random_tensor("F32", (700, 900))}
    plan = {"gate_up": {"style": "column", "dim": 1, "sections": 2}, "down": {"style": "column", "dim": 0}}
    source = write_checkpoint(tmp_path / "in", tensors)
    convert(source, tmp_path / "tp2", tp=2, plan=plan, check="shapes", digest="none")
    reshard(tmp_path / "tp2", tmp_path / "tp3", tp=3, check="shapes")
    convert(source, tmp_path / "direct", tp=3, plan=plan, check="shapes", digest="none")
    assert tree(tmp_path / "tp3") == tree(tmp_path / "direct")


def test_refused_before_anything_is_written(tmp_path):
    tensors, config = llama(heads=6, kv=6)
    source = write_checkpoint(tmp_path / "in", tensors, config=config)
    convert(source, tmp_path / "tp2", tp=2, check="shapes")
    with pytest.raises(PlanError) as raised:
        reshard(tmp_path / "tp2", tmp_path / "tp7", tp=7, check="shapes")
    assert {finding.code for finding in raised.value.diagnostics} == {"AT203"}
    path = tmp_path / "tp2" / "rank-1-of-2" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged|differs from the first"):
        reshard(tmp_path / "tp2", tmp_path / "tp3", tp=3, check="shapes")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "tp2"]
    told = reshard(tmp_path / "tp2", tmp_path / "tp3", tp=3, check="shapes", dry_run=True)
    assert told.dry_run and told.tp == 3 and not (tmp_path / "tp3").exists()


def test_a_config_that_was_changed_is_told_before_the_plan_reads_it(tmp_path):
    tensors, config = llama(heads=6, kv=6)
    source = write_checkpoint(tmp_path / "in", tensors, config=config)
    convert(source, tmp_path / "tp2", tp=2, check="shapes")
    for rank in range(2):
        (tmp_path / "tp2" / f"rank-{rank}-of-2" / "config.json").write_text("{}")
    for dry_run in (True, False):
        with pytest.raises(CheckpointError, match=r"rank-0-of-2/config.json: is not what was written"):
            reshard(tmp_path / "tp2", tmp_path / "tp3", tp=3, check="shapes", dry_run=dry_run)
