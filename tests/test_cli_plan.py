"""`autotp plan`: the dry run, and the proof, of checkpoints and factories."""

import json
import os
from pathlib import Path

import pytest

from tests.command_line import GQA, MLP, TINY_BERT, plan_file, run
from tests.sparse import (
    MINILM,
    bert_checkpoint,
    bert_config,
    bert_shapes,
    llama_checkpoint,
    llama_config,
    write_checkpoint,
)

# The dry run


def test_plan_of_minilm(here):
    bert_checkpoint(here / "minilm", **MINILM)
    code, out, err = run("plan", "minilm", "--tp", 2)
    assert (code, err) == (0, "")
    assert (
        out
        == """\
minilm: plan bert (shipped), tp 2, names and shapes only

rule                    in               style   how it is cut                tensors  a rank holds
word_embeddings         embeddings       vocab   30522 rows -> 15261 + 15261        1      22.4 MiB
self.query              ….*.attention    column  12 attention heads -> 6 + 6       12       1.7 MiB
self.key                ….*.attention    column  12 attention heads -> 6 + 6       12       1.7 MiB
self.value              ….*.attention    column  12 attention heads -> 6 + 6       12       1.7 MiB
attention.output.dense  encoder.layer.*  row     12 attention heads -> 6 + 6        6       1.7 MiB
intermediate.dense      encoder.layer.*  column  1536 features -> 768 + 768        12       6.8 MiB
output.dense            encoder.layer.*  row     1536 features -> 768 + 768         6       6.8 MiB
not in this model, and optional: crossattention.output.dense, predictions.decoder, predictions.bias

whole on every rank: 42 tensors, 1.4 MiB
  embeddings.position_embeddings.weight   768.0 KiB  no rule matches it
  pooler.dense.weight                     576.0 KiB  no rule matches it
  ….*.attention.output.LayerNorm.bias       9.0 KiB  no rule matches it
  ….*.attention.output.LayerNorm.weight     9.0 KiB  no rule matches it
  ….layer.*.attention.output.dense.bias     9.0 KiB  `attention.output.dense: row` leaves it whole
  and 22 smaller tensors, 34.5 KiB

collectives, expected from the styles  forward          backward
  a layer of encoder.layer.*           2 all-reduce     2 all-reduce
  outside the layers                   1 all-reduce     none
  in all                               13 all-reduce    12 all-reduce

a rank holds 44.0 MiB (46,146,048 bytes) of 86.6 MiB, 98.5% of the matrices sharded

ok by names and shapes: layouts are not proven
"""
    )


def test_plan_of_a_llama_with_grouped_heads(here):
    llama_checkpoint(here / "gqa", **GQA)
    code, out, err = run("plan", "gqa", "--tp", 4)
    assert (code, err) == (0, "")
    assert (
        out
        == """\
gqa: plan llama (shipped), tp 4, names and shapes only

rule              in          style   how it is cut                        tensors     a rank holds
embed_tokens      model       vocab   101 rows -> 26 + 3 x 25                    1    4.7 - 4.9 KiB
self_attn.q_proj  ….layers.*  column  12 attention heads -> 2 x 4 + 2 x 2        2   6.0 - 12.0 KiB
self_attn.k_proj  ….layers.*  column  6 kv heads -> 2 x 2 + 2 x 1                2    3.0 - 6.0 KiB
self_attn.v_proj  ….layers.*  column  6 kv heads -> 2 x 2 + 2 x 1                2    3.0 - 6.0 KiB
self_attn.o_proj  ….layers.*  row     12 attention heads -> 2 x 4 + 2 x 2        2   6.0 - 12.0 KiB
mlp.gate_proj     ….layers.*  column  130 features -> 2 x 33 + 2 x 32            2  12.0 - 12.4 KiB
mlp.up_proj       ….layers.*  column  130 features -> 2 x 33 + 2 x 32            2  12.0 - 12.4 KiB
mlp.down_proj     ….layers.*  row     130 features -> 2 x 33 + 2 x 32            2  12.0 - 12.4 KiB
lm_head                       column  101 features -> 26 + 3 x 25                1    4.7 - 4.9 KiB

whole on every rank: 5 tensors, 960 B
  model.layers.*.input_layernorm.weight                384 B  no rule matches it
  model.layers.*.post_attention_layernorm.weight       384 B  no rule matches it
  model.norm.weight                                    192 B  no rule matches it

collectives, expected from the styles  forward                       backward
  a layer of model.layers.*            2 all-reduce                  2 all-reduce
  outside the layers                   1 all-gather, 1 all-reduce    1 all-reduce
  in all                               1 all-gather, 5 all-reduce    5 all-reduce

a rank holds 64.3 KiB to 83.8 KiB (imbalance 13.3%) of 293.1 KiB, 100.0% of the matrices sharded

ok by names and shapes: layouts are not proven
"""
    )


def test_plan_that_is_refused(here):
    write_checkpoint(here / "mlp", MLP)
    plan_file(
        "mlp.yaml",
        """\
        version: 1
        rules:
          fc1: {style: column, heads: 2}
          fc3: row
        """,
    )
    code, out, err = run("plan", "mlp", "--plan", "mlp.yaml", "--tp", 3)
    assert (code, err) == (1, "")
    assert (
        out
        == """\
mlp: plan mlp.yaml, tp 3, names and shapes only

rule  in  style   how it is cut    tensors  a rank holds
fc1       column  refused                0             -
fc3       row     matches nothing        0             -

whole on every rank: 4 tensors, 304 B
  fc1.weight       128 B  its rule `fc1` is refused
  fc2.weight       128 B  no rule matches it
  fc1.bias          32 B  its rule `fc1` is refused
  fc2.bias          16 B  no rule matches it

collectives, expected from the styles  forward  backward
  in all                               none     none

a rank holds 304 B (304 bytes) of 304 B, 0.0% of the matrices sharded

error[AT201]: rule `fc3` matches nothing in mlp
  --> mlp.yaml:4:3
   |
 4 |   fc3: row
   |   ^^^
  = help: its layers: `fc1`, `fc2`
  = help: or let it match nothing where a model or a file has none: `optional: [fc3]`

error[AT203]: fc1: 2 heads over tp=3: fewer heads than ranks
  --> mlp.yaml:3:3
   |
 3 |   fc1: {style: column, heads: 2}
   |   ^^^
  = note: bias f32[8], weight f32[8,4]
  = help: tp sizes that work here: 1, 2

refused: 2 errors
"""
    )


def test_plan_as_json_and_html(here):
    write_checkpoint(here / "mlp", MLP)
    plan_file("mlp.yaml", "rules: {fc1: column, fc2: row}")
    code, out, err = run("plan", "mlp", "--plan", "mlp.yaml", "--tp", 3, "--format", "json")
    document = json.loads(out)
    assert (code, err, document["ok"], document["bytes"]["ranks"]) == (0, "", True, [124, 124, 88])
    code, out, err = run("plan", "mlp", "--plan", "mlp.yaml", "--tp", 3, "--format", "html")
    assert (code, err, out.startswith("<!doctype html>")) == (0, "", True)


def test_the_plan_of_a_json_report_can_be_edited_and_used(here):
    write_checkpoint(here / "mlp", MLP)
    plan_file("mlp.yaml", "rules: {fc1: column, fc2: row}")
    report = json.loads(run("plan", "mlp", "--plan", "mlp.yaml", "--tp", 2, "--format", "json")[1])
    Path("edited.json").write_text(json.dumps(report["plan"]))
    again = json.loads(run("plan", "mlp", "--plan", "edited.json", "--tp", 2, "--format", "json")[1])
    assert again["plan_name"] == "edited.json"
    assert {**again, "plan_name": ""} == {**report, "plan_name": ""}


def test_a_plan_that_shards_nothing_exits_1(here):
    write_checkpoint(here / "mlp", MLP)
    plan_file("mlp.yaml", "rules: {fc1: replicate}")
    code, out, _ = run("plan", "mlp", "--plan", "mlp.yaml", "--tp", 2)
    assert code == 1
    assert "error[AT391]: the plan shards no matrix: every rank would hold the whole model" in out


def test_a_plan_that_shards_next_to_nothing_exits_1_though_it_is_no_error(here):
    write_checkpoint(here / "mlp", {**MLP, "rest.weight": (100, 100)})
    plan_file("mlp.yaml", "rules: {fc1: column, fc2: row, rest: replicate}")
    code, out, _ = run("plan", "mlp", "--plan", "mlp.yaml", "--tp", 2)
    assert code == 1
    assert "warning[AT392]: the plan shards 0.6% of the bytes of all matrices" in out
    assert out.splitlines()[-1] == "ok by names and shapes: layouts are not proven; 1 warning"


def test_one_file_takes_the_config_beside_it(here):
    bert_checkpoint(here / "bert", **TINY_BERT)
    code, out, _ = run("plan", "bert/model.safetensors", "--tp", 2)
    assert code == 0
    assert out.startswith("model.safetensors: plan bert (shipped), tp 2, names and shapes only\n")


# torch stays out


# Factories


@pytest.mark.parametrize("factory", ["mlp", "with_inputs", "MLP", "ready"])
def test_the_layouts_of_a_factory_are_proven(models, factory):
    code, out, err = run("plan", f"{models}:{factory}", "--plan", "mlp.yaml", "--tp", 2)
    assert code == 0
    assert out.splitlines()[0].startswith("MLP: plan mlp.yaml, tp 2, layouts proven (")
    assert out.splitlines()[-1] == "ok: layouts are proven"
    assert err == ("building\n" if factory == "mlp" else "")


def test_a_wrong_plan_of_a_factory_names_plan_and_source_line(models):
    plan_file("wrong.yaml", "rules:\n  fc1: column\n")
    code, out, _ = run("plan", f"{models}:MLP", "--plan", "wrong.yaml", "--tp", 2)
    assert code == 1
    assert "error[AT301]: fc2: " in out
    assert "  --> wrong.yaml:2:3\n" in out
    assert "models_of_test.py:11:" in out
    assert out.splitlines()[-1].startswith("refused: 1 error")


def test_check_of_a_factory(models):
    code, out, _ = run("check", "mlp.yaml", f"{models}:MLP", "--tp", 4)
    assert (code, out) == (0, f"ok: mlp.yaml on {models}:MLP at tp 4, 2 rules\n")


def test_a_factory_without_a_model_type_needs_a_plan(models):
    code, out, err = run("plan", f"{models}:MLP", "--tp", 2)
    assert (code, out) == (2, "")
    assert err.startswith("error: no model_type is known\n")


FAULTS = {
    "models_of_test:raises": "models_of_test:raises raised IndexError: list index out of range\n"
    "  --> HERE/models_of_test.py:21\n",
    "models_of_test:exits": "models_of_test:exits raised SystemExit: no GPU\n"
    "  --> HERE/models_of_test.py:24\n",
    "models_of_test:table": "models_of_test:table returned a value of type dict, not an nn.Module\n"
    "  = help: a factory takes no arguments and returns an nn.Module, or (module, inputs)\n",
    "models_of_test:sized": "models_of_test:sized raised TypeError: "
    "sized() missing 1 required positional argument: 'width'\n",
    "models_of_test:number": "models_of_test:number is of type int, not a factory\n"
    "  = help: a factory takes no arguments and returns an nn.Module, or (module, inputs)\n",
    "models_of_test:mpl": "models_of_test:mpl: models_of_test has no mpl\n  = help: did you mean mlp?\n",
    "models_of_test:MLP.nosuch": "models_of_test:MLP.nosuch: models_of_test.MLP has no nosuch\n",
    "nosuch_module:mlp": "nosuch_module:mlp: there is no module nosuch_module\n"
    "  = help: modules are looked for in HERE and in the installed packages\n",
    "models_of_test.sub:mlp": "models_of_test.sub:mlp: there is no module models_of_test.sub\n"
    "  = help: modules are looked for in HERE and in the installed packages\n",
    "imports_nothing:mlp": "importing imports_nothing raised ModuleNotFoundError: "
    "No module named 'nosuch_dependency'\n  --> HERE/imports_nothing.py:1\n",
    "broken_syntax:mlp": "importing broken_syntax raised SyntaxError: "
    "'(' was never closed (broken_syntax.py, line 1)\n  --> HERE/broken_syntax.py:1\n",
    "raises_at_import:mlp": "importing raises_at_import raised RuntimeError: first line\n"
    "  --> HERE/raises_at_import.py:1\n",
}


@pytest.mark.parametrize("command", ["plan", "derive", "explain", "check"])
@pytest.mark.parametrize("name", ["models_of_test.py", "package/models_of_test.py"])
def test_a_file_of_python_is_named_by_what_makes_the_model(models, name, command):
    words = {"check": ["mlp.yaml", name], "explain": [name, "fc1"]}.get(command, [name])
    code, out, err = run(command, *words, "--tp", 2)
    module = name.removesuffix(".py").replace("/", ".")
    assert (code, out) == (2, "")
    assert err == (
        f"error: {name}: a file of Python is no target\n"
        f"  = help: name what makes the model in it, such as {module}:make_model\n"
    )


@pytest.mark.parametrize("target", FAULTS)
def test_a_factory_that_fails_is_one_error(models, target, here):
    Path("imports_nothing.py").write_text("import nosuch_dependency")
    Path("broken_syntax.py").write_text("f(")
    Path("raises_at_import.py").write_text(r'raise RuntimeError("first line\nsecond line")')
    code, out, err = run("plan", target, "--plan", "mlp.yaml", "--tp", 2)
    assert (code, out, err) == (2, "", "error: " + FAULTS[target].replace("HERE", os.getcwd()))


# Proven from a checkpoint


@pytest.fixture(scope="module", params=["bert", "llama"])
def both(request, tmp_path_factory):
    """The reports on one checkpoint: (from its headers, proven)."""
    folder = tmp_path_factory.mktemp("proven") / request.param
    if request.param == "bert":
        bert_checkpoint(folder, dtype="BF16", **TINY_BERT)
    else:
        llama_checkpoint(folder, dtype="BF16", **GQA)
    command = ("plan", folder, "--tp", 2, "--format", "json")
    found = [run(*command), run(*command, "--prove")]
    assert [(code, err) for code, _, err in found] == [(0, ""), (0, "")]
    return [json.loads(out) for _, out, _ in found]


def test_the_layouts_of_a_checkpoint_are_proven_and_its_dtypes_counted(both):
    shown, proven = both
    assert proven["target"] == shown["target"]
    assert (shown["certainty"], proven["certainty"]) == ("names and shapes", "layouts")
    assert {name: proven["tensors"][name] for name in shown["tensors"]} == shown["tensors"]
    computed = [name for name in proven["tensors"] if name not in shown["tensors"]]  # buffers
    assert all(proven["tensors"][name]["layout"] is None for name in computed)


def test_what_is_expected_from_styles_is_what_the_graph_shows(both):
    expected, proven = (
        sorted((c["mapping"], c["module"], c["direction"], c["calls"]) for c in report["collectives"])
        for report in both
    )
    assert expected == proven


@pytest.mark.slow
@pytest.mark.parametrize("target", ["tiny", "tiny/config.json"])
def test_a_config_alone_is_proven_without_weights(here, target):
    Path("tiny").mkdir()
    Path("tiny/config.json").write_text(json.dumps(llama_config(**GQA)))
    code, out, err = run("plan", target, "--tp", 3)
    assert (code, err) == (0, "")
    assert out.splitlines()[0].startswith("LlamaForCausalLM: plan llama (shipped), tp 3, layouts proven")


def test_a_diff_is_of_a_proof(here):
    bert_checkpoint(here / "bert", **TINY_BERT)
    code, out, _ = run("plan", "bert", "--tp", 2, "--diff")
    assert code == 0 and "layouts proven" in out.splitlines()[0]


def test_names_of_a_checkpoint_that_are_not_its_models(here):
    write_checkpoint(
        here / "stored", {"model.layers.0.mlp.experts.0.w1.weight": (4, 4)}, {"model_type": "mixtral"}
    )
    code, out, _ = run("plan", "stored", "--tp", 2)
    assert code == 1
    assert "stores some models under other names than they have: `autotp plan TARGET --tp N --prove`" in out


@pytest.mark.slow
def test_a_config_for_other_weights_is_a_finding(here):
    other = {name: size for name, size in TINY_BERT.items() if name != "heads"} | {"vocab": 100}
    write_checkpoint(here / "bert", bert_shapes(**other), bert_config(**TINY_BERT))
    code, out, _ = run("plan", "bert", "--tp", 2, "--prove")
    assert code == 1
    assert (
        "error[AT420]: embeddings.word_embeddings.weight: [100, 48] in the checkpoint, "
        "and [99, 48] by its config.json\n"
    ) in out
