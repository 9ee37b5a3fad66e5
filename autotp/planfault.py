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
from dataclasses import dataclass, field, replace
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

__all__ = [
    "Declared",
    "Place",
    "Source",
    "did_you_mean",
    "in_order",
    "named",
    "quoted",
    "refuse",
    "with_line",
]

Place = tuple[str | int, ...]  # ("rules", "fc1", "style")
LONGEST_QUOTE = 120
MOST_FINDINGS = 50


@dataclass(frozen=True)
class Source:
    """A plan as data, where each part of it stands in its text, and the faults of the text itself.

    `keys` and `values` are keyed by place: `keys["rules", "fc1"]` is where `fc1` stands,
    `values["rules", "fc1"]` is where the rule stands. `spoiled` are places that could not be read, so
    that what seems to be missing there is no second fault. `readable` is False when there are no data.
    """

    file: str
    data: object = None
    keys: Mapping[Place, Span] = field(default_factory=dict)
    values: Mapping[Place, Span] = field(default_factory=dict)
    faults: tuple[Diagnostic, ...] = ()
    spoiled: frozenset[Place] = frozenset()
    readable: bool = True

    def span(self, place: Place, *, key: bool = False) -> Span | None:
        """Where a value, or its key, stands; failing that, what holds it."""
        while place:
            for spans in (self.keys, self.values) if key else (self.values, self.keys):
                if place in spans:
                    return spans[place]
            place = place[:-1]
        return self.values.get(())

    def is_spoiled(self, place: Place) -> bool:
        """Whether a place is, holds, or is inside one that could not be read."""
        return any(place[: len(bad)] == bad[: len(place)] for bad in self.spoiled)


def named(text: str) -> str:
    """A name between backticks, printable, cut when it is long.

    >>> named("fc1"), named("bell" + chr(7))
    ('`fc1`', '`bell\\\\x07`')
    """
    short = text[:LONGEST_QUOTE]
    short = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)
    return f"`{short}…`" if len(text) > LONGEST_QUOTE else f"`{short}`"


def with_line(span: Span) -> str:
    """A place with its line, for a note."""
    return f"{span}: `{span.text.strip()}`" if span.text.strip() else str(span)


def quoted(value: object) -> str:
    """A value as a plan would have it.

    >>> quoted(None), quoted(True), quoted("colum"), quoted("12"), quoted([1, "a"]), quoted({})
    ('nothing', '`true`', '`colum`', 'the text `12`', 'a list', 'a mapping')
    """
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    is_text = isinstance(value, str) and (value.isdecimal() or value in ("", "true", "false", "null"))
    return f"the text {named(str(value))}" if is_text else named(str(value))


def did_you_mean(word: str, known: Iterable[str]) -> tuple[str, ...]:
    """A help line with the nearest known word, or nothing.

    >>> did_you_mean("colum", ["column", "row"])
    ('did you mean `column`?',)
    """
    near = difflib.get_close_matches(word.lower()[:LONGEST_QUOTE], list(known), n=1, cutoff=0.65)
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
            faults = [_finding(dict(fault), cls, source) for fault in error.errors()]
            findings = [finding for place, finding in faults if not source.is_spoiled(place)]
            raise PlanError(in_order([*source.faults, *findings])) from None
        finally:
            _inside.reset(outermost)


def in_order(findings: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Findings as they stand in the file; of very many the first, for the file is then no plan."""
    ordered = sorted(findings, key=lambda one: (one.plan.line, one.plan.column) if one.plan else (0, 0))
    if len(ordered) > MOST_FINDINGS:
        more = f"and {len(ordered) - MOST_FINDINGS} more faults"
        last = ordered[MOST_FINDINGS - 1]
        return [*ordered[: MOST_FINDINGS - 1], replace(last, notes=(*last.notes, more))]
    return ordered


def _finding(fault: dict[str, Any], model: type[BaseModel], source: Source) -> tuple[Place, Diagnostic]:
    """One pydantic fault, its place and its finding; those of our own validators carry their words along."""
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
    if fault["loc"][:1] == ("rules",) and len(fault["loc"]) > 1 and code != "AT108":
        message = f"rule {named(str(fault['loc'][1]))}: {message}"
    span = source.span(place, key=on_key)
    return place, Diagnostic(code, message, plan=span, notes=tuple(notes), help=tuple(help))


Words = tuple[str, str, tuple[str, ...], tuple[str, ...]]


def _unknown_key(place: Place, value: object, model: type[BaseModel]) -> Words:
    key = str(place[-1])
    if place[0] == "rules" or model.__name__ == "Rule":
        from autotp.rule import OPTIONS, STYLES

        options = ["style", *OPTIONS]
        if key in STYLES:
            return "AT110", f"unknown option {named(key)}", (), (f"a style is written `style: {key}`",)
        note = f"options: {', '.join(options)}"
        return "AT110", f"unknown option {named(key)}", (note,), did_you_mean(key, options)
    fields = list(model.model_fields)
    help = did_you_mean(key, fields)
    looks_like_a_rule = isinstance(value, str) or (isinstance(value, Mapping) and "style" in value)
    if not help and looks_like_a_rule:
        help = (f"rules stand under `rules:`, indented; there {named(key)} is a pattern",)
    return "AT105", f"unknown key {named(key)}", (f"keys of a plan: {', '.join(fields)}",), help


def _missing(place: Place) -> Words:
    if place[-1] == "rules":
        return "AT107", "a plan needs `rules`", (), ("write `rules:` and under it a line like `fc1: column`",)
    return "AT109", "a rule needs a `style`", (), ("write it as `{style: column, …}`",)


def _no_model(place: Place, fault: Mapping[str, Any]) -> Words:
    value = fault["input"]
    if place == () and fault["type"] in ("model_type", "model_attributes_type"):
        return "AT105", f"a plan is a mapping with `rules`, not {quoted(value)}", (), ()
    return "AT111", f"{'.'.join(map(str, place))}: {quoted(value)}: {fault['msg']}", (), ()
