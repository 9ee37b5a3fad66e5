"""The JSON schema of a plan file, so that editors complete and check plans as they are written.

It says what `Plan` accepts (https://json-schema.org/draft/2020-12), but for what needs two places of a
file at once: that `optional` lists patterns of `rules`. This file knows nothing of torch.
"""

from __future__ import annotations

from typing import Any

from autotp.rule import ALIASES, LARGEST, OPTIONS, STYLES

__all__ = ["plan_schema"]

NUMBER = {"type": "integer", "minimum": 1, "maximum": LARGEST}
CONFIG_KEY = {"type": "string", "pattern": r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$"}
STYLE = {"enum": [*STYLES, *ALIASES], "description": "How the layers that the pattern names are cut."}
PATTERN = r"^(?!\*(\.\*)*$)(\*|[^.*]+)(\.(\*|[^.*]+))*$"

OPTION: dict[str, dict[str, Any]] = {
    "gather_output": {
        "type": "boolean",
        "default": False,
        "description": "Every rank gets the whole output, by an all-gather.",
    },
    "split_input": {
        "type": "boolean",
        "default": False,
        "description": "The input is whole, and each rank takes its part of it.",
    },
    "sections": {
        "anyOf": [
            {"type": "integer", "minimum": 2, "maximum": LARGEST},
            {"type": "array", "minItems": 2, "items": {"anyOf": [NUMBER, CONFIG_KEY]}},
            {"type": "null"},
        ],
        "description": "Equal parts, or parts of these sizes, each cut by itself: 2 for a fused gate|up.",
    },
    "heads": {
        "anyOf": [
            NUMBER,
            CONFIG_KEY,
            {"type": "array", "minItems": 2, "items": {"anyOf": [NUMBER, CONFIG_KEY]}},
            {"type": "null"},
        ],
        "description": "The number of units that are dealt to the ranks, such as num_attention_heads; a list "
        "gives each section its own.",
    },
    "dim": {
        "anyOf": [{"type": "integer", "minimum": -63, "maximum": 63}, {"type": "null"}],
        "description": "The dim that is cut, for a parameter, a buffer, or a weight [in, out].",
    },
}


def _belongs(option: str, styles: tuple[str, ...]) -> dict[str, Any]:
    """An option that says something stands with its styles only."""
    read = [*styles, *(alias for alias, style in ALIASES.items() if style in styles)]
    silent = {"const": OPTION[option].get("default")}
    return {"anyOf": [{"properties": {option: silent}}, {"properties": {"style": {"enum": read}}}]}


def plan_schema() -> dict[str, Any]:
    """The schema of a plan file as plain data.

    >>> sorted(plan_schema()["properties"])
    ['model_type', 'optional', 'rules', 'version']
    """
    rule = {
        "type": "object",
        "required": ["style"],
        "properties": {"style": STYLE, **OPTION},
        "additionalProperties": False,
        "allOf": [_belongs(option, styles) for option, styles in OPTIONS.items()],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "autotp plan",
        "type": "object",
        "required": ["rules"],
        "additionalProperties": False,
        "properties": {
            "version": {"const": 1, "default": 1},
            "model_type": {
                "type": ["string", "null"],
                "minLength": 1,
                "description": "The model_type of the configurations that the plan is made for.",
            },
            "rules": {
                "type": "object",
                "minProperties": 1,
                "propertyNames": {"pattern": PATTERN, "maxLength": 512},
                "additionalProperties": {"anyOf": [STYLE, rule]},
                "description": "Pattern to style, or to a mapping with a style and its options.",
            },
            "optional": {
                "type": "array",
                "items": {"type": "string"},
                "uniqueItems": True,
                "description": "Patterns of rules that may match nothing.",
            },
        },
    }
