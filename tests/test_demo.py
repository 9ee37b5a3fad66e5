"""The demo's checks can fail, and the demo passes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from demo.__main__ import compare, same_bytes
from demo.embed import SENTENCES

ROOT = Path(__file__).parent.parent


def embeddings():
    generator = torch.Generator().manual_seed(0)
    return torch.nn.functional.normalize(torch.randn(len(SENTENCES), 384, generator=generator), dim=-1)


def test_equal_embeddings_pass():
    assert [check.ok for check in compare(embeddings(), embeddings())] == [True, True]


def test_one_wrong_number_fails():
    wrong = embeddings()
    wrong[7, 100] += 2e-5
    assert [check.ok for check in compare(embeddings(), wrong)] == [False, True]


def test_one_wrong_embedding_fails():
    wrong = embeddings()
    wrong[3] = wrong[4]
    assert [check.ok for check in compare(embeddings(), wrong)] == [False, False]


def test_not_a_number_fails():
    wrong = embeddings()
    wrong[3, 0] = float("nan")
    assert [check.ok for check in compare(embeddings(), wrong)] == [False, False]


def test_one_other_byte_fails(tmp_path):
    one, same, other = (tmp_path / name for name in "abc")
    one.write_bytes(bytes(1000))
    same.write_bytes(bytes(1000))
    other.write_bytes(bytes(999) + b"\1")
    assert same_bytes(one, same).ok
    assert not same_bytes(one, other).ok


@pytest.mark.slow
def test_the_demo_passes():
    done = subprocess.run(
        [sys.executable, "-m", "demo"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout[done.stdout.index("all-MiniLM-L6-v2, 22.7 M parameters, tp=2") :]
    assert summary.count("  ok  ") == 4
    assert "FAILED" not in summary
