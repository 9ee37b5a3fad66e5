"""How many ranks there were: what other trainers' files say of it, and what config.json's sizes say.

Of ranks 0, 1, 2 of 4 every file fits the others, and a quarter of each weight would be gone without a word.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from autotp.diagnostic import CheckpointError

__all__ = ["check_sizes", "check_told", "told_counts"]

ALL = "world_size"  # of Megatron: all ranks, tensor-parallel ones times others
COUNTS = (  # numbers of tensor-parallel ranks: Megatron-LM's, DeepSpeed's, others'
    "tensor_model_parallel_size",
    "mp_world_size",
    "tensor_parallel_size",
    "model_parallel_size",
    ALL,
)
HOLDERS = ("args", "config", "cfg", "hyper_parameters")  # where trainers keep their settings
WIDTHS = ("hidden_size", "n_embd", "d_model")
INNER = ("intermediate_size", "ffn_hidden_size", "n_inner", "d_ff", "moe_intermediate_size")
HEADS = ("num_attention_heads", "n_head", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_query_groups")
MOST = 1024  # ranks that are thought of
SHOWN = 8


def told_counts(found: Any) -> dict[str, int]:
    """{name: number of ranks} as the content of a rank's file tells it, beside the weights."""
    told: dict[str, int] = {}
    for where, table in _settings(found):
        for key in COUNTS:
            value = table.get(key)
            if type(value) is int and value > 0:
                told[f"{where}{key}"] = value
                break  # the older names may count pipeline stages too
    return told


def _settings(found: Any) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    if not isinstance(found, Mapping):
        return
    yield "", found
    for holder in HOLDERS:
        inside = found.get(holder)
        if isinstance(inside, Mapping):
            yield f"{holder}.", inside
        elif hasattr(inside, "__dict__"):
            yield f"{holder}.", vars(inside)


def check_told(folder: Path, parts: Sequence[Path], told: Sequence[Mapping[str, int]]) -> bool:
    """Whether the files say how many ranks there were. Raises CheckpointError where others are there."""
    sure = False
    for part, counts in zip(parts, told, strict=True):
        for name, count in counts.items():
            whole = name.rpartition(".")[2] == ALL
            if whole and count > len(parts) and count % len(parts):
                _refuse(
                    part,
                    f"says {name} {count}, which is no multiple of the number of ranks in {folder}, "
                    f"{len(parts)}: are ranks missing?",
                )
            if not whole and count != len(parts):
                there = _files(folder, parts)
                more = f"missing: {_absent(there, count)}" if count > len(parts) else "some are of others"
                _refuse(part, f"says {name} {count}, and {_found(len(parts))} in {folder}; {more}")
            sure = sure or not whole
    return sure


def check_sizes(
    folder: Path,
    parts: Sequence[Path],
    config: Mapping[str, Any],
    cut: Collection[int],
    rows: Collection[int],
) -> bool:
    """Whether config.json's sizes are those of what the parts make up: `cut` dims, and vocabularies' `rows`.

    Raises CheckpointError where they are those of more ranks than are there.
    """
    there, found = len(parts), _files(folder, parts)
    words = config.get("vocab_size")
    if type(words) is int and any(size < words for size in rows):
        short = min(rows)
        _refuse(
            folder,
            f"{_found(there)}, whose vocabulary makes up {short} rows, and config.json says vocab_size "
            f"{words}; missing: {_absent(found, max(there + 1, -(-words * there // short)))}, or more",
        )
    sizes, sought = _sizes(config), {*cut}
    if not sizes or not sought:
        return not sought and {*rows} == {words}
    if all(_explained(size, sizes, there, there) for size in sought):
        return True
    for count in range(there + 1, MOST + 1):
        if all(_explained(size, sizes, there, count) for size in sought):
            told = ", ".join(map(str, sorted(sought)[:SHOWN]))
            _refuse(
                folder,
                f"{_found(there)}, and what they make up, of sizes {told}, is {there} of {count} parts of "
                f"what config.json says; missing: {_absent(found, count)}; if these are all, correct or "
                "remove config.json",
            )
    return False


def _sizes(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(size, width of a unit of it) of every dim that a config tells of and a plan may cut."""
    config = {**config, **(config["text_config"] if isinstance(config.get("text_config"), Mapping) else {})}

    def first(keys: Sequence[str]) -> int:
        found = (config.get(key) for key in keys)
        return next((n for n in found if type(n) is int and n > 0), 0)

    width, heads = first(WIDTHS), first(HEADS)
    if not width:
        return []
    kv, head = first(KV_HEADS) or heads, first(("head_dim",)) or (width // heads if heads else 0)
    inner = {n for key in INNER if type(n := config.get(key)) is int and n > 0} or {4 * width}
    queries, keys = heads * head, kv * head
    sizes = {(n * times, 1) for n in inner for times in (1, 2)} | {(width, 1)}
    if head:
        sizes |= {(n, head) for n in (queries, keys, queries + 2 * keys, 3 * queries)}
    return sorted(sizes)


def _explained(size: int, sizes: Sequence[tuple[int, int]], there: int, count: int) -> bool:
    """Whether `size` is what the first `there` of `count` ranks have of one of the sizes."""
    for whole, unit in sizes:
        units, rest = divmod(whole // unit, count)
        if (there * units + min(there, rest)) * unit == size:
            return True
    return False


def _files(folder: Path, parts: Sequence[Path]) -> list[str]:
    """The folder, or file, of each rank, by name."""
    return [part.relative_to(folder).parts[0] for part in parts]


def _found(count: int) -> str:
    return f"{count} ranks are found" if count > 1 else "1 rank is found"


def _absent(there: Sequence[str], count: int) -> str:
    """The names that the missing ranks would have: those of the last, with other numbers."""
    last = str(len(there) - 1)
    head, _, tail = there[-1].rpartition(last)
    digits = len(head) - len(head.rstrip("0")) + len(last)
    head = head.rstrip("0")
    names = [f"{head}{rank:0{digits}}{tail}" for rank in range(len(there), count)]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _refuse(path: Path, fault: str) -> NoReturn:
    raise CheckpointError(f"{path}: {fault}")
