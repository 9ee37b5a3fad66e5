"""`import autotp` is light, and exposes exactly what it says."""

import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest

import autotp


def test_import_leaves_torch_out():
    code = "import autotp, sys; dir(autotp); autotp.PlanError; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_all_is_sorted_and_equals_what_is_exposed():
    assert list(autotp.__all__) == sorted(autotp.__all__)
    assert set(autotp.__all__) == {*autotp._HOME, "__version__"}
    assert set(autotp.__all__) <= set(dir(autotp))


@pytest.mark.parametrize("name", autotp.__all__)
def test_every_name_can_be_had_and_keeps_its_meaning(name):
    value = getattr(autotp, name)
    home = autotp._HOME.get(name)
    if home is not None:
        # Importing a submodule binds its name in the package: it must not hide a function of that name.
        importlib.import_module(home)
        assert getattr(autotp, name) is value
        assert isinstance(value, ModuleType) == (home == f"autotp.{name}")


def test_no_submodule_hides_a_public_function():
    functions = {name for name, home in autotp._HOME.items() if home != f"autotp.{name}"}
    for name in functions:
        assert importlib.util.find_spec(f"autotp.{name}") is None, f"autotp/{name}.py hides autotp.{name}"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'autotp' has no attribute 'sharde'$"):
        autotp.sharde  # noqa: B018
