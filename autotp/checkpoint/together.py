"""Work that all ranks of a group do, and that fails on all of them when it fails on one."""

from __future__ import annotations

from types import TracebackType

from autotp.comm import Group

__all__ = ["together"]


class together:
    """A `with` block that every rank enters: an error inside is raised there, and told to the others.

    At its end every rank waits for the others, up to `timeout` seconds. A rank on which another one failed,
    or never came, raises UsageError with the rank and the reason.
    """

    def __init__(self, group: Group, *, timeout: float) -> None:
        self.group = group
        self.timeout = timeout

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, Exception):
            self.group.exchange(error, timeout=self.timeout)
