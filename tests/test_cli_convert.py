"""`autotp convert` and `autotp merge`."""

import importlib
import os
from pathlib import Path

import pytest

from tests.command_line import HOSTILE, TINY_BERT, plan_file, run
from tests.sparse import bert_checkpoint


def test_convert_and_merge_give_the_same_file(mlp):
    code, out, err = run("convert", mlp, "out", "--plan", "mlp.yaml", "--tp", 3, "--check", "shapes")
    assert code == 0
    first, *folders, last = out.splitlines()
    assert first == "mlp: plan mlp.yaml, tp 3, layouts not proven: names and shapes only"
    assert [line.split()[0] for line in folders] == ["rank-0-of-3", "rank-1-of-3", "rank-2-of-3"]
    assert last.startswith("wrote out: 3 files, ")
    size = Path("mlp/model.safetensors").stat().st_size
    assert "model.safetensors" in err and err.splitlines()[-1].startswith(f"converted {size} B in ")
    code, out, err = run("merge", "out", "back")
    assert code == 0
    assert out.startswith("wrote back: 1 file, ")
    assert Path("back/model.safetensors").read_bytes() == Path("mlp/model.safetensors").read_bytes()


def test_a_dry_run_writes_nothing(mlp):
    before = sorted(os.listdir())
    arguments = ("convert", mlp, "out", "--plan", "mlp.yaml", "--tp", 3, "--check", "shapes", "--dry-run")
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert "would write out: 3 files, " in out
    assert "checked: plan, headers and room; the bytes of the tensors are not read in a dry run\n" in out
    assert sorted(os.listdir()) == before


def test_a_target_below_a_file(mlp):
    Path("file").touch()
    arguments = ("--plan", "mlp.yaml", "--tp", 2, "--check", "shapes", "--dry-run")
    code, _, err = run("convert", mlp, "file/a/out", *arguments)
    where = Path("file").absolute()
    says = f"cannot be made: {where} is not a folder; name another place"
    assert (code, err) == (2, f"error: file/a/out: {says}\n")


def test_errors_advise_the_options_of_the_command_line(mlp):
    code, _, err = run("convert", mlp, "out", "--plan", "mlp.yaml", "--tp", 2)  # there is no config.json
    assert code == 2 and "--check shapes goes by the names" in err and 'check="shapes"' not in err


@pytest.mark.parametrize("command", [("verify",), ("merge", "back"), ("reshard", "back", "--tp", 3)])
def test_a_folder_that_is_not_there_or_not_yet(mlp, command):
    verb, *more = command
    none = "no such file or folder" if verb == "verify" else "there is no such folder"
    code, out, err = run(verb, "nosuch", *more)
    assert (code, out) == (2, "") and err.splitlines()[0] == f"error: nosuch: {none}"
    assert "unfinished" not in err
    Path(".nosuch.autotp-partial").mkdir()
    code, out, err = run(verb, "nosuch", *more)
    assert code == 2 and err.splitlines()[1] == (
        f"  = help: an unfinished run stands in {Path('.nosuch.autotp-partial').absolute()}: give the same "
        "command again and it goes on where it stopped, or remove that folder"
    )


def test_some_ranks_alone(mlp):
    arguments = ("--plan", "mlp.yaml", "--tp", 4, "--check", "shapes")
    code, out, _ = run("convert", mlp, "out", *arguments, "--ranks", "0-1,3")
    assert code == 0 and "wrote out: 3 files, " in out
    assert sorted(p.name for p in Path("out").iterdir()) == [
        "autotp.json", "rank-0-of-4", "rank-1-of-4", "rank-3-of-4",
    ]  # fmt: skip
    assert run("convert", mlp, "all", *arguments)[0] == 0
    code, out, _ = run("reshard", "all", "again", "--tp", 2, "--check", "shapes", "--ranks", "1")
    assert code == 0 and sorted(p.name for p in Path("again").iterdir()) == ["autotp.json", "rank-1-of-2"]
    for wrong in ("", "x", "3-1", "1-", "0;1", "-1", "1" * 9):
        code, _, err = run("convert", mlp, "x", *arguments, "--ranks", wrong)
        assert (code, err) == (2, f"error: --ranks is a list such as 0-3 or 0,2,5, not {wrong!r}\n")
    code, _, err = run("convert", mlp, "x", *arguments, "--ranks", "2-4")
    assert (code, err) == (2, "error: ranks are from 0 to 3 for tp=4, not [2, 3, 4]\n")


def test_a_dry_run_says_whether_it_fits_the_disk(mlp, monkeypatch):
    monkeypatch.setattr(
        importlib.import_module("autotp.checkpoint.convert"), "free_bytes", lambda target: 100
    )
    arguments = ("convert", mlp, "out", "--plan", "mlp.yaml", "--tp", 2, "--check", "shapes")
    code, out, err = run(*arguments, "--dry-run")
    assert (code, err) == (1, "")
    size = sum(int(line.split()[1]) for line in out.splitlines()[1:3])
    assert out.splitlines()[-3:-1] == [
        f"would write out: 2 files, {size} B (100 B are free)",
        f"it does not fit: {size - 100} B more are needed",
    ]
    code, _, err = run(*arguments)
    assert (code, err) == (2, f"error: out: needs {size} bytes, and 100 are free\n")


@pytest.mark.parametrize("command", ["convert", "reshard"])
def test_a_model_of_ones_own_to_prove_the_plan_on(mlp, here, command):
    (here / "own.py").write_text(
        "import torch\nclass MLP(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.fc1, self.fc2 = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)\n"
        "    def forward(self, x):\n        return self.fc2(self.fc1(x).relu())\n"
        "def make():\n    return MLP(), torch.zeros(3, 4)\n"
    )
    plan = ("--plan", "mlp.yaml")
    assert run("convert", mlp, "out", *plan, "--tp", 4, "--check", "shapes")[0] == 0
    source, options = ("out", ()) if command == "reshard" else (mlp, plan)
    code, out, err = run(command, source, "again", *options, "--tp", 2, "--model", "own:make")
    assert code == 0, err
    assert out.splitlines()[0].endswith(", tp 2, layouts proven")
    code, _, err = run(command, source, "x", *options, "--tp", 2, "--model", "own")
    assert (code, err) == (2, "error: --model is package.module:factory, not 'own'\n")


@pytest.mark.slow
def test_convert_proves_unless_told_otherwise(here):
    bert_checkpoint(here / "bert", **TINY_BERT)
    code, out, _ = run("convert", "bert", "out", "--tp", 2)
    assert code == 0
    assert out.splitlines()[0] == "bert: plan bert (shipped), tp 2, layouts proven"


def test_convert_of_a_refused_plan_writes_nothing(mlp):
    plan_file("wrong.yaml", "rules: {fc1: column, fc3: row}")
    before = sorted(os.listdir())
    code, out, _ = run("convert", mlp, "out", "--plan", "wrong.yaml", "--tp", 2, "--check", "shapes")
    assert code == 1
    assert "error[AT201]: rule `fc3` matches nothing" in out
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    "name", ["missing", "empty", "truncated", "junk", "pickled", "one.safetensors", "pipe"]
)
def test_convert_and_merge_of_a_hostile_source_write_nothing(here, name):
    HOSTILE[name](here / name)
    before = sorted(os.listdir())
    for command in (["convert", name, "out", "--tp", 2, "--plan", "bert"], ["merge", name, "out"]):
        code, out, err = run(*command)
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and name in err and err.count("error") == 1
    assert sorted(os.listdir()) == before


def test_convert_into_a_folder_that_is_not_empty_is_refused(mlp):
    Path("out").mkdir()
    Path("out/mine").write_text("keep")
    code, out, err = run("convert", mlp, "out", "--plan", "mlp.yaml", "--tp", 2, "--check", "shapes")
    assert (code, out) == (2, "")
    assert err.startswith("error: out: is not empty")
    assert os.listdir("out") == ["mine"]
