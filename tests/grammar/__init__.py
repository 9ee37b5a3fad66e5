"""A grammar of random modules, each with the plan that is right for it; and ways to spoil both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.grammar.blocks import BLOCKS
from tests.grammar.statements import on_whole
from tests.grammar.writer import Chooser, Sentence, Writer

__all__ = ["PRODUCTIONS", "Sentence", "sentence"]

PRODUCTIONS = (
    "linear", "norm", "activation", "view", "split", "heads", "attention", "residual", "reduction",
    "shape arithmetic", "shared", "tied", "embedding", "raw parameter", "read parameter", "fused", "gather",
)  # fmt: skip


def sentence(choose: Chooser) -> Sentence:
    """A random module, plan and number of ranks: about a third right by construction."""
    kind = choose.choice(("right", "wrong plan", "wrong module", "both"))
    tp = choose.choice((2, 2, 2, 3, 3, 4))
    w = Writer(choose, tp, 0.2 if kind in ("wrong module", "both") else 0.0)
    width = w.one(4, 5, 6)
    ids = w.maybe(0.35)
    with w.inside("ids" if ids else "x") as net:
        if ids:
            x = _embedded(w, width)
        else:
            x = "x"
            net.values["x"] = ("B", "S", width)
        for number in range(w.one(1, 1, 2)):
            x = on_whole(w, x, width)
            y = _block(w, x, width, BLOCKS if number else BLOCKS[:-1])
            if w.maybe(0.6):
                w.uses("residual")
                y = w.let(f"{w.operand(x)} + {w.operand(y)}", "B", "S", width)
            x = y
        result = _result(w, x, width, ids)
    net.name = "Net"
    w.close(net, result)
    plan = dict(w.rules)
    if kind in ("wrong plan", "both"):
        for _ in range(w.one(1, 1, 2, 3)):
            plan = _spoilt(w, plan)
    cuts = any(rule != "replicate" for rule in plan.values())
    return Sentence("".join(w.classes), plan, tp, frozenset(w.used), kind == "right" and cuts, ids, width)


def _embedded(w: Writer, width: int) -> str:
    w.uses("embedding")
    emb = w.keep("emb", f"nn.Embedding(11, {width})")
    if w.maybe(0.7):
        w.rules[emb] = "vocab"
    return w.let(f"self.{emb}(ids)", "B", "S", width)


def _block(w: Writer, x: str, width: int, blocks: Sequence[Any]) -> str:
    """A block in this forward, or as a module of its own."""
    block = w.one(*blocks)
    if w.maybe(0.6):
        return block(w, x, width)
    with w.inside("x") as scope:
        scope.values["x"] = ("B", "S", width)
        y = block(w, "x", width)
    w.close(scope, y)
    return w.part(scope, x, width)


def _result(w: Writer, x: str, width: int, ids: bool) -> str:
    emb = next((line.split(" ")[0][5:] for line in w.scope.init if "nn.Embedding" in line), None)
    if emb is not None and w.maybe(0.6):
        head = w.keep("head", f"nn.Linear({width}, 11, bias=False)")
        w.linears.append(head)
        if w.maybe(0.7):
            w.uses("tied")
            w.scope.init.append(f"self.{head}.weight = self.{emb}.weight")
            if emb in w.rules:
                w.rules[head] = {"style": "column", "gather_output": True}
        elif w.maybe(0.7):
            w.rules[head] = {"style": "column", "gather_output": True}
        return f"self.{head}({w.operand(x)})"
    return w.one(x, x, f"({x}, {x}.tanh())", f"{{'out': {x}.square()}}", f"{x}.mean(1)", f"{x}[:, 0]")


def _spoilt(w: Writer, plan: dict[str, Any]) -> dict[str, Any]:
    """The plan with one thing changed."""
    bare = [name for name in w.linears if name not in plan]
    kind = w.one("drop", "style", "option", "option", "swap", "add")
    if kind == "add" or not plan:
        if not bare:
            return plan
        options = {"column": "gather_output", "row": "split_input"}
        style = w.one("column", "row")
        return plan | {w.one(*bare): w.one(style, {"style": style, options[style]: True})}
    name = w.one(*plan)
    if kind == "drop":
        return {k: v for k, v in plan.items() if k != name}
    if kind == "swap":
        other = w.one(*plan)
        return plan | {name: plan[other], other: plan[name]}
    rule = plan[name] if isinstance(plan[name], dict) else {"style": plan[name]}
    if kind == "style":
        style = w.one("column", "row", "replicate")
        kept = {k: v for k, v in rule.items() if k == "dim" and style != "replicate"}
        return plan | {name: {"style": style, **kept}}
    changes: list[dict[str, Any]] = [{"heads": w.one(2, 3, 4, 6)}, {"sections": w.one(2, 3)}]
    changes += [{"heads": None}, {"sections": None}]
    if rule["style"] == "column":
        changes.append({"gather_output": True})
    if rule["style"] == "row":
        changes.append({"split_input": True})
    if "dim" in rule:
        changes.append({"dim": w.one(0, 1, 2)})
    changed = {k: v for k, v in (rule | w.one(*changes)).items() if v is not None}
    return plan | {name: changed}
