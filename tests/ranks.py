"""Real ranks for tests: gloo workers that are started once per world size and kept for the session.

A worker costs seconds of imports, so tests share them. Each call is a module-level function, sent by
reference and run as `function(rank, size, *args)` on every worker; what it raises is raised by the call,
with the worker's traceback as a note. After a timeout the workers are ended, and the next call starts
new ones.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

TIMEOUT = 120.0
AFTER_A_FAILURE = 10.0
"""Seconds that the other ranks get when one has raised: they may wait for it in a collective."""
FINE, FAILED = b"+", b"-"
ROOT = Path(__file__).resolve().parent.parent


class RankError(AssertionError):
    """A rank raised, ended or did not answer; the message says which."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Pool:
    """`size` workers with one gloo group, all on this machine."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pipes: list[Connection] = []

    def start(self) -> None:
        """Start the workers and wait until each has called back."""
        key = os.urandom(16)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "AUTOTP_TEST_KEY": key.hex(),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        with Listener(("127.0.0.1", 0), authkey=key) as listener:
            port, store = listener.address[1], free_port()
            self.processes = [
                subprocess.Popen(
                    [
                        sys.executable,
                        "-c",
                        f"from tests.ranks import work; work{port, rank, self.size, store}",
                    ],
                    env=environment,
                    cwd=ROOT,
                )
                for rank in range(self.size)
            ]
            found = [listener.accept() for _ in range(self.size)]
        self.pipes = [pipe for _, pipe in sorted((pipe.recv(), pipe) for pipe in found)]

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """`function(rank, size, *args)` on every worker; the results in rank order."""
        if not self.pipes:
            self.start()
        message = pickle.dumps((function.__module__, function.__qualname__, args))
        for pipe in self.pipes:
            pipe.send_bytes(message)
        answers: dict[int, bytes] = {}
        while len(answers) < self.size:
            open_pipes = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            failed = any(answer[:1] == FAILED for answer in answers.values())
            ready = wait(open_pipes, timeout=min(timeout, AFTER_A_FAILURE) if failed else timeout)
            if not ready:
                self.stop()
                if failed:
                    break
                late = [rank for rank in range(self.size) if rank not in answers]
                raise RankError(f"ranks {late} of {self.size} did not answer within {timeout:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = self.pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv_bytes()
                except EOFError:
                    self.stop()
                    raise RankError(f"rank {rank} of {self.size} ended in {function.__qualname__}") from None
        for rank, answer in sorted(answers.items()):
            if answer[:1] == FAILED:
                error, text = pickle.loads(answer[1:])
                error.add_note(f"on rank {rank} of {self.size}:\n{text}")
                raise error
        return [pickle.loads(answers[rank][1:]) for rank in range(self.size)]

    def stop(self) -> None:
        """End the workers."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()
        self.pipes, self.processes = [], []


_pools: dict[int, Pool] = {}


def pool(size: int) -> Pool:
    """The workers of this session for a world of `size`; they start with their first call."""
    return _pools.setdefault(size, Pool(size))


def stop_all() -> None:
    """End every worker of this session."""
    for each in _pools.values():
        each.stop()
    _pools.clear()


def _answer(function: Callable[..., Any], rank: int, size: int, args: tuple[Any, ...]) -> bytes:
    """What a call gives: FINE and the pickled result, or FAILED and (exception, traceback)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return FINE + pickle.dumps(function(rank, size, *args))
    except Exception as error:
        text = traceback.format_exc()
        try:
            answer = pickle.dumps((error, text))
            pickle.loads(answer)
            return FAILED + answer
        except Exception:
            return FAILED + pickle.dumps((RankError(f"{type(error).__name__}: {error}"), text))


def work(port: int, rank: int, size: int, store: int) -> None:
    """A worker: join the group, then answer calls until the pipe closes."""
    import importlib
    import random
    from multiprocessing.connection import Client

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with Client(("127.0.0.1", port), authkey=bytes.fromhex(os.environ["AUTOTP_TEST_KEY"])) as pipe:
        pipe.send(rank)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{store}", rank=rank, world_size=size)
        while True:
            try:
                module, name, args = pickle.loads(pipe.recv_bytes())
            except EOFError:
                break
            torch.manual_seed(0)
            random.seed(0)
            torch.set_default_dtype(torch.float32)
            function: Any = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            pipe.send_bytes(_answer(function, rank, size, args))
    os._exit(0)  # the group is not left in order when the others are gone already
