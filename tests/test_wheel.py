"""The wheel and the editable install both carry the package, its types marker and the shipped plans."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
OFFLINE = ("--no-index", "--no-deps", "--no-build-isolation")

LOOK = """
import json, sys
import autotp
from autotp.shipped import plans_folder
plans = {file.stem: len(autotp.Plan.load(file.stem).rules) for file in plans_folder().glob("*.yaml")}
print(json.dumps({"package": autotp.__file__, "plans": plans, "torch": "torch" in sys.modules}))
"""


def shipped():
    return sorted(path.stem for path in (ROOT / "plans").glob("*.yaml"))


def run(*command, **environment):
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=ROOT.parent,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def install(tmp_path):
    """Install into an empty environment, and look at what a user would get there.

    The dependencies come from the running environment by PYTHONPATH, which does not read `.pth` files:
    an editable autotp of the running environment stays out.
    """

    def installed(*what):
        home = tmp_path / "environment"
        run(sys.executable, "-m", "venv", "--without-pip", str(home))
        python = str(home / "bin" / "python")
        dependencies = {"PYTHONPATH": sysconfig.get_path("purelib")}
        run(*PIP, "--python", python, "install", *OFFLINE, *what, **dependencies)
        found = json.loads(run(python, "-c", LOOK, **dependencies))
        assert "usage: autotp" in run(str(home / "bin" / "autotp"), "--help", **dependencies).lower()
        return found, home

    return installed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", *OFFLINE, "--wheel-dir", str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    return built


def test_what_the_wheel_holds(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "autotp/py.typed" in names
    assert sorted(Path(name).stem for name in names if name.startswith("autotp/plans/")) == shipped()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"autotp"}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "autotp").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules


@pytest.mark.slow
def test_the_installed_wheel_loads_its_plans(install, wheel):
    found, home = install(str(wheel))
    assert Path(found["package"]).is_relative_to(home)
    assert sorted(found["plans"]) == shipped()
    assert {"bert", "llama"} <= set(found["plans"])
    assert all(found["plans"].values())
    assert found["torch"] is False


@pytest.mark.slow
def test_the_editable_install_loads_the_plans_of_the_checkout(install):
    found, _ = install("--editable", str(ROOT))
    assert Path(found["package"]).parent == ROOT / "autotp"
    assert sorted(found["plans"]) == shipped()
    assert all(found["plans"].values())
