"""Digests of what is read and written: xxh3-128 (free of cost), sha256, or none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Protocol

import xxhash

from autotp.diagnostic import UsageError

__all__ = ["DIGESTS", "Digest", "digest_of", "new_digest"]


class Digest(Protocol):
    """A running digest, as hashlib's."""

    def update(self, data: Any, /) -> None: ...

    def hexdigest(self) -> str: ...


class _None:
    """No digest at all: its text is empty."""

    def update(self, data: Any, /) -> None:
        """Take no notice."""

    def hexdigest(self) -> str:
        """Nothing."""
        return ""


DIGESTS: dict[str, Callable[[], Digest]] = {
    "xxh3": xxhash.xxh3_128,
    "sha256": hashlib.sha256,
    "none": _None,
}


def new_digest(kind: str) -> Digest:
    """A fresh digest; raises UsageError for an unknown kind.

    >>> new_digest("xxh3").hexdigest()
    '99aa06d3014798d86001c324468d497f'
    """
    if kind not in DIGESTS:
        raise UsageError(f"there is no digest {kind!r}; there are {', '.join(DIGESTS)}")
    return DIGESTS[kind]()


def digest_of(data: bytes, kind: str) -> str:
    """The digest of some bytes."""
    digest = new_digest(kind)
    digest.update(data)
    return digest.hexdigest()
