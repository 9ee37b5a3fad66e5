"""The analysis: what is ok, what ranks hold, and the dry run on names and shapes."""

import json
from dataclasses import FrozenInstanceError, replace

import pytest

import autotp
from autotp.analysis import NAMES_AND_SHAPES, Analysis, Collective
from autotp.checkpoint.inventory import inventory
from autotp.comm import simulate
from autotp.diagnostic import CheckpointError, Diagnostic, UsageError
from autotp.plan import Plan
from autotp.shapes import analyze_headers, analyze_shapes, as_stored
from tests import models
from tests.sparse import llama_checkpoint, llama_config, llama_shapes, write_checkpoint

SIZES = {"hidden": 48, "inter": 65, "layers": 2, "heads": 6, "kv": 3, "vocab": 99}


@pytest.fixture
def folder(tmp_path):
    return llama_checkpoint(tmp_path / "llama", dtype="F32", **SIZES)


def test_a_right_plan_is_ok_and_not_proven(folder):
    analysis = analyze_headers(folder, Plan.load("llama"), tp=3)
    assert isinstance(analysis, Analysis)
    assert (analysis.ok, analysis.certainty, analysis.modes, analysis.edits) == (
        True,
        NAMES_AND_SHAPES,
        (),
        "",
    )
    assert analysis.diagnostics == ()
    assert analysis.layouts == analysis.matches.layouts
    assert analysis.sharded_fraction == 1.0
    assert len(analysis.rank_bytes) == 3


def test_warnings_and_notes_do_not_refuse(folder):
    analysis = analyze_headers(folder, Plan.load("llama"), tp=3)
    for severity, ok in (("note", True), ("warning", True), ("error", False)):
        assert replace(analysis, diagnostics=(Diagnostic("AT300", "x", severity=severity),)).ok is ok


def test_a_bad_plan_is_returned_not_raised(folder):
    analysis = analyze_headers(folder, Plan(rules={"q_prj": "column", "up_proj": "column"}), tp=3)
    assert not analysis.ok
    codes = [finding.code for finding in analysis.diagnostics]
    assert codes[0] == "AT201" and "AT390" in codes


def test_a_plan_without_one_right_rule_is_not_told_twice_that_it_shards_nothing(folder):
    analysis = analyze_headers(folder, Plan(rules={"q_prj": "column"}), tp=3)
    assert "AT391" not in {finding.code for finding in analysis.diagnostics}
    assert not analysis.ok


def test_a_plan_that_replicates_everything_is_refused(folder):
    analysis = analyze_headers(folder, Plan(rules={"q_proj": "replicate"}), tp=3)
    assert [finding.code for finding in analysis.diagnostics] == ["AT391"]


@pytest.mark.parametrize("tp", [0, -1, True, 2.0, "2"])
def test_an_impossible_tp_is_a_usage_error(folder, tp):
    with pytest.raises(UsageError, match=r"^tp is a whole number of at least 1, not "):
        analyze_headers(folder, Plan.load("llama"), tp=tp)


def test_a_huge_tp_is_refused_at_once(folder):
    analysis = analyze_headers(folder, Plan.load("llama"), tp=1_000_000)
    assert not analysis.ok


def test_what_cannot_be_read_names_the_file(tmp_path):
    with pytest.raises(CheckpointError, match="nosuch"):
        analyze_headers(tmp_path / "nosuch", Plan.load("llama"), tp=2)


def test_a_collective_is_frozen():
    one = Collective("copy", "fc1", "backward")
    assert (one.calls, one.operation) == (1, "all-reduce")
    with pytest.raises(FrozenInstanceError):
        one.calls = 2


def test_str_is_the_table(folder):
    analysis = analyze_headers(folder, Plan.load("llama"), tp=3)
    first, *_, last = str(analysis).splitlines()
    assert first == "llama: plan llama (shipped), tp 3, names and shapes only"
    assert last == "ok by names and shapes: layouts are not proven"


def test_all_three_forms_tell_the_same_verdict(folder):
    for rules, ok in (({"up_proj": "column", "down_proj": "row"}, True), ({"up_prj": "column"}, False)):
        analysis = analyze_headers(folder, Plan(rules=rules), tp=2)
        assert analysis.ok is json.loads(analysis.to_json())["ok"] is ok
        assert ("refused" in str(analysis), "refused" in analysis.to_html()) == (not ok, not ok)


def test_the_stored_dtypes_decide_the_bytes(tmp_path, folder):
    """config.json describes a model in float32; its checkpoint is stored in bfloat16."""
    built = analyze_shapes(inventory(folder), Plan.load("llama"), tp=2)
    stored = inventory(llama_checkpoint(tmp_path / "stored", dtype="BF16", **SIZES))
    told = as_stored(built, stored)
    assert [2 * held for held in told.rank_bytes] == list(built.rank_bytes)
    assert told.inventory.name == "stored"
    assert told.ok


def test_a_config_for_other_weights_is_an_error(tmp_path, folder):
    built = analyze_shapes(inventory(folder), Plan.load("llama"), tp=2)
    other = {**SIZES, "vocab": 100}
    stored = write_checkpoint(tmp_path / "other", llama_shapes(**other), llama_config(**SIZES))
    told = as_stored(built, inventory(stored))
    assert [finding.render() for finding in told.diagnostics if finding.module == "lm_head.weight"] == [
        "error[AT420]: lm_head.weight: [100, 48] in the checkpoint, and [99, 48] by its config.json\n"
        "  = help: config.json belongs to other weights; get both from one place"
    ]
    assert not told.ok


def held(group, build):
    """The bytes of parameters and buffers of one rank's sharded model, shared ones once."""
    model = autotp.shard(build(), "llama", group, check="shapes")
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


@pytest.mark.parametrize("tied", [False, True])
def test_the_bytes_are_those_of_the_sharded_model(tied):
    def build():
        return models.llama(tie_word_embeddings=tied, num_hidden_layers=1)

    analysis = autotp.analyze(build(), "llama", tp=4, check="shapes")
    assert analysis.rank_bytes == tuple(simulate(4, lambda group: held(group, build)))
    assert len(set(analysis.rank_bytes)) > 1


def test_a_plan_from_a_report_shards_alike():
    first = autotp.analyze(models.MLP(), {"fc1": "column", "fc2": "row"}, tp=2)
    plan = Plan.loads(json.dumps(json.loads(first.to_json())["plan"]))
    again = autotp.analyze(models.MLP(), plan, tp=2)
    assert (again.layouts, again.collectives) == (first.layouts, first.collectives)
    sizes = simulate(2, lambda group: autotp.shard(models.MLP(), plan, group).fc1.weight.shape[0])
    assert sizes == [17, 16]
