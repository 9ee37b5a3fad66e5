"""Real ranks for tests: gloo workers that are started once per world size and kept for the session.

A worker costs seconds of imports, so tests share them, and each is a fork of one process that has imported
what most of them need. Each call is a module-level function, sent by reference and run as
`function(rank, size, *args)` on every worker; what it raises is raised by the call, with the worker's
traceback as a note. After a timeout the workers are ended, and the next call starts new ones.
"""

from __future__ import annotations

import os
import pickle
import signal
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


class Forks:
    """The process of which every worker is a fork; it has imported, and made no thread."""

    def __init__(self) -> None:
        ours, theirs = os.pipe()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, "-c", f"from tests.ranks import fork; fork({theirs})"]
        self.process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, pass_fds=[theirs], text=True
        )
        os.close(theirs)
        self.pids = os.fdopen(ours)

    def worker(self, *args: Any) -> int:
        """A process that runs `work(*args)`; its id."""
        return self._asked(args)

    def end(self, worker: int) -> None:
        """End a worker, and wait for its end."""
        self._asked(worker)

    def _asked(self, line: Any) -> int:
        assert self.process.stdin is not None
        print(repr(line), file=self.process.stdin, flush=True)
        return int(self.pids.readline())

    def stop(self) -> None:
        """End it; its forks go on."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.pids.close()


_forks: list[Forks] = []


def fork(pids: int) -> None:
    """For each line of stdin: a fork that runs `work` with these arguments, or the end of the one with this
    id. The id goes to `pids`."""
    import ast
    import gc

    import torch.distributed  # noqa: F401
    import transformers.modeling_utils  # noqa: F401

    import autotp.decide
    import autotp.rewrite.apply  # noqa: F401

    gc.freeze()
    for line in sys.stdin:
        asked = ast.literal_eval(line)
        process = asked if isinstance(asked, int) else os.fork()
        if process == 0:
            os.close(pids)
            try:
                work(*asked)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        if process == asked:
            os.kill(process, signal.SIGTERM)
            os.waitpid(process, 0)
        os.write(pids, f"{process}\n".encode())


class Pool:
    """`size` workers with one gloo group, all on this machine."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.processes: list[int] = []
        self.pipes: list[Connection] = []

    def start(self) -> None:
        """Start the workers and wait until each has called back."""
        if not _forks:
            _forks.append(Forks())
        key = os.urandom(16)
        with Listener(("127.0.0.1", 0), authkey=key) as listener:
            port, store = listener.address[1], free_port()
            self.processes = [
                _forks[0].worker(port, rank, self.size, store, key) for rank in range(self.size)
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
            _forks[0].end(process)
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
    for forks in _forks:
        forks.stop()
    _forks.clear()


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


def work(port: int, rank: int, size: int, store: int, key: bytes) -> None:
    """A worker: join the group, then answer calls until the pipe closes."""
    import importlib
    import random
    from multiprocessing.connection import Client

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with Client(("127.0.0.1", port), authkey=key) as pipe:
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
