"""The command line as users meet it: what is the same for all commands."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotp.plan import Plan, shipped_plans
from tests.command_line import HOSTILE, MLP, ROOT, TINY_BERT, plan_file, process, run
from tests.sparse import LLAMA_8B, bert_checkpoint, llama_checkpoint, write_checkpoint

LATE = """
import sys
from autotp.cli import app
sys.argv[0] = "autotp"
try:
    app()
finally:
    print("torch" in sys.modules, "transformers" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["plan", "--help"],
        ["plans"],
        ["plans", "--schema"],
        ["check", "llama"],
        ["check", "llama", "LLAMA", "--tp", "8"],
        ["plan", "LLAMA", "--tp", "8"],
        ["plan", "LLAMA", "--tp", "8", "--format", "json"],
        ["plan", "LLAMA", "--tp", "8", "--format", "html"],
        ["convert", "LLAMA", "out", "--tp", "8", "--check", "shapes", "--dry-run"],
        ["verify", "--help"],
        ["explain", "--help"],
    ],
    ids=" ".join,
)
def test_torch_is_not_imported(arguments, tmp_path):
    llama_checkpoint(tmp_path / "LLAMA", **LLAMA_8B)
    done = process(*arguments, code=LATE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "False False"
    assert done.stdout


def test_python_m_autotp(here):
    done = subprocess.run(
        [sys.executable, "-m", "autotp", "--version"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    from autotp import __version__

    assert (done.returncode, done.stdout, done.stderr) == (0, f"autotp {__version__}\n", "")


# Which plan


def test_no_shipped_plan_is_a_usage_error(here):
    write_checkpoint(here / "lama", MLP, {"model_type": "lama"})
    assert run("plan", "lama", "--tp", 2) == (
        2,
        "",
        "error: no plan is shipped for model_type 'lama'\n"
        "  = help: say --plan with a plan file, or with a shipped plan, such as llama: "
        "`autotp plans` lists them\n"
        "  = help: or let one be derived from the model: --plan auto\n",
    )


def test_no_config_is_a_usage_error(here):
    write_checkpoint(here / "mlp", MLP)
    assert run("plan", "mlp", "--tp", 2) == (
        2,
        "",
        "error: no model_type is known\n"
        "  = help: say --plan with a plan file, or with a shipped plan: `autotp plans` lists them\n"
        "  = help: or let one be derived from the model: --plan auto\n",
    )


@pytest.mark.parametrize("name", ["nosuch", "nosuch.yaml", "mlp"])
def test_a_plan_that_cannot_be_read_exits_2(here, name):
    write_checkpoint(here / "mlp", MLP)
    code, out, err = run("plan", "mlp", "--plan", name, "--tp", 2)
    assert (code, out) == (2, "")
    assert err.startswith("error[AT101]: ") and name in err


def test_a_plan_with_faults_exits_1_in_every_form(here):
    write_checkpoint(here / "mlp", MLP)
    plan_file("bad.yaml", "rules: {fc1: colum}")
    code, out, err = run("plan", "mlp", "--plan", "bad.yaml", "--tp", 2)
    assert (code, err) == (1, "")
    assert out.startswith("error[AT109]: ") and out.endswith("refused: 1 error\n")
    code, out, _ = run("plan", "mlp", "--plan", "bad.yaml", "--tp", 2, "--format", "json")
    assert (code, json.loads(out)["diagnostics"][0]["code"]) == (1, "AT109")
    code, out, _ = run("plan", "mlp", "--plan", "bad.yaml", "--tp", 2, "--format", "html")
    assert code == 1 and "AT109" in out


# Hostile targets: one clear error, no traceback


@pytest.mark.parametrize("command", ["plan", "prove", "check"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_target_is_one_error(here, name, command):
    HOSTILE[name](here / name)
    options = {
        "plan": ("plan", name, "--tp", 2),
        "prove": ("plan", name, "--tp", 2, "--prove"),
        "check": ("check", "bert", name),
    }
    code, out, err = run(*options[command])
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("error") == 1
    assert name in err


@pytest.mark.parametrize("model_type", ["[1]", "7", "null", '""', '"x/../bert"'])
def test_a_config_with_an_odd_model_type_is_one_error(here, model_type):
    bert_checkpoint(here / "bert", **TINY_BERT)
    Path("bert/config.json").write_text(f'{{"model_type": {model_type}}}')
    code, out, err = run("plan", "bert", "--tp", 2)
    assert (code, out) == (2, "")
    assert err.startswith("error: no ") and "--plan" in err


def test_an_empty_target_is_no_folder(here):
    code, out, err = run("plan", "", "--tp", 2)
    assert (code, out, err.splitlines()[0]) == (2, "", "error: '': no such file or folder")


@pytest.mark.parametrize("tp", ["0", "-2", "two", "1.5"])
def test_an_impossible_tp_is_a_usage_error(here, tp):
    bert_checkpoint(here / "bert", **TINY_BERT)
    for command in (["plan", "bert"], ["check", "bert", "bert"], ["convert", "bert", "out"]):
        code, out, err = run(*command, f"--tp={tp}")
        assert (code, out) == (2, "")
        assert "--tp" in err
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "arguments", [["plan"], ["plan", "x"], ["nosuch"], ["plan", "x", "--tp", "2", "--nosuch"]]
)
def test_usage_errors_exit_2(here, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "Usage: autotp" in err


# plans


def test_plans_are_listed():
    code, out, err = run("plans")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == list(shipped_plans())


@pytest.mark.parametrize("name", shipped_plans())
def test_a_shipped_plan_is_printed_as_it_stands(name):
    code, out, _ = run("plans", name)
    assert (code, Plan.loads(out)) == (0, Plan.load(name))
    assert "#" in out


def test_the_schema_is_json():
    code, out, _ = run("plans", "--schema")
    assert code == 0
    assert set(json.loads(out)["properties"]) == set(Plan.model_fields)


def test_a_plan_that_is_not_shipped():
    assert run("plans", "nosuch") == (
        2,
        "",
        "error: no plan 'nosuch' is shipped\n  = help: `autotp plans` lists them\n",
    )
    assert run("plans", "lama")[2].endswith("  = help: did you mean llama? `autotp plans` lists them\n")
    assert run("plans", "bert", "--schema")[0] == 2


@pytest.mark.parametrize(
    "command",
    [
        [],
        *([name] for name in ["plan", "check", "explain", "derive", "verify", "convert"]),
        *([name] for name in ["merge", "reshard", "plans"]),
    ],
)
def test_every_help_has_an_example(command):
    code, out, err = run(*command, "--help")
    assert (code, err) == (0, "")
    assert f"    autotp {' '.join(command)}" in out or not command
    assert "autotp plan " in out or command
    assert max(map(len, out.splitlines())) <= 100


def test_no_command_shows_the_help():
    code, out, err = run()
    assert code == 2
    assert "Commands:" in out + err


def test_a_tp_beyond_all_machines(tmp_path):
    from autotp.diagnostic import UsageError
    from autotp.match import match
    from autotp.plan import Plan
    from tests.inventories import MLP

    with pytest.raises(UsageError) as caught:
        match(Plan(rules={"fc1": "column"}), MLP, 10**20)
    assert str(caught.value).startswith("tp is a number of ranks: at most 1,000,000, not 100,000,000,")
