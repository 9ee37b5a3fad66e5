"""Mutants of real headers, indexes, manifests, configs and plans: success, or one named error.

Never another exception, never a file outside the target, never a half-written target, never a hang or
memory out of proportion. Each mutant is made from its number, so that a failure can be repeated.
"""

import json
import os
import random
import resource
import shutil
import time

import pytest

from autotp.checkpoint import convert, inventory, merge
from autotp.diagnostic import AutotpError
from autotp.plan import Plan
from tests.checkpoints import random_tensor, tree, write_checkpoint

TENSORS = {
    "up.weight": random_tensor("F32", (6, 4)),
    "down.weight": random_tensor("BF16", (4, 6)),
    "qkv.weight": random_tensor("F16", (8, 2)),
    "norm.weight": random_tensor("F32", (4,)),
    "ids": random_tensor("I64", (3,)),
    "packed": random_tensor("F4", (2, 3)),
}
PLAN = """version: 1
model_type: tiny
rules:
  up: column
  down: {style: row}
  qkv: {style: column, sections: [4, 2, 2], heads: 2}
optional: [qkv]
"""
NUMBERS = [0, 1, -1, 2, 3, 7, 255, 1 << 31, 1 << 40, 1 << 62, 1 << 63, 1 << 70, 1.5, 1e308]
VALUES = [
    *NUMBERS,
    None,
    True,
    "",
    "x",
    "../x",
    "/etc/passwd",
    "a\0b",
    "\ud800",
    "日本",
    [],
    {},
    [[]],
    [1, 2],
    {"a": 1},
    "F4",
    "BF16",
    "model-00001-of-00002.safetensors",
    "autotp.json",
    "." * 300,
]
SNIPPETS = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\\",
    b"\xff",
    b"\0",
    b"9" * 30,
    b"e9",
    b"-",
    b"null",
    b"NaN",
    b"../",
    b"\\u0000",
    b"\\ud800",
    b"&a ",
    b"*a",
    b"<<: ",
    b"!!python/object:os.system ",
    b"\n",
    b"\t",
]


def mutate_bytes(content, rng):
    """A few flips, cuts, copies and insertions."""
    content = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(content) + 1)
        match rng.randrange(5):
            case 0 if content:
                content[at % len(content)] ^= 1 << rng.randrange(8)
            case 1:
                del content[at : at + rng.choice([1, 2, 8, 100])]
            case 2:
                content[at:at] = rng.choice(SNIPPETS)
            case 3:
                content[at:at] = content[at : at + rng.choice([1, 10, 60])]
            case _:
                content[at : at + 1] = rng.choice(SNIPPETS)
    return bytes(content)


def mutate_json(content, rng):
    """One value somewhere in the tree is changed, removed, renamed or doubled."""
    table = json.loads(content)
    places, stack = [], [table]
    while stack:
        node = stack.pop()
        items = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
        places += [(node, key) for key, _ in items]
        stack += [value for _, value in items if isinstance(value, dict | list) and value]
    node, key = rng.choice(places)
    match rng.randrange(4):
        case 0 if isinstance(node, dict):
            node[rng.choice(["x", "../x", "", "\0", "weight", str(key) + "x"])] = node.pop(key)
        case 1:
            del node[key]
        case 2 if isinstance(node[key], int) and not isinstance(node[key], bool):
            node[key] += rng.choice([-1, 1, -8, 8, 1 << 20])
        case _:
            node[key] = rng.choice(VALUES)
    return json.dumps(table).encode("utf-8", "surrogatepass")


def mutate_header(content, rng):
    """The JSON of a .safetensors file is changed as a tree; its length and padding stay right."""
    length = int.from_bytes(content[:8], "little")
    text = mutate_json(content[8 : 8 + length], rng)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A checkpoint with an index, and its converted folder."""
    base = tmp_path_factory.mktemp("originals")
    source = write_checkpoint(base / "in", TENSORS, config={"model_type": "tiny", "n": 2}, files=2)
    (source / "tokenizer.json").write_text("{}")
    convert(source, base / "out", plan=Plan.loads(PLAN), tp=2, check="shapes")
    return base


def source_mutant(originals, place, rng):
    """A mutated checkpoint that is read and converted."""
    shutil.copytree(originals / "in", place / "in")
    name = rng.choice(
        ["model.safetensors.index.json", "config.json", *["model-00001-of-00002.safetensors"] * 4]
    )
    path = place / "in" / name
    if name.endswith(".json"):
        change = rng.choice([mutate_bytes, mutate_json])
    else:
        change = rng.choice([mutate_bytes, mutate_header])
    path.write_bytes(change(path.read_bytes(), rng))
    inventory(place / "in")
    convert(place / "in", place / "target", plan=Plan.loads(PLAN), tp=2, check="shapes")
    merge(place / "target", place / "again")
    mutated = tree(place / "in")
    assert tree(place / "again") == {name: mutated[name] for name in tree(place / "again")}


def shards_mutant(originals, place, rng):
    """A mutated converted folder that is merged: the original, or an error."""
    shutil.copytree(originals / "out", place / "in")
    shard = "rank-1-of-2/model-00001-of-00002.safetensors"
    name = rng.choice(["autotp.json", "autotp.json", "autotp.json", shard, "rank-0-of-2/config.json"])
    path = place / "in" / name
    change = rng.choice([mutate_bytes, mutate_json]) if name == "autotp.json" else mutate_bytes
    path.write_bytes(change(path.read_bytes(), rng))
    merge(place / "in", place / "target")
    weights = {n: data for n, data in tree(place / "target").items() if n.endswith(".safetensors")}
    assert list(weights.values()) == [
        d for n, d in tree(originals / "in").items() if n.endswith(".safetensors")
    ]


def plan_mutant(originals, place, rng):
    """A mutated plan file that is read and used."""
    plan = Plan.loads(mutate_bytes(PLAN.encode(), rng).decode("utf-8", "replace"))
    convert(originals / "in", place / "target", plan=plan, tp=2, check="shapes", dry_run=True)


def run_mutants(originals, place, kind, numbers):
    ended = {"success": 0, "error": 0}
    for number in numbers:
        work = place / "work"
        work.mkdir()
        started = time.monotonic()
        try:
            kind(originals, work, random.Random(f"{kind.__name__} {number}"))
            ended["success"] += 1
        except AutotpError as error:
            assert str(error) and "Traceback" not in str(error)
            ended["error"] += 1
            assert not (work / "target").exists() or kind is source_mutant, number
        except BaseException as error:
            error.add_note(f"{kind.__name__} number {number}")
            raise
        assert time.monotonic() - started < 20, f"{kind.__name__} number {number} took too long"
        assert set(os.listdir(work)) <= {"in", "target", "again"}, f"{kind.__name__} number {number}"
        assert os.listdir(place) == ["work"], f"{kind.__name__} number {number}"
        shutil.rmtree(work)
    return ended


@pytest.mark.parametrize("kind", [source_mutant, shards_mutant, plan_mutant])
def test_some_mutants(originals, tmp_path, kind):
    ended = run_mutants(originals, tmp_path, kind, range(60))
    assert ended["error"] > 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", [source_mutant, shards_mutant, plan_mutant])
def test_thousands_of_mutants(originals, tmp_path, kind):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ended = run_mutants(originals, tmp_path, kind, range(60, 1670))
    assert ended["error"] > 600 and ended["success"] > 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB
