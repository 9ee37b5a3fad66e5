"""from_pretrained: every rank reads its own slices; what does not fit is told, all of it, by name."""

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, BertConfig, BertForMaskedLM, BertModel, LlamaConfig, LlamaForCausalLM

from autotp.checkpoint import convert
from autotp.checkpoint.load import from_pretrained
from autotp.comm import simulate
from autotp.diagnostic import CheckpointError, PlanError, UsageError
from autotp.plan import Plan, plan_for
from tests.checkpoints import minilm_folder

SMALL_LLAMA = {
    "vocab_size": 33, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 64,
}  # fmt: skip
SMALL_BERT = {
    "vocab_size": 33, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2,
    "num_attention_heads": 3, "max_position_embeddings": 32,
}  # fmt: skip


def randomise(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return model.eval()


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


def llama(folder, *, tied=False, dtype=torch.float64):
    model = randomise(LlamaForCausalLM(LlamaConfig(**SMALL_LLAMA, tie_word_embeddings=tied)).to(dtype))
    return model, saved(model, folder)


def bert(folder, kind=BertModel):
    model = randomise(kind(BertConfig(**SMALL_BERT)).double())
    return model, saved(model, folder)


def rewrite(folder, edit):
    """Change the tensors of a folder's only file."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def refusal(error, *args, **kwargs):
    with pytest.raises(error) as raised:
        from_pretrained(*args, **kwargs)
    return str(raised.value)


IDS = torch.randint(0, 33, (2, 8), generator=torch.Generator().manual_seed(1))


def logits(model):
    with torch.no_grad():
        out = model(input_ids=IDS)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


@pytest.mark.parametrize(
    ("tp", "check"), [(2, "shapes"), (3, "shapes"), pytest.param(2, "layouts", marks=pytest.mark.slow)]
)
def test_folder_and_rank_folders_give_the_unsharded_outputs(tmp_path, tp, check):
    model, folder = llama(tmp_path / "in")
    convert(folder, tmp_path / "out", tp=tp, check=check)

    def run(group):
        for source in (folder, tmp_path / "out"):
            sharded = from_pretrained(source, mesh=group, check=check)
            assert not sharded.training and {p.dtype for p in sharded.parameters()} == {torch.float64}
            assert not any(p.is_meta for p in sharded.parameters())
            held = sum(p.numel() for p in sharded.parameters())
            yield logits(sharded), held, sorted(sharded.state_dict())

    results = simulate(tp, lambda group: list(run(group)))
    whole = sum(p.numel() for p in model.parameters())
    for found in results:
        for output, held, names in found:
            torch.testing.assert_close(output, logits(model), atol=1e-10, rtol=0)
            assert held < 0.75 * whole and names == sorted(model.state_dict())


@pytest.mark.slow
def test_the_real_minilm(tmp_path):
    source = minilm_folder()
    convert(source, tmp_path / "out", tp=2)
    with torch.no_grad():
        expected = AutoModel.from_pretrained(source)(input_ids=IDS).last_hidden_state
    for folder in (source, tmp_path / "out"):
        for output in simulate(2, lambda group, at=folder: logits(from_pretrained(at, mesh=group))):
            torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)


def test_one_rank_without_torchrun_is_the_whole_model(tmp_path):
    model, folder = llama(tmp_path / "in")
    whole = from_pretrained(folder)
    torch.testing.assert_close(whole.state_dict(), model.state_dict(), atol=0, rtol=0)
    torch.testing.assert_close(logits(whole), logits(model), atol=0, rtol=0)


def test_what_generate_does_by_default_comes_along(tmp_path):
    _, folder = llama(tmp_path / "in")
    (folder / "generation_config.json").write_text(
        '{"temperature": 0.5, "do_sample": true, "eos_token_id": 7}'
    )
    convert(folder, tmp_path / "out", tp=1, check="shapes")
    for source in (folder, tmp_path / "out"):
        settings = from_pretrained(source, check="shapes").generation_config
        assert (settings.temperature, settings.do_sample, settings.eos_token_id) == (0.5, True, 7)
    for unsound in ("{", "[]", '{"max_new_tokens": "many"}'):
        (folder / "generation_config.json").write_text(unsound)
        message = refusal(CheckpointError, folder, check="shapes")
        assert message.startswith(f"{folder / 'generation_config.json'}: cannot be read: ")


def assert_same_weights(found, expected):
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (3, 1)])
def test_rank_folders_are_resharded_as_they_are_read(tmp_path, before, after):
    model, folder = llama(tmp_path / "in")
    convert(folder, tmp_path / "out", tp=before, check="shapes")
    for output in simulate(
        after, lambda group: logits(from_pretrained(tmp_path / "out", mesh=group, check="shapes"))
    ):
        torch.testing.assert_close(output, logits(model), atol=1e-10, rtol=0)
    if after == 1:
        assert_same_weights(from_pretrained(tmp_path / "out", check="shapes"), model)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_damage_is_found_while_resharding_whoever_needs_it(tmp_path, rank):
    _, folder = llama(tmp_path / "in")
    convert(folder, tmp_path / "out", tp=3, check="shapes")
    shard = tmp_path / "out" / f"rank-{rank}-of-3" / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-5] ^= 8
    shard.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=rf"rank-{rank}-of-3/model.safetensors: tensor '.*' of rank {rank} is damaged"
    ):
        simulate(2, lambda group: from_pretrained(tmp_path / "out", mesh=group, check="shapes"))


class Small(torch.nn.Module):
    """No architecture that a config.json could name."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 10), torch.nn.Linear(10, 6)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def test_a_model_of_ones_own_is_proven_converted_and_loaded(tmp_path):
    plan, model = {"up": "column", "down": "row"}, randomise(Small().double())
    (tmp_path / "in").mkdir()
    save_file(model.state_dict(), tmp_path / "in" / "model.safetensors")
    x = torch.randn(3, 6, dtype=torch.float64)
    with pytest.raises(CheckpointError, match=r"there is no config\.json, so the architecture is not known"):
        convert(tmp_path / "in", tmp_path / "out", plan=plan, tp=2)
    with pytest.raises(PlanError, match="AT3"):
        convert(tmp_path / "in", tmp_path / "out", plan={"up": "column"}, tp=2, model=model, inputs=x)
    done = convert(tmp_path / "in", tmp_path / "out", plan=plan, tp=2, model=model, inputs=x)
    assert done.proof == "layouts"
    with pytest.raises(
        UsageError, match='a model is given to prove the plan on, which check="shapes" leaves out'
    ):
        convert(tmp_path / "in", tmp_path / "x", plan=plan, tp=2, model=model, inputs=x, check="shapes")
    for source, how in ((tmp_path / "in", plan), (tmp_path / "out", None)):

        def run(group, source=source, how=how):
            with torch.device("meta"):
                empty = Small().double()
            return from_pretrained(source, plan=how, mesh=group, model=empty, inputs=x)(x)

        for output in simulate(2, run):
            torch.testing.assert_close(output, model(x), atol=1e-10, rtol=0)


def test_other_formats_are_read_by_each_rank(tmp_path):
    model, folder = llama(tmp_path / "in")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    for output in simulate(2, lambda group: logits(from_pretrained(folder, mesh=group, check="shapes"))):
        torch.testing.assert_close(output, logits(model), atol=1e-10, rtol=0)


def test_another_plan_than_the_folders_is_an_error(tmp_path):
    _, folder = llama(tmp_path / "in")
    convert(folder, tmp_path / "out", tp=1, check="shapes")
    rules = dict(plan_for("llama").rules)
    del rules["mlp.gate_proj"]
    other = Plan(rules=rules, model_type="llama", optional=["lm_head"])
    assert refusal(UsageError, tmp_path / "out", plan=other) == (
        f"{tmp_path / 'out'} was converted by another plan: mlp.gate_proj differs; leave the plan out, or "
        "convert the checkpoint again"
    )
    for same in ("llama", plan_for("llama"), "auto", None):
        from_pretrained(tmp_path / "out", plan=same, check="shapes")


def test_missing_unexpected_and_mismatched_are_listed_together(tmp_path):
    _, folder = llama(tmp_path / "in")

    def edit(tensors):
        del tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.norm.wieght"] = tensors.pop("model.norm.weight")
        tensors["model.layers.1.mlp.gate_proj.weight"] = torch.zeros(37, 23)
        tensors["model.layers.1.self_attn.o_proj.weight"] = torch.zeros(24, 24, dtype=torch.int64)

    rewrite(folder, edit)
    assert refusal(CheckpointError, folder, check="shapes") == (
        f"{folder}: 5 tensors do not fit the model:\n"
        "  missing: model.layers.0.mlp.up_proj.weight\n"
        "  missing: model.norm.weight\n"
        "  unexpected: model.norm.wieght\n"
        "  mismatched: model.layers.1.self_attn.o_proj.weight is I64, the model's is torch.float32\n"
        "  mismatched: model.layers.1.mlp.gate_proj.weight is [37, 23], the model's is [37, 24] "
        "(config.json: hidden_size 24)"
    )


def test_without_strict_only_the_unexpected_is_forgiven(tmp_path):
    _, folder = llama(tmp_path / "in")
    rewrite(folder, lambda tensors: tensors.update(extra=torch.zeros(2)))
    expected = f"{folder}: 1 tensor does not fit the model:\n  unexpected: extra"
    assert refusal(CheckpointError, folder, check="shapes") == expected
    from_pretrained(folder, check="shapes", strict=False)
    rewrite(folder, lambda tensors: tensors.pop("model.norm.weight"))
    assert "missing: model.norm.weight" in refusal(CheckpointError, folder, check="shapes", strict=False)


@pytest.mark.parametrize(
    ("change", "tensor", "hint"),
    [
        ({"vocab_size": 35}, "lm_head.weight is [33, 24], the model's is [35, 24]", "vocab_size 35"),
        (
            {"num_key_value_heads": 2},
            "model.layers.0.self_attn.k_proj.weight is [12, 24], the model's is [8, 24]",
            "num_key_value_heads 2 × head_dim 4",
        ),
    ],
)
def test_config_and_weights_that_disagree(tmp_path, change, tensor, hint):
    _, folder = llama(tmp_path / "in")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    assert f"  mismatched: {tensor} (config.json: {hint})" in refusal(CheckpointError, folder, check="shapes")


def test_tied_names_in_four_states(tmp_path):
    model, folder = llama(tmp_path / "in", tied=True)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    embedding = tensors.pop("model.embed_tokens.weight")
    for state, both in {
        "embedding": {"model.embed_tokens.weight": embedding},
        "head": {"lm_head.weight": embedding},
        "both": {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()},
    }.items():
        save_file(tensors | both, folder / "model.safetensors", {"format": "pt"})

        def run(group):
            sharded = from_pretrained(folder, mesh=group, check="shapes")
            assert sharded.lm_head.weight is sharded.model.embed_tokens.weight
            return logits(sharded)

        for output in simulate(2, run):
            torch.testing.assert_close(output, logits(model), atol=1e-10, rtol=0, msg=state)
    different = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding + 1}
    save_file(tensors | different, folder / "model.safetensors", {"format": "pt"})
    message = refusal(CheckpointError, folder, check="shapes")
    assert message.startswith(
        f"{folder}: the model ties 'lm_head.weight' to 'model.embed_tokens.weight', but "
    )
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    expected = (
        f"{folder}: 1 tensor does not fit the model:\n  missing: model.embed_tokens.weight or lm_head.weight"
    )
    assert refusal(CheckpointError, folder, check="shapes") == expected


@pytest.mark.slow
def test_a_head_alone_is_converted_by_what_the_model_proves(tmp_path):
    model, folder = llama(tmp_path / "in", tied=True)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    convert(folder, tmp_path / "out", tp=2)
    load = partial(from_pretrained, tmp_path / "out", check="shapes")
    for output in simulate(2, lambda group: logits(load(mesh=group))):
        torch.testing.assert_close(output, logits(model), atol=1e-10, rtol=0)


def test_a_head_that_is_not_tied_must_be_there(tmp_path):
    _, folder = llama(tmp_path / "in")
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert refusal(CheckpointError, folder, check="shapes").endswith("  missing: lm_head.weight")


def test_dtypes_are_the_files_or_the_one_asked_for(tmp_path):
    _, folder = llama(tmp_path / "in", dtype=torch.bfloat16)
    rewrite(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].float()}))
    kept = from_pretrained(folder, check="shapes").state_dict()
    assert kept.pop("model.norm.weight").dtype == torch.float32
    assert {tensor.dtype for tensor in kept.values()} == {torch.bfloat16}
    cast = from_pretrained(folder, check="shapes", dtype=torch.float64)
    assert {tensor.dtype for tensor in cast.parameters()} == {torch.float64}


class Counting(Small):
    """Buffers that are no floats."""

    def __init__(self):
        super().__init__()
        self.register_buffer("places", torch.arange(2**40, 2**40 + 3))
        self.register_buffer("mask", torch.tensor([True, False, True]))


def test_a_dtype_that_is_asked_for_is_that_of_floats_alone(tmp_path):
    model = Counting()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    given = {"plan": {"up": "column", "down": "row"}, "dtype": torch.bfloat16, "inputs": torch.randn(3, 6)}

    def run(group):
        with torch.device("meta"):
            empty = Counting()
        return from_pretrained(tmp_path, mesh=group, model=empty, **given)

    for loaded in simulate(2, run):
        assert {tensor.dtype for tensor in loaded.parameters()} == {torch.bfloat16}
        for name in ("places", "mask"):
            there, whole = getattr(loaded, name), getattr(model, name)
            assert there.dtype == whole.dtype and torch.equal(there, whole), name


def test_dtype_is_spelled_as_transformers_does(tmp_path):
    _, folder = llama(tmp_path / "in", dtype=torch.bfloat16)
    for spelled, dtype in (("auto", torch.bfloat16), ("float16", torch.float16)):
        loaded = from_pretrained(folder, check="shapes", dtype=spelled)
        assert {tensor.dtype for tensor in loaded.parameters()} == {dtype}, spelled
    for wrong in ("half precision", "int8", torch.int8, 16, "nn"):
        says = "dtype is a floating-point dtype, as torch.bfloat16 or 'bfloat16', or 'auto', not "
        assert refusal(UsageError, tmp_path / "nothing", dtype=wrong) == says + repr(wrong)


def test_a_base_checkpoint_in_a_model_with_a_head_and_the_reverse(tmp_path):
    with_head, folder = bert(tmp_path / "mlm", BertForMaskedLM)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    rewrite(folder, lambda t: t.update({"bert.pooler.dense.weight": torch.zeros(24, 24).double(),
                                        "bert.pooler.dense.bias": torch.zeros(24).double()}))  # fmt: skip
    convert(folder, tmp_path / "out", tp=2)  # the proof speaks of `encoder`, the files of `bert.encoder`
    with torch.no_grad():
        expected = with_head.bert(input_ids=IDS).last_hidden_state
    for source in (folder, tmp_path / "out"):
        load = partial(from_pretrained, source, check="shapes")
        for output in simulate(2, lambda group, load=load: logits(load(mesh=group))):
            torch.testing.assert_close(output, expected, atol=1e-10, rtol=0)
    _, base = bert(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    message = refusal(CheckpointError, base, check="shapes")
    missing = [line.removeprefix("  missing: ") for line in message.splitlines()[1:] if "missing" in line]
    assert missing and all(line.startswith("cls.") for line in missing)
    assert [line for line in message.splitlines() if "unexpected" in line] == [
        "  unexpected: pooler.dense.bias", "  unexpected: pooler.dense.weight"
    ]  # fmt: skip


def test_old_names_and_computed_buffers(tmp_path):
    model, folder = bert(tmp_path / "in")

    def edit(tensors):
        for name in [name for name in tensors if "LayerNorm" in name]:
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            )
            tensors[old] = tensors.pop(name)
        tensors["embeddings.position_ids"] = torch.arange(32)[None]

    rewrite(folder, edit)
    whole = from_pretrained(folder, check="shapes")
    torch.testing.assert_close(logits(whole), logits(model), atol=0, rtol=0)


def test_a_damaged_shard_is_found_while_loading(tmp_path):
    _, folder = llama(tmp_path / "in")
    convert(folder, tmp_path / "out", tp=2, check="shapes")
    path = tmp_path / "out" / "rank-1-of-2" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as raised:
        simulate(2, lambda group: from_pretrained(tmp_path / "out", mesh=group, check="shapes"))
    assert str(raised.value).endswith(
        "of rank 1 is damaged: its bytes have not the digest that autotp.json tells; copy this rank's folder "
        "again, or convert again"
    )
    assert str(raised.value).startswith(f"{path}: tensor ")


def test_a_folder_of_another_cut_is_an_error(tmp_path):
    _, folder = llama(tmp_path / "in")
    convert(folder, tmp_path / "out", tp=2, check="shapes")
    manifest = json.loads((tmp_path / "out" / "autotp.json").read_text())
    halves = manifest["tensors"]["model.layers.0.mlp.up_proj.weight"]["layout"]["deal"]["ranges"]
    assert halves == [[0, 19], [19, 37]]
    halves[:] = [[0, 18], [18, 37]]
    (tmp_path / "out" / "autotp.json").write_text(json.dumps(manifest))
    with pytest.raises(
        CheckpointError, match=r"up_proj.weight' is F64 \[19, 24\]; autotp.json gives this rank F64 "
    ):
        simulate(2, lambda group: from_pretrained(tmp_path / "out", mesh=group, check="shapes"))


def load_one_broken(rank, size, folder):
    """On real ranks: one of them cannot read its shard."""
    try:
        from_pretrained(folder, check="shapes")
    except (CheckpointError, UsageError) as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


@pytest.mark.slow
def test_what_fails_on_one_rank_fails_on_all(ranks, tmp_path):
    _, folder = llama(tmp_path / "in")
    convert(folder, tmp_path / "out", tp=2, check="shapes")
    assert ranks(2)(load_one_broken, str(tmp_path / "out")) == ["loaded", "loaded"]
    shutil.rmtree(tmp_path / "out" / "rank-1-of-2")
    first, second = ranks(2)(load_one_broken, str(tmp_path / "out"))
    assert second.startswith("CheckpointError: ") and "rank-1-of-2" in second
    assert first.startswith("UsageError: ") and "rank-1-of-2" in first


def load_derived(rank, size, folder, ids):
    """On real ranks: the model of a folder by a plan that each rank derives, and its logits."""
    model = from_pretrained(folder, plan="auto")
    with torch.no_grad():
        return model(input_ids=ids).logits, model.lm_head.weight.shape[0]


@pytest.mark.slow
def test_a_derived_plan(ranks, tmp_path):
    model, folder = llama(tmp_path / "in")
    ids = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    found = ranks(2)(load_derived, str(folder), ids)
    assert [rows for _, rows in found] == [17, 16]
    assert all((logits - wanted).abs().max() < 1e-5 for logits, _ in found)
