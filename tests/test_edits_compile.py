"""Edited text becomes the same function: closures, class cells, defaults, decorators, line numbers."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import traceback

import pytest

from autotp.rewrite.edits.compile import holds, named, rebuilt, remade
from autotp.rewrite.edits.text import NoSource, inserted, source_of

_NUMBER = itertools.count()


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A module from its text."""

    def make(text: str, name: str = ""):
        name = name or f"edits_made_{next(_NUMBER)}"
        file = tmp_path / f"{name}.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return make


def edited(function, old: str, name: str = "local", value=lambda n: n // 2):
    """`function` with name(...) around the first place of `old` in its text."""
    source = source_of(function.__code__, function.__globals__)
    node = source.definition(function.__code__)
    start = source.raw.index(old.encode(), source.span(node)[0])
    inserts = [(start, -len(old), f"{name}("), (start + len(old), len(old), ")")]
    return remade(function, inserts, {name: value})


def test_text_is_inserted_and_nothing_else_changes():
    assert inserted(b"f(a, b)  # c", [(2, -1, "g("), (3, 1, ")")]) == b"f(g(a), b)  # c"
    assert inserted(b"xab", [(2, -1, "l("), (3, 1, ")"), (2, -9, "s(); ")], 1) == b"xs(); l(a)b"


def test_a_closure_stays_live(written):
    module = written(
        "def outer():\n"
        "    count = 8\n"
        "    def set(n):\n"
        "        nonlocal count\n"
        "        count = n\n"
        "    def get():\n"
        "        return count + 1\n"
        "    return set, get\n"
    )
    set_, get = module.outer()
    new = edited(get, "count")
    assert (get(), new()) == (9, 5)
    set_(20)
    assert (get(), new()) == (21, 11)


def test_globals_stay_live(written):
    module = written("SIZE = 6\ndef f():\n    return SIZE\n")
    new = edited(module.f, "SIZE")
    module.SIZE = 10
    assert new() == 5 and "local" not in vars(module)


def test_super_private_names_and_the_class_by_its_name(written):
    module = written(
        "class A:\n"
        "    def f(self):\n"
        "        return 1\n"
        "class B(A):\n"
        "    flag = 100\n"
        "    def __init__(self):\n"
        "        self.__n = 8\n"
        "    def f(self):\n"
        "        return super().f() + self.__n + B.flag + __class__.flag\n"
    )
    new = edited(module.B.f, "self.__n")
    assert new(module.B()) == 1 + 4 + 100 + 100


def test_defaults_annotations_and_names_stay(written):
    module = written(
        "from __future__ import annotations\n"
        "def f(a, b: Unknown = 4, *rest: Unknown, c: int = 6, **more) -> Unknown:\n"
        '    "What it does."\n'
        "    return (a, b), rest, c, more\n"
    )
    new = edited(module.f, "(a, b)", name="twice", value=lambda pair: (*pair, *pair))
    assert new(1)[0] == (1, 4, 1, 4)
    assert (new.__defaults__, new.__kwdefaults__) == ((4,), {"c": 6})
    assert (new.__name__, new.__qualname__, new.__doc__) == ("f", "f", "What it does.")
    assert new.__annotations__ == module.f.__annotations__ and new.__module__ == module.__name__


def test_decorators_are_copied_and_do_not_run_again(written):
    module = written(
        "import functools\n"
        "runs = []\n"
        "def deco(tag):\n"
        "    def around(f):\n"
        "        runs.append(tag)\n"
        "        @functools.wraps(f)\n"
        "        def wrapper(*a):\n"
        "            return (tag, f(*a))\n"
        "        return wrapper\n"
        "    return around\n"
        "@deco('x')\n"
        "@deco('y')\n"
        "def f(n):\n"
        "    return n + 0\n"
    )
    inner = module.f.__wrapped__.__wrapped__
    assert holds(module.f, inner.__code__) is inner
    new = rebuilt(module.f, inner, edited(inner, "n + 0"))
    assert new is not module.f and new(6) == ("x", ("y", 3))
    assert module.runs == ["y", "x"]
    assert new.__wrapped__.__wrapped__ is not inner


def test_static_class_methods_and_properties_are_remade(written):
    module = written(
        "class A:\n"
        "    size = 8\n"
        "    @staticmethod\n"
        "    def s(n):\n"
        "        return n + 0\n"
        "    @classmethod\n"
        "    def c(cls):\n"
        "        return cls.size\n"
        "    @property\n"
        "    def p(self):\n"
        "        return self.size\n"
    )
    kept = vars(module.A)
    static = rebuilt(kept["s"], kept["s"].__func__, edited(kept["s"].__func__, "n + 0"))
    assert isinstance(static, staticmethod) and static(8) == 4
    class_ = rebuilt(kept["c"], kept["c"].__func__, edited(kept["c"].__func__, "cls.size"))
    prop = rebuilt(kept["p"], kept["p"].fget, edited(kept["p"].fget, "self.size"))
    made = type("A", (module.A,), {"c": class_, "p": prop})
    assert (made.c(), made().p) == (4, 4)


def test_lambdas_of_one_line_are_told_apart(written):
    module = written("n = 8\nf = [lambda a: a * n, lambda a: a * n, lambda a: a + n]\n")
    sources = [source_of(f.__code__, vars(module)) for f in module.f]
    texts = [s.span(s.definition(f.__code__)) for s, f in zip(sources, module.f, strict=True)]
    assert [start for start, _ in texts] == [11, 28, 45]
    assert [f(2) for f in module.f] == [16, 16, 10]


def test_a_lambda_and_a_comprehension(written):
    module = written("n = 8\nf = [lambda a: a, lambda a: [a * n for _ in range(2)]]\n")
    new = edited(module.f[1], "a * n")
    assert new(3) == [12, 12]


def test_lines_of_a_traceback_are_those_of_the_file(written):
    module = written("def f(a):\n    b = a\n\n    # a comment\n    return b / 0\n")
    new = edited(module.f, "b / 0")
    with pytest.raises(ZeroDivisionError) as caught:
        new(8)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.lineno, last.line) == (module.__file__, 5, "return b / 0")


def test_equal_functions_of_two_files_are_two(written):
    text = "def f(n):\n    return n + 0\n"
    one, other = written(text), written(text)
    assert one.f.__code__ == other.f.__code__
    a, b = (edited(m.f, "n + 0", value=v) for m, v in ((one, lambda n: 1), (other, lambda n: 2)))
    assert (a(9), b(9)) == (1, 2)
    assert (a.__code__.co_filename, b.__code__.co_filename) == (one.__file__, other.__file__)


def test_an_edited_text_that_changed_since_is_refused(written):
    module = written("def f(n):\n    return n\n")
    with open(module.__file__, "w") as file:
        file.write("def f(n):\n    return n + 1\n")
    with pytest.raises(NoSource, match="the text on disk is not the code that runs"):
        source_of(module.f.__code__, vars(module))
    with open(module.__file__, "w") as file:
        file.write("# shifted\ndef f(n):\n    return n\n")
    with pytest.raises(NoSource, match="the text on disk is not the code that runs"):
        source_of(module.f.__code__, vars(module))


def test_code_without_text_is_refused_with_what_to_do():
    names: dict[str, object] = {}
    exec("def f(n):\n    return n\n", names)
    with pytest.raises(NoSource, match="write it in a file that Python imports"):
        source_of(names["f"].__code__, names)


def test_wrappers_get_names_that_are_free(written):
    module = written("def f(local, n):\n    local2 = 1\n    return local + local2 + n\n")
    source = source_of(module.f.__code__, vars(module))
    assert named(source, module.f, "local", "swap", "local") == ["local3", "swap", "local4"]
