"""Forwards that set torch's generators themselves.

    torch.manual_seed(5); noise = torch.randn_like(h)

Every rank then draws the same numbers, and on a shard these are not those of the whole. Nothing is drawn
while a forward is recorded, so a generator that is not as it was at the start was set.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autotp.random import global_states, restore
from autotp.trace.hooks import modes_off

__all__ = ["DRAWS", "SEEDED", "Seeds", "may_draw"]

SEEDED = "seeded"
"""The note on a node that draws from a generator which the forward has set."""
DRAWS = "draws"
"""The note on the node of a module that was not looked into: the calls in it that may draw; None for any."""
_SETTING = ("manual_seed", "seed", "set_rng_state")


@functools.lru_cache(maxsize=4096)
def may_draw(op: Any) -> bool:
    """Whether any call of an op draws random numbers."""
    schema = getattr(op, "_schema", None)
    if schema is None or schema.name.rstrip("_") in _BY_FLAG:
        return True
    named = {argument.name for argument in schema.arguments}
    return {"p", "train"} <= named or torch.Tag.nondeterministic_seeded in op.tags


_BY_FLAG = frozenset(["aten::scaled_dot_product_attention", "aten::rrelu"])


class Seeds:
    """The generators in one recording."""

    def __init__(self) -> None:
        self._start = global_states()

    def were_set(self) -> bool:
        """Whether a generator is not as it was at the start."""
        with modes_off():
            return not all(map(torch.equal, self._start, global_states()))

    @contextlib.contextmanager
    def watched(self, told: Callable[[], None]) -> Iterator[None]:
        """Call `told` where a generator is set; afterwards all are as they were."""
        places = [(space, name) for space in (torch, torch.random) for name in _SETTING]
        originals = [getattr(space, name) for space, name in places]

        def telling(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def setting(*args: Any, **kwargs: Any) -> Any:
                told()
                return original(*args, **kwargs)

            return setting

        for (space, name), original in zip(places, originals, strict=True):
            setattr(space, name, telling(original))
        try:
            yield
        finally:
            for (space, name), original in zip(places, originals, strict=True):
                setattr(space, name, original)
            with modes_off():
                restore(self._start)
