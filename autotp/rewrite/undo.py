"""What carrying out a plan did to each module, found by comparing, so that it can be taken back.

Whatever gave a module another class, an attribute or a hook: the class, attributes and hooks of before are
remembered, and put back. Weights are not the business of this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from autotp.diagnostic import UsageError

__all__ = ["Change", "Hooks", "changes", "check", "hooks", "snapshot", "undo", "without_later"]

Snapshot = dict[str, tuple[type[nn.Module], dict[str, Any]]]
Hooks = dict[str, dict[str, frozenset[int]]]
_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


@dataclass(frozen=True)
class Change:
    """One module: its class before, what its class is called now, and its new attributes and hooks."""

    before: type[nn.Module]
    after: str
    added: tuple[str, ...] = ()
    replaced: Mapping[str, Any] = field(default_factory=dict)
    hooks: tuple[tuple[str, int], ...] = ()


def snapshot(model: nn.Module) -> Snapshot:
    """Every module's class and attributes, and which hooks it has."""
    return {path: (type(module), _attributes(module)) for path, module in model.named_modules()}


def changes(model: nn.Module, before: Snapshot) -> dict[str, Change]:
    """Every module that is another than in the snapshot, by its path."""
    found: dict[str, Change] = {}
    for path, module in model.named_modules():
        was, old = before[path]
        new = _attributes(module)
        change = Change(
            was,
            _name(type(module)),
            tuple(key for key in new if key not in old),
            {key: old[key] for key in new if key in old and not _is_hooks(key) and new[key] is not old[key]},
            tuple(
                (key, hook)
                for key in new
                if _is_hooks(key) and key in old
                for hook in new[key]
                if hook not in old[key]
            ),
        )
        if type(module) is not was or change.added or change.replaced or change.hooks:
            found[path] = change
    return found


def check(model: nn.Module, changed: Mapping[str, Change]) -> None:
    """Raises UsageError when a module is gone, or is not what carrying out the plan made of it."""
    modules = dict(model.named_modules())
    for path, change in changed.items():
        module = modules.get(path)
        what = f"{type(model).__name__}: its {path}" if path else type(model).__name__
        if module is None:
            raise UsageError(f"{what} is gone since the model was sharded, so nothing is put back")
        if _name(type(module)) != change.after:
            raise UsageError(
                f"{what} was {change.after} when the model was sharded and is {_name(type(module))} now, "
                "so nothing is put back"
            )


def undo(model: nn.Module, changed: Mapping[str, Change]) -> None:
    """Give the modules back their classes, attributes and hooks; what the user added since stays."""
    for path, change in changed.items():
        module = model.get_submodule(path)
        module.__class__ = change.before
        for key in change.added:
            module.__dict__.pop(key, None)
        module.__dict__.update(change.replaced)
        for table, hook in change.hooks:
            module.__dict__[table].pop(hook, None)


def hooks(model: nn.Module) -> Hooks:
    """The hooks of every module, by their numbers."""
    return {
        path: {
            key: frozenset(value) for key, value in _attributes(module).items() if _is_hooks(key) and value
        }
        for path, module in model.named_modules()
    }


def without_later(model: nn.Module, before: Hooks) -> None:
    """Take away the hooks that were not there before."""
    for path, module in model.named_modules():
        for key, table in module.__dict__.items():
            if _is_hooks(key) and isinstance(table, dict):
                for hook in [hook for hook in table if hook not in before.get(path, {}).get(key, ())]:
                    del table[hook]


def _is_hooks(key: str) -> bool:
    """Whether an attribute of a module is one of torch's tables of hooks."""
    return key.startswith("_") and "hooks" in key


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        key: set(value) if _is_hooks(key) and isinstance(value, dict) else value
        for key, value in module.__dict__.items()
        if key not in _TABLES
    }


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
