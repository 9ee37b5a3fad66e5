"""The command line as users meet it: what it prints, where, and how it exits."""

import importlib
import json
import os
import pty
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotp.cli import app
from autotp.cli import target as targets
from autotp.cli.progress import progress
from autotp.plan import Plan, shipped_plans
from tests.sparse import (
    LLAMA_8B,
    MINILM,
    bert_checkpoint,
    bert_config,
    bert_shapes,
    llama_checkpoint,
    llama_config,
    write_checkpoint,
    write_file,
)

ROOT = Path(__file__).parent.parent
GQA = {"hidden": 96, "inter": 130, "layers": 2, "heads": 12, "kv": 6, "vocab": 101}
TINY_BERT = {"hidden": 48, "inter": 65, "layers": 2, "heads": 4, "vocab": 99, "positions": 16}
MLP = {"fc1.weight": (8, 4), "fc1.bias": (8,), "fc2.weight": (4, 8), "fc2.bias": (4,)}
FACTORIES = """
import torch
from torch import nn

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 33), nn.Linear(33, 16)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))

def mlp():
    print("building")
    return MLP()

def with_inputs():
    return MLP(), torch.zeros(2, 16)

def raises():
    return [][3]

def exits():
    raise SystemExit("no GPU")

def table():
    return {"fc1": 1}

def sized(width):
    return MLP()

number = 7
ready = MLP()
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, from which modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in sys.modules[name].__file__:
            del sys.modules[name]


def run(*arguments):
    """(exit code, stdout, stderr) of a command; an exception that escapes is raised."""
    done = CliRunner().invoke(app, [str(a) for a in arguments], prog_name="autotp", catch_exceptions=False)
    return done.exit_code, done.stdout, done.stderr


def process(*arguments, code="from autotp.cli import main; main()", **options):
    """A command in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        **options,
    )


def plan_file(name, text):
    Path(name).write_text(textwrap.dedent(text))
    return name


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

LATE = """
import sys
from autotp.cli import app
sys.argv[0] = "autotp"
try:
    app()
finally:
    print("torch" in sys.modules, "transformers" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["plan", "--help"],
        ["plans"],
        ["plans", "--schema"],
        ["check", "llama"],
        ["check", "llama", "LLAMA", "--tp", "8"],
        ["plan", "LLAMA", "--tp", "8"],
        ["plan", "LLAMA", "--tp", "8", "--format", "json"],
        ["plan", "LLAMA", "--tp", "8", "--format", "html"],
        ["convert", "LLAMA", "out", "--tp", "8", "--check", "shapes", "--dry-run"],
        ["verify", "--help"],
        ["explain", "--help"],
    ],
    ids=" ".join,
)
def test_torch_is_not_imported(arguments, tmp_path):
    llama_checkpoint(tmp_path / "LLAMA", **LLAMA_8B)
    done = process(*arguments, code=LATE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "False False"
    assert done.stdout


def test_python_m_autotp(here):
    done = subprocess.run(
        [sys.executable, "-m", "autotp", "--version"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    from autotp import __version__

    assert (done.returncode, done.stdout, done.stderr) == (0, f"autotp {__version__}\n", "")


# Which plan


def test_no_shipped_plan_is_a_usage_error(here):
    write_checkpoint(here / "lama", MLP, {"model_type": "lama"})
    assert run("plan", "lama", "--tp", 2) == (
        2,
        "",
        "error: no plan is shipped for model_type 'lama'\n"
        "  = help: say --plan with a plan file, or with a shipped plan, such as llama: "
        "`autotp plans` lists them\n"
        "  = help: or let one be derived from the model: --plan auto\n",
    )


def test_no_config_is_a_usage_error(here):
    write_checkpoint(here / "mlp", MLP)
    assert run("plan", "mlp", "--tp", 2) == (
        2,
        "",
        "error: no model_type is known\n"
        "  = help: say --plan with a plan file, or with a shipped plan: `autotp plans` lists them\n"
        "  = help: or let one be derived from the model: --plan auto\n",
    )


@pytest.mark.parametrize("name", ["nosuch", "nosuch.yaml", "mlp"])
def test_a_plan_that_cannot_be_read_exits_2(here, name):
    write_checkpoint(here / "mlp", MLP)
    code, out, err = run("plan", "mlp", "--plan", name, "--tp", 2)
    assert (code, out) == (2, "")
    assert err.startswith("error[AT101]: ") and name in err


def test_a_plan_with_faults_exits_1_in_every_form(here):
    write_checkpoint(here / "mlp", MLP)
    plan_file("bad.yaml", "rules: {fc1: colum}")
    code, out, err = run("plan", "mlp", "--plan", "bad.yaml", "--tp", 2)
    assert (code, err) == (1, "")
    assert out.startswith("error[AT109]: ") and out.endswith("refused: 1 error\n")
    code, out, _ = run("plan", "mlp", "--plan", "bad.yaml", "--tp", 2, "--format", "json")
    assert (code, json.loads(out)["diagnostics"][0]["code"]) == (1, "AT109")
    code, out, _ = run("plan", "mlp", "--plan", "bad.yaml", "--tp", 2, "--format", "html")
    assert code == 1 and "AT109" in out


# Hostile targets: one clear error, no traceback


def junk(path):
    path.write_bytes(bytes(range(256)) * 4)


def truncated(folder):
    bert_checkpoint(folder, **TINY_BERT)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(5000)


def junk_folder(folder):
    folder.mkdir()
    junk(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(bert_config(**TINY_BERT)))


def broken_config(folder):
    bert_checkpoint(folder, **TINY_BERT)
    (folder / "config.json").write_text("{")


def pickled(folder):
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")


HOSTILE = {
    "missing": lambda path: None,
    "empty": Path.mkdir,
    "truncated": truncated,
    "junk": junk_folder,
    "broken_config": broken_config,
    "pickled": pickled,
    "one.safetensors": junk,
    "short.safetensors": lambda path: path.write_bytes(b"abc"),
    "config.json": lambda path: path.write_text("[]"),
    "other.txt": lambda path: path.write_text("hello"),
    "pipe": os.mkfifo,
    "missing:": lambda path: None,
    ":factory": lambda path: None,
    "a b:c": lambda path: None,
    "missing/config.json": lambda path: None,
}


@pytest.mark.parametrize("command", ["plan", "prove", "check"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_target_is_one_error(here, name, command):
    HOSTILE[name](here / name)
    options = {
        "plan": ("plan", name, "--tp", 2),
        "prove": ("plan", name, "--tp", 2, "--prove"),
        "check": ("check", "bert", name),
    }
    code, out, err = run(*options[command])
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("error") == 1
    assert name in err


@pytest.mark.parametrize("model_type", ["[1]", "7", "null", '""', '"x/../bert"'])
def test_a_config_with_an_odd_model_type_is_one_error(here, model_type):
    bert_checkpoint(here / "bert", **TINY_BERT)
    Path("bert/config.json").write_text(f'{{"model_type": {model_type}}}')
    code, out, err = run("plan", "bert", "--tp", 2)
    assert (code, out) == (2, "")
    assert err.startswith("error: no ") and "--plan" in err


def test_an_empty_target_is_no_folder(here):
    code, out, err = run("plan", "", "--tp", 2)
    assert (code, out, err.splitlines()[0]) == (2, "", "error: '': no such file or folder")


@pytest.mark.parametrize("tp", ["0", "-2", "two", "1.5"])
def test_an_impossible_tp_is_a_usage_error(here, tp):
    bert_checkpoint(here / "bert", **TINY_BERT)
    for command in (["plan", "bert"], ["check", "bert", "bert"], ["convert", "bert", "out"]):
        code, out, err = run(*command, f"--tp={tp}")
        assert (code, out) == (2, "")
        assert "--tp" in err
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "arguments", [["plan"], ["plan", "x"], ["nosuch"], ["plan", "x", "--tp", "2", "--nosuch"]]
)
def test_usage_errors_exit_2(here, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "Usage: autotp" in err


# Factories


@pytest.fixture
def models(here):
    Path("models_of_test.py").write_text(FACTORIES)
    plan_file("mlp.yaml", "rules: {fc1: column, fc2: row}")
    return "models_of_test"


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
def test_a_config_alone_is_proven_without_weights(here):
    Path("tiny").mkdir()
    Path("tiny/config.json").write_text(json.dumps(llama_config(**GQA)))
    code, out, err = run("plan", "tiny/config.json", "--tp", 3)
    assert (code, err) == (0, "")
    assert out.splitlines()[0].startswith("LlamaForCausalLM: plan llama (shipped), tp 3, layouts proven")


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


# check


def test_check_of_a_sound_plan(here):
    plan_file("mlp.yaml", "rules: {fc1: column, fc2: row}")
    assert run("check", "mlp.yaml") == (0, "ok: mlp.yaml, 2 rules\n", "")
    assert run("check", "llama")[0] == 0


def test_check_tells_every_fault_with_its_line(here):
    plan_file(
        "bad.yaml",
        """\
        version: 1
        rules:
          fc1: colum
          fc2: {style: row, gather_output: true}
        """,
    )
    code, out, err = run("check", "bad.yaml")
    assert (code, err) == (1, "")
    assert "  --> bad.yaml:3:8\n" in out and "  --> bad.yaml:4:" in out
    assert out.splitlines()[-1] == "refused: 2 errors"


def test_check_against_a_model(here):
    write_checkpoint(here / "mlp", MLP)
    plan_file("mlp.yaml", "rules: {fc1: column, fc3: row}")
    code, out, err = run("check", "mlp.yaml", "mlp")
    assert (code, err) == (1, "")
    assert "error[AT201]: rule `fc3` matches nothing in mlp" in out
    code, out, _ = run("check", "mlp.yaml", "mlp", "--format", "json")
    assert code == 1 and json.loads(out)["ok"] is False


def test_check_with_warnings_only_is_fine(here):
    write_checkpoint(here / "mlp", {**MLP, "fc3.weight": (8, 8)})
    plan_file("mlp.yaml", "rules: {fc1: column, fc2: row}")
    code, out, _ = run("check", "mlp.yaml", "mlp")
    assert code == 0
    assert out.startswith("warning[AT390]: fc3.weight: ") and out.endswith("ok: 1 warning\n")


@pytest.mark.parametrize("name", ["nosuch.yaml", ".", "/dev/null", "junk.yaml"])
def test_check_of_what_is_no_plan_file_exits_2(here, name):
    junk(here / "junk.yaml")
    code, out, err = run("check", name)
    assert (code, out) == (2, "")
    assert err.startswith("error[AT101]: ")


# convert and merge


def stored(folder):
    """A small checkpoint with data in it."""
    write_file(folder / "model.safetensors", MLP)
    with (folder / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(size - 304)
        file.write(bytes(n % 251 for n in range(304)))


@pytest.fixture
def mlp(here):
    Path("mlp").mkdir()
    stored(here / "mlp")
    plan_file("mlp.yaml", "rules: {fc1: column, fc2: row}")
    return "mlp"


def test_convert_and_merge_give_the_same_file(mlp):
    code, out, err = run("convert", mlp, "out", "--plan", "mlp.yaml", "--tp", 3, "--check", "shapes")
    assert code == 0
    first, *folders, last = out.splitlines()
    assert first == "mlp: plan mlp.yaml, tp 3, layouts not proven: names and shapes only"
    assert [line.split()[0] for line in folders] == ["rank-0-of-3", "rank-1-of-3", "rank-2-of-3"]
    assert last.startswith("wrote out: 3 files, ")
    size = Path("mlp/model.safetensors").stat().st_size
    assert "model.safetensors" in err and err.splitlines()[-1].startswith(f"converted {size} B in ")
    code, out, err = run("merge", "out", "back")
    assert code == 0
    assert out.startswith("wrote back: 1 file, ")
    assert Path("back/model.safetensors").read_bytes() == Path("mlp/model.safetensors").read_bytes()


def test_a_dry_run_writes_nothing(mlp):
    before = sorted(os.listdir())
    arguments = ("convert", mlp, "out", "--plan", "mlp.yaml", "--tp", 3, "--check", "shapes", "--dry-run")
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert "would write out: 3 files, " in out
    assert sorted(os.listdir()) == before


def test_some_ranks_alone(mlp):
    arguments = ("--plan", "mlp.yaml", "--tp", 4, "--check", "shapes")
    code, out, _ = run("convert", mlp, "out", *arguments, "--ranks", "0-1,3")
    assert code == 0 and "wrote out: 3 files, " in out
    assert sorted(p.name for p in Path("out").iterdir()) == [
        "autotp.json", "rank-0-of-4", "rank-1-of-4", "rank-3-of-4",
    ]  # fmt: skip
    assert run("convert", mlp, "all", *arguments)[0] == 0
    code, out, _ = run("reshard", "all", "again", "--tp", 2, "--check", "shapes", "--ranks", "1")
    assert code == 0 and sorted(p.name for p in Path("again").iterdir()) == ["autotp.json", "rank-1-of-2"]
    for wrong in ("", "x", "3-1", "1-", "0;1", "-1", "1" * 9):
        code, _, err = run("convert", mlp, "x", *arguments, "--ranks", wrong)
        assert (code, err) == (2, f"error: --ranks is a list such as 0-3 or 0,2,5, not {wrong!r}\n")
    code, _, err = run("convert", mlp, "x", *arguments, "--ranks", "2-4")
    assert (code, err) == (2, "error: ranks are from 0 to 3 for tp=4, not [2, 3, 4]\n")


def test_a_dry_run_says_whether_it_fits_the_disk(mlp, monkeypatch):
    monkeypatch.setattr(
        importlib.import_module("autotp.checkpoint.convert"), "free_bytes", lambda target: 100
    )
    arguments = ("convert", mlp, "out", "--plan", "mlp.yaml", "--tp", 2, "--check", "shapes")
    code, out, err = run(*arguments, "--dry-run")
    assert (code, err) == (1, "")
    size = sum(int(line.split()[1]) for line in out.splitlines()[1:3])
    assert out.splitlines()[-2:] == [
        f"would write out: 2 files, {size} B (100 B are free)",
        f"it does not fit: {size - 100} B more are needed",
    ]
    code, _, err = run(*arguments)
    assert (code, err) == (2, f"error: out: needs {size} bytes, and 100 are free\n")


@pytest.mark.parametrize("command", ["convert", "reshard"])
def test_a_model_of_ones_own_to_prove_the_plan_on(mlp, here, command):
    (here / "own.py").write_text(
        "import torch\nclass MLP(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.fc1, self.fc2 = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)\n"
        "    def forward(self, x):\n        return self.fc2(self.fc1(x).relu())\n"
        "def make():\n    return MLP(), torch.zeros(3, 4)\n"
    )
    plan = ("--plan", "mlp.yaml")
    assert run("convert", mlp, "out", *plan, "--tp", 4, "--check", "shapes")[0] == 0
    source, options = ("out", ()) if command == "reshard" else (mlp, plan)
    code, out, err = run(command, source, "again", *options, "--tp", 2, "--model", "own:make")
    assert code == 0, err
    assert out.splitlines()[0].endswith(", tp 2, layouts proven")
    code, _, err = run(command, source, "x", *options, "--tp", 2, "--model", "own")
    assert (code, err) == (2, "error: --model is package.module:factory, not 'own'\n")


@pytest.mark.slow
def test_convert_proves_unless_told_otherwise(here):
    bert_checkpoint(here / "bert", **TINY_BERT)
    code, out, _ = run("convert", "bert", "out", "--tp", 2)
    assert code == 0
    assert out.splitlines()[0] == "bert: plan bert (shipped), tp 2, layouts proven"


def test_convert_of_a_refused_plan_writes_nothing(mlp):
    plan_file("wrong.yaml", "rules: {fc1: column, fc3: row}")
    before = sorted(os.listdir())
    code, out, _ = run("convert", mlp, "out", "--plan", "wrong.yaml", "--tp", 2, "--check", "shapes")
    assert code == 1
    assert "error[AT201]: rule `fc3` matches nothing" in out
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    "name", ["missing", "empty", "truncated", "junk", "pickled", "one.safetensors", "pipe"]
)
def test_convert_and_merge_of_a_hostile_source_write_nothing(here, name):
    HOSTILE[name](here / name)
    before = sorted(os.listdir())
    for command in (["convert", name, "out", "--tp", 2, "--plan", "bert"], ["merge", name, "out"]):
        code, out, err = run(*command)
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and name in err and err.count("error") == 1
    assert sorted(os.listdir()) == before


def test_convert_into_a_folder_that_is_not_empty_is_refused(mlp):
    Path("out").mkdir()
    Path("out/mine").write_text("keep")
    code, out, err = run("convert", mlp, "out", "--plan", "mlp.yaml", "--tp", 2, "--check", "shapes")
    assert (code, out) == (2, "")
    assert err.startswith("error: out: is not empty")
    assert os.listdir("out") == ["mine"]


# plans


def test_plans_are_listed():
    code, out, err = run("plans")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == list(shipped_plans())


@pytest.mark.parametrize("name", shipped_plans())
def test_a_shipped_plan_is_printed_as_it_stands(name):
    code, out, _ = run("plans", name)
    assert (code, Plan.loads(out)) == (0, Plan.load(name))
    assert "#" in out


def test_the_schema_is_json():
    code, out, _ = run("plans", "--schema")
    assert code == 0
    assert set(json.loads(out)["properties"]) == set(Plan.model_fields)


def test_a_plan_that_is_not_shipped():
    assert run("plans", "nosuch") == (
        2,
        "",
        "error: no plan 'nosuch' is shipped\n  = help: `autotp plans` lists them\n",
    )
    assert run("plans", "lama")[2].endswith("  = help: did you mean llama? `autotp plans` lists them\n")
    assert run("plans", "bert", "--schema")[0] == 2


# Terminals, pipes, interrupts


@pytest.mark.parametrize(
    "command",
    [
        [],
        *([name] for name in ["plan", "check", "explain", "derive", "verify", "convert"]),
        *([name] for name in ["merge", "reshard", "plans"]),
    ],
)
def test_every_help_has_an_example(command):
    code, out, err = run(*command, "--help")
    assert (code, err) == (0, "")
    assert f"    autotp {' '.join(command)}" in out or not command
    assert "autotp plan " in out or command
    assert max(map(len, out.splitlines())) <= 100


def test_no_command_shows_the_help():
    code, out, err = run()
    assert code == 2
    assert "Commands:" in out + err


def on_terminal(*arguments, cwd, **environment):
    """stdout and stderr of a command that runs on a terminal."""
    leader, follower = pty.openpty()
    plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM", "FORCE_COLOR")}
    child = subprocess.Popen(
        [sys.executable, "-m", "autotp", *map(str, arguments)],
        stdout=follower,
        stderr=follower,
        stdin=subprocess.DEVNULL,
        cwd=cwd,
        env={**plain, "PYTHONPATH": str(ROOT), "TERM": "xterm", **environment},
    )
    os.close(follower)
    said = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        said += piece
    os.close(leader)
    return child.wait(timeout=60), said.decode()


def test_colour_on_terminals_only_and_not_with_no_color(mlp, here):
    plan_file("wrong.yaml", "rules: {fc1: column, fc3: row}")
    command = ("plan", mlp, "--plan", "wrong.yaml", "--tp", 2)
    code, said = on_terminal(*command, cwd=here)
    assert code == 1 and "\x1b[1;31merror\x1b[0m[AT201]" in said
    for quiet in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "\x1b" not in on_terminal(*command, cwd=here, **quiet)[1]
    assert "\x1b" not in run(*command)[1]


def test_errors_are_coloured_on_terminals(here):
    code, said = on_terminal("plan", "nosuch", "--tp", 2, cwd=here)
    assert code == 2 and said.startswith("\x1b[1;31merror\x1b[0m: nosuch: no such file or folder")


def test_a_conversion_on_a_terminal_ends_with_its_summary(mlp, here):
    arguments = ("convert", mlp, "out", "--plan", "mlp.yaml", "--tp", 2, "--check", "shapes")
    code, said = on_terminal(*arguments, cwd=here)
    assert code == 0
    assert f"converted {Path('mlp/model.safetensors').stat().st_size} B in " in said
    assert "wrote out: 2 files, " in said


def test_progress_in_plain_lines(capsys):
    with progress("converted") as tell:
        for done in (0, 256, 512):
            tell(done, 1024, "one.safetensors")
        tell(768, 1024, "two.safetensors")
        tell(1024, 1024, "two.safetensors")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[:-1] == [
        "  0%  one.safetensors",
        " 25%  one.safetensors",
        " 50%  one.safetensors",
        " 75%  two.safetensors",
        "100%  two.safetensors",
    ]
    assert said.err.splitlines()[-1].startswith("converted 1.0 KiB in 0.0 s, ")


def test_the_rate_is_that_of_the_bytes_alone(capsys):
    with progress("converted") as tell:
        time.sleep(0.3)  # a proof
        tell(1024, 1024, "one.safetensors")
    assert " in 0.0 s, " in capsys.readouterr().err


def test_no_rate_is_said_where_nothing_was_done(capsys):
    with progress("converted"):
        pass
    assert capsys.readouterr().err == ""


def test_a_reader_that_goes_away_is_no_error(here):
    bert_checkpoint(here / "bert", **MINILM)
    child = subprocess.Popen(
        [sys.executable, "-m", "autotp", "plan", "bert", "--tp", "2", "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait(timeout=60) == 141
    child.stderr.close()


def test_an_interrupt_is_quiet(here, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("autotp.cli.plan.analyze_target", interrupted)
    assert run("plan", "x", "--tp", 2) == (130, "", "")
    assert targets.analyze_target is not interrupted


def test_an_error_of_the_file_system_is_one_line(here, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied", "secret/config.json")

    monkeypatch.setattr("autotp.cli.plan.analyze_target", refused)
    assert run("plan", "x", "--tp", 2) == (2, "", "error: secret/config.json: Permission denied\n")


def test_names_that_a_terminal_cannot_show(here):
    name = "caf\xe9"
    bert_checkpoint(here / name, **TINY_BERT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "autotp", "plan", name, "--tp", "2"],
        capture_output=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"caf\\xe9: plan bert (shipped)")


def test_what_nobody_foresaw_is_one_message(tmp_path, monkeypatch):
    (tmp_path / "odd.py").write_text(
        "from torch import nn\n"
        "class Odd(nn.Module):\n"
        "    def __init__(self): super().__init__(); self.fc = nn.Linear(4, 4)\n"
        "    def named_modules(self, *a, **k): raise LookupError('no names today')\n"
    )
    (tmp_path / "plan.yaml").write_text("rules:\n  fc: column\n")
    command = [sys.executable, "-m", "autotp", "plan", "odd:Odd", "--plan", "plan.yaml", "--tp", "2"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "LookupError: no names today" in done.stderr and "AUTOTP_TRACEBACK=1" in done.stderr


def test_a_tp_beyond_all_machines(tmp_path):
    from autotp.diagnostic import UsageError
    from autotp.match import match
    from autotp.plan import Plan
    from tests.inventories import MLP

    with pytest.raises(UsageError) as caught:
        match(Plan(rules={"fc1": "column"}), MLP, 10**20)
    assert str(caught.value).startswith("tp is a number of ranks: at most 1,000,000, not 100,000,000,")
