"""Whether code decides by the number of a layer."""

from __future__ import annotations

import pytest
from torch import nn

from autotp.trace.indexed import decides_by_attribute, decides_by_position


class Hands:
    def __init__(self, layer_idx):
        self.layer_idx = layer_idx
        self.even = layer_idx % 2 == 0

    def forward(self, x, cache):
        kind = self.config.layer_types[self.layer_idx]
        return cache.update(x, self.layer_idx) if cache is not None else kind


class Compares:
    def forward(self, x):
        return x if self.layer_idx == 0 else -x


class Halves:
    def forward(self, x):
        return x * (self.layer_idx // 2)


class Belongs:
    def helper(self, x):
        return [y for y in x if self.layer_idx in self.skipped]


class Inherits(Compares):
    pass


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Hands, False), (Compares, True), (Halves, True), (Belongs, True), (Inherits, True), (nn.Linear, False)],
)
def test_attributes(kind, expected):
    assert decides_by_attribute(kind, "layer_idx") == expected
    assert not decides_by_attribute(kind, "other") or kind is None


class Plain:
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Numbered:
    def forward(self, x, cache):
        for i, layer in enumerate(self.layers):
            x = layer(x, self.config.kinds[i], cache[i])
        return x


class Ranged:
    def forward(self, x):
        for i in range(len(self.layers)):
            x = self.layers[i](x)
        return x


class Sliced:
    def forward(self, x):
        for layer in self.layers[: self.config.num_hidden_layers]:
            x = layer(x)
        return self.layers[0](self.layers[-1](x))


class Skips:
    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if i != 3:
                x = layer(x)
        return x


class Every:
    def forward(self, x):
        return [layer(x) for i, layer in enumerate(self.layers) if i % 2]


class Named:
    def forward(self, x):
        return self.layers[3](x)


class Late:
    def forward(self, x):
        for layer in self.layers[2:]:
            x = layer(x)
        return x


class Counts:
    def forward(self, x):
        n = 0
        for layer in self.layers:
            x = layer(x)
            n += 1  # noqa: SIM113
            if n == 2:
                x = -x
        return x


class Pairs:
    def forward(self, x):
        match len(self.layers):
            case 2:
                return x
        for i, layer in enumerate(self.layers):
            x = layer(x) if i > 1 else x
        return x


class Elsewhere(Plain):
    def other(self, x):
        return [i for i in range(3) if i == 2]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Plain, False), (Numbered, False), (Ranged, False), (Sliced, False), (Elsewhere, False),
        (Skips, True), (Every, True), (Named, True), (Late, True), (Counts, True), (Pairs, True),
    ],
)  # fmt: skip
def test_positions(kind, expected):
    assert decides_by_position(kind, "layers") == expected


def test_without_source_all_is_possible():
    names = {}
    exec("class Made:\n    def forward(self, x):\n        return x\n", names)
    assert decides_by_position(names["Made"], "layers") and decides_by_attribute(names["Made"], "layer_idx")
