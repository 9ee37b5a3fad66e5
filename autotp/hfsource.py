"""Where transformers keeps the plan of a model: in its config, in the class of its head, in the model itself.

`base_model_tp_plan` of a config names the modules of the base model, `_tp_plan` of a model class those of its
head; a model has gathered both, and those of its parts, under the names of its own modules
(https://huggingface.co/docs/transformers/perf_infer_gpu_multi). What the styles mean: `autotp.hfplan`.

transformers is asked for only where a config has to be read or a head looked up; torch only for a model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autotp.diagnostic import UsageError
from autotp.inventory import Inventory

__all__ = ["Entries", "layer_name", "read"]


def layer_name(name: str) -> str:
    """A name as transformers looks it up: a number after a dot becomes `*`, a second one after it does not.

    >>> layer_name("model.layers.0.mlp"), layer_name("0.mlp"), layer_name("blocks.0.1.mlp")
    ('model.layers.*.mlp', '0.mlp', 'blocks.*.1.mlp')
    """
    return re.sub(r"\.[0-9]+(\.|$)", r".*\1", name)


@dataclass(frozen=True)
class Entries:
    """transformers' plan for one model, and what is known of the model.

    `styles`: name → style. `config`: the config as a dict, for its numbers of heads. `names`: the model's
    modules and tensors, None where only a config is known.
    """

    styles: Mapping[str, str]
    config: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    names: Inventory | None = None


def read(source: object) -> Entries:
    """transformers' plan of a config, a model, a model class, a config as a dict, a folder or a config.json;
    or the plan itself, a dict from names to styles.

    Raises UsageError for what has no plan and where transformers is not installed.
    """
    if isinstance(source, Mapping) and "model_type" not in source:
        return Entries(_checked(source, "the dict"))
    if isinstance(source, (str, Path, Mapping)):
        source = _config(source)
    name = source.__name__ if isinstance(source, type) else type(source).__name__
    if isinstance(source, type):
        config = source() if hasattr(source, "base_model_tp_plan") else _default_config(source)
        own = getattr(source, "_tp_plan", None)
        return Entries(_checked(_merged(config, own), name), _as_dict(config))
    if hasattr(source, "named_modules") and hasattr(source, "config"):
        from autotp.trace.inventory import inventory

        own = getattr(source, "_tp_plan", None) or {}
        return Entries(_checked(own, name), _as_dict(source.config), inventory(source))  # type: ignore[arg-type]
    if hasattr(source, "base_model_tp_plan"):
        return Entries(_checked(_merged(source, _head(source)), name), _as_dict(source))
    raise UsageError(f"a config or a model of transformers has a plan, and this is of type {name}")


def _checked(styles: object, name: str) -> dict[str, str]:
    if not isinstance(styles, Mapping) or not styles:
        raise UsageError(f"{name} has no tensor-parallel plan of transformers")
    wrong = next(((k, v) for k, v in styles.items() if not (isinstance(k, str) and isinstance(v, str))), None)
    if wrong is not None:
        raise UsageError(f"transformers' plan maps names to styles, and has {wrong[0]!r}: {wrong[1]!r:.60}")
    return dict(styles)


def _merged(config: Any, head: Mapping[str, str] | None) -> dict[str, str]:
    return {**(getattr(config, "base_model_tp_plan", None) or {}), **(head or {})}


def _as_dict(config: Any) -> dict[str, Any]:
    found = config.to_dict()
    assert isinstance(found, dict)
    return found


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "reading transformers' plans needs transformers\n  = help: pip install 'autotp[hf]'"
        ) from error
    return transformers


def _config(source: str | Path | Mapping[str, Any]) -> Any:
    """The config that a folder, a config.json or a dict describes; nothing is downloaded, no code is run."""
    transformers = _transformers()
    try:
        if isinstance(source, Mapping):
            kind = str(source["model_type"])
            return transformers.AutoConfig.for_model(**source) if kind else None
        folder = Path(source) if Path(source).is_dir() else Path(source).parent
        if not (folder / "config.json").is_file():
            raise UsageError(f"{folder}: there is no config.json, so transformers' plan is not known")
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = "the dict" if isinstance(source, Mapping) else str(source)
        raise UsageError(
            f"{what}: transformers {transformers.__version__} reads no config: {reason}"
        ) from error


def _default_config(model: type) -> Any:
    config = getattr(model, "config_class", None)
    if config is None:
        raise UsageError(f"a model class of transformers has a config_class, and {model.__name__} has none")
    return config()


def _head(config: Any) -> dict[str, str]:
    """What the class of the architecture says of its head; the causal language model's by default."""
    transformers = _transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    named = getattr(config, "architectures", None) or [CAUSAL.get(config.model_type)]
    classes = [getattr(transformers, name, None) for name in named if isinstance(name, str)]
    own = getattr(next(filter(None, classes), None), "_tp_plan", None)
    return dict(own or {})
