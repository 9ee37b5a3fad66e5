"""Real tensors that a forward writes into while it is recorded: attributes of modules that have no fakes."""

from __future__ import annotations

import torch

from autotp.trace import hooks

__all__ = ["Overwritten"]


class Overwritten:
    """What was in them."""

    def __init__(self) -> None:
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, written: list[torch.Tensor]) -> None:
        """An op is about to write into these."""
        for tensor in written:
            if not hooks.is_fake(tensor) and not tensor.is_meta:
                with hooks.modes_off(), torch.no_grad():
                    self._before.append((tensor, tensor.clone()))

    def give_back(self) -> None:
        """Undo what was written, the last write first."""
        with torch.no_grad():
            for tensor, before in reversed(self._before):
                tensor.copy_(before)
