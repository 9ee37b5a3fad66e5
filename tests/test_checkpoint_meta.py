"""Meta's consolidated files: the same logits as transformers' own model, at any number of ranks."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from autotp.checkpoint import convert, merge
from autotp.checkpoint.load import from_pretrained
from autotp.checkpoint.meta import Meta
from autotp.comm import simulate
from autotp.diagnostic import CheckpointError

# 6 heads and 2 kv heads of 8: 4 / 2 = 2 would hide a permutation by the wrong number of heads
CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
)
NAMES = {
    "self_attn.q_proj": ("attention.wq", 0), "self_attn.k_proj": ("attention.wk", 0),
    "self_attn.v_proj": ("attention.wv", 0), "self_attn.o_proj": ("attention.wo", 1),
    "mlp.gate_proj": ("feed_forward.w1", 0), "mlp.down_proj": ("feed_forward.w2", 1),
    "mlp.up_proj": ("feed_forward.w3", 0), "input_layernorm": ("attention_norm", None),
    "post_attention_layernorm": ("ffn_norm", None), "model.embed_tokens": ("tok_embeddings", "axis"),
    "model.norm": ("norm", None), "lm_head": ("output", 0),
}  # fmt: skip


def interleaved(weight, heads):
    """From halves (x0, x1, …, y0, y1, …) to pairs (x0, y0, x1, y1, …): row by row, by hand."""
    size = weight.shape[0] // heads
    order = [
        head * size + half * (size // 2) + pair
        for head in range(heads)
        for pair in range(size // 2)
        for half in (0, 1)
    ]
    return weight[order]


def meta_checkpoint(folder, parts, *, axis):
    """A random Llama as transformers has it, and its files as Meta writes them."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.3, 0.3)
    shards = [{} for _ in range(parts)]
    for name, tensor in model.state_dict().items():
        path = name.removesuffix(".weight")
        layer = path.split(".")[2] if path.startswith("model.layers.") else None
        new, dim = NAMES[path.split(".", 3)[3] if layer is not None else path]
        dim = axis if dim == "axis" else dim
        if "q_proj" in name or "k_proj" in name:
            tensor = interleaved(tensor, 6 if "q_proj" in name else 2)
        full = f"layers.{layer}.{new}.weight" if layer is not None else f"{new}.weight"
        for shard, part in zip(
            shards, [tensor] * parts if dim is None else tensor.chunk(parts, dim), strict=True
        ):
            shard[full] = part.clone()
    folder.mkdir()
    for number, shard in enumerate(shards):
        torch.save(shard | {"rope.freqs": torch.zeros(4)}, folder / f"consolidated.{number:02}.pth")
    params = {
        "dim": 48,
        "n_layers": 2,
        "n_heads": 6,
        "n_kv_heads": 2,
        "vocab_size": -1,
        "norm_eps": 1e-5,
        "rope_theta": 500000.0,
    }
    (folder / "params.json").write_text(json.dumps(params))
    return model


IDS = torch.arange(20).reshape(2, 10)


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize(("parts", "axis"), [(2, 0), (2, 1), (1, 0)])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_logits_of_transformers_at_any_number_of_ranks(tmp_path, parts, axis, tp):
    model = meta_checkpoint(tmp_path / "in", parts, axis=axis)
    convert(tmp_path / "in", tmp_path / "out", tp=tp, check="shapes")
    load = lambda group: logits(from_pretrained(tmp_path / "out", mesh=group, check="shapes"))  # noqa: E731
    for output in simulate(tp, load):
        torch.testing.assert_close(output, logits(model), atol=1e-10, rtol=0)


def test_what_is_merged_loads_with_transformers_and_says_how_rows_were_permuted(tmp_path):
    model = meta_checkpoint(tmp_path / "in", 2, axis=1)
    for name in ("tokenizer.model", "LICENSE"):
        (tmp_path / "in" / name).write_text(name)
    (tmp_path / "in" / "config.json").write_text('{"num_hidden_layers": 2, "bos_token_id": 7}')
    convert(tmp_path / "in", tmp_path / "out", tp=2, check="shapes")
    merge(tmp_path / "out", tmp_path / "back")
    files = ["LICENSE", "config.json", "model.safetensors", "tokenizer.model"]
    assert sorted(os.listdir(tmp_path / "back")) == files
    assert json.loads((tmp_path / "back" / "config.json").read_text())["bos_token_id"] == 7
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float64)
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-10, rtol=0)
    for path in (tmp_path / "back", tmp_path / "out" / "rank-0-of-2"):
        with safe_open(path / "model.safetensors", "pt") as library:
            assert "permuted from Meta's interleaved rotary order" in library.metadata()["rope"]


def test_each_rank_reads_it_without_a_conversion(tmp_path):
    model = meta_checkpoint(tmp_path / "in", 2, axis=0)
    ids = torch.arange(8)[None]
    says = r"in: assumed, as params.json does not tell it: max_position_embeddings 4096$"
    with pytest.warns(UserWarning, match=says) as told:
        outputs = simulate(
            2, lambda group: from_pretrained(tmp_path / "in", mesh=group, check="shapes")(ids).logits
        )
    assert len(told) == 1 and told[0].filename == __file__
    for output in outputs:
        torch.testing.assert_close(output, model(ids).logits, atol=1e-10, rtol=0)


def test_files_of_transformers_come_before_metas_beside_them(tmp_path):
    meta_checkpoint(tmp_path / "in", 1, axis=0)
    convert(tmp_path / "in", tmp_path / "out", tp=1, check="shapes")
    merge(tmp_path / "out", tmp_path / "both")
    (tmp_path / "in" / "consolidated.00.pth").rename(tmp_path / "both" / "consolidated.00.pth")
    told = convert(tmp_path / "both", tmp_path / "again", tp=2, check="shapes")
    assert told.notes == () and told.left_out == ("consolidated.00.pth",)
    merge(tmp_path / "again", tmp_path / "back")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("both", "back")]
    assert weights[0] == weights[1]


def test_what_is_assumed_is_said(tmp_path):
    at = tmp_path / "in"
    meta_checkpoint(at, 1, axis=0)
    note = lambda: convert(at, tmp_path / "out", tp=1, check="shapes", dry_run=True).notes  # noqa: E731
    says = "assumed, as params.json does not tell it: max_position_embeddings "
    assert note() == (says + "4096",)
    params(use_scaled_rope=True, rope_scale_factor=32)(at)
    assert note() == (says + "131072",)
    assert Meta(at).config["rope_scaling"]["factor"] == 32
    params(max_seq_len=64)(at)
    assert note() == ()
    (at / "params.json").write_text('{"dim": 48, "n_heads": 6, "n_kv_heads": 2}')
    said = "rms_norm_eps 1e-05, rope_theta 10000, max_position_embeddings 4096"
    assert note() == (f"assumed, as params.json does not tell it: {said}",)


@pytest.mark.slow
def test_with_the_layouts_proven(tmp_path):
    meta_checkpoint(tmp_path / "in", 2, axis=0)
    assert convert(tmp_path / "in", tmp_path / "out", tp=2).proof == "layouts"


def edit(path, change):
    shard = torch.load(path, weights_only=True)
    change(shard)
    torch.save(shard, path)


def params(**entries):
    """Change entries of params.json."""

    def change(at):
        path = at / "params.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    return change


def skip_layer(shard):
    for name in [name for name in shard if name.startswith("layers.1.")]:
        shard[name.replace("layers.1.", "layers.2.")] = shard.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda at: (at / "consolidated.00.pth").unlink(), "{at}: parts are missing: consolidated.00.pth"),
        (
            lambda at: (at / "consolidated.01.pth").rename(at / "consolidated.03.pth"),
            "{at}: parts are missing: consolidated.01.pth, consolidated.02.pth",
        ),
        (
            lambda at: (at / "consolidated.1.pth").write_bytes(b""),
            "{at}: consolidated.01.pth and consolidated.1.pth are the same part",
        ),
        (
            lambda at: (at / "consolidated.01.pth").unlink(),
            "{at}: tensor 'layers.0.attention.wq.weight' of 1 files is [24, 48], and params.json makes it "
            "[48, 48]: are all files there?",
        ),
        (
            lambda at: (at / "params.json").unlink(),
            "{at}/params.json: cannot be read: No such file or directory",
        ),
        (
            lambda at: (at / "params.json").write_text('{"dim": 48, "n_heads": "6"}'),
            "{at}/params.json: n_heads is a whole number from 1 on, not '6'",
        ),
        (params(norm_eps="x"), "{at}/params.json: norm_eps is a number above 0, not 'x'"),
        (params(rope_theta=[1]), "{at}/params.json: rope_theta is a number above 0, not [1]"),
        (params(rope_theta=True), "{at}/params.json: rope_theta is a number above 0, not True"),
        (params(max_seq_len=2.5), "{at}/params.json: max_seq_len is a number above 0, not 2.5"),
        (params(rope_scale_factor=-1), "{at}/params.json: rope_scale_factor is a number above 0, not -1"),
        (
            params(use_scaled_rope=True),
            "{at}/params.json: use_scaled_rope is true, and no file tells by what factor\n"
            '  = help: add it: "rope_scale_factor": 8 for Llama 3.1 and 3.3, 32 for Llama 3.2 of 1B and 3B',
        ),
        (
            lambda at: [
                params(use_scaled_rope=True, rope_scale_factor=8)(at),
                (at / "config.json").write_text('{"rope_parameters": {"factor": 32}}'),
            ],
            "{at}/config.json: rope_parameters has the factor 32, and 8 by params.json",
        ),
        (
            params(n_heads=3, n_kv_heads=1),
            "{at}/consolidated.00.pth: tensor 'rope.freqs' is [4], and params.json (dim 48, n_heads 3) "
            "makes it [8]; correct params.json",
        ),
        (params(use_scaled_rope="no"), "{at}/params.json: use_scaled_rope is true or false, not 'no'"),
        (
            params(vocab_size=500),
            "{at}: 'tok_embeddings.weight' is [32, 48]; params.json says vocab_size 500",
        ),
        (params(n_layers=3), "{at}: its files hold the layers 0, 1; params.json makes it 3 from 0 on"),
        (
            lambda at: [edit(at / f"consolidated.0{n}.pth", skip_layer) for n in (0, 1)],
            "{at}: its files hold the layers 0, 2; params.json makes it 2 from 0 on",
        ),
        (
            lambda at: (at / "config.json").write_text('{"num_hidden_layers": 5}'),
            "{at}/config.json: num_hidden_layers is 5, and 2 by params.json and the tensors; correct it, or "
            "remove config.json: one is made",
        ),
        (
            lambda at: edit(at / "consolidated.01.pth", lambda shard: shard.pop("norm.weight")),
            "{at}: tensor 'norm.weight' is missing in consolidated.01.pth",
        ),
        (
            lambda at: edit(at / "consolidated.01.pth", lambda shard: shard["norm.weight"].add_(1)),
            "{at}/consolidated.01.pth: tensor 'norm.weight' differs from that of consolidated.00.pth: "
            "largest difference 1",
        ),
        (
            lambda at: [
                edit(at / f"consolidated.0{n}.pth", lambda shard: shard.update(x=torch.zeros(1)))
                for n in (0, 1)
            ],
            "{at}: tensor 'x' is none of a Llama's",
        ),
        (
            lambda at: edit(
                at / "consolidated.01.pth",
                lambda s: s.update({"output.weight": torch.zeros(16, 47).double()}),
            ),
            "{at}: tensor 'output.weight': parts of [16, 48], [16, 47] do not fit together",
        ),
        (
            lambda at: edit(
                at / "consolidated.01.pth", lambda s: s.update({"output.weight": torch.zeros(16, 48)})
            ),
            "{at}/consolidated.01.pth: tensor 'output.weight' is torch.float32, and torch.float64 in "
            "consolidated.00.pth: they do not fit together",
        ),
    ],
)
def test_parts_that_do_not_make_a_whole(tmp_path, change, message):
    at = tmp_path / "in"
    meta_checkpoint(at, 2, axis=0)
    change(at)
    with pytest.raises(CheckpointError) as raised:
        convert(at, tmp_path / "out", plan="llama", tp=2, check="shapes")
    assert str(raised.value) == message.format(at=at)
    assert not (tmp_path / "out").exists()
