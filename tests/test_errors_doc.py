"""docs/errors.md: every code with its meaning, an example as it is printed, and the remedy.

The examples are the tests' bad plans (tests/bad_plans, tests/refusals), and tests/error_examples.py for the
codes that those do not show. With AUTOTP_WRITE_MESSAGES=1 the file is written anew; read the difference
before it is committed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotp.codes import CODES, meaning
from tests.command_line import run
from tests.error_examples import EXAMPLES

ROOT = Path(__file__).parent.parent
DOC = ROOT / "docs" / "errors.md"
FOLDERS = [ROOT / "tests" / "bad_plans", ROOT / "tests" / "refusals"]
CODE = re.compile(r"AT\d{3}")

CHAPTERS = {
    "1": ("Plan file", "What is wrong with the text of a plan, whatever the model."),
    "2": ("Match and shape", "What a plan says of names and shapes that the model has otherwise."),
    "3": ("Layout and cost", "What the proof finds on the traced graph, and what a plan saves."),
    "4": ("Checkpoint", "What a checkpoint's files contradict."),
}
INTRODUCTION = """\
# Errors

Every finding has a code. This page says what each means, shows a plan that provokes it with the message as
it is printed, and says what to do. `autotp check --explain AT203` says the same on the command line.

A finding has a severity: an `error` refuses the plan, a `warning` and a `note` do not. All findings of a run
come at once.

This file is generated from the tests: `AUTOTP_WRITE_MESSAGES=1 pytest tests/test_errors_doc.py`.
"""


def file_examples() -> dict[str, tuple[str, str, str]]:
    """code -> (plan, its language, the finding), the shortest that the files of the tests hold."""
    found: dict[str, tuple[str, str, str]] = {}
    for folder in FOLDERS:
        for file in sorted(folder.glob("*.txt")):
            plan = next(p for p in (file.with_suffix(".yaml"), file.with_suffix(".json")) if p.exists())
            text = plan.read_text(encoding="utf-8")
            if not text.replace("\n", "").isprintable():
                continue
            for finding in file.read_text(encoding="utf-8").strip("\n").split("\n\n"):
                code = CODE.search(finding)
                assert code is not None, file
                example = (text, plan.suffix[1:], finding)
                known = found.get(code[0])
                if known is None or _length(example) < _length(known):
                    found[code[0]] = example
    return found


def _length(example: tuple[str, str, str]) -> int:
    return len(example[0]) + len(example[2])


def live_example(code: str) -> tuple[str, str, str]:
    """The same from the table of examples."""
    example = EXAMPLES[code]
    finding = next(d for d in example.find() if d.code == code)
    return example.shown, example.language, finding.render()


def sections() -> Iterator[str]:
    files = file_examples()
    chapter = ""
    for code, about in CODES.items():
        if code[2] != chapter:
            chapter = code[2]
            title, words = CHAPTERS[chapter]
            yield f"## {title}\n\n{words}\n"
        yield f"### {code}\n\n{about.means}\n"
        shown, language, finding = files.get(code) or live_example(code)
        yield f"```{language}\n{shown.rstrip()}\n```\n\n```text\n{finding}\n```\n"
        yield f"Remedy: {about.remedy}\n"


def in_source() -> dict[str, set[str]]:
    """code -> the files of the package that name it."""
    found: dict[str, set[str]] = {}
    for file in sorted((ROOT / "autotp").rglob("*.py")):
        if file.name == "codes.py":
            continue
        for code in CODE.findall(file.read_text(encoding="utf-8")):
            found.setdefault(code, set()).add(str(file.relative_to(ROOT / "autotp")))
    return found


def test_the_file_is_what_is_generated():
    text = "\n".join([INTRODUCTION, *sections()])
    if os.environ.get("AUTOTP_WRITE_MESSAGES"):
        DOC.write_text(text, encoding="utf-8")
    assert DOC.read_text(encoding="utf-8") == text


def test_every_code_of_the_source_has_one_meaning():
    assert set(in_source()) == set(CODES)
    assert list(CODES) == sorted(CODES)
    assert len({about.means for about in CODES.values()}) == len(CODES)
    for about in CODES.values():
        for sentence in (about.means, about.remedy):
            assert sentence[0].isupper() or sentence.startswith(("`", "transformers"))
            assert sentence.endswith(".") and len(sentence) < 160


# Which files may find what: a number that two of these parts use would have two meanings.
PARTS = {
    "the plan's text": ("plan", "planfault", "planfile", "plantext", "rule", "hfplan", "hfwrite", "hfsource"),
    "match": ("match", "claims", "units", "styles", "tied"),
    "the model": ("trace/support", "decide"),
    "the layouts": ("propagate/", "prove", "proof_notes", "rewrite/edits/"),
    "the cost": ("cost", "derive/auto"),
    "the checkpoint": ("shapes", "checkpoint/"),
}
QUOTING = ("diagnostic.py", "dry_run.py", "explanation.py", "cli/", "report/")  # these only quote codes


def test_no_code_is_used_by_two_parts():
    for code, files in in_source().items():
        own = {name for name in files if not name.startswith(QUOTING)}
        parts = {
            part
            for part, names in PARTS.items()
            for name in own
            if name.removesuffix(".py").startswith(names)
        }
        assert len(parts) == 1, (code, sorted(own))


@pytest.mark.parametrize("name", ["planfault", "match", "hfplan"])
def test_the_tables_of_the_sources_name_known_codes_once(name):
    docstring = (ROOT / "autotp" / f"{name}.py").read_text(encoding="utf-8").split('"""')[1]
    named = re.findall(r"(?:^|  )(AT\d{3})  ", docstring, re.MULTILINE)
    assert len(named) == len(set(named)) > 0
    assert set(named) <= set(CODES)


def test_every_code_has_an_example_and_only_one_place_for_it():
    files = set(file_examples())
    assert files | set(EXAMPLES) == set(CODES)
    assert not files & set(EXAMPLES)


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_provokes_its_code(code):
    assert code in {finding.code for finding in EXAMPLES[code].find()}


def test_the_command_explains_a_code():
    assert run("check", "--explain", "AT203") == (0, meaning("AT203") + "\n", "")
    assert run("check", "--explain", "at203")[0] == 0
    code, out, err = run("check", "--explain", "AT299")
    assert (code, out) == (2, "") and "there is no code AT299" in err
