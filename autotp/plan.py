"""The plan: which rule is for which pattern. All that a user declares, and nothing that is decided.

    version: 1
    model_type: bert            # optional: the plan is chosen for models of this type
    rules:
      query: column             # pattern: style
      key: {style: column, heads: num_attention_heads}
      lm_head: {style: column, gather_output: true}
    optional: [lm_head]         # these patterns may match nothing

A rule that matches nothing in a model is an error, for it is most often a slip. A plan for a whole
family names modules that some of its models lack (`lm_head` in a base model); those patterns are
listed under `optional`, one by one, so that no other rule loses the check.

This file knows nothing of torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, PrivateAttr, ValidationInfo, field_validator

from autotp import pattern as patterns
from autotp import planfile, plantext
from autotp.diagnostic import PlanError, Span, UsageError
from autotp.planfault import Declared, Source, did_you_mean, in_order, named, quoted, refuse
from autotp.planschema import plan_schema
from autotp.rule import Rule, RuleLike

if TYPE_CHECKING:
    from autotp.analysis import Analysis

__all__ = ["Plan", "Rule", "RuleLike", "as_plan", "plan_for", "shipped_plans"]


def _version(value: object) -> object:
    if type(value) is int and value == 1:
        return value
    help = ["write `version: 1`"]
    raise refuse("AT106", f"version is 1, not {quoted(value)}", help=help)


def _model_type(value: object) -> object:
    if value is None or (isinstance(value, str) and value and value.isprintable()):
        return value
    raise refuse("AT111", f"model_type is a word such as `bert`, not {quoted(value)}")


def _pattern(value: object) -> object:
    if not isinstance(value, str):
        raise refuse("AT108", f"a pattern is text, not {quoted(value)}", help=[f'write "{value}"'])
    if why := patterns.fault(value):
        raise refuse("AT108", f"pattern {named(value)}: {why}")
    return value


def _rules(value: object) -> object:
    help = ["write under it a line like `fc1: column`"]
    if value is None or value == {}:
        raise refuse("AT107", "rules is empty: the plan would shard nothing", help=help)
    if not isinstance(value, Mapping):
        help = ["leave out the dashes: a line is like `fc1: column`"] if isinstance(value, list) else help
        raise refuse("AT107", f"rules is a mapping of patterns to styles, not {quoted(value)}", help=help)
    return value


def _optional(value: object) -> object:
    if not isinstance(value, (list, tuple)):
        message = f"optional is a list of patterns, not {quoted(value)}"
        raise refuse("AT111", message, help=["write `optional: [lm_head]`"])
    return value


def _optional_rule(value: object, info: ValidationInfo) -> object:
    rules = info.data.get("rules")
    if not isinstance(value, str):
        raise refuse("AT111", f"optional lists patterns, not {quoted(value)}")
    if rules is not None and value not in rules:
        help = did_you_mean(value, rules)
        raise refuse("AT113", f"optional: {named(value)} is no rule of this plan", help=help)
    return value


class Plan(Declared):
    """Rules by pattern, for one model or a family of models.

    - `rules`: pattern → rule; a bare style is a rule. How patterns match: `autotp.pattern`.
    - `model_type`: the `model_type` of the configurations that the plan is made for.
    - `optional`: patterns of `rules` that may match nothing.

    Two plans are equal when they say the same, wherever they were read. Raises PlanError with every
    fault at once, AT101 to AT113; each names the line of the file, if there is one.

    >>> plan = Plan(rules={"fc1": "column", "fc2": {"style": "row"}})
    >>> print(plan.dumps(), end="")
    version: 1
    rules:
      fc1: column
      fc2: row
    >>> Plan.loads(plan.dumps()) == plan
    True
    """

    version: Annotated[Literal[1], BeforeValidator(_version)] = 1
    model_type: Annotated[str | None, BeforeValidator(_model_type)] = None
    rules: Annotated[dict[Annotated[str, BeforeValidator(_pattern)], Rule], BeforeValidator(_rules)]
    optional: Annotated[
        tuple[Annotated[str, BeforeValidator(_optional_rule)], ...], BeforeValidator(_optional)
    ] = ()
    _spans: dict[str, Span] = PrivateAttr(default_factory=dict)
    _whole_names: bool = PrivateAttr(default=False)  # its patterns are names as transformers' plans have them

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            rules: Mapping[str, RuleLike],
            model_type: str | None = None,
            optional: Sequence[str] = (),
            version: int = 1,
        ) -> None: ...

    @field_validator("optional")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for index, name in enumerate(value):
            if name in value[:index]:
                raise refuse("AT113", f"optional lists {named(name)} twice", at=(index,))
        return value

    def __eq__(self, other: object) -> bool:
        return self.__dict__ == other.__dict__ if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.model_type, frozenset(self.rules.items()), self.optional))

    def span(self, pattern: str) -> Span | None:
        """Where the rule of a pattern stands in its file, or None for a plan that has no file."""
        return self._spans.get(pattern)

    @classmethod
    def load(cls, source: str | Path) -> Plan:
        """Reads a plan file (YAML or JSON), or a shipped plan by its name, such as "llama".

        A string without folder and suffix that names a shipped plan is that plan; write `./llama` for
        a file of that name. Raises PlanError.
        """
        return cls._read(planfile.open_plan(source))

    @classmethod
    def loads(cls, text: str, file: str = "<string>") -> Plan:
        """Reads a plan from YAML or JSON text; `file` is what messages call it. Raises PlanError."""
        return cls._read(plantext.read(text, file))

    @classmethod
    def _read(cls, source: Source) -> Plan:
        if not source.readable:
            raise PlanError(in_order(source.faults))
        plan = cls.model_validate(source.data, context=source)
        if source.faults:
            raise PlanError(in_order(source.faults))
        plan._spans = {p: source.keys["rules", p] for p in plan.rules if ("rules", p) in source.keys}
        return plan

    @classmethod
    def from_transformers(cls, source: object) -> Plan:
        """What transformers' own tensor-parallel plan says, as a plan: `autotp.hfplan` has the styles.

        `source` is a config, a model, a model class, a config as a dict, a folder with a config.json, or
        the plan itself, a dict from names to styles (which knows no numbers of heads).

        >>> styles = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
        >>> print(Plan.from_transformers(styles).dumps(), end="")
        version: 1
        rules:
          layers.*.mlp.up_proj: column
          layers.*.mlp.down_proj: row
        optional: [layers.*.mlp.up_proj, layers.*.mlp.down_proj]

        Raises PlanError with every entry that no rule can say, AT114, and UsageError for what has no plan.
        """
        from autotp import hfplan, hfsource

        return hfplan.plan_of(hfsource.read(source))

    def to_transformers(self, analysis: Analysis | None = None) -> dict[str, str]:
        """The dict that transformers takes as a plan.

        A plan that came from there is written as it stands. Any other is written by a proven `analysis` of
        the model that it is for: its names are then whole, and what the proof found is in it.

        >>> styles = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
        >>> Plan.from_transformers(styles).to_transformers() == styles
        True

        Raises PlanError with every rule that transformers cannot carry, AT115, and UsageError for an
        analysis of another plan or without a proof.
        """
        from autotp import hfwrite

        if analysis is None:
            return hfwrite.from_rules(self)
        if analysis.plan != self:
            raise UsageError("the analysis is of another plan")
        return hfwrite.from_analysis(analysis)

    def to_data(self) -> dict[str, Any]:
        """The plan as plain data, in the order of a plan file, without defaults."""
        data: dict[str, Any] = {"version": self.version}
        if self.model_type is not None:
            data["model_type"] = self.model_type
        data["rules"] = {pattern: rule.to_data() for pattern, rule in self.rules.items()}
        if self.optional:
            data["optional"] = list(self.optional)
        return data

    def dumps(self, *, format: Literal["yaml", "json"] = "yaml") -> str:
        """The plan as the text of a plan file; `Plan.loads` reads either format back."""
        if format == "json":
            return json.dumps(self.to_data(), indent=2, ensure_ascii=False) + "\n"
        return plantext.write(self.to_data())

    def save(self, path: str | Path) -> None:
        """Writes the plan file, as JSON when the path ends in .json, else as YAML."""
        format: Literal["yaml", "json"] = "json" if Path(path).suffix == ".json" else "yaml"
        Path(path).write_text(self.dumps(format=format), encoding="utf-8")

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON schema of a plan file, for editors: `autotp plans --schema`."""
        return plan_schema()


def as_plan(plan: Plan | Mapping[str, Any] | str | Path) -> Plan:
    """A plan from whatever stands for one: itself, `{"rules": …}`, the bare rules, a path or a name.

    >>> as_plan({"fc1": "column"}) == as_plan({"rules": {"fc1": "column"}})
    True

    Raises PlanError.
    """
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, Mapping):
        whole = isinstance(plan.get("rules"), Mapping)
        return Plan.model_validate(dict(plan) if whole else {"rules": dict(plan)})
    return Plan.load(plan)


def shipped_plans() -> tuple[str, ...]:
    """The names of the plans that come with autotp."""
    return planfile.shipped_names()


def plan_for(model_type: str) -> Plan | None:
    """The shipped plan for models of a type, by its `model_type`, or None."""
    names = shipped_plans()
    likely: Iterable[str] = [model_type] if model_type in names else names
    return next((plan for plan in map(Plan.load, likely) if plan.model_type == model_type), None)
