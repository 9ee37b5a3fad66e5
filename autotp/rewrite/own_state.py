"""A sharded model's own `state_dict` and `load_state_dict` are of one rank's parts.

torch's `load_state_dict` takes whatever has the right shapes. Where a cut divides evenly, a state that rank 0
has saved has them on every rank, and each would go on with rank 0's parts. So a state_dict says whose parts
it holds, in the metadata where torch keeps versions (`torch.save` keeps it, safetensors does not), and
another rank's is refused. Whole tensors are refused with the name of the function that takes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from autotp.diagnostic import UsageError

__all__ = ["WHOSE", "watch_state"]

WHOSE = "autotp_rank"
"""The key of a module's metadata, under which [rank, ranks] stand."""


def watch_state(model: nn.Module) -> None:
    """Let the model's state_dict tell its rank, and its load_state_dict refuse what is not of that rank."""
    model.register_state_dict_post_hook(_tell)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]


def _tell(model: nn.Module, state: Mapping[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    group = model.__dict__["_autotp"].group
    metadata[WHOSE] = [group.rank, group.size]


def _refuse(
    model: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *others: Any
) -> None:
    memory = model.__dict__["_autotp"]
    group, name = memory.group, type(model).__name__
    whose = metadata.get(WHOSE, [group.rank, group.size])
    if list(whose) != [group.rank, group.size]:
        raise UsageError(
            f"{name}.load_state_dict: the state holds the parts of rank {whose[0]} of {whose[1]}, and this "
            f"is rank {group.rank} of {group.size}\n  = help: {_HELP}"
        )
    whole = [
        key
        for key, shape in memory.shapes.items()
        if tuple(getattr(state.get(prefix + key), "shape", ())) == shape
        and memory.layouts[key].local_shape(shape, group.rank) != shape
    ]
    if whole:
        raise UsageError(
            f"{name}.load_state_dict: {whole[0]} {list(memory.shapes[whole[0]])} is whole, and so are "
            f"{len(whole) - 1} more; rank {group.rank} of {group.size} holds a part\n  = help: {_HELP}"
        )


_HELP = (
    "autotp.load_state_dict(model, state) takes the unsharded model's state, as "
    "autotp.gather_state_dict(model) gives it"
)
