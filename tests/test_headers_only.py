"""A dry run from a checkpoint's headers: no torch, no weights read, the numbers of Llama 3.1 8B."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from benchmarks.dry_run import dry_run
from benchmarks.llama_headers import shapes, write

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write(tmp_path_factory.mktemp("headers") / "Llama-3.1-8B")


def test_the_files_are_real_and_take_no_disk(llama):
    """The safetensors library reads the headers; 16 GB of files hold a few blocks."""
    files = sorted(llama.glob("*.safetensors"))
    found = {}
    for path in files:
        with safe_open(path, framework="numpy") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert found == shapes()
    assert len(found) == 291
    assert sum(map(math.prod, found.values())) == 8_030_261_248
    assert sum(path.stat().st_size for path in files) > 16e9
    assert sum(path.stat().st_blocks * 512 for path in files) < 1e6


def test_a_dry_run_leaves_torch_out(llama):
    run = dry_run(llama, tp=8)
    assert not run.torch
    assert "names and shapes" in run.output
    assert "q_proj" in run.output and "down_proj" in run.output


def test_analyze_of_a_folder_leaves_torch_out(llama):
    code = (
        "import autotp, sys\n"
        f"analysis = autotp.analyze({str(llama)!r}, 'llama', tp=8, check='shapes')\n"
        "print(analysis.ok, analysis.certainty, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "True names and shapes False\n"
