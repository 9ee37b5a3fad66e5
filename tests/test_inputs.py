"""Sample inputs: given, made from a config, found by trying."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autotp
from autotp.trace.inputs import Samples, make
from autotp.trace.recorder import record
from autotp.trace.sizes import heads_of, sizes_of
from tests import architectures, models


def shapes(samples):
    named = {k: tuple(v.shape) for k, v in samples.kwargs.items()}
    return [tuple(a.shape) for a in samples.args], named


def runs(model, samples):
    with torch.no_grad():
        return model(*samples.args, **samples.kwargs, **samples.labels)


# -- given


def test_given_inputs():
    x = torch.zeros(2, 3)
    assert Samples.given(x).args == (x,) and Samples.given([x, 1]).args == (x, 1)
    assert Samples.given({"x": x}).kwargs == {"x": x} and Samples.given(x).origin == "given"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({1: 2}, "inputs: a dict of samples is keyed by the names of forward's arguments"),
        (3, "inputs is a tensor, a tuple of arguments or a dict of keyword arguments, not int"),
    ],
)
def test_inputs_that_cannot_mean_anything(inputs, message):
    with pytest.raises(autotp.UsageError, match=f"^{message}$"):
        make(nn.Linear(2, 2), inputs)


# -- from a config


FAST = ("llama", "bert", "t5", "whisper", "vit")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in architectures.KNOWN]
)
def test_samples_of_transformers_models(name):
    model = architectures.build(name)
    samples = make(model)
    assert samples.origin == "config"
    assert set(samples.kwargs) >= set(architectures.inputs(model))
    runs(model, samples)


def used(model, samples, names=("input_ids", "decoder_input_ids")):
    return {n for k, v in samples.kwargs.items() if k in names for n in v.shape}


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", pytest.param("t5", marks=pytest.mark.slow)])
@pytest.mark.parametrize("pair", [0, 1])
def test_sizes_say_where_they_come_from(name, pair):
    model = architectures.build(name)
    samples = make(model).pair if pair else make(model)
    for size in used(model, samples):
        assert all(n % size for n in sizes_of(model)), size
        assert size > heads_of(model) == (3 if name == "gpt2" else 6)
    batch, sequence = samples.kwargs["input_ids"].shape
    assert batch != sequence


def test_pairs_differ_in_every_size():
    model = architectures.build("t5")
    samples = make(model)
    first, second = used(model, samples), used(model, samples.pair)
    assert samples.pair.kwargs.keys() == samples.kwargs.keys() and samples.pair.labels.keys() == {"labels"}
    assert len(first) == len(second) == 3 and not first & second


def test_the_sequence_stays_within_the_positions():
    model = architectures.build("bert", max_position_embeddings=12)
    samples = make(model)
    batch, sequence = samples.kwargs["input_ids"].shape
    assert sequence <= 8 < batch or batch > 6
    runs(model, samples)


def test_few_positions_and_many_heads():
    model = architectures.build("gpt2", n_positions=8, n_embd=46, n_head=23)
    batch, sequence = make(model).kwargs["input_ids"].shape
    assert sequence == 4 and batch > 23
    runs(model, make(model))


def test_the_padding_is_real():
    mask = make(architectures.build("llama")).kwargs["attention_mask"]
    assert mask[0].tolist() == sorted(mask[0].tolist(), reverse=True) and 0 < mask[0].sum() < mask.shape[1]
    assert mask[1:].all()


def test_ids_are_no_padding():
    model = architectures.build("roberta", vocab_size=5, pad_token_id=1, bos_token_id=0, eos_token_id=2)
    assert not (make(model).kwargs["input_ids"] == 1).any()


@pytest.mark.parametrize(
    ("name", "expected"), [("llama", True), ("bert", True), ("t5", True), ("whisper", True), ("vit", False)]
)
def test_labels(name, expected):
    model = architectures.build(name)
    samples = make(model)
    assert bool(samples.labels) == expected
    if expected:
        assert runs(model, samples).loss.dim() == 0


def test_labels_of_a_classifier():
    from transformers import BertForSequenceClassification

    config = architectures.build("bert", num_labels=5).config
    model = BertForSequenceClassification(config).eval()
    samples = make(model)
    assert samples.labels["labels"].shape == samples.kwargs["input_ids"].shape[:1]
    assert runs(model, samples).loss.dim() == 0


def test_a_model_of_two_modalities_gets_both():
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 3}
    text = {**small, "vocab_size": 97, "max_position_embeddings": 40}
    vision = {**small, "image_size": 16, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision)).eval()
    samples = make(model)
    assert {"input_ids", "pixel_values"} <= set(samples.kwargs)
    runs(model, samples)


def test_samples_have_the_dtype_of_the_model():
    assert make(architectures.build("vit").double()).kwargs["pixel_values"].dtype == torch.float64


def test_a_model_on_meta_gets_real_samples():
    model = architectures.build("llama", device="meta")
    assert make(model).kwargs["input_ids"].device.type == "cpu"
    record(model, (), make(model).kwargs)


# -- found


class Call(nn.Module):
    """Layers by name, and what forward does with them."""

    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)


class Cross(Call):
    def forward(self, x, context):
        return self.q(x) @ self.k(context).transpose(-2, -1)


class Tokens(Call):
    def forward(self, ids, features):
        return self.embed(ids) + self.fc(features)


class Named(Call):
    def forward(self, x, *, scale, shift):
        return self.fc(x) * self.scale(scale) + self.shift(shift)


class Optional(Call):
    def forward(self, x=None, mask=None):
        x = self.fc(x)
        return x if mask is None else x * mask


class Masked(Call):
    def forward(self, x, mask):
        return self.fc(x).masked_fill(~mask.unsqueeze(-1), 0.0)


class Labelled(Call):
    def forward(self, x, targets):
        return F.cross_entropy(self.fc(x), targets)


class Lenet(Call):
    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return self.fc(x.flatten(1))


class Late(Call):
    """The layer that is defined first is not the one that is met first."""

    def forward(self, x):
        return self.head(self.body(x))


class Constant(Call):
    def forward(self):
        return self.fc.weight.sum()


CASES = [
    (lambda: nn.Linear(10, 14), ([(13, 10)], {})),
    (lambda: nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16)), ([(7, 16)], {})),
    (lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4)), ([(7, 5)], {})),
    (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), ([(7, 3, 37, 41)], {})),
    (lambda: nn.Sequential(nn.Conv1d(3, 4, 3)), ([(7, 3, 67)], {})),
    (lambda: nn.Sequential(nn.Conv3d(2, 4, 3)), ([(7, 2, 17, 19, 23)], {})),
    (lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)), ([(7, 4, 37, 41)], {})),
    (lambda: nn.GRU(6, 8, batch_first=True), ([(7, 5, 6)], {})),
    (lambda: models.Opt(), ([(11, 48)], {})),
    (lambda: Cross(q=nn.Linear(6, 8), k=nn.Linear(10, 8)), ([(11, 6), (11, 10)], {})),
    (lambda: Tokens(embed=nn.Embedding(9, 4), fc=nn.Linear(6, 4)), ([(7, 5), (7, 5, 6)], {})),
    (lambda: nn.Bilinear(6, 10, 4), ([(11, 6), (11, 10)], {})),
    (
        lambda: Named(fc=nn.Linear(4, 6), scale=nn.Linear(8, 6), shift=nn.Embedding(9, 6)),
        ([(7, 4)], {"scale": (7, 8), "shift": (7,)}),
    ),
    (lambda: Optional(fc=nn.Linear(4, 6)), ([(7, 4)], {})),
    (lambda: Masked(fc=nn.Linear(4, 6)), ([(7, 5, 4)], {})),
    (lambda: Labelled(fc=nn.Linear(4, 6)), ([(7, 4)], {})),
    (lambda: Lenet(conv=nn.Conv2d(1, 4, 5), fc=nn.Linear(4 * 12 * 12, 10)), ([(7, 1, 28, 28)], {})),
    (lambda: Late(head=nn.Linear(6, 3), body=nn.Linear(8, 6)), ([(7, 8)], {})),
    (lambda: Constant(fc=nn.Linear(4, 6)), ([], {})),
]


@pytest.mark.parametrize(("build", "expected"), CASES)
def test_what_each_argument_meets(build, expected):
    model = build().double()
    samples = make(model)
    assert samples.origin == "found"
    runs(model, samples)
    args, kwargs = shapes(samples)
    assert len(args) >= len(expected[0]) and set(kwargs) == set(expected[1])
    for size in (n for shape in args for n in shape[:1]):
        assert size not in sizes_of(model)


@pytest.mark.parametrize(("build", "expected"), CASES[:9])
def test_the_shapes_that_are_found(build, expected):
    assert shapes(make(build())) == expected


def test_both_ranks_are_given_where_both_run():
    (longer,) = make(models.Opt()).also
    assert shapes(longer) == ([(11, 7, 48)], {})
    assert make(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).also == ()
    assert make(nn.Embedding(4, 4)).also == ()


def test_other_sizes():
    assert shapes(make(nn.Linear(10, 14)).pair) == ([(23, 10)], {})
    assert make(nn.Linear(4, 4), torch.zeros(2, 4)).pair is None


def test_the_search_leaves_the_module_alone():
    model = Cross(q=nn.Linear(6, 8), k=nn.Linear(10, 8))
    before = [id(p) for p in model.parameters()]
    make(model)
    assert [id(p) for p in model.parameters()] == before and "forward" not in vars(model)


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, table):
        return self.fc(x)[table["rows"]]


def test_what_cannot_be_found_is_said():
    with pytest.raises(autotp.UsageError) as caught:
        make(Odd())
    first, note, remedy = str(caught.value).splitlines()
    assert remedy == "  = help: on the command line a factory gives them: it returns (model, inputs)"
    assert first == (
        "Odd: autotp cannot tell what forward(x, table) takes. Pass sample inputs: "
        "inputs=x, inputs=(x, y) or inputs={'x': x}"
    )
    assert note.startswith(
        "  = note: the nearest try was forward([7, 4] float32, [7, 4] float32): IndexError: "
    )
    assert "tests/test_inputs.py:" in note


def test_a_module_without_layers():
    with pytest.raises(autotp.UsageError, match=r"autotp cannot tell what forward\(\) takes|forward\(none\)"):
        make(nn.Module())
