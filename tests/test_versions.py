"""The torch that is installed is checked, and the ranges that are stated agree."""

import tomllib
import warnings
from pathlib import Path

import pytest

from autotp import versions
from autotp.diagnostic import UsageError

ROOT = Path(__file__).parent.parent


@pytest.fixture
def installed(monkeypatch):
    """Pretend that another torch is installed."""

    def pretend(version):
        monkeypatch.setattr(versions.metadata, "version", lambda name: version)
        versions.check_torch.cache_clear()

    yield pretend
    versions.check_torch.cache_clear()


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.14.1", "2.14.0a0+git1234"])
def test_supported_versions_say_nothing(installed, version):
    installed(version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.check_torch()


def test_an_older_torch_is_an_error(installed):
    installed("2.9.1+cu128")
    with pytest.raises(UsageError) as error:
        versions.check_torch()
    assert str(error.value) == (
        "torch 2.9.1+cu128 is too old: autotp supports torch >=2.13,<2.15 and is tested with 2.13.0\n"
        "  = help: pip install torch==2.13.0"
    )


def test_a_newer_torch_is_one_warning(installed):
    installed("2.15.0")
    with pytest.warns(versions.TorchVersionWarning) as caught:
        versions.check_torch()
        versions.check_torch()
    assert [str(warning.message) for warning in caught] == [
        "torch 2.15.0 is newer than tested: autotp supports torch >=2.13,<2.15 and is tested with 2.13.0\n"
        "  = help: pip install torch==2.13.0"
    ]


def test_a_missing_torch_is_an_error(installed, monkeypatch):
    installed("0")

    def missing(name):
        raise versions.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions.metadata, "version", missing)
    with pytest.raises(UsageError, match=r"^torch is not installed: autotp supports torch >=2.13,<2.15"):
        versions.check_torch()


def test_pyproject_and_constraints_state_the_same_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, beyond = (".".join(map(str, end)) for end in versions.TORCH_RANGE)
    assert f"torch>={first},<{beyond}" in project["dependencies"]
    assert f"torch=={versions.TESTED_TORCH}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert f"TORCH := torch=={versions.TESTED_TORCH}" in (ROOT / "Makefile").read_text().splitlines()


def test_every_dependency_is_pinned():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = settings["project"]
    asked = [
        *project["dependencies"],
        *settings["dependency-groups"]["dev"],
        *settings["build-system"]["requires"],
    ]
    for extra in project["optional-dependencies"].values():
        asked += extra
    names = {name.split(">")[0].strip().lower() for name in asked}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower() for line in lines if "==" in line and not line.startswith("#")}
    assert names <= pinned
