"""Which of the formats that are not Hugging Face's safetensors a checkpoint is in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotp.diagnostic import UsageError
from autotp.plan import as_plan

if TYPE_CHECKING:
    from autotp.checkpoint.meta import Meta
    from autotp.checkpoint.perrank import PerRank
    from autotp.checkpoint.pickled import Pickled

__all__ = ["other_format"]


def other_format(source: Path, plan: Any, biases: Any) -> Pickled | Meta | PerRank | None:
    """The checkpoint as torch.save, Meta or other trainers wrote it, if it is one of theirs; needs torch.

    `plan` and `biases` are as `convert` takes them. Raises CheckpointError for what is wrong with the files,
    UsageError where they need a plan and none is given, and PlanError for one that does not fit them.
    """
    if biases not in ("equal", "summed"):
        raise UsageError(f"biases are 'equal' or 'summed', not {biases!r}")
    found: Pickled | Meta | PerRank | None = None
    if source.suffix in (".bin", ".pt", ".pth") or any(source.glob("pytorch_model.bin*")):
        from autotp.checkpoint import pickled

        found = pickled.Pickled(source) if pickled.holds_pickles(source) else None
    elif any(source.glob("consolidated.*.pth")) and not any(source.glob("model.safetensors*")):
        from autotp.checkpoint import meta

        found = meta.Meta(source) if meta.holds_meta(source) else None
    elif any(source.glob("*rank*")) and not any(source.glob("model.safetensors*")):
        from autotp.checkpoint import perrank, rankfiles

        if rankfiles.holds_rank_files(source):
            if plan is None or plan == "auto":
                raise UsageError(
                    f"{source}: holds the files of other trainers' ranks; give a plan, with patterns for the "
                    "names in them, that says how they were cut"
                )
            return perrank.PerRank(source, as_plan(plan), biases=biases)
    if biases != "equal":
        raise UsageError(f"{source}: holds no files of other trainers' ranks, whose biases could be summed")
    return found
