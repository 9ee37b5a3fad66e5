"""The way back from `autotp.shard`: the whole model in place, on every rank."""

from __future__ import annotations

from torch import fx, nn

from autotp.checkpoint.together import together
from autotp.comm.group import EXCHANGE_TIMEOUT
from autotp.diagnostic import UsageError
from autotp.parts import Part, parts_of
from autotp.rewrite.apply import forget_graphs, forget_sharding, sharded
from autotp.rewrite.undo import check, undo

__all__ = ["unshard"]


def unshard(model: nn.Module) -> nn.Module:
    """Make a sharded model whole again, in place, and return it. Call it on every rank of its group.

    Every layer has its own class and forward again, every parameter is the same object and holds the whole
    weight, tied ones stay tied; gradients are gathered, too. Hooks and attributes that were added since
    stay. One whole tensor at a time is gathered. An optimizer still holds the right parameters; state that
    it has collected is that of the parts, so save it before (`autotp.save_optimizer`) and load
    it afterwards.

    Raises UsageError, with the model as it was, when nothing of it was sharded by `autotp.shard`, when a
    module was replaced since, or when not every rank calls.

    >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> import autotp
    >>> unshard(autotp.shard(mlp, {"0": "column", "2": "row"})) is mlp
    True
    """
    found = [(module, memory) for module in model.modules() if (memory := sharded(module)) is not None]
    if not found:
        raise UsageError(f"{type(model).__name__}: nothing of it was sharded by autotp.shard")
    if any(isinstance(module, fx.GraphModule) for module, _ in found):
        raise UsageError(
            f"{type(model).__name__}: a graph is not made whole\n"
            "  = help: the model that it was made of was never sharded; `autotp.gather_state_dict(graph)` "
            "has the whole weights that the graph has now, for its load_state_dict"
        )
    for module, memory in found:
        with together(memory.group, timeout=EXCHANGE_TIMEOUT):
            check(module, memory.changes)
            parts = parts_of(module)
            for part in parts.values():
                part.shape  # noqa: B018  it raises for what is no part any more
        for part in parts.values():
            _put_whole(part)
        undo(module, memory.changes)
        forget_sharding(module)
    return model


def _put_whole(part: Part) -> None:
    """The tensor holds the whole, and its gradient, too; the part is freed."""
    tensor, gradient = part.tensor, part.tensor.grad
    if tensor.is_meta:
        tensor.data = tensor.data.new_empty(part.shape)
        return
    tensor.grad = None
    whole = part.gathered()
    whole_gradient = None if gradient is None else part.gathered(gradient)
    forget_graphs(tensor)
    tensor.data = whole
    tensor.grad = whole_gradient
