"""A rank ends quietly though a model, and torch itself, still hold its process group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = """
import atexit
import time
from pathlib import Path

atexit.register(sum, range(50_000_000))  # runs last: one call that lets no other thread run

import torch
import torch.distributed as dist

import autotp
from autotp.comm import group_of
from autotp.nn import ColumnParallelLinear

mesh = autotp.initialize(tp=2, backend="gloo")
kept, group, ending = ColumnParallelLinear(4, 6, group=mesh), group_of(mesh), Path("ending")
atexit.register(ending.touch)


class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        while group.rank == 1 and not ending.exists():
            time.sleep(0.005)
        time.sleep(0.04 * group.rank)  # until the first rank is in its last call, or in the pause before it
        group.all_reduce_later(grad)
        return grad


Late.apply(torch.ones(4, requires_grad=True)).sum().backward()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_collective_that_ends_late_does_not_abort_the_process(tmp_path):
    """Its thread asks for Python's lock while Python ends. Of the two ranks the second takes part when the
    first has begun to end, and the first has one more thing to do, which keeps the lock to the end."""
    (tmp_path / "rank.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", "rank.py"],
        capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
