"""`autotp.explain` and `autotp explain`: the values along one module, with placement, mapping and reason."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import autotp
from autotp.decide import decide_with_proof
from autotp.explanation import Explanation, Mapped
from autotp.propagate.along import along
from tests import models
from tests.command_line import plan_file, run
from tests.test_regions import PLAN as RAW
from tests.test_regions import Net

PLAN = {"fc1": "column", "fc2": "row"}
REFUSALS = Path(__file__).parent / "refusals"


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(models.MLP() for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def steps(found):
    return [(s.module, s.op, s.placement, s.mappings, s.why) for s in found.steps]


def test_a_column_and_a_row_layer():
    found = autotp.explain(models.MLP(), "", PLAN, tp=2)
    assert steps(found) == [
        (
            "fc1",
            "linear",
            "shard dim 1: 33 -> 17 + 16",
            (Mapped("copy", "before", "x"),),
            "rule `fc1` (column)",
        ),
        ("", "gelu", "shard dim 1: 33 -> 17 + 16", (), "follows fc1"),
        ("fc2", "linear", "replicate", (Mapped("reduce", "after"),), "rule `fc2` (row)"),
    ]
    assert [(s.op, s.placement, s.why) for s in found.entered] == [("x", "replicate", "from the caller")]
    assert [(s.op, s.placement, s.why) for s in found.left] == [("result", "replicate", "from fc2")]
    assert found.ok and (found.mode, found.calls) == ("eval", 1)
    assert {step.source.file for step in found.steps} == {"tests/models.py"}


def test_the_text_of_a_small_module():
    found = autotp.explain(models.MLP(), "", PLAN, tp=2)
    line = found.steps[0].source.line
    assert (
        str(found)
        == f"""\
MLP: plan given in code, tp 2, in eval mode
  the same in {", ".join(found.covers)}

line  op           shape    on each rank                mapping           why
  in  x            [7, 16]  replicate                                     from the caller
models.py
  {line}  fc1: linear  [7, 33]  shard dim 1: 33 -> 17 + 16  copy of x before  rule `fc1` (column)
  {line}  gelu         [7, 33]  shard dim 1: 33 -> 17 + 16                    follows fc1
  {line}  fc2: linear  [7, 16]  replicate                   reduce after      rule `fc2` (row)
 out  result       [7, 16]  replicate                                     from fc2

ok: layouts are proven"""
    )


def test_gathered_and_split():
    plan = {"fc1": {"style": "column", "gather_output": True}, "fc2": {"style": "row", "split_input": True}}
    found = autotp.explain(models.MLP(), "", plan, tp=2)
    assert [(s.placement, [(m.mapping, m.when) for m in s.mappings]) for s in found.steps] == [
        ("replicate", [("copy", "before"), ("gather", "after")]),
        ("replicate", []),
        ("replicate", [("scatter", "before"), ("reduce", "after")]),
    ]
    assert found.steps[1].why == "every input is whole"


@pytest.mark.slow
def test_layers_side_by_side_share_a_copy():
    found = autotp.explain(models.llama(), "layers.0.self_attn", "llama", tp=2)
    mapped = {s.module: (s.mappings, s.why) for s in found.steps if s.op == "linear"}
    assert mapped["q_proj"][0] == (Mapped("copy", "before", "hidden_states"),)
    assert mapped["k_proj"] == ((Mapped("copy", "shared", "q_proj"),), "rule `self_attn.k_proj` (column)")
    assert mapped["o_proj"] == ((Mapped("reduce", "after"),), "rule `self_attn.o_proj` (row)")
    assert [step.op for step in found.entered][:2] == ["hidden_states", "attention_mask"]
    assert found.entered[0].why == "from model.layers.0.input_layernorm"


@pytest.mark.slow
def test_the_mappings_are_those_of_the_analysis():
    """Every collective that the analysis counts stands at an op of the whole model, and no other."""
    for factory, plan in (
        (models.llama, "llama"),
        (models.bert, "bert"),
        (Net, RAW),
        (models.PerFeature, PLAN),
    ):
        analysis = autotp.analyze(factory(), plan, tp=2)
        found = autotp.explain(factory(), "", plan, tp=2)
        shown = [
            m.mapping for s in found.steps for m in s.mappings if m.when != "shared" and m.mapping != "slice"
        ]
        counted = sorted({(c.mapping, c.module): c.calls for c in analysis.collectives}.items())
        assert sorted(shown) == sorted(m for (m, _), calls in counted for _ in range(calls))


def test_reads_are_told():
    found = autotp.explain(models.PerFeature(), "", PLAN, tp=2)
    added = [(s.why, [m.mapping for m in s.mappings]) for s in found.steps if "added by" in s.why]
    line = found.steps[0].source.line
    assert added == [
        ("follows scale; added by the proof: a whole tensor meets a shard", ["copy", "slice"]),
        (f"follows mul:{line}, offset; added by the proof: a whole tensor meets a shard", ["slice"]),
    ]
    assert "copy and slice of scale before" in str(found)


def test_borders_are_told():
    found = autotp.explain(Net(), "raw", RAW, tp=2)
    assert [(s.op, s.placement, [m.mapping for m in s.mappings]) for s in found.steps] == [
        ("linear", "shard dim 1: 33 -> 17 + 16", ["copy"]),
        ("gelu", "shard dim 1: 33 -> 17 + 16", []),
        ("numpy_T", "shard dim 0: 33 -> 17 + 16", []),
        ("matmul", "partial", []),
        ("mul", "replicate", ["copy", "reduce"]),
    ]
    assert found.steps[0].why.startswith("follows w1 (rule `raw.w1`), b1 (rule `raw.b1`); added by the proof")
    assert found.steps[3].why.startswith("each rank sums its part of gelu:")
    assert [s.placement for s in found.left] == ["replicate"]


def test_a_layer_deep_in_a_stack():
    found = autotp.explain(Stack(), "4", PLAN, tp=3)
    assert found.module == "layers.4"
    assert [s.module for s in found.steps if s.mappings] == ["fc1", "fc2"]


def test_a_module_that_runs_twice():
    found = autotp.explain(models.Twice(), "fc1", PLAN, tp=2)
    assert found.calls == 2 and len(found.steps) == 1
    assert "it runs 2 times; this is the first" in str(found)


# A refused plan


def test_values_up_to_the_conflict_and_the_conflict():
    model, plan = models.MLP(between=models.softmax), REFUSALS / "softmax.yaml"
    found = autotp.explain(model, "", plan, tp=2, inputs=torch.zeros(5, 16))
    assert not found.ok
    assert [(s.op, s.placement, s.code) for s in found.steps] == [
        ("linear", "shard dim 1: 33 -> 17 + 16", ""),
        ("softmax", "refused: AT303", "AT303"),
    ]
    assert found.steps[1].why == "reads fc1"
    assert (found.unknown, found.left[0].placement) == (1, "unknown")
    text = str(found)
    assert "  1 op follows that cannot be told\n\nerror[AT303]: softmax over dim 1" in text
    assert text.endswith("\nrefused: 1 error")


def test_a_module_before_the_conflict_is_told_in_full():
    found = autotp.explain(models.llama(), "layers.0.input_layernorm", REFUSALS / "k_forgotten.yaml", tp=2)
    assert not found.ok and found.unknown == 0
    assert {s.placement for s in found.steps} == {"replicate"}


def test_a_rank_that_differs_is_told_at_its_op():
    found = autotp.explain(models.Scaled(), "", REFUSALS / "size_in_the_numbers.yaml", tp=2)
    (step,) = [s for s in found.steps if s.code]
    assert (step.op, step.placement) == ("mul", "shard dim 1: 33 -> 17 + 16, refused: AT313")


def test_a_plan_that_names_refuse_has_no_values():
    found = autotp.explain(models.MLP(), "fc1", REFUSALS / "misspelt.yaml", tp=2)
    assert not found.ok and not found.steps
    assert "no value has a layout: the plan is refused before the model is traced\n\nerror[AT201]" in str(
        found
    )


# Names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fc3", "there is no module fc3 in MLP\n  = help: did you mean fc2 or fc1?"),
        ("zzz", "there is no module zzz in MLP"),
    ],
)
def test_an_unknown_module(name, message):
    with pytest.raises(autotp.UsageError) as raised:
        autotp.explain(models.MLP(), name, PLAN, tp=2)
    assert str(raised.value) == message


def test_the_end_of_several_modules():
    with pytest.raises(autotp.UsageError) as raised:
        autotp.explain(models.llama(num_hidden_layers=4), "mlp", "llama", tp=2)
    assert str(raised.value) == (
        "mlp is the end of 4 modules of LlamaForCausalLM: "
        "model.layers.0.mlp, model.layers.1.mlp, model.layers.2.mlp and 1 more"
    )
    with pytest.raises(autotp.UsageError, match=r"did you mean model\.layers\.0\.self_attn\.q_proj or "):
        autotp.explain(models.llama(), "self_attn.q_prj", "llama", tp=2)


def test_modes():
    assert autotp.explain(models.MLP(), "", PLAN, tp=2, mode="train").covers
    with pytest.raises(autotp.UsageError, match="mode 'training' was not traced\n  = help: these were: eval"):
        autotp.explain(models.MLP(), "", PLAN, tp=2, mode="training")
    found = autotp.explain(models.Dropped(), "", PLAN, tp=2, mode="train")
    assert found.mode == "train"


def test_a_module_that_does_not_run():
    with pytest.raises(autotp.UsageError, match="spare does not run in any mode that was traced"):
        autotp.explain(models.Unused(), "spare", {"fc1": "column", "fc2": "row"}, tp=2)


def test_a_list_of_layers_names_what_is_in_it():
    with pytest.raises(autotp.UsageError) as raised:
        autotp.explain(Stack(), "layers", PLAN, tp=2)
    assert str(raised.value) == (
        "layers does not run in any mode that was traced\n"
        "  = help: name a module in it: layers.0, layers.1, layers.2 and 3 more"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "plan"),
    [(models.bert, "bert"), (models.llama, "llama"), (models.llama, REFUSALS / "k_forgotten.yaml")],
)
def test_every_module_in_every_mode_can_be_explained(factory, plan):
    """On one proof: no module, container, mode or refusal ends in another error."""
    model = factory()
    analysis, proof = decide_with_proof(model, plan, tp=2)
    told = 0
    for path, module in model.named_modules():
        for mode in (None, *proof.propagations, *proof.covered):
            start = Explanation("M", path, "K", "p", 2, diagnostics=analysis.diagnostics)
            try:
                found = along(start, module, proof, mode)
            except autotp.UsageError:
                continue
            assert json.loads(found.to_json())["ok"] is analysis.ok
            assert len(str(found).partition("\nerror")[0].splitlines()) < 80
            told += 1
    assert told > 3 * len(proof.propagations)


def test_nothing_is_touched():
    model = models.MLP()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    autotp.explain(model, "fc1", PLAN, tp=2)
    assert all(id(p) == before[n][0] and p.equal(before[n][1]) for n, p in model.named_parameters())


# The screen


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        "layers.0.self_attn",
        pytest.param("layers.0", marks=pytest.mark.slow),
        pytest.param("", marks=pytest.mark.slow),
    ],
)
def test_a_large_module_fits_a_screen(module):
    found = autotp.explain(models.llama(), module, "llama", tp=2)
    text = str(found)
    rows = [line for line in text.splitlines() if line.startswith((" ", "line"))]
    assert len(rows) <= 60 and max(map(len, text.splitlines())) <= (160 if module else 180)
    folded = sum(int(row.split("… ")[1].split()[0]) for row in rows if "… " in row)
    if module:
        shown = sum(row.count(":") > 0 or row.strip()[:1].isdigit() for row in rows)
        assert folded < len(found.steps) and shown
    for step in found.steps:  # what has a mapping is never folded
        if step.mappings:
            module = step.module.split(".")[-1]
            assert any(f"{module}: {step.op}" in row or f" {step.op} " in row for row in rows)


# The command


def test_the_command(models):
    code, out, err = run("explain", f"{models}:mlp", "fc2", "--plan", "mlp.yaml", "--tp", 2)
    assert (code, err) == (0, "building\n")
    assert out.startswith("fc2 (Linear): plan mlp.yaml, tp 2, in eval mode\n")
    assert "reduce after" in out and out.endswith("\nok: layouts are proven\n")


def test_the_command_as_json(models):
    command = ("explain", f"{models}:MLP", "fc1", "--plan", "mlp.yaml", "--tp", 2, "--format", "json")
    code, out, err = run(*command)
    found = json.loads(out)
    assert (code, err, found["ok"], found["module"], found["kind"]) == (0, "", True, "fc1", "Linear")
    (op,) = found["ops"]
    assert op["mappings"] == [{"mapping": "copy", "when": "before", "of": "input"}]
    assert op["source"]["file"].endswith("models_of_test.py")


def test_the_command_on_a_refused_plan(models):
    plan_file("wrong.yaml", "rules: {fc1: column}")
    command = ("explain", f"{models}:MLP", "", "--plan", "wrong.yaml", "--tp", 2)
    code, out, _ = run(*command)
    assert code == 1 and "refused: AT301" in out and "error[AT301]: fc2: " in out
    code, out, _ = run(*command, "--format", "json")
    assert (code, json.loads(out)["ok"]) == (1, False)


def test_the_command_on_a_plan_with_faults(models):
    plan_file("bad.yaml", "rules: {fc1: colum}")
    code, out, _ = run("explain", f"{models}:MLP", "fc1", "--plan", "bad.yaml", "--tp", 2)
    assert code == 1 and out.startswith("error[AT109]: ")


def test_the_command_on_an_unknown_module(models):
    assert run("explain", f"{models}:MLP", "fc3", "--plan", "mlp.yaml", "--tp", 2) == (
        2,
        "",
        "error: there is no module fc3 in MLP\n  = help: did you mean fc2 or fc1?\n",
    )


@pytest.mark.slow
def test_the_command_on_a_config(here):
    from tests.sparse import llama_config

    sizes = {"hidden": 96, "inter": 130, "layers": 9, "heads": 12, "kv": 6, "vocab": 101}
    Path("config.json").write_text(json.dumps(llama_config(**sizes)))
    code, out, err = run("explain", "config.json", "layers.8.mlp", "--tp", 4)
    assert (code, err) == (0, "")
    assert out.startswith("model.layers.8.mlp (LlamaMLP): plan llama (shipped), tp 4, in eval mode\n")
