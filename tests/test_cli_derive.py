"""`autotp derive`, and `--plan auto` of the other commands."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from autotp.cli import app
from autotp.plan import Plan
from tests.sparse import bert_checkpoint

TINY_BERT = {"hidden": 48, "inter": 65, "layers": 2, "heads": 4, "vocab": 99, "positions": 16}
FACTORIES = """
import torch
from torch import nn

def mlp():
    print("building")
    return nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 16)), torch.zeros(3, 16)

class Inverse(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16))

    def forward(self, x):
        return x @ torch.linalg.inv(self.weight)

def inverted():
    first = nn.Sequential(nn.ReLU(), Inverse())
    return nn.Sequential(first, nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 16)), torch.zeros(3, 16)

def soft():
    return nn.Sequential(nn.Linear(16, 33), nn.Softmax(-1)), torch.zeros(3, 16)

def whole():
    return Inverse(), torch.zeros(3, 16)
"""


def run(*arguments):
    done = CliRunner().invoke(app, list(map(str, arguments)))
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "derived_models.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_plan_is_printed_and_loads_again(here):
    code, out, err = run("derive", "derived_models:mlp", "--tp", 2)
    assert (code, err) == (0, "building\n")
    assert out == (
        "# Derived from the graph of Sequential, proven for tp=2:\n"
        "# 100.0% of the bytes of matrices are sharded; collectives: 1 in forward and 1 in backward.\n"
        "version: 1\n"
        "rules:\n"
        '  "0": column\n'
        '  "2": row\n'
    )
    assert set(Plan.loads(out).rules) == {"0", "2"}
    (here / "plan.yaml").write_text(out)
    code, out, _ = run("verify", "derived_models:mlp", "--plan", "plan.yaml", "--tp", 2)
    assert code == 0 and "\nok: " in out


def test_what_stays_whole_is_a_comment(here):
    code, out, _ = run("derive", "derived_models:inverted", "--tp", 2)
    assert code == 0
    plan, _, comments = out.partition("# What stays whole on every rank, and why:\n")
    assert plan.endswith('  "1": column\n  "3": row\n  "0.1": replicate\n')  # "1" would match it
    first, *rest = comments.splitlines()
    assert first.startswith("#   0.1.weight [1,024 bytes]: linalg_inv")
    assert all(line.startswith("#     ") for line in rest)


def test_what_is_gathered_is_a_comment(here):
    code, out, _ = run("derive", "derived_models:soft", "--tp", 2)
    assert code == 0
    plan, _, comments = out.partition(
        "# What is cut, though its layer's output is read whole and so gathered:\n"
    )
    assert plan.endswith('rules:\n  "0": {style: column, gather_output: true}\n')
    assert comments.startswith("#   0.weight [2,112 bytes]: softmax over dim 1, which is sharded:")


@pytest.mark.slow
def test_auto_is_derived_from_a_config(here):
    bert_checkpoint(here / "bert", **TINY_BERT)
    code, out, _ = run("derive", "bert", "--tp", 2)
    assert code == 0
    assert "  self.query: column\n" in out and "model_type: bert\n" in out
    code, text, _ = run("plan", "bert", "--plan", "auto", "--tp", 2, "--format", "json")
    assert code == 0 and json.loads(text)["plan"]["rules"] == Plan.loads(out).to_data()["rules"]


def test_nothing_to_shard(here):
    code, out, err = run("derive", "derived_models:whole", "--tp", 2)
    assert code == 1
    assert '"auto" found nothing to shard' in out + err and "linalg_inv" in out + err


def test_verify_derives(here):
    code, out, _ = run("verify", "derived_models:mlp", "--plan", "auto", "--tp", 3)
    assert code == 0 and "\nok: " in out
