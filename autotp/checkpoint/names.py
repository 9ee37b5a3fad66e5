"""Which name in a checkpoint is which name in a model: usually the same, sometimes nearly.

A model with a head calls its base `bert.…`; a checkpoint of the base alone does not, and the reverse. Old
checkpoints say gamma and beta where models say weight and bias. transformers reads both, and so do we.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

__all__ = ["resolve"]

OLD = {"weight": "gamma", "bias": "beta"}


def resolve(wanted: Iterable[str], there: Collection[str], prefix: str) -> dict[str, str]:
    """{name in the model: name in the checkpoint}, for the names that are there.

    `prefix` is what a model with a head calls its base (transformers' base_model_prefix), or empty.

    >>> resolve(["bert.pooler.bias", "head.bias"], ["pooler.bias"], "bert")
    {'bert.pooler.bias': 'pooler.bias'}
    """
    found = {}
    for name in wanted:
        spelled = [name]
        if prefix:
            spelled += [name.removeprefix(f"{prefix}."), f"{prefix}.{name}"]
        path, _, last = name.rpartition(".")
        if last in OLD and path.lower().endswith("norm"):
            spelled += [f"{one.rpartition('.')[0]}.{OLD[last]}" for one in spelled]
        chosen = next((one for one in spelled if one in there), None)
        if chosen is not None:
            found[name] = chosen
    return found
