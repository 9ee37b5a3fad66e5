"""Plan files: found by path or by name, and refused when they are no readable text."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autotp.diagnostic import PlanError
from autotp.plan import Plan
from autotp.planfile import shipped_names


def refused(source: object) -> str:
    with pytest.raises(PlanError) as caught:
        Plan.load(source)  # type: ignore[arg-type]
    (finding,) = caught.value.diagnostics
    assert finding.code == "AT101"
    return str(caught.value)


def test_missing_file_names_it_and_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "my-plan.yaml").write_text("rules: {fc1: column}\n")
    assert refused(tmp_path / "my_plan.yaml") == (
        f"error[AT101]: {tmp_path}/my_plan.yaml: no such file\n  = help: did you mean `my-plan.yaml`?"
    )
    assert refused(str(tmp_path / "no" / "plan.yaml")) == (
        f"error[AT101]: {tmp_path}/no/plan.yaml: no such file"
    )


def test_folder_is_no_plan_file(tmp_path: Path) -> None:
    assert refused(tmp_path) == f"error[AT101]: {tmp_path}: is a folder, not a plan file"


def test_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    text = refused(tmp_path / "pipe.yaml")
    assert text == f"error[AT101]: {tmp_path}/pipe.yaml: is a device, not a plan file"


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_bytes(b"rules:\n  caf\xe9: column\n")
    text = refused(tmp_path / "plan.yaml")
    assert text == f"error[AT101]: {tmp_path}/plan.yaml: not UTF-8 text: byte 0xe9 in line 2"


def test_file_too_large(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_bytes(b"#" * (1 << 20) + b"\n")
    text = refused(tmp_path / "plan.yaml")
    assert text == f"error[AT101]: {tmp_path}/plan.yaml: larger than 1 MiB; a plan has some lines"


def test_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_bytes(b"\xef\xbb\xbfrules: {fc1: column}\n")
    assert Plan.load(tmp_path / "plan.yaml") == Plan(rules={"fc1": "column"})


def test_unknown_name_lists_the_shipped_plans() -> None:
    assert refused("lama") == (
        "error[AT101]: no plan is named `lama`\n"
        f"  = note: shipped plans: {', '.join(shipped_names())}\n"
        "  = help: did you mean `llama`?"
    )
    assert "a path to a plan file ends in .yaml or .json" in refused("zzzzz")


def test_text_of_a_plan_is_no_path() -> None:
    assert refused("rules:\n  fc1: column\n" * 200).endswith(
        "  = help: the text of a plan is read by `Plan.loads(text)`"
    )
    assert "no plan is named" in refused("\n")


def test_what_is_no_plan_at_all() -> None:
    assert refused(None) == "error[AT101]: a plan is a Plan, a dict, a path or a name, not NoneType"


def test_shipped_name_wins_over_a_file_and_a_path_reaches_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").write_text("rules: {fc1: column}\n")
    (tmp_path / "mine").write_text("rules: {fc1: column}\n")
    assert Plan.load("llama").model_type == "llama"
    assert (
        Plan.load("./llama") == Plan.load(Path("llama")) == Plan.load("mine") == Plan(rules={"fc1": "column"})
    )
