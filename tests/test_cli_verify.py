"""`autotp verify` and `autotp reshard` as users meet them."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from autotp.cli import verify as verify_command
from autotp.nn import RowParallelLinear
from autotp.report.verified import verification_json, verification_text
from autotp.verification import Verification
from tests.checkpoints import llama, write_checkpoint
from tests.command_line import plan_file, run

GQA = {"hidden": 24, "inter": 36, "layers": 2, "heads": 6, "kv": 3, "vocab": 33}
FAILING = """
import torch
from torch import nn

class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.fc1, self.fc2 = nn.Embedding(9, 16), nn.Linear(16, 33), nn.Linear(33, 16)

    def forward(self, ids):
        print("running")
        return self.fc2(torch.relu(self.fc1(self.table(ids))))

def out_of_range():
    return Lookup(), torch.full((2, 3), 9)

def in_range():
    return Lookup(), torch.full((2, 3), 8)
"""


@pytest.fixture
def checkpoint(here):
    tensors, config = llama(**GQA)
    write_checkpoint(here / "llama", tensors, config=config)
    return "llama"


# The numbers


def test_a_factory(models):
    code, out, err = run("verify", f"{models}:MLP", "--plan", "mlp.yaml", "--tp", 3)
    first, collectives, last = out.splitlines()
    assert (code, err) == (0, "")
    assert first == "models_of_test:MLP: plan mlp.yaml, tp 3, random weights in float64"
    assert collectives == "  collectives of a rank: 1 all-reduce forward; 1 all-reduce backward"
    assert last.startswith("ok: outputs differ by ")
    assert last.endswith("tolerance 1e-09; merged state_dict equal; modes eval, train")


def test_json(models):
    command = ("verify", f"{models}:with_inputs", "--plan", "mlp.yaml", "--tp", 2)
    code, out, _ = run(*command, "--format", "json", "--weights", "own", "--dtype", "float32")
    found = json.loads(out)
    assert code == 0
    assert (found["ok"], found["tp"], found["weights"], found["dtype"]) == (True, 2, "own", "float32")
    assert found["max_output_diff"] <= 1e-5 >= found["max_grad_diff"]
    assert found["collectives"] == [{"forward": {"all-reduce": 1}, "backward": {"all-reduce": 1}}] * 2


def test_wrong_numbers_exit_1(models, monkeypatch):
    monkeypatch.setattr(
        RowParallelLinear,
        "forward",
        lambda layer, x: nn.functional.linear(x, layer.weight) + layer.bias,  # no reduce
    )
    code, out, _ = run("verify", f"{models}:MLP", "--plan", "mlp.yaml", "--tp", 2)
    assert code == 1
    assert out.splitlines()[-1].startswith("WRONG: outputs differ by ")
    code, out, _ = run("verify", f"{models}:MLP", "--plan", "mlp.yaml", "--tp", 2, "--format", "json")
    assert (code, json.loads(out)["ok"]) == (1, False)


def test_a_refused_plan_exits_1_with_its_findings(models):
    plan_file("wrong.yaml", "rules:\n  fc1: column\n")
    code, out, err = run("verify", f"{models}:MLP", "--plan", "wrong.yaml", "--tp", 2)
    assert (code, err) == (1, "")
    assert out.startswith("error[AT301]: fc2: ") and out.splitlines()[-1].startswith("refused: 1 error")
    code, out, _ = run("verify", f"{models}:MLP", "--plan", "wrong.yaml", "--tp", 2, "--format", "json")
    assert (code, json.loads(out)["diagnostics"][0]["code"]) == (1, "AT301")


def test_what_the_forward_prints_is_no_data(here):
    Path("failing_model.py").write_text(FAILING)
    plan_file("mlp.yaml", "rules: {fc1: column, fc2: row}")
    code, out, err = run(
        "verify", "failing_model:in_range", "--plan", "mlp.yaml", "--tp", 2, "--format", "json"
    )
    assert code == 0 and json.loads(out)["ok"]
    assert set(err.split()) == {"running"}


def test_a_forward_that_fails_on_real_numbers_is_one_error(here):
    Path("failing_model.py").write_text(FAILING)
    plan_file("mlp.yaml", "rules: {fc1: column, fc2: row}")
    code, out, err = run("verify", "failing_model:out_of_range", "--plan", "mlp.yaml", "--tp", 2)
    assert (code, out) == (2, "")
    told = err.replace("running\n", "")
    assert told.startswith("error: running failing_model:out_of_range raised IndexError: index out of range")
    assert "Traceback" not in told


def test_differences_that_are_no_numbers():
    found = Verification(
        False, float("inf"), float("nan"), "a.w", torch.float32, 1e-5, False, ("e",),
        zero_gradients=tuple(f"layers.{n}.k.bias" for n in range(3)) + tuple("abcd"),
        collectives=({"forward": {"all-reduce": 1}, "backward": {}}, {"forward": {}, "backward": {}}),
    )  # fmt: skip
    from autotp.plan import Plan

    given = {"target": "t", "plan": Plan.load("bert"), "tp": 2, "weights": "own"}
    document = json.loads(verification_json(found, **given))
    assert (document["max_output_diff"], document["max_grad_diff"]) == (None, None)
    assert (
        verification_text(found, **given)
        == """\
t: plan bert (shipped), tp 2, its own weights in float32
  collectives of a rank: rank 0: 1 all-reduce forward; none backward; rank 1: none forward; none backward
  true gradients of zero: layers.*.k.bias, a, b, c and 1 more
WRONG: outputs differ by inf, gradients by nan (a.w), tolerance 1e-05; merged state_dict DIFFERENT; modes e"""
    )


# Checkpoints


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["random", "own"])
def test_a_checkpoint(checkpoint, weights):
    code, out, _ = run("verify", checkpoint, "--tp", 3, "--weights", weights)
    assert code == 0
    assert out.splitlines()[-1].startswith("ok: outputs differ by ")
    assert float(out.partition("outputs differ by ")[2].partition(",")[0]) < 1e-9


@pytest.mark.slow
def test_a_config_alone(checkpoint):
    command = ("verify", f"{checkpoint}/config.json", "--tp", 3)
    code, out, err = run(*command, "--format", "json")
    found = json.loads(out)
    assert (code, err, found["ok"], found["plan_name"]) == (0, "", True, "llama (shipped)")
    assert run(*command, "--weights", "own") == (
        2,
        "",
        "error: llama/config.json: holds no weights: name its folder, or leave out --weights own\n",
    )


def test_a_checkpoint_that_is_too_large_names_the_remedies(checkpoint, monkeypatch):
    monkeypatch.setattr(verify_command, "LIMIT", 100 * 1024)
    assert run("verify", checkpoint, "--tp", 3) == (
        2,
        "",
        "error: llama: verify runs 3 ranks and the whole model in this process, in float64: 565.7 KiB for "
        "10,344 parameters, and a checkpoint may take 100.0 KiB\n"
        "  = help: verify a config.json with fewer layers and smaller sizes: the same plan fits it\n"
        "  = help: or prove the layouts without running it: autotp plan llama --tp 3 --prove\n"
        "  = help: or name a factory, package.module:factory, which has no limit\n",
    )


def test_usage(checkpoint):
    assert run("verify", checkpoint) == (2, "", "error: say the number of ranks: --tp N\n")
    code, out, err = run("verify", checkpoint, "--tp", 2, "--source", "x")
    assert (code, out) == (2, "")
    assert err == "error: llama: --source goes with a folder that `autotp convert` wrote\n"
    code, out, err = run("verify", "nosuch", "--tp", 2)
    assert (code, out) == (2, "") and err.startswith("error: nosuch: no such file or folder")


# Converted folders


@pytest.fixture
def converted(checkpoint):
    assert run("convert", checkpoint, "out", "--tp", 3, "--check", "shapes")[0] == 0
    return "out"


def test_a_converted_folder_is_read_in_full(converted, checkpoint):
    code, out, err = run("verify", converted)
    first, last = out.splitlines()
    assert code == 0
    assert first == "out: plan llama (shipped), tp 3, layouts not proven"
    assert last.startswith("ok: 21 tensors, ")
    assert last.endswith(" on 3 ranks; every xxh3 digest is what was written")
    assert err.splitlines()[-1].startswith("checked ")
    code, out, _ = run("verify", converted, "--source", checkpoint)
    assert (code, out.splitlines()[-1]) == (0, f"{last}, and what llama holds")


def test_damage_exits_1_and_names_the_file(converted, checkpoint):
    file = Path("out/rank-1-of-3/model.safetensors")
    with file.open("r+b") as opened:
        opened.seek(-3, 2)
        byte = opened.read(1)
        opened.seek(-3, 2)
        opened.write(bytes([byte[0] ^ 1]))
    code, out, _ = run("verify", converted)
    assert code == 1
    assert f"error: {file}: " in out and out.endswith("damaged: 1 finding\n")
    code, out, _ = run("verify", converted, "--format", "json")
    assert code == 1
    found = json.loads(out)
    assert found["ok"] is False and str(file) in found["findings"][0]


def test_another_source_is_found(converted, here):
    tensors, config = llama(**GQA, seed=1)
    write_checkpoint(here / "other", tensors, config=config)
    code, out, _ = run("verify", converted, "--source", "other")
    assert code == 1 and "is not what was converted" in out


def test_without_digests_that_is_said(checkpoint):
    run("convert", checkpoint, "plain", "--tp", 2, "--check", "shapes", "--digest", "none", "--plan", "llama")
    code, out, _ = run("verify", "plain")
    assert code == 0
    assert out.splitlines()[-1].endswith(
        "; no digests were written, so names, shapes and equal copies were checked"
    )


def test_a_converted_folder_has_its_own_plan_and_tp(converted):
    code, out, err = run("verify", converted, "--tp", 2)
    assert (code, out) == (2, "")
    assert err == (
        "error: out: is converted, by the plan and for the tp that its autotp.json holds: "
        "leave out --plan and --tp\n"
    )


def test_a_manifest_that_cannot_be_read_is_one_error(converted):
    Path("out/autotp.json").write_text("{")
    code, out, err = run("verify", converted)
    assert (code, out) == (2, "")
    assert err.startswith("error: out/autotp.json: ")


# Reshard


def test_reshard(converted, checkpoint):
    code, out, err = run("reshard", converted, "two", "--tp", 2, "--check", "shapes")
    first, *folders, last = out.splitlines()
    assert code == 0
    assert first == "out: plan llama (shipped), tp 2, layouts not proven: names and shapes only"
    assert [line.split()[0] for line in folders] == ["rank-0-of-2", "rank-1-of-2"]
    assert last.startswith("wrote two: ")
    assert err.splitlines()[-1].startswith("resharded ")
    assert run("merge", "two", "back")[0] == 0
    assert Path("back/model.safetensors").read_bytes() == Path("llama/model.safetensors").read_bytes()


def test_a_dry_run_of_reshard_writes_nothing(converted):
    code, out, err = run("reshard", converted, "two", "--tp", 2, "--check", "shapes", "--dry-run")
    assert (code, err) == (0, "")
    assert "would write two: " in out and not Path("two").exists()


def test_a_number_of_ranks_that_the_plan_cannot_have_writes_nothing(converted):
    code, out, _ = run("reshard", converted, "four", "--tp", 7, "--check", "shapes")
    assert code == 1
    assert out.startswith("error[AT203]: ") and not Path("four").exists()


@pytest.mark.slow
def test_reshard_proves_unless_told_otherwise(converted):
    code, out, _ = run("reshard", converted, "two", "--tp", 2)
    assert code == 0
    assert out.splitlines()[0] == "out: plan llama (shipped), tp 2, layouts proven"


@pytest.mark.parametrize("name", ["nosuch", "llama"])
def test_reshard_of_what_is_not_converted(checkpoint, name):
    code, out, err = run("reshard", name, "two", "--tp", 2)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and name in err
