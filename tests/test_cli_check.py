"""`autotp check`: a plan alone, and against a model."""

import json

import pytest

from tests.command_line import MLP, junk, plan_file, run
from tests.sparse import write_checkpoint

# check


def test_check_of_a_sound_plan(here):
    plan_file("mlp.yaml", "rules: {fc1: column, fc2: row}")
    assert run("check", "mlp.yaml") == (0, "ok: mlp.yaml, 2 rules\n", "")
    assert run("check", "llama")[0] == 0


def test_check_tells_every_fault_with_its_line(here):
    plan_file(
        "bad.yaml",
        """\
        version: 1
        rules:
          fc1: colum
          fc2: {style: row, gather_output: true}
        """,
    )
    code, out, err = run("check", "bad.yaml")
    assert (code, err) == (1, "")
    assert "  --> bad.yaml:3:8\n" in out and "  --> bad.yaml:4:" in out
    assert out.splitlines()[-1] == "refused: 2 errors"


def test_check_against_a_model(here):
    write_checkpoint(here / "mlp", MLP)
    plan_file("mlp.yaml", "rules: {fc1: column, fc3: row}")
    code, out, err = run("check", "mlp.yaml", "mlp")
    assert (code, err) == (1, "")
    assert "error[AT201]: rule `fc3` matches nothing in mlp" in out
    code, out, _ = run("check", "mlp.yaml", "mlp", "--format", "json")
    assert code == 1 and json.loads(out)["ok"] is False


def test_check_with_warnings_only_is_fine(here):
    write_checkpoint(here / "mlp", {**MLP, "fc3.weight": (8, 8)})
    plan_file("mlp.yaml", "rules: {fc1: column, fc2: row}")
    code, out, _ = run("check", "mlp.yaml", "mlp")
    assert code == 0
    assert out.startswith("warning[AT390]: fc3.weight: ") and out.endswith("ok: 1 warning\n")


@pytest.mark.parametrize("name", ["nosuch.yaml", ".", "/dev/null", "junk.yaml"])
def test_check_of_what_is_no_plan_file_exits_2(here, name):
    junk(here / "junk.yaml")
    code, out, err = run("check", name)
    assert (code, out) == (2, "")
    assert err.startswith("error[AT101]: ")
