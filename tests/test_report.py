"""The reports, word for word, and the JSON that programs read."""

import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import autotp
from autotp.analysis import LAYOUTS
from autotp.collectives import Collective, collectives_of
from autotp.diagnostic import Diagnostic, Span
from autotp.placement import Deal, Shard, deal
from autotp.plan import Plan
from autotp.report import findings
from autotp.report.table import collective_lines, headline, plan_name, rows, unmatched, verdict
from autotp.report.text import WIDTH, render
from autotp.report.words import bytes_words, deal_words, findings_words, parts_words, shard_words, shortened
from autotp.shapes import analyze_headers
from tests.sparse import LLAMA_8B, bert_checkpoint, llama_checkpoint, write_checkpoint

TINY_BERT = {"hidden": 48, "inter": 129, "layers": 2, "heads": 3, "vocab": 99, "positions": 16}
MLP = {"fc1.weight": (33, 16), "fc1.bias": (33,), "fc2.weight": (16, 33), "fc2.bias": (16,)}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = bert_checkpoint(tmp_path_factory.mktemp("report") / "bert", **TINY_BERT)
    return analyze_headers(folder, Plan.load("bert"), tp=2)


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory):
    folder = llama_checkpoint(tmp_path_factory.mktemp("report") / "llama", **LLAMA_8B)
    return analyze_headers(folder, Plan.load("llama"), tp=8)


@pytest.fixture
def mlp(tmp_path):
    def analyzed(rules, tp=2, shapes=MLP, **plan):
        folder = write_checkpoint(tmp_path / "mlp", shapes)
        return analyze_headers(folder, Plan(rules=rules, **plan), tp=tp)

    return analyzed


def test_sizes_in_words():
    assert [bytes_words(n) for n in (0, 1023, 1024, 1_023_999, 1 << 20, 5 << 40, 1 << 60)] == [
        "0 B", "1023 B", "1.0 KiB", "1.0 MiB", "1.0 MiB", "5.0 TiB", "1,048,576.0 TiB",
    ]  # fmt: skip


def test_parts_in_words():
    assert parts_words([7]) == "7"
    assert parts_words([5, 5]) == "5 + 5"
    assert parts_words([2, 1, 1]) == "2 + 1 + 1"
    assert parts_words([2, 2, 1, 1]) == "2 x 2 + 2 x 1"


def test_a_deal_in_declared_units():
    assert deal_words(deal(12, 2), 384, "heads") == "12 heads -> 6 + 6"
    assert deal_words(deal(3, 2), 48, "heads") == "3 heads -> 2 + 1"
    assert deal_words(deal(50257, 8), 50257, "rows") == "50257 rows -> 6283 + 7 x 6282"


def test_kv_heads_that_ranks_share():
    shared = Deal(2, ((0, 1), (0, 1), (1, 2), (1, 2)), declared=2)
    assert deal_words(shared, 32, "kv heads") == "2 kv heads -> 1 each, each shared by 2 ranks"


def test_a_shard_with_sections():
    assert shard_words(Shard(0, deal(65, 2), groups=2), 130, "features") == (
        "2 sections of 65 features -> 33 + 32"
    )
    unequal = Shard(0, sections=((32, deal(4, 2)), (8, None)))
    assert shard_words(unequal, 40, "features") == "sections 32+8 whole -> 24 + 24"


def test_long_names_lose_their_front():
    assert shortened("layers.*.mlp", 20) == "layers.*.mlp"
    assert shortened("model.language_model.layers.*.mlp", 16) == "….layers.*.mlp"
    assert shortened("a_very_long_name_of_one_segment", 12) == "a_very_long_name_of_one_segment"


def test_findings_are_counted_by_severity():
    error, warning = Diagnostic("AT201", "x"), Diagnostic("AT390", "y", severity="warning")
    assert findings_words([error, error, warning]) == "refused: 2 errors, 1 warning"
    assert findings_words([warning]) == "ok: 1 warning"


def test_a_bert_over_two_ranks(bert):
    assert (
        render(bert)
        == """\
bert: plan bert (shipped), tp 2, names and shapes only

rule                    in             style   how it is cut               tensors     a rank holds
word_embeddings         embeddings     vocab   99 rows -> 50 + 49                1    9.2 - 9.4 KiB
self.query              ….*.attention  column  3 attention heads -> 2 + 1        4   6.1 - 12.2 KiB
self.key                ….*.attention  column  3 attention heads -> 2 + 1        4   6.1 - 12.2 KiB
self.value              ….*.attention  column  3 attention heads -> 2 + 1        4   6.1 - 12.2 KiB
attention.output.dense  ….layer.*      row     3 attention heads -> 2 + 1        2   6.0 - 12.0 KiB
intermediate.dense      ….layer.*      column  129 features -> 65 + 64           4  24.5 - 24.9 KiB
output.dense            ….layer.*      row     129 features -> 65 + 64           2  24.0 - 24.4 KiB
not in this model, and optional: crossattention.output.dense, predictions.decoder, predictions.bias

whole on every rank: 18 tensors, 15.2 KiB
  pooler.dense.weight                                   9.0 KiB  no rule matches it
  embeddings.position_embeddings.weight                 3.0 KiB  no rule matches it
  embeddings.token_type_embeddings.weight                 384 B  no rule matches it
  encoder.layer.*.attention.output.LayerNorm.bias         384 B  no rule matches it
  encoder.layer.*.attention.output.LayerNorm.weight       384 B  no rule matches it
  and 11 smaller tensors, 2.1 KiB

collectives, expected from the styles  forward         backward
  a layer of encoder.layer.*           2 all-reduce    2 all-reduce
  outside the layers                   1 all-reduce    none
  in all                               5 all-reduce    4 all-reduce

a rank holds 97.2 KiB to 122.6 KiB (imbalance 11.5%) of 204.6 KiB, 93.8% of the matrices sharded

warning[AT390]: pooler.dense.weight: stays whole on every rank: no rule matches it
  = note: 9,216 bytes, 4.4% of the model
  = help: shard it by a rule, or accept it by `pooler.dense: replicate`

warning[AT390]: embeddings.position_embeddings.weight: stays whole on every rank: no rule matches it
  = note: 3,072 bytes, 1.5% of the model
  = help: shard it by a rule, or accept it by `embeddings.position_embeddings: replicate`

ok by names and shapes: layouts are not proven; 2 warnings"""
    )


def test_a_llama_of_8_billion_fits_one_screen(llama_8b):
    lines = render(llama_8b).splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= WIDTH
    words = [" ".join(line.split()) for line in lines]
    assert "self_attn.k_proj model.layers.* column 8 kv heads -> 1 each 32 32.0 MiB" in words
    assert "a rank holds 1.9 GiB (2,008,031,232 bytes) of 15.0 GiB, 100.0% of the matrices sharded" in lines


def test_the_table_of_a_refused_rule_and_of_one_that_matches_nothing(mlp):
    found = rows(mlp({"fc1": {"style": "column", "heads": 5}, "fc2": "row", "fc3": "column"}))
    assert [(row.rule, row.cut) for row in found] == [
        ("fc1", "refused"),
        ("fc2", "33 features -> 17 + 16"),
        ("fc3", "matches nothing"),
    ]


def test_an_optional_rule_that_matches_nothing_is_no_row(mlp):
    analysis = mlp({"fc1": "column", "fc2": "row", "fc3": "column"}, optional=["fc3"])
    assert [row.rule for row in rows(analysis)] == ["fc1", "fc2"]
    assert unmatched(analysis) == ["fc3"]
    assert "not in this model, and optional: fc3" in render(analysis).splitlines()
    assert "AT215" not in render(analysis)


def test_a_rule_that_replicates_has_a_row(mlp):
    (row,) = [row for row in rows(mlp({"fc1": "replicate", "fc2": "row"})) if row.rule == "fc1"]
    assert (row.style, row.cut, row.tensors, row.nbytes) == ("replicate", "whole", 2, "2.2 KiB")


def test_a_row_that_takes_the_heads_of_its_input_says_so(mlp):
    analysis = mlp({"fc1": {"style": "column", "heads": 3}, "fc2": "row"})
    analysis.layouts = {**analysis.layouts, "fc2.weight": Shard(1, deal(3, 2))}
    assert [row.cut for row in rows(analysis)] == ["3 heads -> 2 + 1", "3 heads -> 2 + 1"]


def test_one_rank_holds_everything(mlp):
    text = render(mlp({"fc1": "column", "fc2": "row"}, tp=1))
    assert "a rank holds 4.3 KiB (4,420 bytes) of 4.3 KiB, 100.0% of the matrices sharded" in text


def test_a_proven_plan_says_which_modes(mlp):
    proven = replace(mlp({"fc1": "column", "fc2": "row"}), certainty=LAYOUTS, modes=("eval", "train"))
    assert headline(proven) == "mlp: plan given in code, tp 2, layouts proven (eval, train)"
    assert verdict(proven) == "ok: layouts are proven"
    assert "collectives, from the graph" in render(proven)


def test_plan_names(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("rules: {fc1: column}")
    assert plan_name(Plan.load(path)) == str(path)
    assert plan_name(Plan.load("llama")) == "llama (shipped)"
    assert plan_name(Plan(rules={"fc1": "column"}), "mine") == "mine"


def test_layers_that_differ_are_a_range():
    found = [Collective("reduce", f"layers.{n}.fc", "forward", calls) for n, calls in ((0, 1), (1, 3))]
    assert collective_lines(found) == [
        ("a layer of layers.*", "1 to 3 all-reduce", "none"),
        ("in all", "4 all-reduce", "none"),
    ]


def test_different_collectives_are_counted_apart():
    found = [c for mapping in ("gather", "reduce", "scatter") for c in collectives_of(mapping, "head")]
    assert collective_lines(found) == [("in all", "1 all-gather, 1 all-reduce", "1 all-gather")]


def test_errors_come_before_warnings_and_are_all_there(mlp):
    text = render(mlp({"fc1": "column", "fc3": "row"}))
    assert text.index("error[AT201]") < text.index("warning[AT390]: fc2.weight")
    assert text.endswith("refused: 1 error, 1 warning")


def test_edits_are_shown(mlp):
    edited = replace(mlp({"fc1": "column", "fc2": "row"}), edits="- h = 4\n+ h = local(4)\n")
    assert "edits of the model's own code:\n- h = 4\n+ h = local(4)\n\n" in render(edited, diff=True) + "\n\n"
    named = replace(
        edited, edits="--- model.py\n+++ model.py (Net.forward)\n@@ -1 +1 @@\n- h = 4\n+ h = local(4)\n"
    )
    assert (
        "edits of the model's own code (--diff, and `analysis.edits`, show them)\n"
        "  model.py (Net.forward)  1 line\n"
    ) in render(named)


class PerHead(nn.Module):
    """A learned scale and a slope for each head, whole in the model."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)
        self.scale = nn.Parameter(torch.ones(1))
        self.slopes = nn.Parameter(torch.ones(3, 1))

    def forward(self, x):
        heads = self.fc1(x).view(*x.shape[:-1], -1, 4)
        return self.fc2((heads * self.scale * self.slopes).flatten(-2))


def test_what_the_proof_adds_is_listed():
    analysis = autotp.analyze(PerHead(), {"fc1": {"style": "column", "heads": 3}, "fc2": "row"}, tp=2)
    assert analysis.ok, str(analysis)
    text = str(analysis)
    assert "\nadded by the proof\n" in text
    assert "  scale   copied where it is read: its gradient is summed\n" in text
    assert (
        "  slopes  copied where it is read: its gradient is summed, "
        "each rank reads its part: 3 elements -> 2 + 1\n"
    ) in text
    assert "each rank reads its part: 3 elements -> 2 + 1" in page(analysis.to_html()).text
    reads = json.loads(analysis.to_json())["reads"]
    assert {read["name"]: read["layout"] for read in reads} == {
        "scale": None,
        "slopes": {"dim": 0, "ranges": [[[0, 2]], [[2, 3]]]},
    }


def test_colour_only_when_asked(mlp):
    analysis = mlp({"fc1": "column", "fc3": "row"})
    assert "\x1b" not in render(analysis)
    coloured = render(analysis, colour=True)
    assert "\x1b[1;31merror\x1b[0m[AT201]" in coloured
    assert coloured.endswith("\x1b[1;31mrefused: 1 error, 1 warning\x1b[0m")


KEYS = {
    "report": int, "target": str, "plan_name": str, "plan": dict, "tp": int, "ok": bool, "certainty": str,
    "modes": list, "random": list, "matched": dict, "unmatched": list, "tensors": dict, "whole": list,
    "reads": list, "regions": list, "branches": list, "collectives": list, "bytes": dict,
    "sharded_fraction": float, "edits": str, "diagnostics": list,
}  # fmt: skip


def test_the_json_has_these_keys_in_this_order(bert):
    document = json.loads(bert.to_json())
    assert {key: type(value) for key, value in document.items()} == KEYS
    assert list(document) == list(KEYS)
    assert all(set(t) == {"shape", "dtype", "tied_to", "layout"} for t in document["tensors"].values())
    assert all(set(w) == {"name", "tensors", "bytes", "reason"} for w in document["whole"])
    collective = {"module", "mapping", "direction", "operation", "calls"}
    assert all(set(c) == collective for c in document["collectives"])
    finding = {"code", "severity", "module", "message", "plan", "source", "notes", "help"}
    assert all(set(d) == finding for d in document["diagnostics"])


def test_the_json_says_what_is_matched_replicated_and_held(bert):
    document = json.loads(bert.to_json())
    assert document["matched"]["self.key"] == [f"encoder.layer.{n}.attention.self.key" for n in (0, 1)]
    assert document["unmatched"] == ["crossattention.output.dense", "predictions.decoder", "predictions.bias"]
    assert document["whole"][0] == {
        "name": "pooler.dense.weight", "tensors": 1, "bytes": 9216, "reason": "no rule matches it",
    }  # fmt: skip
    assert document["bytes"]["ranks"] == list(bert.rank_bytes)
    query = document["tensors"]["encoder.layer.1.attention.self.query.weight"]
    assert query["layout"] == {"dim": 0, "ranges": [[[0, 32]], [[32, 48]]]}
    assert document["tensors"]["pooler.dense.bias"]["layout"] is None


def test_the_plan_of_the_json_gives_the_same_result_again(bert, tmp_path):
    plan = Plan.loads(json.dumps(json.loads(bert.to_json())["plan"]))
    assert plan == bert.plan
    folder = bert_checkpoint(tmp_path / "bert", **TINY_BERT)
    again = analyze_headers(folder, plan, tp=2)
    assert again.layouts == bert.layouts
    assert {**json.loads(again.to_json()), "plan_name": ""} == {**json.loads(bert.to_json()), "plan_name": ""}


def test_the_json_is_the_same_text_every_time(bert):
    assert bert.to_json() == bert.to_json()


def test_the_json_is_what_its_data_is_for_any_text():
    awkward = 'a "quoted" \\ name\n\x00é</script>'
    finding = Diagnostic("AT201", awkward, plan=Span(awkward, 3, 2, 4, "text"), notes=(awkward,))
    read = json.loads(findings.as_json([finding]))
    assert read["ok"] is False
    assert read["diagnostics"][0]["message"] == awkward
    assert read["diagnostics"][0]["plan"] == {"file": awkward, "line": 3, "column": 2, "length": 4}


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def page(html):
    parser = Page()
    parser.feed(html)
    return parser


def test_the_html_is_one_page_with_the_same_content(bert):
    html = bert.to_html()
    read = page(html)
    assert not [tag for tag, attrs in read.tags if tag in ("script", "link", "img") or "src" in attrs]
    for row in rows(bert):
        assert row.rule in read.text and row.cut in read.text
    for finding in bert.diagnostics:
        assert finding.render() in read.text
    assert verdict(bert) in read.text
    assert len(html) < 20_000


def test_the_html_escapes_what_models_and_plans_are_called(mlp):
    analysis = mlp({"fc1": "column", "fc2": "row"})
    name = "<img src=x onerror=alert(1)>"
    hostile = replace(
        analysis,
        inventory=replace(analysis.inventory, name=name),
        diagnostics=(Diagnostic("AT201", name, module=name),),
        edits=name,
    )
    for html in (hostile.to_html(), findings.as_html(hostile.diagnostics)):
        assert not [tag for tag, _ in page(html).tags if tag == "img"]
        assert name in page(html).text


def test_findings_alone_as_text():
    finding = Diagnostic(
        "AT104", "the key `fc1` is given twice", plan=Span("plan.yaml", 3, 3, 3, "  fc1: row")
    )
    assert (
        findings.as_text([finding])
        == """\
error[AT104]: the key `fc1` is given twice
  --> plan.yaml:3:3
   |
 3 |   fc1: row
   |   ^^^

refused: 1 error"""
    )
