"""`python -m tests.zoo`: every architecture, each in a process of its own, and docs/coverage.md.

Results are kept in .zoo/, one file each; a second run goes on where the first one stopped, and tries anew
what an older state of the sources gave. `--keep` takes old results, too; `--only` tries some. What took
least the last time, at any tp, comes first. Of architectures that are one model one is tried. Tokens are
generated at the first tp alone. At an odd tp, which deals heads unevenly, a fixed sample is tried.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from tests.zoo.build import architectures, described
from tests.zoo.report import report
from tests.zoo.trial import Result, attempt, from_data

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".zoo"
SAMPLE = (
    *(
        "llama",
        "mistral",
        "gemma2",
        "qwen3",
        "phi3",
        "gpt2",
        "gpt_neox",
        "bloom",
        "falcon",
        "opt",
        "bart",
        "bert",
    ),
    *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "mamba2", "qwen3_next"),
)
SECONDS = 3600  # for one architecture, unless `--seconds` says otherwise
MEMORY = 8 << 30


def sources() -> str:
    """A digest of what decides a result: the sources and the versions."""
    digest = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for file in sorted([*(ROOT / "autotp").rglob("*.py"), *Path(__file__).parent.glob("*.py")]):
        if file.name not in ("report.py", "__main__.py"):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def commit() -> str:
    """The commit that is checked out; a plus behind it where files differ from it."""
    git = ("git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=7")
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


def known(kind: str, tp: int, state: str | None) -> Result | None:
    """The result of an earlier run; of any state when `state` is None."""
    file = CACHE / f"{kind}-{tp}.json"
    if not file.exists():
        return None
    data = json.loads(file.read_text())
    return from_data(data["result"]) if state in (None, data["state"]) else None


def taken(kind: str) -> float:
    """The seconds of an earlier run; many where there was none that came to an end."""
    found = [json.loads(file.read_text())["result"] for file in CACHE.glob(f"{kind}-[0-9]*.json")]
    return min((r["seconds"] for r in found if r["seconds"] or r["end"] == "unbuilt"), default=SECONDS)


def tried(kind: str, tp: int, *, seconds: float, generate: bool) -> Result:
    """The result of a process of its own, which may die or take too long."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, kind, tp, generate))
    process.start()
    theirs.close()
    try:
        result = ours.recv() if ours.poll(seconds) else Result(kind, tp, "late", f"more than {seconds:.0f} s")
    except EOFError:
        result = Result(kind, tp, "foreign", "the process died")
    process.kill() if process.is_alive() and not result.seconds else None
    process.join()
    return result


def _child(pipe: object, kind: str, tp: int, generate: bool) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    pipe.send(attempt(kind, tp, generate=generate))  # type: ignore[attr-defined]


def main() -> None:
    """Run what is asked for, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo")
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sample", type=int, nargs="*", default=[3], help="at these tp the fixed sample")
    parser.add_argument("--only", nargs="+", default=None)
    parser.add_argument("--keep", action="store_true", help="take results of older sources, too")
    parser.add_argument("--known", action="store_true", help="write the page of the results there are")
    parser.add_argument(
        "--again", nargs="+", default=[], help="try results that ended so anew: refused wrong"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for one architecture")
    parser.add_argument("--report", type=Path, default=ROOT / "docs" / "coverage.md")
    chosen = parser.parse_args()
    CACHE.mkdir(exist_ok=True)
    state, results = sources(), []
    if not chosen.known:
        attempt("llama", 2)  # what torch imports and fills once is then there in every process
    for tp in chosen.tp if chosen.only else (*chosen.tp, *chosen.sample):
        kinds = chosen.only or (architectures() if tp in chosen.tp else SAMPLE)
        same: dict[str, Result] = {}  # some architectures have one model
        for kind in sorted(kinds, key=taken):
            result = known(kind, tp, None if chosen.keep or chosen.known else state)
            if result is None and chosen.known:
                continue
            model = kind if chosen.known else described(kind)
            if result is None or result.end in chosen.again:
                twin = same.get(model)
                result = replace(twin, kind=kind) if twin is not None else tried(
                    kind, tp, seconds=chosen.seconds, generate=tp == chosen.tp[0]
                )  # fmt: skip
                result.commit = commit()
                data = {"state": state, "result": result.to_data()}
                (CACHE / f"{kind}-{tp}.json").write_text(json.dumps(data, indent=1))
                why = result.why.splitlines()[0] if result.why else ""
                print(
                    f"{kind} tp {tp}: {result.end} {result.fraction:.0%} {result.seconds} s {why}", flush=True
                )
            results.append(result)
            same[model] = result
    if chosen.only is None:
        chosen.report.write_text(report(results, len(architectures())), encoding="utf-8")
        print(f"wrote {chosen.report}", file=sys.stderr)


if __name__ == "__main__":
    main()
