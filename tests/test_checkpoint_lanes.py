"""Two threads carry the tensors of a file: each once, and the first error ends both."""

import threading

import pytest

from autotp.checkpoint import convert, merge
from autotp.checkpoint.lanes import in_lanes
from autotp.diagnostic import CheckpointError
from tests.checkpoints import tree, write_checkpoint


def test_each_item_is_carried_once_and_a_lane_has_one_at_a_time():
    done, busy, both = [], {"left": 0, "right": 0}, threading.Barrier(2)

    def work(lane: str, item: int) -> None:
        busy[lane] += 1
        assert busy[lane] == 1
        if item < 2:
            both.wait(timeout=30)  # the two lanes work side by side
        done.append(item)
        busy[lane] -= 1

    in_lanes(work, range(100), ["left", "right"])
    assert sorted(done) == list(range(100))


def test_the_first_error_ends_all_lanes():
    seen = []

    def work(lane: str, item: int) -> None:
        seen.append(item)
        if item == 3:
            raise CheckpointError("3: cannot be read")

    with pytest.raises(CheckpointError, match=r"^3: cannot be read$"):
        in_lanes(work, range(100_000), ["left", "right"])
    assert len(seen) < 100_000 and threading.active_count() < 10


def test_many_tensors_of_odd_sizes_end_where_they_belong(tmp_path):
    """Each tensor's bytes tell whose they are; the digests stand in the order of the file."""
    tensors = {
        f"layers.{n}.{name}.weight": ("F32", shape, bytes([n, kind, 7, n]) * (shape[0] * shape[1]))
        for n in range(40)
        for kind, (name, shape) in enumerate({"up": (36 + 12 * n, 5), "down": (5, 36 + 12 * n)}.items())
    }
    source = write_checkpoint(tmp_path / "in", tensors)
    plan = {"layers.*.up": "column", "layers.*.down": "row"}
    convert(source, tmp_path / "out", plan=plan, tp=3, check="shapes")
    merge(tmp_path / "out", tmp_path / "back")
    assert tree(tmp_path / "back") == tree(source)
