"""Patterns: how a rule of a plan names the modules and tensors that it is for.

A pattern is read from the end of a name and in whole segments; `*` is any one segment:

    fc1                  mlp.fc1, layers.3.mlp.fc1              not  mlp.fc12, fc1.bias
    output.dense         layer.0.output.dense, layer.0.attention.output.dense
    layers.*.mlp.fc1     model.layers.3.mlp.fc1                 not  layers.3.extra.mlp.fc1

Of two patterns for one name the one with more literal segments wins, so `attention.output.dense`
beats `output.dense` where both match. Equally many are a tie, which the caller has to report.

This file knows nothing of torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["ANY", "fault", "general", "literals", "matches", "nearest", "segments", "shortest", "strongest"]

ANY = "*"
LONGEST = 512  # characters; the longest parameter names of real models have about 100
MOST_CANDIDATES = 4000  # names compared for a suggestion, so that a hostile file costs no minutes


def segments(name: str) -> tuple[str, ...]:
    """The parts of a dotted name or pattern.

    >>> segments("layers.*.fc1")
    ('layers', '*', 'fc1')
    """
    return tuple(name.split("."))


def general(name: str) -> str:
    """A name with its layer numbers as `*`.

    >>> general("model.layers.0.mlp.fc1")
    'model.layers.*.mlp.fc1'
    """
    return ".".join(ANY if part.isdigit() else part for part in segments(name))


def literals(pattern: str) -> int:
    """How many segments of a pattern are names: the more, the stronger.

    >>> literals("layers.*.fc1")
    2
    """
    return sum(part != ANY for part in segments(pattern))


def fault(pattern: str) -> str | None:
    """What is wrong with the writing of a pattern, or None.

    >>> fault("gate_*")
    '`*` stands for one whole segment, not for a part of `gate_*`'
    """
    parts = segments(pattern)
    if not pattern:
        return "it is empty"
    if len(pattern) > LONGEST:
        return f"it is longer than {LONGEST} characters"
    if pattern != pattern.strip() or not pattern.isprintable():
        return "it has blanks at an end or characters that cannot be printed"
    if "" in parts:
        return "it has an empty segment: names are joined by single dots"
    for part in parts:
        if ANY in part and part != ANY:
            return f"`*` stands for one whole segment, not for a part of `{part}`"
    if literals(pattern) == 0:
        return "it has no name: `*` alone matches everything"
    return None


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern is for a module path or tensor name.

    >>> matches("output.dense", "layer.0.attention.output.dense")
    True
    >>> matches("dense", "layer.0.dense_h_to_4h")
    False
    """
    return _fits(segments(pattern), segments(name))


def _fits(wanted: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    if len(wanted) > len(parts) or wanted[-1] not in (ANY, parts[-1]):
        return False
    tail = parts[len(parts) - len(wanted) :]
    return all(want in (ANY, part) for want, part in zip(wanted, tail, strict=True))


def strongest(patterns: Iterable[str], name: str) -> tuple[str, ...]:
    """The patterns that decide about a name: none, one, or several in a tie.

    >>> strongest(["dense", "output.dense", "fc1"], "layer.0.output.dense")
    ('output.dense',)
    >>> strongest(["layers.*.fc1", "mlp.fc1"], "layers.0.mlp.fc1")
    ('mlp.fc1',)
    >>> strongest(["*.mlp.fc1", "mlp.fc1"], "layers.0.mlp.fc1")
    ('*.mlp.fc1', 'mlp.fc1')
    """
    parts = segments(name)
    found = [pattern for pattern in patterns if _fits(segments(pattern), parts)]
    most = max(map(literals, found), default=0)
    return tuple(pattern for pattern in found if literals(pattern) == most)


def nearest(pattern: str, names: Iterable[str], *, count: int = 2) -> tuple[str, ...]:
    """Patterns that look like this one and do match some of the names, the closest first.

    Layer numbers are written as `*`, unless the pattern has numbers itself.

    >>> nearest("layers.*.mlp.gate_prj", ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"])
    ('layers.*.mlp.gate_proj', 'layers.*.mlp.up_proj')
    """
    wanted = segments(pattern)
    numbered = any(part.isdigit() for part in wanted)
    lengths = range(max(1, len(wanted) - 1), len(wanted) + 2)
    candidates: dict[str, None] = {}
    for name in names:
        parts = segments(name if numbered else general(name))
        for length in lengths:
            tail = parts[-length:]
            if len(tail) == length and tail[0] != ANY:
                candidates[".".join(tail)] = None
        if len(candidates) >= MOST_CANDIDATES:
            break
    close = difflib.get_close_matches(pattern, candidates, n=4 * count, cutoff=0.7)
    best: dict[str, str] = {}  # for each last name its closest candidate
    for candidate in close:
        best.setdefault(segments(candidate)[-1], candidate)
    return tuple(best.values())[:count]


def shortest(name: str, names: Iterable[str]) -> str:
    """The shortest pattern for a name that fits no other of the names; layer numbers become `*`.

    >>> shortest("model.layers.0.mlp.fc1", ["model.layers.0.mlp.fc1", "model.layers.1.mlp.fc1", "fc1"])
    'mlp.fc1'
    """
    parts = segments(general(name))
    others = {segments(general(other)) for other in names} - {parts}
    for length in range(1, len(parts)):
        tail = parts[-length:]
        if tail[0] != ANY and not any(_fits(tail, other) for other in others):
            return ".".join(tail)
    return name
