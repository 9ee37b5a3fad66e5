"""The table of layout rules: an op's name and its rule, by family. An op that is not in it is refused."""

from __future__ import annotations

from collections.abc import Callable

from autotp.placement import Layout
from autotp.propagate.attention import ATTENTION
from autotp.propagate.call import Call
from autotp.propagate.contract import CONTRACTIONS
from autotp.propagate.convolution import CONVOLUTIONS
from autotp.propagate.creation import CREATION
from autotp.propagate.experts import EXPERTS
from autotp.propagate.indexing import INDEXING
from autotp.propagate.losses import LOSSES
from autotp.propagate.moving import MOVING
from autotp.propagate.pointwise import POINTWISE
from autotp.propagate.reductions import REDUCTIONS
from autotp.propagate.shapes import SHAPES
from autotp.propagate.splitting import SPLITTING

__all__ = ["RULES", "Rule"]

Rule = Callable[[Call], Layout | list[Layout]]
RULES: dict[str, Rule] = {
    **POINTWISE,
    **SHAPES,
    **SPLITTING,
    **MOVING,
    **CONTRACTIONS,
    **ATTENTION,
    **CONVOLUTIONS,
    **EXPERTS,
    **REDUCTIONS,
    **LOSSES,
    **INDEXING,
    **CREATION,
}
