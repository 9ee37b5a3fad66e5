"""A rank ends quietly though a model still holds its process group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = """
import torch
import torch.distributed as dist
from autotp.nn import ColumnParallelLinear

dist.init_process_group("gloo")
kept = ColumnParallelLinear(4, 6)
for _ in range(20):
    kept(torch.ones(2, 4))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_process_group_that_is_held_does_not_abort_the_process(tmp_path):
    """torch's threads end the process by an abort if a group outlives `destroy_process_group`."""
    (tmp_path / "rank.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    for _ in range(3):
        done = subprocess.run(
            [*command, "--nproc-per-node", "2", "rank.py"],
            capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
