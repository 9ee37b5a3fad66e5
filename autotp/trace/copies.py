"""The arguments of a call with other tensors in the place of theirs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch.utils import _pytree as pytree

from autotp.trace.graph import TraceError, is_cache

__all__ = ["copied"]

T = TypeVar("T")


def copied(given: T, made: Mapping[int, torch.Tensor]) -> T:
    """What holds the tensors is copied, so that a cache object of the caller is not filled; `made` are the
    new tensors, by the ids of the old ones. Streams stay what they are: an offloaded cache has one.

    Raises TraceError for what cannot be copied.
    """
    memo = dict[int, object](made)
    for value in pytree.tree_leaves(given, is_leaf=lambda value: is_cache(type(value))):
        held = getattr(value, "__dict__", {}).values()
        memo |= {id(part): part for part in (value, *held) if isinstance(part, torch.Stream)}
    try:
        return copy.deepcopy(given, memo)
    except Exception as error:
        text = f"an argument of the call cannot be copied: {type(error).__name__}: {error}"
        raise TraceError(text, "", None) from error
