"""One rule of a plan: how the modules and tensors that a pattern names are cut.

| style     | cuts                                       | options                                |
|-----------|--------------------------------------------|----------------------------------------|
| column    | a linear layer's output features, its bias | gather_output, sections, heads, dim    |
| row       | a linear layer's input features            | split_input, sections, heads, dim      |
| vocab     | the rows of an embedding                   |                                        |
| replicate | nothing: the whole is on every rank        |                                        |

The names are those of Megatron-LM (https://arxiv.org/abs/1909.08053); `colwise` and `rowwise`, as
torch and transformers say, are read as column and row. This file knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, ValidationInfo, field_validator, model_validator

from autotp.planfault import Declared, did_you_mean, quoted, refuse

__all__ = ["OPTIONS", "STYLES", "Rule", "RuleLike", "Style"]

Style = Literal["column", "row", "vocab", "replicate"]
STYLES: tuple[str, ...] = ("column", "row", "vocab", "replicate")
ALIASES = {"colwise": "column", "rowwise": "row"}
OPTIONS: dict[str, tuple[str, ...]] = {  # option -> the styles that have it
    "gather_output": ("column",),
    "split_input": ("row",),
    "sections": ("column", "row"),
    "heads": ("column", "row"),
    "dim": ("column", "row"),
}
FOREIGN = {  # other projects' names for what a style and an option say here
    "colwise_rep": "{style: column, gather_output: true}",
    "colwise_gather_output": "{style: column, gather_output: true}",
    "rowwise_rep": "{style: row, split_input: true}",
    "rowwise_split_input": "{style: row, split_input: true}",
    "embedding_rowwise": "vocab",
    "replicated": "replicate",
    "whole": "replicate",
}
BOOLEAN_LIKE = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
LARGEST = 2**31 - 1


def _style(value: object) -> object:
    """Reads a style; the aliases become the two names that plans print."""
    note = f"styles: {', '.join(STYLES)}"
    if value is None:
        raise refuse("AT109", "no style is given", notes=[note])
    if not isinstance(value, str):
        raise refuse("AT109", f"a style is a word, not {quoted(value)}", notes=[note])
    word = ALIASES.get(value, value)
    if word in STYLES:
        return word
    if value.lower() in FOREIGN:
        help: tuple[str, ...] = (f"write `{FOREIGN[value.lower()]}`",)
    elif value.lower() in BOOLEAN_LIKE:
        help = (f"{quoted(value)} is text here, only true and false are booleans; write `replicate`",)
        help = help if BOOLEAN_LIKE[value.lower()] == "false" else ()
    else:
        help = did_you_mean(value, (*STYLES, *ALIASES))
    raise refuse("AT109", f"unknown style {quoted(value)}", notes=[note], help=help)


def _flag(value: object, info: ValidationInfo) -> object:
    if isinstance(value, bool):
        return value
    likely = None
    if isinstance(value, str):
        likely = BOOLEAN_LIKE.get(value.lower(), value.lower())
    help = [f"write `{info.field_name}: {likely}`"] if likely in ("true", "false") else []
    raise refuse("AT111", f"{info.field_name} is true or false, not {quoted(value)}", help=help)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number_in_text(value: object) -> list[str]:
    if isinstance(value, str) and value.isdecimal():
        return [f"a number stands without quotes: {value[:20]}"]
    return []


def _count(value: object, what: str, least: int) -> str | None:
    """Why a value is neither a whole number of at least `least` nor a config key."""
    if isinstance(value, str) and all(part.isidentifier() for part in value.split(".")):
        return None
    if not _whole(value):
        return f"{what} is a whole number or a config key, not {quoted(value)}"
    assert isinstance(value, int)
    if not least <= value <= LARGEST:
        limit = f"at least {least}" if value < least else f"at most {LARGEST}"
        return f"{what} is {limit}, not {quoted(value)}"
    return None


def _heads(value: object) -> object:
    if not isinstance(value, (list, tuple)):
        if value is not None and (why := _count(value, "heads", 1)):
            raise refuse("AT111", why, help=_number_in_text(value))
        return value
    if len(value) < 2:
        raise refuse("AT111", f"a list of heads has one for each of at least 2 sections, not {len(value)}")
    for index, number in enumerate(value):
        if why := _count(number, "heads", 1):
            raise refuse("AT111", why, help=_number_in_text(number), at=(index,))
    return tuple(value)


def _sections(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        if not _whole(value):
            message = f"sections is a number of equal parts or a list of sizes, not {quoted(value)}"
            raise refuse("AT111", message, help=_number_in_text(value))
        if why := _count(value, "the number of sections", 2):
            raise refuse("AT111", why)
        return value
    if len(value) < 2:
        raise refuse("AT111", f"a list of sections has at least 2 sizes, not {len(value)}")
    for index, size in enumerate(value):
        if why := _count(size, "a section", 1):
            raise refuse("AT111", why, help=_number_in_text(size), at=(index,))
    return tuple(value)


def _dim(value: object) -> object:
    if value is None or (_whole(value) and isinstance(value, int) and abs(value) < 64):
        return value
    raise refuse("AT111", f"dim is a whole number, not {quoted(value)}", help=_number_in_text(value))


class Rule(Declared):
    """How one pattern's modules or tensors are cut.

    - `style`: "column", "row", "vocab" or "replicate" (also read: "colwise", "rowwise").
    - `gather_output` (column): every rank gets the whole output, by an all-gather.
    - `split_input` (row): the input is whole, and each rank takes its part of it.
    - `sections`: the cut dim is so many equal parts, or parts of these sizes (numbers or config
      keys), each cut by itself: 2 for a fused gate|up, 3 for an equal q|k|v.
    - `heads`: the number of units that are dealt to the ranks, in every section; a number or a
      config key such as `num_attention_heads`, or `text_config.num_attention_heads` where that config
      holds others. A unit is never cut. Without it one feature is a unit.
      A list gives each section its own: `[num_attention_heads, num_key_value_heads,
      num_key_value_heads]` for a fused q|k|v; without `sections` the heads are equally wide.
    - `dim`: the dim that is cut; needed for a parameter or buffer, and for a weight [in, out] where
      only the headers of a file are known.

    A style alone stands for its rule: `"column"` is `Rule(style="column")`.
    Raises PlanError with every fault, AT109 to AT112.

    >>> rule = Rule(style="colwise", heads="num_attention_heads")
    >>> rule.style, rule.heads, rule.gather_output
    ('column', 'num_attention_heads', False)
    """

    style: Annotated[Style, BeforeValidator(_style)]
    gather_output: Annotated[bool, BeforeValidator(_flag)] = False
    split_input: Annotated[bool, BeforeValidator(_flag)] = False
    sections: Annotated[int | tuple[int | str, ...] | None, BeforeValidator(_sections)] = None
    heads: Annotated[int | str | tuple[int | str, ...] | None, BeforeValidator(_heads)] = None
    dim: Annotated[int | None, BeforeValidator(_dim)] = None

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            style: str,
            gather_output: bool = False,
            split_input: bool = False,
            sections: int | tuple[int | str, ...] | list[int | str] | None = None,
            heads: int | str | tuple[int | str, ...] | list[int | str] | None = None,
            dim: int | None = None,
        ) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _from_style(cls, data: Any) -> Any:
        """A bare style is a rule; what is neither that nor a mapping is refused."""
        if isinstance(data, (Mapping, Rule)):
            return data
        if isinstance(data, str):
            return {"style": data}
        note = "a rule is a style, or a mapping like `{style: column, heads: 12}`"
        if data is None:
            raise refuse("AT109", "no style is given", notes=[note, f"styles: {', '.join(STYLES)}"])
        raise refuse("AT109", f"{quoted(data)} is no rule", notes=[note])

    @field_validator(*OPTIONS)
    @classmethod
    def _belongs(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses an option that the rule's style does not have."""
        style, option = info.data.get("style"), str(info.field_name)
        if style is None or value is None or value is False or style in OPTIONS[option]:
            return value
        own = [name for name, styles in OPTIONS.items() if style in styles]
        raise refuse(
            "AT112",
            f"style {style} has no {option}",
            notes=[f"{option} belongs to {' and '.join(OPTIONS[option])}"],
            help=[f"options of {style}: {', '.join(own)}" if own else f"{style} has no options"],
        )

    def to_data(self) -> str | dict[str, Any]:
        """The shortest plan-file form: a style, or a mapping of what is not the default."""
        given = self.model_dump(exclude_defaults=True)
        for name in ("sections", "heads"):
            if isinstance(given.get(name), tuple):
                given[name] = list(given[name])
        return self.style if list(given) == ["style"] else given


RuleLike = Rule | str | Mapping[str, Any]
