"""Terminals, pipes, interrupts, and what nobody foresaw."""

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotp.cli import target as targets
from autotp.cli.progress import progress
from tests.command_line import ROOT, TINY_BERT, plan_file, run
from tests.sparse import MINILM, bert_checkpoint


def on_terminal(*arguments, cwd, **environment):
    """stdout and stderr of a command that runs on a terminal."""
    leader, follower = pty.openpty()
    plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM", "FORCE_COLOR")}
    child = subprocess.Popen(
        [sys.executable, "-m", "autotp", *map(str, arguments)],
        stdout=follower,
        stderr=follower,
        stdin=subprocess.DEVNULL,
        cwd=cwd,
        env={**plain, "PYTHONPATH": str(ROOT), "TERM": "xterm", **environment},
    )
    os.close(follower)
    said = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        said += piece
    os.close(leader)
    return child.wait(timeout=60), said.decode()


def test_colour_on_terminals_only_and_not_with_no_color(mlp, here):
    plan_file("wrong.yaml", "rules: {fc1: column, fc3: row}")
    command = ("plan", mlp, "--plan", "wrong.yaml", "--tp", 2)
    code, said = on_terminal(*command, cwd=here)
    assert code == 1 and "\x1b[1;31merror\x1b[0m[AT201]" in said
    for quiet in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "\x1b" not in on_terminal(*command, cwd=here, **quiet)[1]
    assert "\x1b" not in run(*command)[1]


def test_errors_are_coloured_on_terminals(here):
    code, said = on_terminal("plan", "nosuch", "--tp", 2, cwd=here)
    assert code == 2 and said.startswith("\x1b[1;31merror\x1b[0m: nosuch: no such file or folder")


def test_a_conversion_on_a_terminal_ends_with_its_summary(mlp, here):
    arguments = ("convert", mlp, "out", "--plan", "mlp.yaml", "--tp", 2, "--check", "shapes")
    code, said = on_terminal(*arguments, cwd=here)
    assert code == 0
    assert f"converted {Path('mlp/model.safetensors').stat().st_size} B in " in said
    assert "wrote out: 2 files, " in said


def test_progress_in_plain_lines(capsys):
    with progress("converted") as tell:
        for done in (0, 256, 512):
            tell(done, 1024, "one.safetensors")
        tell(768, 1024, "two.safetensors")
        tell(1024, 1024, "two.safetensors")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[:-1] == [
        "  0%  one.safetensors",
        " 25%  one.safetensors",
        " 50%  one.safetensors",
        " 75%  two.safetensors",
        "100%  two.safetensors",
    ]
    assert said.err.splitlines()[-1].startswith("converted 1.0 KiB in 0.0 s, ")


def test_the_rate_is_that_of_the_bytes_alone(capsys):
    with progress("converted") as tell:
        time.sleep(0.3)  # a proof
        tell(1024, 1024, "one.safetensors")
    assert " in 0.0 s, " in capsys.readouterr().err


def test_no_rate_is_said_where_nothing_was_done(capsys):
    with progress("converted"):
        pass
    assert capsys.readouterr().err == ""


def test_a_reader_that_goes_away_is_no_error(here):
    bert_checkpoint(here / "bert", **MINILM)
    child = subprocess.Popen(
        [sys.executable, "-m", "autotp", "plan", "bert", "--tp", "2", "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait(timeout=60) == 141
    child.stderr.close()


def test_an_interrupt_is_quiet(here, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("autotp.cli.plan.analyze_target", interrupted)
    assert run("plan", "x", "--tp", 2) == (130, "", "")
    assert targets.analyze_target is not interrupted


def test_an_error_of_the_file_system_is_one_line(here, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied", "secret/config.json")

    monkeypatch.setattr("autotp.cli.plan.analyze_target", refused)
    assert run("plan", "x", "--tp", 2) == (2, "", "error: secret/config.json: Permission denied\n")


def test_names_that_a_terminal_cannot_show(here):
    name = "caf\xe9"
    bert_checkpoint(here / name, **TINY_BERT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "autotp", "plan", name, "--tp", "2"],
        capture_output=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"caf\\xe9: plan bert (shipped)")


@pytest.mark.slow
def test_what_nobody_foresaw_is_one_message(tmp_path, monkeypatch):
    (tmp_path / "odd.py").write_text(
        "from torch import nn\n"
        "class Odd(nn.Module):\n"
        "    def __init__(self): super().__init__(); self.fc = nn.Linear(4, 4)\n"
        "    def named_modules(self, *a, **k): raise LookupError('no names today')\n"
    )
    (tmp_path / "plan.yaml").write_text("rules:\n  fc: column\n")
    command = [sys.executable, "-m", "autotp", "plan", "odd:Odd", "--plan", "plan.yaml", "--tp", "2"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "LookupError: no names today" in done.stderr and "AUTOTP_TRACEBACK=1" in done.stderr
