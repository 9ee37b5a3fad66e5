"""One copy of a value for all the column layers that read it: q, k and v, or gate and up.

Each layer's own copy sums a gradient over the ranks in backward; the layers that read one value need one
sum of their added gradients (Megatron-LM has it by fusing q, k and v into one layer).
"""

from __future__ import annotations

from torch import Tensor

from autotp import mappings
from autotp.comm import Group
from autotp.derivatives import tracked
from autotp.marks import capturing

__all__ = ["SharedCopy"]


class SharedCopy:
    """`mappings.copy` of the same tensor for `readers` layers that are called with it one after another.

    The copy is kept from the first reader to the last, and made anew for another tensor: a layer that is
    called alone, or with a tensor of its own, has a copy of its own.

    >>> import torch
    >>> from autotp.comm import GroupOfOne
    >>> shared, x = SharedCopy(GroupOfOne(), readers=2), torch.ones(2, requires_grad=True)
    >>> shared(x) is shared(x)
    True
    """

    def __init__(self, group: Group, readers: int) -> None:
        self.group = group
        self.readers = readers
        self.left = 0
        self.source: Tensor | None = None
        self.value: Tensor | None = None

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles start without the value of an unfinished forward."""
        return self.__dict__ | {"source": None, "value": None, "left": 0}

    def __call__(self, x: Tensor) -> Tensor:
        """`x`, whose gradient is summed over the ranks, once for all readers."""
        if not capturing() and not tracked(x):
            return x
        if self.source is not x or self.value is None:
            self.source, self.value, self.left = x, mappings.copy(x, self.group), self.readers
        value = self.value
        self.left -= 1
        if self.left == 0:
            self.source = self.value = None
        return value
