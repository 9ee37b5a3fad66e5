"""What the code of a forward reads besides its arguments and tensors, by name.

    FLAG, settings.FLAG, OPTIONS["k"]        globals of its file
    self.flag, self.config.flag              attributes
    getattr(self, "flag", False)             a word that may name an attribute
    os.environ.get("FLAG")                   a variable of the environment

What stands there is looked at before each call (`rewrite/attributes.py`, `rewrite/around.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, is_dataclass
from types import CodeType
from typing import Any

from torch import nn

__all__ = ["ANY", "ASKING", "Consulted", "Space", "asked_in", "consulted", "names_in"]


@dataclass(frozen=True, eq=False)
class Space:
    """The globals of a file. Where it is pickled, it is its name."""

    name: str
    table: dict[str, Any] = field(repr=False)

    def __reduce__(self) -> Any:
        return _space, (self.name,)

    def __deepcopy__(self, memo: object) -> Space:
        return self


def _space(name: str) -> Space:
    return Space(name, vars(sys.modules[name]) if name in sys.modules else {})


@dataclass(frozen=True)
class Consulted:
    """`names` of attributes and globals that the code has, words that it may ask attributes by (`asked`),
    `variables` of the environment, and the globals that it names of each file; `any_name` where it may read
    an attribute whose name it does not have. Of objects of the classes `whole`, and where it looks at
    dataclasses (`data`) of all those, it may read every attribute."""

    names: frozenset[str] = frozenset()
    asked: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()
    globals: tuple[tuple[Space, frozenset[str]], ...] = ()
    any_name: bool = False
    whole: frozenset[str] = frozenset()
    data: bool = False

    def reads_all(self, kind: type) -> bool:
        """Whether the code may read every attribute of an object of a class, which is no module's."""
        classes = {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__}
        return self.any_name or (self.data and is_dataclass(kind)) or not self.whole.isdisjoint(classes)


def consulted(ran: Iterable[tuple[CodeType, dict[str, Any]]]) -> Consulted:
    """What functions read; each is its code and its globals.

    >>> def forward(self, x):
    ...     return x if getattr(self, "flag", False) else print(x)
    >>> found = consulted([(forward.__code__, {"print": print, "y": 1})])
    >>> sorted(found.names), found.asked, found.globals[0][1]
    (['getattr', 'print'], frozenset({'flag'}), frozenset({'print'}))
    """
    tables: dict[int, tuple[dict[str, Any], set[str]]] = {}
    codes, any_name, whole, data = [], False, set[str](), False
    for code, table in ran:
        names = names_in([code])
        tables.setdefault(id(table), (table, set()))[1].update(name for name in names if name in table)
        codes.append(code)
        if _of_an_object(code, table):
            if not (ANY | _OF_DATA).isdisjoint(names):
                whole.add(f"{table.get('__name__')}.{code.co_qualname.partition('.')[0]}")
            continue
        any_name |= not ANY.isdisjoint(names)
        data |= not _OF_DATA.isdisjoint(names)
    return Consulted(
        names_in(codes),
        asked_in(codes),
        _words_in(codes, _ENVIRONMENT),
        tuple(
            (Space(str(table.get("__name__")), table), frozenset(names)) for table, names in tables.values()
        ),
        any_name,
        frozenset(whole),
        data,
    )


def _of_an_object(code: CodeType, table: dict[str, Any]) -> bool:
    """Whether it is a method of a class that is no module, which looks at its own attributes."""
    kind = table.get(code.co_qualname.partition(".")[0])
    return isinstance(kind, type) and not issubclass(kind, nn.Module)


ANY = frozenset(["__dict__", "vars", "attrgetter", "getattr_static"])
_OF_DATA = frozenset(["asdict", "astuple", "fields"])
ASKING = frozenset(["getattr", "hasattr", "__getattribute__", "__getattr__"]) | ANY
_ENVIRONMENT = frozenset(["environ", "getenv"])


def names_in(codes: Iterable[CodeType]) -> frozenset[str]:
    """The names of attributes and globals in these codes and in those inside of them."""
    return frozenset(name for code in _within(codes) for name in code.co_names)


def asked_in(codes: Iterable[CodeType]) -> frozenset[str]:
    """The words by which these codes may ask attributes."""
    return _words_in(codes, ASKING)


def _words_in(codes: Iterable[CodeType], where: frozenset[str]) -> frozenset[str]:
    """The words in codes with one of the names `where`."""
    return frozenset(
        word
        for code in _within(codes)
        if not where.isdisjoint(code.co_names)
        for word in code.co_consts
        if type(word) is str and word.isidentifier()
    )


def _within(codes: Iterable[CodeType]) -> Iterable[CodeType]:
    todo = list(codes)
    while todo:
        code = todo.pop()
        yield code
        todo += [c for c in code.co_consts if isinstance(c, CodeType)]
