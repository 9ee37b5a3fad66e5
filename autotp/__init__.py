"""Makes an ordinary `nn.Module` tensor-parallel, and proves the plan before it touches a weight.

    plan = autotp.Plan(rules={"fc1": "column", "fc2": "row"})
    print(autotp.analyze(model, plan, tp=2, inputs=x))    # dry run: layouts, bytes, collectives
    model = autotp.shard(model, plan, mesh, inputs=x)     # in place, on every rank

Names are imported when they are first used: `import autotp` does not import torch, and neither does
what works on checkpoint headers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotp import mappings as mappings
    from autotp import nn as nn
    from autotp.analysis import Analysis as Analysis
    from autotp.api import shard as shard
    from autotp.api import verify as verify
    from autotp.checkpoint.convert import convert as convert
    from autotp.checkpoint.load import from_pretrained as from_pretrained
    from autotp.checkpoint.merge import merge as merge
    from autotp.checkpoint.optimizer import load_optimizer as load_optimizer
    from autotp.checkpoint.optimizer import save_optimizer as save_optimizer
    from autotp.checkpoint.reshard import reshard as reshard
    from autotp.checkpoint.save import save_pretrained as save_pretrained
    from autotp.clip import clip_grad_norm_ as clip_grad_norm_
    from autotp.diagnostic import AutotpError as AutotpError
    from autotp.diagnostic import CheckpointError as CheckpointError
    from autotp.diagnostic import Diagnostic as Diagnostic
    from autotp.diagnostic import PlanError as PlanError
    from autotp.diagnostic import Span as Span
    from autotp.diagnostic import UnprovenPath as UnprovenPath
    from autotp.diagnostic import UsageError as UsageError
    from autotp.dry_run import analyze as analyze
    from autotp.explanation import Explanation as Explanation
    from autotp.explanation import explain as explain
    from autotp.groups import initialize as initialize
    from autotp.nn.splitting import split as split
    from autotp.plan import Plan as Plan
    from autotp.plan import Rule as Rule
    from autotp.rewrite.unshard import unshard as unshard
    from autotp.state import gather_state_dict as gather_state_dict
    from autotp.state import load_state_dict as load_state_dict
    from autotp.verification import Verification as Verification

__version__ = "0.1.0"

__all__ = [
    "Analysis",
    "AutotpError",
    "CheckpointError",
    "Diagnostic",
    "Explanation",
    "Plan",
    "PlanError",
    "Rule",
    "Span",
    "UnprovenPath",
    "UsageError",
    "Verification",
    "__version__",
    "analyze",
    "clip_grad_norm_",
    "convert",
    "explain",
    "from_pretrained",
    "gather_state_dict",
    "initialize",
    "load_optimizer",
    "load_state_dict",
    "mappings",
    "merge",
    "nn",
    "reshard",
    "save_optimizer",
    "save_pretrained",
    "shard",
    "split",
    "unshard",
    "verify",
]

# Name -> the module that defines it. A module stands for itself.
_HOME = {
    "Analysis": "autotp.analysis",
    "AutotpError": "autotp.diagnostic",
    "CheckpointError": "autotp.diagnostic",
    "Diagnostic": "autotp.diagnostic",
    "Explanation": "autotp.explanation",
    "Plan": "autotp.plan",
    "PlanError": "autotp.diagnostic",
    "Rule": "autotp.plan",
    "Span": "autotp.diagnostic",
    "UnprovenPath": "autotp.diagnostic",
    "UsageError": "autotp.diagnostic",
    "Verification": "autotp.verification",
    "analyze": "autotp.dry_run",
    "clip_grad_norm_": "autotp.clip",
    "convert": "autotp.checkpoint.convert",
    "explain": "autotp.explanation",
    "from_pretrained": "autotp.checkpoint.load",
    "gather_state_dict": "autotp.state",
    "initialize": "autotp.groups",
    "load_optimizer": "autotp.checkpoint.optimizer",
    "load_state_dict": "autotp.state",
    "mappings": "autotp.mappings",
    "merge": "autotp.checkpoint.merge",
    "nn": "autotp.nn",
    "reshard": "autotp.checkpoint.reshard",
    "save_optimizer": "autotp.checkpoint.optimizer",
    "save_pretrained": "autotp.checkpoint.save",
    "shard": "autotp.api",
    "split": "autotp.nn.splitting",
    "unshard": "autotp.rewrite.unshard",
    "verify": "autotp.api",
}

# Using one of these imports torch, so the installed version is checked first.
_NEEDS_TORCH = {
    "clip_grad_norm_",
    "explain",
    "from_pretrained",
    "gather_state_dict",
    "initialize",
    "load_optimizer",
    "load_state_dict",
    "mappings",
    "nn",
    "save_optimizer",
    "save_pretrained",
    "shard",
    "split",
    "unshard",
    "verify",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'autotp' has no attribute {name!r}")
    if name in _NEEDS_TORCH:
        importlib.import_module("autotp.versions").check_torch()
    module = importlib.import_module(home)
    value = module if home == f"autotp.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
