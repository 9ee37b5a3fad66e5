"""Meta's own Llama checkpoints, consolidated.00.pth … and params.json, read as the model of transformers.

Each file is one rank of Meta's model parallelism (https://github.com/meta-llama/llama). The parts are put
together on the dim they were cut on, renamed, and the rows of wq and wk go from Meta's interleaved rotary
order to the half-split order of transformers; the header's metadata says so. A config.json is made from
params.json and the shapes; one that is there may say more, and nothing else than they do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from autotp.checkpoint import metaconfig
from autotp.checkpoint.folder import Folder, companions_of, read_config, read_text, regular_file
from autotp.checkpoint.joined import Joined, as_single, check_equal
from autotp.checkpoint.pickled import load_tensors
from autotp.diagnostic import CheckpointError
from autotp.header import parse_json, shown

__all__ = ["Meta", "holds_meta"]

PARTS = re.compile(r"consolidated\.(\d+)\.pth")
ROPE = "rows of q_proj and k_proj permuted from Meta's interleaved rotary order to half-split order"
# Meta's name -> (transformers' name, the dim that it is cut on; None: whole on every rank)
LAYER: dict[str, tuple[str, int | None]] = {
    "attention.wq": ("self_attn.q_proj", 0),
    "attention.wk": ("self_attn.k_proj", 0),
    "attention.wv": ("self_attn.v_proj", 0),
    "attention.wo": ("self_attn.o_proj", 1),
    "feed_forward.w1": ("mlp.gate_proj", 0),
    "feed_forward.w2": ("mlp.down_proj", 1),
    "feed_forward.w3": ("mlp.up_proj", 0),
    "attention_norm": ("input_layernorm", None),
    "ffn_norm": ("post_attention_layernorm", None),
}
TOP: dict[str, tuple[str, int | None]] = {
    "tok_embeddings": ("model.embed_tokens", -1),  # dim 1 in Llama 1 and 2, dim 0 from Llama 3 on
    "norm": ("model.norm", None),
    "output": ("lm_head", 0),
}


def holds_meta(path: Path) -> bool:
    """Whether a folder holds Meta's files."""
    return path.is_dir() and any(PARTS.fullmatch(entry.name) for entry in path.iterdir())


class Meta(Joined):
    """A `Supply` (supply.py) of Meta's checkpoint; `folder` shows it as one of transformers' style.

    Raises CheckpointError for parts that are missing, that do not fit together or params.json, and for
    tensors that a Llama has not.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts = _parts(path)
        params = regular_file(path, "params.json")
        self.others = (params,)
        self.params = parse_json(read_text(params), params, "content")
        tensors = [load_tensors(part) for part in self.parts]
        self.heads = self._number("n_heads")
        self.kv_heads = self._number("n_kv_heads", self.heads)
        self.width = self._number("dim")
        self.places = {
            name: self._place(name, tensors) for part in tensors for name in part if name != "rope.freqs"
        }
        described = {}
        for name, (new, _) in self.places.items():
            whole = self._whole(name, [part[name].to("meta") for part in tensors])
            described[new] = (whole.dtype, whole.shape)
        file = as_single(path, described, {"format": "pt", "rope": ROPE})
        for needed in ("model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight"):
            if needed not in described:
                _refuse(path, f"no file holds what becomes {needed!r}")
        shapes = {name: entry.shape for name, entry in file.tensors.items()}
        metaconfig.check_params(self.params, shapes, path)
        told = metaconfig.told(self.params, shapes)
        told |= {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads}
        given = read_config(path)
        self._check_frequencies(tensors)
        told |= metaconfig.scaling(self.params, given, path)
        for key in told:
            if given.get(key, told[key]) != told[key]:
                _refuse(
                    path / "config.json",
                    f"{key} is {shown(given[key])}, and {shown(told[key])} by params.json and the tensors; "
                    "correct it, or remove config.json: one is made",
                )
        guessed = metaconfig.assumed(self.params, {**given, **told})
        said = ", ".join(f"{key} {value:g}" for key, value in guessed.items())
        self.assumed = (f"assumed, as params.json does not tell it: {said}",) if guessed else ()
        self.config = {**guessed, **given, **told}
        others = tuple(name for name in companions_of(path) if name not in ("config.json", "params.json"))
        self.folder = Folder(path, (file,), self.config, companions=others)

    def load(self) -> Callable[[str], torch.Tensor]:
        """See Joined."""
        tensors = [load_tensors(part) for part in self.parts]
        old = {new: name for name, (new, _) in self.places.items()}
        return lambda new: self._converted(old[new], [part[old[new]] for part in tensors])

    def companions(self) -> Mapping[str, Path | bytes]:
        """The other files, by relative name, and config.json as it was made."""
        made = (json.dumps(self.config, indent=2) + "\n").encode()
        return {**{name: self.path / name for name in self.folder.companions}, "config.json": made}

    def _check_frequencies(self, tensors: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """One rotary frequency for each pair of a head's elements: else the heads are others."""
        for part, held in zip(self.parts, tensors, strict=True):
            found, needed = held.get("rope.freqs"), [self.width // self.heads // 2]
            if found is not None and list(found.shape) != needed:
                _refuse(
                    part,
                    f"tensor 'rope.freqs' is {list(found.shape)}, and params.json (dim {self.width}, n_heads "
                    f"{self.heads}) makes it {needed}; correct params.json",
                )

    def _number(self, key: str, default: int | None = None) -> int:
        value = self.params.get(key, default)
        if type(value) is not int or not 0 < value < 1 << 31:
            _refuse(self.path / "params.json", f"{key} is a whole number from 1 on, not {value!r}")
        return value

    def _place(self, name: str, tensors: Sequence[Mapping[str, torch.Tensor]]) -> tuple[str, int | None]:
        """The new name of one of Meta's tensors, and the dim it is cut on."""
        absent = [part.name for part, held in zip(self.parts, tensors, strict=True) if name not in held]
        if absent:
            _refuse(self.path, f"tensor {name!r} is missing in {', '.join(absent)}")
        layer = re.fullmatch(r"layers\.(\d{1,6})\.([\w.]+)\.weight", name)
        known = LAYER.get(layer[2]) if layer else TOP.get(name.removesuffix(".weight"))
        if known is None:
            _refuse(self.path, f"tensor {name!r} is none of a Llama's")
        new, dim = known
        if dim == -1:
            dim = 0 if tensors[0][name].shape[-1] == self.width else 1
        return f"model.layers.{layer[1]}.{new}.weight" if layer else f"{new}.weight", dim

    def _whole(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parts of a tensor put together, in Meta's order."""
        new, dim = self.places[name]
        if dim is None:
            return parts[0]
        try:
            for part, file in zip(parts, self.parts, strict=True):
                if part.dtype != parts[0].dtype:  # torch.cat would make one of them
                    _refuse(
                        file,
                        f"tensor {name!r} is {part.dtype}, and {parts[0].dtype} in {self.parts[0].name}: "
                        "they do not fit together",
                    )
            whole = torch.cat(list(parts), dim)
        except RuntimeError as error:
            shapes = ", ".join(f"{list(part.shape)}" for part in parts)
            raise CheckpointError(
                f"{self.path}: tensor {name!r}: parts of {shapes} do not fit together"
            ) from error
        heads = self._rotary_heads(new)
        expected = (self.width // self.heads * heads, self.width)
        if heads and whole.shape != expected:
            _refuse(
                self.path,
                f"tensor {name!r} of {len(parts)} files is {list(whole.shape)}, and params.json makes it "
                f"{list(expected)}: are all files there?",
            )
        return whole

    def _converted(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parts of a tensor put together, in the order of transformers."""
        new, dim = self.places[name]
        if dim is None:
            check_equal(name, parts, self.parts)
        heads = self._rotary_heads(new)
        whole = self._whole(name, parts)
        return _half_split(whole, heads) if heads else whole

    def _rotary_heads(self, name: str) -> int:
        """How many heads a tensor has that rotary embeddings turn; 0 for all others."""
        heads = {"self_attn.q_proj.weight": self.heads, "self_attn.k_proj.weight": self.kv_heads}
        return next((count for end, count in heads.items() if name.endswith(end)), 0)


def _half_split(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from pairs (x0, y0, x1, y1, …) to halves (x0, x1, …, y0, y1, …)."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _parts(path: Path) -> list[Path]:
    """consolidated.NN.pth in the order of their numbers; a gap or a number twice is named."""
    found: dict[int, str] = {}
    for entry in sorted(path.iterdir()):
        number = PARTS.fullmatch(entry.name)
        if number:
            if int(number[1]) in found:
                _refuse(path, f"{found[int(number[1])]} and {entry.name} are the same part")
            found[int(number[1])] = entry.name
    missing = [n for n in range(max(found) + 1) if n not in found]
    if missing:
        _refuse(path, f"parts are missing: {', '.join(f'consolidated.{n:02}.pth' for n in missing[:8])}")
    return [regular_file(path, found[number]) for number in sorted(found)]


def _refuse(path: Path, fault: str) -> NoReturn:
    raise CheckpointError(f"{path}: {fault}")
