"""Checkpoints as transformers writes them: under other names than the model's, experts one by one."""

import pytest
import torch
import transformers
from typer.testing import CliRunner

import autotp
from autotp.checkpoint import convert, merge, reshard
from autotp.checkpoint.assembled import Assembled, assembled, parts_of_layout, whole_shape
from autotp.cli import app
from autotp.comm import simulate
from autotp.diagnostic import CheckpointError
from autotp.placement import Shard, deal
from tests.checkpoints import tree

SIZES = {
    "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6,
    "intermediate_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
HEADS = {**SIZES, "num_key_value_heads": 3, "head_dim": 8}
EXPERTS = {**HEADS, "num_experts_per_tok": 2}


def stored(kind, folder):
    """A checkpoint by transformers' own save_pretrained, and its model."""
    config = {
        "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES),
        "mixtral": lambda: transformers.MixtralConfig(**EXPERTS, num_local_experts=11),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**EXPERTS, num_experts=4, moe_intermediate_size=24),
    }[kind]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model


def logits(folder, tp, ids, **options):
    """What each rank computes with what it loads."""

    def rank(group):
        with torch.no_grad():
            return autotp.from_pretrained(folder, mesh=group, **options)(ids).logits

    return simulate(tp, rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, plan, loads",
    [
        ("gpt_neox", None, [("out", 2), ("in", 3)]),
        ("mixtral", None, [("out", 3)]),  # of other ranks
        ("qwen3_moe", "auto", [("out", 2)]),
    ],
)
def test_what_transformers_saves_is_converted_loaded_and_given_back(kind, plan, loads, tmp_path):
    model = stored(kind, tmp_path / "in")
    ids = torch.randint(0, 97, (2, 5))
    with torch.no_grad():
        expected = model(ids).logits
    written = convert(tmp_path / "in", tmp_path / "out", plan=plan, tp=2)
    assert written.proof == "layouts"
    merge(tmp_path / "out", tmp_path / "back")
    assert tree(tmp_path / "back") == tree(tmp_path / "in")
    for folder, tp in loads:
        for found in logits(tmp_path / folder, tp, ids):
            torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)
    if plan is None:
        shown = CliRunner().invoke(app, ["plan", str(tmp_path / "in"), "--tp", "2", "--prove"])
        assert shown.exit_code == 0, shown.output
    reshard(tmp_path / "out", tmp_path / "three", tp=3)
    merge(tmp_path / "three", tmp_path / "again")
    assert tree(tmp_path / "again") == tree(tmp_path / "in")


def test_names_and_parts_as_transformers_has_them(tmp_path):
    model = stored("mixtral", tmp_path / "in")
    names = {name.removeprefix("model.") for name in model.state_dict()}
    inside = "model.layers.0.block_sparse_moe.experts"
    there = [f"{inside}.{n}.{w}.weight" for n in range(11) for w in ("w3", "w1", "w2")]
    made = assembled(model, there)
    gates, ups, downs = (tuple(f"{inside}.{n}.{w}.weight" for n in range(11)) for w in ("w1", "w3", "w2"))
    assert made == {
        "model.layers.0.mlp.experts.gate_up_proj": Assembled((gates, ups), 1, True),
        "model.layers.0.mlp.experts.down_proj": Assembled((downs,), 0, True),
    }
    assert {name.removeprefix("model.") for name in made} < names
    # one up projection is missing: nothing is made of the rest
    assert set(assembled(model, [n for n in there if "7.w3" not in n])) == {
        "model.layers.0.mlp.experts.down_proj"
    }
    assert assembled(torch.nn.Linear(2, 2), ["other"]) == {}


@pytest.mark.slow
def test_a_missing_expert_is_told(tmp_path):
    from safetensors.torch import load_file, save_file

    stored("mixtral", tmp_path / "in")
    path = tmp_path / "in/model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.block_sparse_moe.experts.7.w3.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "in", tmp_path / "out", tp=2)
    assert "missing: model.layers.0.mlp.experts.gate_up_proj" in str(caught.value)
    assert not (tmp_path / "out").exists()


PAIR = Assembled((("a0", "a1"), ("b0", "b1")), 1, True)
SHAPES = {"a0": (6, 5), "a1": (6, 5), "b0": (4, 5), "b1": (4, 5)}


def test_a_part_is_cut_as_its_place_in_the_whole():
    assert whole_shape(PAIR, SHAPES) == (2, 10, 5)
    assert whole_shape(PAIR, {**SHAPES, "b1": (4, 6)}) is None
    assert whole_shape(PAIR, {**SHAPES, "b0": (4, 6), "b1": (4, 6)}) is None
    halves = Shard(1, sections=((6, deal(6, 2)), (4, deal(2, 2))))
    assert parts_of_layout(halves, PAIR, SHAPES) == [Shard(0, deal(6, 2)), Shard(0, deal(2, 2))]
    mixed = Shard(1, sections=((3, None), (3, deal(3, 2)), (4, None)))
    assert parts_of_layout(mixed, PAIR, SHAPES) == [
        Shard(0, sections=((3, None), (3, deal(3, 2)))),
        None,
    ]
    assert parts_of_layout(Shard(2, deal(5, 2)), PAIR, SHAPES) == [Shard(1, deal(5, 2))] * 2
    assert parts_of_layout(None, PAIR, SHAPES) == [None, None]
    assert parts_of_layout(Shard(0, deal(2, 2)), PAIR, SHAPES) is None  # whole experts on each rank
    assert parts_of_layout(Shard(1, deal(10, 2)), PAIR, SHAPES) is None  # a piece in both


@pytest.mark.slow
def test_a_derived_plan_says_how_conv1d_holds_its_weights(tmp_path):
    """By the headers alone a square weight tells nothing of its order."""
    config = transformers.GPT2Config(n_embd=24, n_head=4, n_layer=1, vocab_size=97, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "in")
    plan = convert(tmp_path / "in", tmp_path / "out", plan="auto", tp=2).plan
    convert(tmp_path / "in", tmp_path / "shapes", plan=plan, tp=2, check="shapes")
    for rank in range(2):
        home = f"rank-{rank}-of-2/model.safetensors"
        assert (tmp_path / "out" / home).read_bytes() == (tmp_path / "shapes" / home).read_bytes()
    merge(tmp_path / "out", tmp_path / "back")
    assert tree(tmp_path / "back") == tree(tmp_path / "in")
