"""The inventory of a checkpoint, from its headers alone: no weight is read, and torch is not needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotp.checkpoint.folder import MANIFEST, open_folder
from autotp.checkpoint.formats import other_format
from autotp.diagnostic import CheckpointError
from autotp.header import Entry
from autotp.inventory import Inventory, ModuleInfo, TensorInfo

__all__ = ["describe_tensors", "inventory"]

# What transformers ties under `tie_word_embeddings`: the last segments of the two modules' names.
INPUT_EMBEDDINGS = (
    "embed_tokens",
    "wte",
    "word_embeddings",
    "embed_in",
    "tok_embeddings",
    "embeddings",
    "shared",
)
OUTPUT_EMBEDDINGS = (
    "lm_head",
    "generator_lm_head",
    "embed_out",
    "output_projection",
    "output",
    "decoder",
    "vocab_projector",
)


def inventory(path: str | Path, *, plan: Any = None) -> Inventory:
    """What a checkpoint holds: a folder, one .safetensors file, or a folder that autotp converted.

    Of a converted folder it is the inventory of the checkpoint that was converted. Headers do not tell
    what a module is: its kind is "norm" when all it has is 1-D and named like a norm's, else "unknown".
    A tied head of which only the bias is stored has its weight too, as a further name of the embedding's.
    Other trainers' files of each rank are put together by `plan`. What is no safetensors needs torch.
    Raises CheckpointError naming the file; for a config.json alone it says what is needed.

    >>> inventory("config.json")
    Traceback (most recent call last):
        ...
    autotp.diagnostic.CheckpointError: config.json: a configuration alone has no tensors; give the folder \
with its weights, or a factory as package.module:function
    """
    path = Path(path)
    if path.suffix == ".json" and path.name != MANIFEST:
        raise CheckpointError(
            f"{path}: a configuration alone has no tensors; give the folder with its weights, or a factory "
            "as package.module:function"
        )
    if path.name == MANIFEST or (path / MANIFEST).is_file():
        from autotp.checkpoint.manifest import load_manifest

        manifest = load_manifest(path.parent if path.name == MANIFEST else path)
        entries = [entry for file in manifest.files for entry in file.tensors.values()]
        return describe_tensors(entries, manifest.config, name=path.name or str(path))
    other = None if any(path.glob("*.safetensors")) else other_format(path, plan, "equal")
    folder = open_folder(path) if other is None else other.folder
    entries = [entry for _, entry in folder.tensors().values()]
    return describe_tensors(entries, folder.config, name=path.resolve().name)


def describe_tensors(
    entries: Iterable[Entry], config: Mapping[str, Any], *, name: str = "model"
) -> Inventory:
    """The inventory of these tensors: modules in natural order (layer 2 before layer 10)."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for entry in sorted(entries, key=lambda entry: _natural(entry.name)):
        path, _, local = entry.name.rpartition(".")
        info = TensorInfo(entry.name, entry.shape, entry.dtype, entry.itemsize)
        modules.setdefault(path, {})[local] = info
    described = {path: ModuleInfo(path, _kind(tensors), tensors) for path, tensors in modules.items()}
    paths = {".".join(path.split(".")[:n]): None for path in modules for n in range(1, path.count(".") + 2)}
    found = Inventory(described, paths=tuple(path for path in paths if path), config=dict(config), name=name)
    aliases = _tied(found, config)
    for head, first in aliases.items():
        path, tensors = head.rpartition(".")[0], found.tensors()
        if head not in tensors:  # stored under the embedding's name alone
            weight = replace(tensors[first], name=head)
            described[path] = replace(described[path], tensors={"weight": weight, **described[path].tensors})
    return replace(found, modules=described, aliases=aliases)


def _natural(name: str) -> list[tuple[int, str]]:
    """A key under which layers.2 comes before layers.10."""
    short = [(part, part.isdecimal() and len(part) < 18) for part in name.split(".")]
    return [(int(part), "") if number else (-1, part) for part, number in short]


def _kind(tensors: Mapping[str, TensorInfo]) -> str:
    """ "norm" for a 1-D weight (with or without a bias), the rest is unknown."""
    weight = tensors.get("weight")
    if weight is not None and len(weight.shape) == 1 and set(tensors) <= {"weight", "bias"}:
        return "norm"
    return "unknown"


def _tied(found: Inventory, config: Mapping[str, Any]) -> dict[str, str]:
    """{head: embedding} when the config ties them and the checkpoint holds both.

    Of a head with a bias of its own the bias is enough, one number a word: transformers stores a tied weight
    once. A config that is silent ties such a head too, as transformers' classes do: it has no other weight.
    """
    nested = config.get("text_config")
    tied = config.get("tie_word_embeddings")
    if tied is None and isinstance(nested, Mapping):
        tied = nested.get("tie_word_embeddings")

    def named(segments: tuple[str, ...]) -> list[ModuleInfo]:
        return [module for path, module in found.modules.items() if path.split(".")[-1] in segments]

    def is_leaf(module: ModuleInfo) -> bool:  # RoBERTa's lm_head has a bias, and layers inside
        return not any(path.startswith(f"{module.path}.") for path in found.modules)

    inputs = [_matrix(module) for module in named(INPUT_EMBEDDINGS)]
    pairs = []
    for head, first in ((head, first) for head in named(OUTPUT_EMBEDDINGS) for first in inputs if first):
        weight, bias = _matrix(head), head.tensors.get("bias")
        alone = set(head.tensors) == {"bias"} and bias is not None and bias.shape == first.shape[:1]
        if (tied is True and weight and weight.shape == first.shape) or (
            alone and tied in (True, None) and is_leaf(head)
        ):
            pairs.append((f"{head.path}.weight", first.name))
    return dict(pairs) if len(pairs) == 1 else {}


def _matrix(module: ModuleInfo) -> TensorInfo | None:
    """The weight of a layer or an embedding."""
    weight = module.tensors.get("weight")
    return weight if weight is not None and len(weight.shape) == 2 else None
