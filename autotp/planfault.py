"""From a value that is not a plan to findings: each fault with its place, the values allowed and a remedy.

`Plan` and `Rule` are pydantic models. Their validators state a fault once, by `refuse(...)`; whatever
way a plan comes in (a YAML or JSON file, a dict, keyword arguments) it is told with the same words,
all faults at once, as `PlanError`. Only the line and the carets depend on the way: a `Source` has them.

    AT101  the file cannot be read, or no shipped plan has that name
    AT102  not YAML or JSON, empty, several documents, nested too deeply
    AT103  YAML that plans do without: aliases, anchors, merge keys, tags, keys that are not text
    AT104  a key that is given twice
    AT105  an unknown key of the plan, or no mapping at all
    AT106  a version other than 1
    AT107  no rules
    AT108  a pattern that cannot match
    AT109  an unknown style, or a rule without one
    AT110  an unknown option
    AT111  a value that an option cannot have
    AT112  an option that belongs to other styles
    AT113  an optional pattern that is no rule of the plan

This file knows nothing of torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from autotp.diagnostic import Diagnostic, PlanError, Span

__all__ = ["Declared", "Place", "Source", "did_you_mean", "quoted", "refuse"]

Place = tuple[str | int, ...]  # ("rules", "fc1", "style")
LONGEST_QUOTE = 60


@dataclass(frozen=True)
class Source:
    """A plan as data, where each part of it stands in its text, and the faults of the text itself.

    `keys` and `values` are keyed by place: `keys["rules", "fc1"]` is where `fc1` stands,
    `values["rules", "fc1"]` is where the rule stands. `readable` is False when there are no data.
    """

    file: str
    data: object = None
    keys: Mapping[Place, Span] = field(default_factory=dict)
    values: Mapping[Place, Span] = field(default_factory=dict)
    faults: tuple[Diagnostic, ...] = ()
    readable: bool = True

    def span(self, place: Place, *, key: bool = False) -> Span | None:
        """Where a value, or its key, stands; failing that, what holds it."""
        while place:
            for spans in (self.keys, self.values) if key else (self.values, self.keys):
                if place in spans:
                    return spans[place]
            place = place[:-1]
        return self.values.get(())


def quoted(value: object) -> str:
    """A value as a plan would have it, between backticks, cut when it is long.

    >>> quoted(None), quoted(True), quoted("colum"), quoted([1, 2])
    ('nothing', '`true`', '`colum`', 'the list `[1, 2]`')
    """
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, Mapping):
        return "a mapping"
    text = value if isinstance(value, str) else repr(value)
    if len(text) > LONGEST_QUOTE:
        text = text[:LONGEST_QUOTE] + "…"
    return f"the list `{text}`" if isinstance(value, (list, tuple)) else f"`{text}`"


def did_you_mean(word: str, known: Iterable[str]) -> tuple[str, ...]:
    """A help line with the nearest known word, or nothing.

    >>> did_you_mean("colum", ["column", "row"])
    ('did you mean `column`?',)
    """
    near = difflib.get_close_matches(word.lower()[:LONGEST_QUOTE], list(known), n=1, cutoff=0.6)
    return tuple(f"did you mean `{found}`?" for found in near)


def refuse(
    code: str, message: str, *, notes: Iterable[str] = (), help: Iterable[str] = (), at: Place = ()
) -> PydanticCustomError:
    """The error that a validator raises; `at` is the place inside the value that it looks at."""
    context = {"message": message, "notes": tuple(notes), "help": tuple(help), "at": at}
    return PydanticCustomError(code, "{message}", context)


_inside: ContextVar[bool] = ContextVar("autotp_inside_a_plan", default=False)


class Declared(BaseModel):
    """A frozen model whose faults come as one `PlanError`, also when it is made by hand."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="wrap")
    @classmethod
    def _all_faults_at_once(
        cls, data: Any, handler: ModelWrapValidatorHandler[Any], info: ValidationInfo
    ) -> Any:
        if _inside.get():  # a rule of a plan: the plan gathers the faults
            return handler(data)
        outermost = _inside.set(True)
        try:
            return handler(data)
        except ValidationError as error:
            source = info.context if isinstance(info.context, Source) else Source("")
            findings = [_finding(dict(fault), cls, source) for fault in error.errors()]
            raise PlanError(sorted([*source.faults, *findings], key=_in_order)) from None
        finally:
            _inside.reset(outermost)


def _in_order(finding: Diagnostic) -> tuple[int, int]:
    return (finding.plan.line, finding.plan.column) if finding.plan else (0, 0)


def _finding(fault: dict[str, Any], model: type[BaseModel], source: Source) -> Diagnostic:
    """One pydantic fault as a finding; those of our own validators carry their words along."""
    place: Place = fault["loc"]
    on_key = place[-1:] == ("[key]",)
    place = place[:-1] if on_key else place
    words: Mapping[str, Any] = fault.get("ctx") or {}
    if fault["type"].startswith("AT"):
        code, message, notes, help = fault["type"], words["message"], words["notes"], words["help"]
        place += words["at"]
    elif fault["type"] == "extra_forbidden":
        on_key = True
        code, message, notes, help = _unknown_key(place, fault["input"], model)
    elif fault["type"] == "missing":
        on_key, place = True, place[:-1]
        code, message, notes, help = _missing(fault["loc"])
    else:  # a type that pydantic itself refuses
        code, message, notes, help = _no_model(place, fault)
    subject = _subject(fault["loc"], model)
    return Diagnostic(
        code, subject + message, plan=source.span(place, key=on_key), notes=tuple(notes), help=tuple(help)
    )


def _subject(place: Place, model: type[BaseModel]) -> str:
    """`rule `fc1`: ` for a fault inside a rule of a plan."""
    return f"rule `{place[1]}`: " if len(place) > 1 and place[0] == "rules" else ""


Words = tuple[str, str, tuple[str, ...], tuple[str, ...]]


def _unknown_key(place: Place, value: object, model: type[BaseModel]) -> Words:
    key = str(place[-1])
    if place[0] == "rules" or model.__name__ == "Rule":
        from autotp.rule import OPTIONS, STYLES

        options = ["style", *OPTIONS]
        if key in STYLES:
            return "AT110", f"unknown option {quoted(key)}", (), (f"a style is written `style: {key}`",)
        note = f"options: {', '.join(options)}"
        return "AT110", f"unknown option {quoted(key)}", (note,), did_you_mean(key, options)
    fields = list(model.model_fields)
    help = did_you_mean(key, fields)
    looks_like_a_rule = isinstance(value, str) or (isinstance(value, Mapping) and "style" in value)
    if not help and looks_like_a_rule:
        help = (f"rules stand under `rules:`, indented; there `{key}` is a pattern",)
    return "AT105", f"unknown key {quoted(key)}", (f"keys of a plan: {', '.join(fields)}",), help


def _missing(place: Place) -> Words:
    if place[-1] == "rules":
        return "AT107", "a plan needs `rules`", (), ("write `rules:` and under it a line like `fc1: column`",)
    return "AT109", "a rule needs a `style`", (), ("write it as `{style: column, …}`",)


def _no_model(place: Place, fault: Mapping[str, Any]) -> Words:
    value = fault["input"]
    if place == () and fault["type"] in ("model_type", "model_attributes_type"):
        return "AT105", f"a plan is a mapping with `rules`, not {quoted(value)}", (), ()
    return "AT111", f"{'.'.join(map(str, place))}: {quoted(value)}: {fault['msg']}", (), ()
