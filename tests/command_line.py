"""What the tests of the command line share: how a command is run, where, and on what."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotp.cli import app
from tests.sparse import bert_checkpoint, bert_config, write_file

ROOT = Path(__file__).parent.parent
GQA = {"hidden": 96, "inter": 130, "layers": 2, "heads": 12, "kv": 6, "vocab": 101}
TINY_BERT = {"hidden": 48, "inter": 65, "layers": 2, "heads": 4, "vocab": 99, "positions": 16}
MLP = {"fc1.weight": (8, 4), "fc1.bias": (8,), "fc2.weight": (4, 8), "fc2.bias": (4,)}
FACTORIES = """
import torch
from torch import nn

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 33), nn.Linear(33, 16)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))

def mlp():
    print("building")
    return MLP()

def with_inputs():
    return MLP(), torch.zeros(2, 16)

def raises():
    return [][3]

def exits():
    raise SystemExit("no GPU")

def table():
    return {"fc1": 1}

def sized(width):
    return MLP()

number = 7
ready = MLP()
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, from which modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in sys.modules[name].__file__:
            del sys.modules[name]


def run(*arguments):
    """(exit code, stdout, stderr) of a command; an exception that escapes is raised."""
    done = CliRunner().invoke(app, [str(a) for a in arguments], prog_name="autotp", catch_exceptions=False)
    return done.exit_code, done.stdout, done.stderr


def process(*arguments, code="from autotp.cli import main; main()", **options):
    """A command in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        **options,
    )


def plan_file(name, text):
    Path(name).write_text(textwrap.dedent(text))
    return name


# Targets that nothing can be read from


def junk(path):
    path.write_bytes(bytes(range(256)) * 4)


def truncated(folder):
    bert_checkpoint(folder, **TINY_BERT)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(5000)


def junk_folder(folder):
    folder.mkdir()
    junk(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(bert_config(**TINY_BERT)))


def broken_config(folder):
    bert_checkpoint(folder, **TINY_BERT)
    (folder / "config.json").write_text("{")


def pickled(folder):
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")


HOSTILE = {
    "missing": lambda path: None,
    "empty": Path.mkdir,
    "truncated": truncated,
    "junk": junk_folder,
    "broken_config": broken_config,
    "pickled": pickled,
    "one.safetensors": junk,
    "short.safetensors": lambda path: path.write_bytes(b"abc"),
    "config.json": lambda path: path.write_text("[]"),
    "other.txt": lambda path: path.write_text("hello"),
    "pipe": os.mkfifo,
    "missing:": lambda path: None,
    ":factory": lambda path: None,
    "a b:c": lambda path: None,
    "missing/config.json": lambda path: None,
}


# A checkpoint with data, and models to build


def stored(folder):
    """A small checkpoint with data in it."""
    write_file(folder / "model.safetensors", MLP)
    with (folder / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(size - 304)
        file.write(bytes(n % 251 for n in range(304)))


@pytest.fixture
def mlp(here):
    Path("mlp").mkdir()
    stored(here / "mlp")
    plan_file("mlp.yaml", "rules: {fc1: column, fc2: row}")
    return "mlp"


@pytest.fixture
def models(here):
    Path("models_of_test.py").write_text(FACTORIES)
    plan_file("mlp.yaml", "rules: {fc1: column, fc2: row}")
    return "models_of_test"
