"""Every example runs, in less than half a minute of processor time, and says what it promises."""

import os
import resource
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
}
TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--local-addr",
    "127.0.0.1",
    "--nproc-per-node",
    "2",
)


def seconds():
    """Processor time of the processes that have ended so far: other work on the machine does not count."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def run(*command):
    before = seconds()
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert seconds() - before < 30
    return done.stdout


@pytest.fixture
def run_here(capsys, monkeypatch):
    """One rank of an example, in this process: imports take longer than most of them."""
    monkeypatch.syspath_prepend(ROOT / "examples")

    def run_one(name):
        before = time.process_time()
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        assert time.process_time() - before < 30
        return capsys.readouterr().out

    return run_one


def test_every_example_is_tested():
    assert sorted(path.name for path in (ROOT / "examples").glob("*.py")) == [
        "01_mlp.py",
        "02_minilm.py",
        "03_gpt_block.py",
        "04_two_ranks.py",
        "05_own_code.py",
    ]


@pytest.mark.slow
def test_mlp(run_here):
    output = run_here("01_mlp.py")
    assert "fc1" in output
    assert "softmax" in output and "01_mlp.py:" in output  # the refusal names the line of the model
    assert "outputs differ by" in output


@pytest.mark.slow
def test_mlp_on_two_ranks():
    output = run(*TORCHRUN, "examples/01_mlp.py")
    assert output.count("fc1.weight (128, 64), difference") == 2


@pytest.mark.slow
def test_minilm(run_here):
    output = run_here("02_minilm.py")
    assert "tp=2: outputs differ by" in output
    assert "tp=5: outputs differ by" in output


@pytest.mark.slow
def test_gpt_block_has_the_same_losses_on_one_rank_and_on_two(run_here):
    one, two = run_here("03_gpt_block.py"), run(*TORCHRUN, "examples/03_gpt_block.py")
    losses = [line for line in one.splitlines() if line.startswith("step")]
    assert len(losses) == 3
    assert [line for line in two.splitlines() if line.startswith("step")] == losses
    assert "rank 1 of 2 holds 54720 parameters" in two  # of 107584; the first rank holds one token more


@pytest.mark.slow
def test_two_ranks_print_what_they_hold():
    output = run("examples/04_two_ranks.py")
    assert "[[0.0, 1.0], [2.0, 3.0]]" in output  # the column weight of rank 0
    assert "[[2.0, 3.0], [6.0, 7.0], [10.0, 11.0]]" in output  # the row weight of rank 1
    assert output.count("[[96.0, 272.0, 448.0]]") == 2


@pytest.mark.slow
def test_own_code(run_here):
    output = run_here("05_own_code.py")
    assert output.count("5 heads over 3 ranks: outputs differ by") == 5
    assert "k = k.view(B, T, local(self.n_head), C // self.n_head).transpose(1, 2)" in output
    assert "is_fastpath_enabled = slow(torch.backends.mha.get_fastpath_enabled())" in output
