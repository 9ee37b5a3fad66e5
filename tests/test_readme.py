"""What the README shows is true: its Python runs, its dry run is what the command prints today."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autotp import Plan
from demo.embed import model_folder

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_python_runs(capsys):
    (code,) = blocks("python")
    exec(compile(code, "README.md", "exec"), {"__name__": "__readme__"})
    assert "fc1" in capsys.readouterr().out


def test_ten_lines_are_ten_lines():
    (code,) = blocks("python")
    assert len([line for line in code.splitlines() if line.strip()]) == 10


@pytest.mark.slow
def test_the_dry_run_is_what_the_command_prints(tmp_path):
    (shown,) = blocks("console")
    command, _, output = shown.partition("\n")
    assert command.startswith("$ autotp ")
    (tmp_path / "all-MiniLM-L6-v2").symlink_to(model_folder())
    done = subprocess.run(
        [sys.executable, "-m", "autotp", *command.split()[2:]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == output


@pytest.mark.slow
def test_the_refusal_is_what_the_example_prints():
    (shown,) = blocks("text")
    done = subprocess.run(
        [sys.executable, "examples/01_mlp.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown in done.stdout


def test_the_plan_is_a_plan():
    (text,) = blocks("yaml")
    assert set(Plan.loads(text).rules) == {
        "word_embeddings",
        "self.query",
        "gate_up_proj",
        "qkv_proj",
        "output.dense",
        "lm_head",
    }


def test_every_file_that_it_names_exists():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
