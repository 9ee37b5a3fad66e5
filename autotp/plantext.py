"""The text of a plan: YAML or JSON to data, with the line and column of every key and value, and back.

Plans use a small part of YAML: mappings, lists, text, whole numbers, true, false and null. Only `true`
and `false` are booleans; `yes`, `no`, `on` and `off` are text, and numbers with a point are too.
Aliases, anchors, merge keys, tags and repeated keys, which can make a file say another thing than it
seems to say, are refused, each with its place. JSON is read by the same reader. All faults come at once.

The text is read as PyYAML's stream of events, which never recurses. This file knows nothing of torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from autotp.diagnostic import Diagnostic, Span
from autotp.planfault import Place, Source, named, with_line

__all__ = ["read", "write"]

DEEPEST = 16
LONGEST_LINE = 400  # characters that are shown; of a longer line only its number and column
INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,999})")
PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.([A-Za-z0-9_-]+|\*))*")  # text that YAML reads without quotes
LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")  # as YAML counts lines
RESERVED = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
PLAIN_WORDS = {  # a part of what the parser says -> what it means to whoever wrote the line
    "mapping values are not allowed": "a `:` too many, or text that should be quoted",
    "<stream end>": "the file ends before a bracket is closed",
    "unexpected end of stream": "the file ends before a quote is closed",
    "expected <block end>": "this line is not indented like the ones it belongs to",
    "expected ',' or": "a comma or a closing bracket is missing before this",
    "the node content": "a value is missing before this",
    "could not find expected ':'": "a `:` is missing after the name",
    "cannot start any token": "text that begins with this character must be quoted",
    "unknown escape": "in double quotes a backslash needs another; use single quotes",
}
STAR = "a name that starts with `*` is an alias in YAML"


def read(text: str, file: str = "<string>") -> Source:
    """Plan text to data with places and faults. Never raises for a bad text."""
    return _Reader(text, file).source()


def _shown(line: str) -> str:
    """A line of the text as a terminal may show it; nothing of a line that no one could read."""
    if len(line) > LONGEST_LINE:
        return ""
    return line if line.isprintable() else "".join(c if c.isprintable() or c == "\t" else "�" for c in line)


class _Reader:
    """Builds the data of one document from YAML's events, keeping the place of each part."""

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file = text, file
        self.lines = [_shown(line) for line in LINE_BREAK.split(text)]
        self.keys: dict[Place, Span] = {}
        self.values: dict[Place, Span] = {}
        self.faults: list[Diagnostic] = []
        self.spoiled: set[Place] = set()
        self.data: object = None
        self.documents = 0
        self.open: list[tuple[Place, dict[str, Any] | list[Any]]] = []  # containers around the event
        self.key: list[str | None] = []  # of each open container: the key whose value comes next

    def source(self) -> Source:
        whole = self._events()
        if whole and not self.documents:
            self._fault("AT102", "no plan stands here", self._line(1), help=("a plan has at least `rules:`",))
            whole = False
        spoiled = frozenset(self.spoiled)
        return Source(self.file, self.data, self.keys, self.values, tuple(self.faults), spoiled, whole)

    def _events(self) -> bool:
        """Feeds all events; False when the text breaks off."""
        text = self.text
        if self.file.endswith(".json") or text.lstrip().startswith("{"):
            text = text.replace("\t", " ")  # JSON may be indented by tabs, YAML may not
        if self.file.endswith(".json") and not self._is_json():
            return False
        try:
            for event in yaml.parse(text, Loader=yaml.SafeLoader):
                if not self._event(event):
                    return False
        except yaml.YAMLError as error:
            self._syntax(error)
            return False
        return True

    def _is_json(self) -> bool:
        try:
            json.loads(self.text, parse_int=str, parse_float=str)
        except json.JSONDecodeError as error:
            self._fault("AT102", f"not JSON: {error.msg}", self._line(error.lineno, error.colno))
        except RecursionError:
            self._fault("AT102", f"nested more than {DEEPEST} deep", self._line(1))
        else:
            return True
        return False

    def _event(self, event: yaml.Event) -> bool:
        """Takes one event; False stops the reading."""
        if isinstance(event, yaml.DocumentStartEvent):
            self.documents += 1
            if self.documents > 1:
                help = ("keep one plan a file",)
                self._fault("AT102", "a second document starts here", self._span(event), help=help)
                return False
        elif isinstance(event, yaml.CollectionEndEvent):
            self.open.pop()
            self.key.pop()
        elif isinstance(event, yaml.NodeEvent):
            return self._node(event)
        return True

    def _node(self, event: yaml.NodeEvent) -> bool:
        span = self._span(event)
        if event.anchor is not None:
            self._name(event, span)
        tag = getattr(event, "tag", None)
        if tag is not None:
            short = tag.replace("tag:yaml.org,2002:", "!!")
            self._fault("AT103", f"the tag {named(short)} is not read in plans", span)
        if self.open and isinstance(self.open[-1][1], dict) and self.key[-1] is None:
            return self._mapping_key(event, span)
        value: object = None
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event, span)
        elif isinstance(event, yaml.CollectionStartEvent):
            value = {} if isinstance(event, yaml.MappingStartEvent) else []
        place = self._store(value, span)
        if isinstance(event, yaml.AliasEvent):
            self.spoiled.add(place)
        if isinstance(value, (dict, list)):
            if len(self.open) >= DEEPEST:
                self._fault("AT102", f"nested more than {DEEPEST} deep", span)
                return False
            self.open.append((place, value))
            self.key.append(None)
        return True

    def _name(self, event: yaml.NodeEvent, span: Span) -> None:
        """Refuses an anchor or an alias."""
        if not isinstance(event, yaml.AliasEvent):
            self._fault("AT103", f"the anchor `&{event.anchor}` is not read in plans", span)
            return
        is_key = bool(self.open) and isinstance(self.open[-1][1], dict) and self.key[-1] is None
        if is_key:
            help = f"patterns match from the end: write `{event.anchor}`"
            self._fault("AT103", f"`*{event.anchor}`: {STAR}", span, help=(help,))
        else:
            self._fault("AT103", f"the alias `*{event.anchor}` is not read in plans", span)

    def _mapping_key(self, event: yaml.NodeEvent, span: Span) -> bool:
        place, container = self.open[-1]
        assert isinstance(container, dict)
        if isinstance(event, yaml.AliasEvent):
            self.key[-1] = key = f"*{event.anchor}"  # told already; its value is read and dropped with it
            self.spoiled.add((*place, key))
            return True
        if not isinstance(event, yaml.ScalarEvent):
            self._fault("AT103", "a key is text, not a list or a mapping", span)
            return False
        value = self._scalar(event, span)
        key = value if isinstance(value, str) else event.value
        if key == "<<" and event.implicit[0]:
            self._fault("AT103", "the merge key `<<` is not read in plans", span)
            self.spoiled.add((*place, key))
        elif not isinstance(value, str):
            kind = "empty" if value is None else "a boolean" if isinstance(value, bool) else "a number"
            help = (f'quote it: "{key}"',) if value is not None else ()
            self._fault("AT103", f"the key {named(key)} is {kind}, not text", span, help=help)
        if key in container:
            first = self.keys[(*place, key)]
            message = f"the key {named(key)} is given twice"
            self._fault("AT104", message, span, notes=(f"first at {with_line(first)}",))
        else:
            self.keys.setdefault((*place, key), span)
        self.key[-1] = key
        return True

    def _store(self, value: object, span: Span) -> Place:
        """Puts a value where it belongs; gives its place."""
        if not self.open:
            self.data = value
            self.values[()] = span
            return ()
        place, container = self.open[-1]
        if isinstance(container, list):
            place = (*place, len(container))
            container.append(value)
        else:
            key = self.key[-1]
            assert key is not None
            self.key[-1] = None
            place = (*place, key)
            if key not in container and place in self.keys:
                container[key] = value
        if value is not None or span.text[span.column - 1 :].strip():
            self.values.setdefault(place, span)  # nothing stands at nothing: its key is shown instead
        return place

    def _scalar(self, event: yaml.ScalarEvent, span: Span) -> object:
        """The value of a scalar: null, a boolean, a whole number, or text."""
        text = event.value
        if event.implicit[0] and event.style is None:
            if text in ("", "~", "null"):
                return None
            if text in ("true", "false"):
                return text == "true"
            return int(text) if INTEGER.fullmatch(text) else text
        try:  # JSON writes a character beyond 16 bits as two escapes
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            self._fault("AT102", "half of a surrogate pair is no character", span)
            return "�"

    def _syntax(self, error: yaml.YAMLError) -> None:
        mark = getattr(error, "problem_mark", None)
        if mark is None:  # the reader's own: a character that no YAML text may have
            position = int(getattr(error, "position", 0))
            line = self.text.count("\n", 0, position) + 1
            column = position - (self.text.rfind("\n", 0, position) + 1) + 1
            character = f"U+{ord(self.text[position]):04X}" if position < len(self.text) else "the last one"
            self._fault(
                "AT102", f"the character {character} cannot stand in a plan", self._line(line, column)
            )
            return
        start = getattr(error, "context_mark", None)
        context = str(getattr(error, "context", "") or "")
        if "alias" in context and start is not None:
            name = re.split(r"[:\s]", start.buffer[start.pointer :].rstrip("\0"), maxsplit=1)[0]
            help = (f'quote it: "{name}"',) if name.strip("*.") else ()
            at = self._line(start.line + 1, start.column + 1, len(name))
            self._fault("AT103", f"{named(name)}: {STAR}", at, help=help)
            return
        problem = str(getattr(error, "problem", None) or "not readable")
        at = self._line(mark.line + 1, mark.column + 1)
        if "'\\t'" in problem:
            self._fault("AT102", "not YAML: a tab stands here", at, help=("indent with spaces",))
            return
        words = next((words for part, words in PLAIN_WORDS.items() if part in problem), problem)
        self._fault("AT102", f"not YAML: {words}", at)

    def _fault(
        self, code: str, message: str, span: Span, *, notes: tuple[str, ...] = (), help: tuple[str, ...] = ()
    ) -> None:
        self.faults.append(Diagnostic(code, message, plan=span, notes=notes, help=help))

    def _line(self, line: int, column: int = 1, length: int = 1) -> Span:
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        return Span(self.file, line, column, length, text)

    def _span(self, event: yaml.Event) -> Span:
        start, end = event.start_mark, event.end_mark
        assert start is not None and end is not None, "events of a text have marks"
        length = end.column - start.column if end.line == start.line else 1
        return self._line(start.line + 1, start.column + 1, max(1, length))


def write(data: Mapping[str, Any]) -> str:
    """The YAML text of a plan's data; `read` gives the data back.

    >>> print(
    ...     write({"version": 1, "rules": {"*.fc1": "column", "qkv": {"style": "column", "sections": 3}}}),
    ...     end="",
    ... )
    version: 1
    rules:
      "*.fc1": column
      qkv: {style: column, sections: 3}
    """
    lines = []
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            lines.append(f"{key}:")
            lines += [f"  {_flow(name)}: {_flow(entry)}" for name, entry in value.items()]
        else:
            lines.append(f"{key}: {_flow(value)}")
    return "\n".join(lines) + "\n"


def _flow(value: object) -> str:
    """One value on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_flow(k)}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in RESERVED:
        return value
    return json.dumps(value, ensure_ascii=False)
