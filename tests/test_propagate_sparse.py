"""The sparse walk finds what the full one finds: layouts, reads, regions, and the first conflict."""

from __future__ import annotations

import pytest

import autotp
from autotp.match import match
from autotp.placement import INVARIANT
from autotp.propagate.engine import propagate
from autotp.propagate.sparse import sparse
from autotp.trace.inputs import make
from autotp.trace.inventory import inventory
from autotp.trace.modes import modes
from tests import architectures, models


def _both(model, plan, *, until_conflict=False):
    stock = inventory(model)
    matches = match(plan, stock, 2)
    first = dict(stock.aliases)
    cuts = {first.get(n, n): cut for n, cut in matches.layouts.items()}
    kinds = {t.name: m.kind for m in stock.modules.values() for t in m.tensors.values()}
    trace = modes(model, make(model))[0].capture(model)
    given = {"aliases": first, "kinds": kinds, "reads": {}, "regions": {}}
    full = propagate(trace, matches, cuts, **given)
    return (
        trace,
        full,
        propagate(trace, matches, cuts, **given, engine=sparse(trace, until_conflict=until_conflict)),
    )


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "bert", "gpt_neox"])
def test_the_same_as_the_full_walk(name):
    trace, full, found = _both(architectures.build(name), autotp.Plan.load(name))
    assert not full.findings and not found.findings
    assert found.cuts == full.cuts and found.reads == full.reads and found.regions == full.regions
    assert found.reached == full.reached and found.copied == full.copied
    for node in trace.graph.nodes:
        if node.op != "output":
            assert found.layouts[node] == full.layouts[node], node
    assert len(dict.keys(found.layouts)) < len(full.layouts)
    assert any(layout != INVARIANT for layouts in dict.values(found.layouts) for layout in layouts)


@pytest.mark.parametrize("rules", [{"q_proj": "column"}, {"gate_proj": "column", "down_proj": "row"}])
@pytest.mark.parametrize("until_conflict", [False, True])
def test_the_same_conflicts(rules, until_conflict):
    _, full, found = _both(models.llama(), autotp.Plan(rules=rules), until_conflict=until_conflict)
    told = [(f.node.name, f.conflict.code, f.origins) for f in full.findings]
    assert [(f.node.name, f.conflict.code, f.origins) for f in found.findings] == (
        told[:1] if until_conflict else told
    )
    assert told
