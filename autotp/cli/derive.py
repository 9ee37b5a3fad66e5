"""`autotp derive`: a plan from a model's graph, as a plan file."""

from __future__ import annotations

import contextlib
import sys

from autotp.cli.console import FINE, Format, guarded, report_findings, write
from autotp.cli.options import RankCount, Target

__all__ = ["command"]


@guarded
def command(
    target: Target,
    tp: RankCount,
) -> int:
    """Find a plan for a model from its graph, prove it, and print it as YAML.

    Names carry no meaning. What stays whole is listed in comments, with the op that speaks against it. Of a
    checkpoint only its config.json is read.

    \b
    Examples:
      autotp derive ./my-model --tp 4 > my-plan.yaml
      autotp derive my_package.models:make_mlp --tp 2

    Exit code: 0 fine, 1 nothing can be sharded, 2 usage or unreadable files.
    """
    from autotp.cli.model import live_model

    live = live_model(target, "auto")
    from autotp.decide import derive_with_proof
    from autotp.derive.words import derived_text

    with contextlib.redirect_stdout(sys.stderr):  # what the user's forward prints
        analysis, _, found = derive_with_proof(live.model, tp=tp, inputs=live.inputs)
    if not analysis.ok:
        return report_findings(analysis.diagnostics, Format.text)
    write(derived_text(analysis, found))
    return FINE
