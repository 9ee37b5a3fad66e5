"""A folder appears whole or not at all; a killed run goes on."""

import fcntl
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from autotp.checkpoint import check_shards, convert, merge
from autotp.checkpoint.folder import JOURNAL
from autotp.checkpoint.staging import Staging, check_target, free_bytes, partial
from autotp.diagnostic import CheckpointError
from tests.checkpoints import random_tensor, tree, write_checkpoint

JOB = {"job": "x", "source": [["a", 1, 2, "h"]]}


class Killed(BaseException):
    """What ends a run without any chance to clean up."""


def refusal(*args):
    with pytest.raises(CheckpointError) as raised:
        Staging(*args)
    return str(raised.value)


def test_the_target_appears_at_the_end(tmp_path):
    target = tmp_path / "deep" / "out"
    with Staging(target, JOB) as staging:
        (staging.path / "file").write_text("x")
        assert not target.exists()
        staging.commit()
    assert tree(tmp_path) == {"deep/out/file": b"x"}


def test_an_error_leaves_nothing(tmp_path):
    with pytest.raises(ValueError), Staging(tmp_path / "out", JOB) as staging:
        (staging.path / "file").write_text("x")
        raise ValueError
    assert os.listdir(tmp_path) == []


def interrupted(target, job, names=("one",)):
    with pytest.raises(Killed), Staging(target, job) as staging:
        for name in names:
            (staging.path / name).write_text(name)
            staging.finish(name, {"by": name})
        raise Killed


def test_what_cannot_be_resumed_leaves_nothing_when_interrupted(tmp_path):
    with pytest.raises(Killed), Staging(tmp_path / "out", JOB, resumable=False):
        raise Killed
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_resumed_takes_nothing_of_a_killed_run(tmp_path):
    interrupted(tmp_path / "out", JOB)  # as a killed save leaves it
    with Staging(tmp_path / "out", JOB, resumable=False) as staging:
        staging.commit()
    assert os.listdir(tmp_path / "out") == []


def test_the_same_job_goes_on_and_another_starts_afresh(tmp_path):
    target = tmp_path / "out"
    interrupted(target, JOB)
    with open(partial(target) / JOURNAL, "a") as journal:
        journal.write('{"file": "two", "rec')  # killed in the middle of a line
    interrupted(target, JOB, names=("two",))
    with Staging(target, JOB) as staging:
        assert staging.finished == {"one": {"by": "one"}, "two": {"by": "two"}}
        assert (staging.path / "one").read_text() == "one"
        raised = refusal(target, JOB)
        assert raised == f"{target}: another run is writing it"
    with Staging(target, JOB | {"job": "y"}) as staging:
        assert staging.finished == {} and os.listdir(staging.path) == [JOURNAL]
    (partial(target) / JOURNAL).write_bytes(b"\xff\x00")
    (partial(target) / "folder").mkdir()
    with Staging(target, JOB) as staging:
        assert staging.finished == {} and os.listdir(staging.path) == [JOURNAL]


@pytest.mark.parametrize(
    "line",
    ["[1]", '"x"', "5", "null", "{}", "[" * 9999, '{"job": "x"}', '{"job": "x", "source": "a"}',
     '{"job": "x", "source": [5]}', '{"job": "x", "source": [[]]}'],
)  # fmt: skip
def test_a_journal_that_is_none_starts_afresh(tmp_path, line):
    target = tmp_path / "out"
    partial(target).mkdir()
    (partial(target) / JOURNAL).write_text(line + "\n" + '{"file": "one", "record": {}}\n')
    with Staging(target, JOB) as staging:
        assert staging.finished == {}
    (partial(target) / JOURNAL).write_text(json.dumps(JOB) + "\n" + line + "\n")
    with Staging(target, JOB) as staging:
        assert staging.finished == {}


def test_a_source_that_changed_since_is_an_error(tmp_path):
    target = tmp_path / "out"
    interrupted(target, JOB)
    changed = {"job": "x", "source": [["a", 1, 3, "h"], ["b", 1, 1, ""]]}
    assert refusal(target, changed) == (
        f"{partial(target)}: an interrupted run read other files: a, b changed meanwhile; "
        "remove this folder to start again"
    )


def test_links_in_the_way_are_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"link: exists and is not a folder; name a new one$"):
        check_target(tmp_path / "link")
    partial(tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    assert (
        refusal(tmp_path / "out", JOB) == f"{partial(tmp_path / 'out')}: cannot be written: Not a directory"
    )
    assert (tmp_path / "elsewhere" / "precious").exists()


def test_a_target_that_someone_else_makes_meanwhile(tmp_path):
    with pytest.raises(CheckpointError) as raised, Staging(tmp_path / "out", JOB) as staging:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").touch()
        staging.commit()
    assert str(raised.value) == f"{tmp_path / 'out'}: was made by someone else meanwhile"
    assert tree(tmp_path) == {"out/theirs": b""}


def test_the_folder_one_stands_in(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "in", {"up.weight": random_tensor("F32", (4, 2))})
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(CheckpointError, match=r"^\.: is the current folder; name a new one$"):
        convert(source, ".", plan={"up": "column"}, tp=2, check="shapes")
    convert(source, "out", plan={"up": "column"}, tp=2, check="shapes")
    assert os.listdir(tmp_path / "here") == ["out"]


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def no_locks(fd, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with Staging(tmp_path / "out", JOB) as staging:
        staging.commit()
    assert os.listdir(tmp_path / "out") == []


def test_free_bytes_count_what_the_last_run_left(tmp_path, monkeypatch):
    """Other processes write on the same disk meanwhile: how full it is, is set."""
    asked = []
    usage = SimpleNamespace(free=7 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: asked.append(place) or usage)
    assert free_bytes(tmp_path / "a" / "b") == 7 << 20
    partial(tmp_path / "out").mkdir()
    (partial(tmp_path / "out") / "file").write_bytes(random.randbytes(1 << 24))
    assert (7 << 20) + (1 << 24) <= free_bytes(tmp_path / "out") <= (8 << 20) + (1 << 24)
    assert asked == [tmp_path, tmp_path]


TENSORS = {f"up.{i}.weight": random_tensor("F32", (1024, 512), i) for i in range(6)}
PLAN = {"up.*": "column"}


PLAN_OF_UP = {"up": "column"}


def stop_in_second(source, out, options):
    def stop(done, total, name):
        if name.startswith("model-00002"):
            raise Killed

    with pytest.raises(Killed):
        convert(source, out, progress=stop, **options)


def test_a_run_that_was_interrupted_does_not_repeat_what_is_done(tmp_path):
    source, out = write_checkpoint(tmp_path / "in", TENSORS, files=3), tmp_path / "out"
    options = {"plan": PLAN, "tp": 2, "check": "shapes"}
    convert(source, tmp_path / "whole", **options)

    def stop_in(file):
        def progress(done, total, name):
            if name.startswith(file):
                raise Killed

        return progress

    for _ in range(2):
        with pytest.raises(Killed):
            convert(source, out, progress=stop_in("model-00003"), **options)
        written = {p: p.stat().st_mtime_ns for p in partial(out).rglob("model-0000[12]*")}
        assert len(written) == 4 and not out.exists()
    names, told = sorted({path.name for path in written}), []
    again = convert(source, out, progress=lambda *at: told.append(at), **options)
    assert again.kept == tuple(names)
    sizes = [(source / name).stat().st_size for name in names]
    total = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    assert told[0] == (sum(sizes), total, f"kept from the run before: {', '.join(names)}")
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told) and told[-1][0] == total
    for path, when in written.items():
        assert (out / path.relative_to(partial(out))).stat().st_mtime_ns == when
    assert tree(out) == tree(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path)) == ["in", "out", "whole"]


@pytest.mark.parametrize("digests", [5, "", [], ["a"], ["a", "b"], [1, 2, 3], None])
def test_a_record_that_is_none_is_done_again(tmp_path, digests):
    tensors = {"up.weight": random_tensor("F32", (4, 2)), "up.bias": random_tensor("F32", (4,))}
    source, out = write_checkpoint(tmp_path / "in", tensors, files=2), tmp_path / "out"
    options = {"plan": PLAN_OF_UP, "tp": 2, "check": "shapes"}
    stop_in_second(source, out, options)
    journal = partial(out) / JOURNAL
    job, line = map(json.loads, journal.read_text().splitlines())
    line["record"] = dict.fromkeys(line["record"], digests)
    journal.write_text(f"{json.dumps(job)}\n{json.dumps(line)}\n")
    told = []
    assert convert(source, out, progress=lambda *at: told.append(at[:2]), **options).kept == ()
    assert told[-1][0] == told[-1][1]
    assert check_shards(out, source=source).ok


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_what_someone_put_among_what_is_being_written_is_neither_followed_nor_kept(tmp_path, link):
    tensors = {"up.weight": random_tensor("F32", (4, 2)), "up.bias": random_tensor("F32", (4,))}
    source, out = write_checkpoint(tmp_path / "in", tensors, files=2, config={"a": 1}), tmp_path / "out"
    options = {"plan": PLAN_OF_UP, "tp": 2, "check": "shapes"}
    convert(source, tmp_path / "whole", **options)
    stop_in_second(source, out, options)
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "elsewhere").mkdir()
    home = partial(out) / "rank-0-of-2"
    second = home / "model-00002-of-00002.safetensors"
    second.unlink(missing_ok=True)
    for place in (second, home / "config.json", home / "stray", partial(out) / "autotp.json"):
        getattr(place, link)(tmp_path / "precious")
    (home / "sub").mkdir()
    shutil.rmtree(partial(out) / "rank-1-of-2")
    (partial(out) / "rank-1-of-2").symlink_to(tmp_path / "elsewhere")
    convert(source, out, **options)
    assert tree(out) == tree(tmp_path / "whole") and not (out / "rank-0-of-2" / "sub").exists()
    assert (tmp_path / "precious").read_text() == "precious" and not os.listdir(tmp_path / "elsewhere")


def test_what_a_dead_machine_lost_is_written_again(tmp_path):
    source, out = write_checkpoint(tmp_path / "in", TENSORS, files=3), tmp_path / "out"
    options = {"plan": PLAN, "tp": 2, "check": "shapes"}
    convert(source, tmp_path / "whole", **options)

    def stop(done, total, name):
        if name.startswith("model-00003"):
            raise Killed

    with pytest.raises(Killed):
        convert(source, out, progress=stop, **options)
    lost = partial(out) / "rank-1-of-2" / "model-00002-of-00003.safetensors"
    size = lost.stat().st_size
    os.truncate(lost, 5000)
    os.truncate(lost, size)
    (partial(out) / "rank-0-of-2" / "model-00001-of-00003.safetensors").unlink()
    convert(source, out, **options)
    assert tree(out) == tree(tmp_path / "whole")


def test_two_runs_at_once(tmp_path):
    source, out = write_checkpoint(tmp_path / "in", TENSORS, files=3), tmp_path / "out"
    partial(out).mkdir()
    lock = os.open(partial(out), os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match=r"out: another run is writing it$"):
        convert(source, out, plan=PLAN, tp=2, check="shapes")
    os.close(lock)
    convert(source, out, plan=PLAN, tp=2, check="shapes")


SERVER = multiprocessing.get_context("forkserver")  # it imports once, for all the runs that are killed


def work(ready, what, source, target, options):
    ready.send(None)
    (convert if what == "convert" else merge)(source, target, **options)


def run_and_kill(after, *args):
    """Start a run in its own process, kill it `after` seconds of work; whether it lived to its end."""
    ours, theirs = SERVER.Pipe()
    process = SERVER.Process(target=work, args=(theirs, *args))
    process.start()
    ours.recv()
    time.sleep(after)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


@pytest.mark.slow
def test_killed_at_any_moment_the_target_is_whole_or_absent(tmp_path):
    """Twenty kills of a convert and of a merge each; every rerun goes on and ends in identical bytes."""
    source = write_checkpoint(
        tmp_path / "in", {f"up.{i}.weight": random_tensor("F32", (1024, 1024), i) for i in range(6)}, files=3
    )
    options = {"plan": PLAN, "tp": 3, "check": "shapes"}
    started = time.monotonic()
    convert(source, tmp_path / "whole", **options)
    merge(tmp_path / "whole", tmp_path / "back")
    took = (time.monotonic() - started) / 2
    expected, original = tree(tmp_path / "whole"), tree(source)
    assert tree(tmp_path / "back") == original
    moments = random.Random(0)
    SERVER.set_forkserver_preload([__name__, "autotp.checkpoint.carry", "autotp.checkpoint.ranks"])
    for what, begin, given, bytes_expected in (
        ("convert", source, options, expected),
        ("merge", tmp_path / "whole", {}, original),
    ):
        target, kills, finished = tmp_path / f"{what}-out", 0, 0
        while kills < 20:
            lived = run_and_kill(moments.uniform(0, took * 1.2), what, begin, target, given)
            kills += not lived
            if target.exists():
                assert tree(target) == bytes_expected
                finished += 1
                shutil.rmtree(target)
        if not target.exists():
            convert(begin, target, **options) if what == "convert" else merge(begin, target)
        assert tree(target) == bytes_expected
        assert not partial(target).exists()


def test_a_full_disk_is_told_before_and_during(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "in", TENSORS, files=3)
    options = {"plan": PLAN, "tp": 2, "check": "shapes"}
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    told = convert(source, tmp_path / "out", dry_run=True, **options)
    assert not told.fits and told.free == 1000
    with pytest.raises(CheckpointError, match=rf"out: needs {told.nbytes} bytes, and 1000 are free$"):
        convert(source, tmp_path / "out", **options)
    monkeypatch.undo()
    real, written = os.pwrite, []

    def full(fd, data, at):
        written.append(len(data))
        if sum(written) > 5 << 20:
            raise OSError(28, "No space left on device")
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        CheckpointError, match=r"model-0000\d-of-00003.safetensors: cannot be written: No space left on"
    ):
        convert(source, tmp_path / "out", **options)
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("place", ["in", "in/out", "in/deep/out", "link/out"])
def test_a_target_inside_the_source(tmp_path, place):
    source = write_checkpoint(tmp_path / "in", {"up.weight": random_tensor("F32", (4, 2))})
    (tmp_path / "link").symlink_to(source)
    before = tree(tmp_path)
    with pytest.raises(CheckpointError) as raised:
        convert(source, tmp_path / place, plan={"up": "column"}, tp=2, check="shapes")
    assert str(raised.value) == (
        f"{tmp_path / place}: is inside the source {source}, of which it would become a part; name another "
        "place"
    )
    assert tree(tmp_path) == before
    convert(source / "model.safetensors", source / "out", plan={"up": "column"}, tp=2, check="shapes")


# On a disk of 20 MiB of its own if this machine lets us mount one, else under a limit of the size of files.
ON_A_SMALL_DISK = """
import json, os, resource, shutil, signal, subprocess, sys
from pathlib import Path
from autotp.checkpoint import check_shards, convert, merge
from autotp.diagnostic import CheckpointError
source, disk = map(Path, sys.argv[1:3])
mounted = not subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", disk]).returncode
filler, said = disk / "filler", []
def filled(done, total, name):
    if mounted and not filler.exists():
        filler.write_bytes(bytes(shutil.disk_usage(disk).free - (4 << 20)))
    elif not mounted:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
def freed():
    if filler.exists():
        filler.unlink()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
def attempt(run, begin, target, **options):
    try:
        run(begin, target, progress=filled, **options)
    except CheckpointError as error:
        said.append(str(error))
    freed()
    said.append(sorted(entry.name for entry in disk.iterdir()))
options = {"plan": {"up.*": "column"}, "tp": 2, "check": "shapes"}
attempt(convert, source, disk / "out", **options)
convert(source, disk / "out", **options)
attempt(merge, disk / "out", disk / "back")
merge(disk / "out", disk / "back")
said.append(mounted)
if mounted:
    written = convert(source, disk / "again", dry_run=True, **options)
    said.append(written.fits)
    attempt(convert, source, disk / "again", **options)
    shutil.rmtree(disk / "back")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    attempt(merge, disk / "out", disk / "third")
print(json.dumps(said))
"""


@pytest.mark.slow
def test_a_disk_that_is_full(tmp_path):
    source = write_checkpoint(
        tmp_path / "in", {f"up.{i}.weight": random_tensor("F32", (1024, 512), i) for i in range(4)}, files=4
    )
    (tmp_path / "disk").mkdir()
    command = [sys.executable, "-c", ON_A_SMALL_DISK, str(source), str(tmp_path / "disk")]
    alone = ["unshare", "--map-root-user", "--mount"]
    inside = alone if shutil.which("unshare") and not subprocess.run([*alone, "true"]).returncode else []
    done = subprocess.run([*inside, *command], capture_output=True, text=True, check=True)
    first, left, second, then, mounted, *rest = json.loads(done.stdout)
    why = "No space left on device" if mounted else "File too large"
    partial_out = tmp_path / "disk" / ".out.autotp-partial"
    assert first.startswith(f"{partial_out}/rank-") and first.endswith(f": cannot be written: {why}")
    assert left == [] and then == ["out"]
    assert second.endswith(f": cannot be written: {why}")
    if mounted:
        fits, refused, there, read_only, still = rest
        assert not fits and refused.startswith(f"{tmp_path / 'disk' / 'again'}: needs ")
        assert there == ["back", "out"] and still == ["out"]
        assert (
            read_only
            == f"{tmp_path / 'disk'}/.third.autotp-partial: cannot be written: Read-only file system"
        )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x" * 250, "File name too long"),
        ("a\0b", "no file can have this name; name a new one"),
        ("file/out", "cannot be made: "),
    ],
)
def test_targets_that_cannot_be(tmp_path, name, message):
    source = write_checkpoint(tmp_path / "in", {"up.weight": random_tensor("F32", (4, 2))})
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=message):
        convert(source, f"{tmp_path}/{name}", plan={"up": "column"}, tp=2, check="shapes")
    assert sorted(os.listdir(tmp_path)) == ["file", "in"]


def test_a_manifest_that_could_not_be_read_is_not_written(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "in", TENSORS)
    monkeypatch.setattr("autotp.checkpoint.carry.LARGEST_JSON", 3000)
    with pytest.raises(CheckpointError) as raised:
        convert(source, tmp_path / "out", plan=PLAN, tp=8, check="shapes")
    assert "autotp.json would take " in str(raised.value) and str(raised.value).endswith(
        " bytes, and at most 3000 are read: 6 cut tensors over 8 ranks; take fewer ranks, or no digest"
    )
    assert os.listdir(tmp_path) == ["in"]
