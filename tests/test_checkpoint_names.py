"""Names in a model and in a checkpoint that mean the same tensor."""

from autotp.checkpoint.names import resolve

BASE = ["embeddings.weight", "layer.0.LayerNorm.weight", "layer.0.LayerNorm.bias"]
FULL = [f"bert.{name}" for name in BASE] + ["head.weight"]


def test_the_same_names():
    assert resolve(BASE, BASE, "bert") == dict(zip(BASE, BASE, strict=True))


def test_a_base_in_a_model_with_a_head_and_the_reverse():
    up = dict(zip(BASE, FULL, strict=False))
    assert resolve(BASE, FULL, "bert") == up
    assert resolve(FULL, BASE, "bert") == {full: base for base, full in up.items()}


def test_gamma_and_beta():
    old = ["bert.layer.0.LayerNorm.gamma", "bert.layer.0.LayerNorm.beta", "bert.embeddings.gamma"]
    assert resolve(BASE, old, "bert") == {BASE[1]: old[0], BASE[2]: old[1]}


def test_nothing_is_guessed():
    assert resolve(["a.weight"], ["b.weight", "a.bias", "x.a.weight"], "bert") == {}
