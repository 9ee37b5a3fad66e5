"""The header reader against the safetensors library, and against what the library lets through."""

import json
import os
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from autotp.diagnostic import CheckpointError
from autotp.header import BITS, encode_header, parse_header, read_header


def line(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def raw_file(table, data=b"", *, length=None):
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def refusal(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as raised:
        read_header(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


arrays = st.dictionaries(
    st.text(
        st.characters(codec="utf-8", exclude_categories=["Cc"], exclude_characters="/\\."), min_size=1
    ).filter(lambda name: name != "__metadata__"),
    st.tuples(
        st.sampled_from(["float32", "int64", "bool", "float16", "uint8"]),
        st.lists(st.integers(0, 3), max_size=3),
    ),
    max_size=5,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(arrays, st.none() | st.dictionaries(st.text(max_size=4), st.text(max_size=4), min_size=1, max_size=2))
def test_reads_what_the_library_writes(tmp_path_factory, shapes, metadata):
    path = tmp_path_factory.mktemp("header") / "x.safetensors"
    content = {name: np.full(shape, 1, dtype) for name, (dtype, shape) in shapes.items()}
    path.write_bytes(save(content, metadata))
    header = read_header(path)
    assert header.metadata == (metadata or {})
    assert header.size == path.stat().st_size and path.read_bytes().startswith(header.raw)
    with safe_open(path, "numpy") as library:
        assert set(library.keys()) == set(header.tensors)
        for name, entry in header.tensors.items():
            known = library.get_slice(name)
            assert (known.get_dtype(), tuple(known.get_shape())) == (entry.dtype, entry.shape)
            assert path.read_bytes()[entry.start : entry.stop] == content[name].tobytes()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(arrays)
def test_the_library_reads_what_is_encoded(tmp_path_factory, shapes):
    path = tmp_path_factory.mktemp("header") / "x.safetensors"
    names = {"float32": "F32", "int64": "I64", "bool": "BOOL", "float16": "F16", "uint8": "U8"}
    content = {name: np.full(shape, 1, dtype) for name, (dtype, shape) in shapes.items()}
    wanted = {n: (names[str(a.dtype)], a.shape, a.nbytes) for n, a in content.items()}
    raw, starts = encode_header(wanted, {"format": "pt"})
    data = bytearray(sum(a.nbytes for a in content.values()))
    for name, array in content.items():
        at = starts[name] - len(raw)
        data[at : at + array.nbytes] = array.tobytes()
    path.write_bytes(raw + data)
    assert {n: (e.dtype, e.shape, e.start) for n, e in read_header(path).tensors.items()} == {
        n: (dtype, shape, starts[n]) for n, (dtype, shape, _) in wanted.items()
    }
    with safe_open(path, "numpy") as library:
        assert library.metadata() == {"format": "pt"}
        for name in library.keys():  # noqa: SIM118 - the library's object is no mapping
            np.testing.assert_array_equal(library.get_tensor(name), content[name])


def test_every_known_dtype_is_the_librarys(tmp_path):
    path = tmp_path / "x.safetensors"
    for dtype, bits in BITS.items():
        content = raw_file({"t": line(dtype, (8,), (0, bits))}, bytes(bits))
        path.write_bytes(content)
        entry = read_header(path).tensors["t"]
        assert (entry.nbytes, entry.itemsize) == (bits, bits / 8)
        with safe_open(path, "numpy") as library:
            assert library.get_slice("t").get_dtype() == dtype


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_what_is_accepted_the_library_accepts_too(tmp_path_factory, data):
    """Mutants of a real file: either one CheckpointError, or the library reads the same tensors."""
    content = bytearray(save({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.int64)}, {"format": "pt"}))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        change = data.draw(st.sampled_from(["flip", "cut", "insert", "digit"]))
        if change == "flip":
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        elif change == "cut":
            del content[at : at + data.draw(st.integers(1, 20))]
        elif change == "insert":
            content[at:at] = data.draw(st.binary(min_size=1, max_size=4))
        else:
            content[at : at + 1] = data.draw(st.sampled_from([b"0", b"9", b'"', b"[", b"}", b",", b"-"]))
        content = content or bytearray(b"x")
    path = tmp_path_factory.mktemp("mutant") / "x.safetensors"
    path.write_bytes(content)
    try:
        header = read_header(path)
    except CheckpointError as error:
        assert str(path) in str(error)
        return
    with safe_open(path, "numpy") as library:
        for name in library.keys():  # noqa: SIM118 - the library's object is no mapping
            assert tuple(library.get_slice(name).get_shape()) == header.tensors[name].shape


GOOD = {"a": line(offsets=(0, 4)), "b": line(offsets=(4, 8))}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abcd", "is 4 bytes long; a .safetensors file has at least 8"),
        (b"", "is 0 bytes long; a .safetensors file has at least 8"),
        (
            raw_file(GOOD, bytes(8), length=1 << 60),
            "says that its header is 1152921504606846976 bytes long; at most 100000000 are read",
        ),
        (raw_file(GOOD, b"", length=5000), "is truncated: 136 bytes, and its header alone takes 5008"),
        (raw_file(GOOD, bytes(3)), "is truncated: 139 bytes, and its header accounts for 144"),
        (
            raw_file(GOOD, bytes(24)),
            "has bytes that belong to no tensor: 160 bytes, and its header accounts for 144",
        ),
        (raw_file(b"[1]"), "its header does not begin with '{': is it a .safetensors file?"),
        (
            raw_file(b"{"),
            "its header is not sound JSON: Expecting property name enclosed in double quotes: "
            "line 1 column 9 (char 8)",
        ),
        (raw_file(b'{"a":' + b"[" * 100_000), "its header is nested too deeply"),
        (raw_file(b'{"a": NaN}'), "its header is not sound JSON: NaN is not JSON"),
        (raw_file(b'{"a": 1, "a": 2}'), "its header is not sound JSON: 'a' appears twice"),
        (
            raw_file(b'{"a":{"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
            "its header is not sound JSON: 'dtype' appears twice",
        ),
        (raw_file({"__metadata__": {"a": 1}}), "its __metadata__ is not a table of strings"),
        (
            raw_file({"a": line("U8", (4,)), "b": line("U8", (4,), (2, 6))}, bytes(6)),
            "tensor 'b' overlaps the tensor before it: it starts at byte 2 of the data, expected 4",
        ),
        (
            raw_file({"a": line(offsets=(0, 4)), "b": line(offsets=(8, 12))}, bytes(12)),
            "tensor 'b' leaves a gap before it: it starts at byte 8 of the data, expected 4",
        ),
        (raw_file({"../x": line()}, bytes(4)), "the tensor name '../x' is a path that could leave a folder"),
        (
            raw_file({"a/../../x": line()}, bytes(4)),
            "the tensor name 'a/../../x' is a path that could leave a folder",
        ),
        (
            raw_file({"/etc/x": line()}, bytes(4)),
            "the tensor name '/etc/x' is a path that could leave a folder",
        ),
        (
            raw_file({"k" * 5000: line()}, bytes(4)),
            f"the tensor name '{'k' * 59}… is 5000 characters long, and at most 1000 are taken",
        ),
        (
            raw_file({"a\0b": line()}, bytes(4)),
            "the tensor name 'a\\x00b' holds a control character",
        ),
        (
            raw_file({"\ud800": line()}, bytes(4)),
            "its header is not sound JSON: half a surrogate pair in a string",
        ),
        (raw_file({"": line()}, bytes(4)), "the tensor name '' is empty"),
        (raw_file({"a": 3}), "tensor 'a' is not described by dtype, shape and data_offsets"),
        (
            raw_file({"a": line("F31")}, bytes(4)),
            f"tensor 'a' has the unknown dtype 'F31'; known are {', '.join(sorted(BITS))}",
        ),
        (
            raw_file({"a": line(shape=(1,) * 65)}, bytes(4)),
            "tensor 'a' has an impossible shape (at most 64 dims, each from 0)",
        ),
        (
            raw_file({"a": line(shape=(-1,))}, bytes(4)),
            "tensor 'a' has an impossible shape (at most 64 dims, each from 0)",
        ),
        (
            raw_file({"a": line(shape=(True,))}, bytes(4)),
            "tensor 'a' has an impossible shape (at most 64 dims, each from 0)",
        ),
        (
            raw_file({"a": line(shape=(1 << 40, 1 << 40))}, bytes(4)),
            "tensor 'a' of shape [1099511627776, 1099511627776] is larger than the file, 100 bytes",
        ),
        (
            raw_file({"a": line(shape=(2,))}, bytes(4)),
            "tensor 'a': F32 [2] takes 8 bytes, its data_offsets span 4",
        ),
        (
            raw_file({"a": line("F4", (3,), (0, 1))}, bytes(1)),
            "tensor 'a': F4 [3] takes 1.5 bytes, its data_offsets span 1",
        ),
        (raw_file({"a": line(offsets=(4, 0))}, bytes(4)), "tensor 'a' has impossible data_offsets"),
        (raw_file({"a": line(offsets=(0, 4, 8))}, bytes(4)), "tensor 'a' has impossible data_offsets"),
        (
            raw_file({"a": line("U8", (1,), (0, 1)), "b": line(offsets=(1, 5))}, bytes(5)),
            "tensor 'b' is not aligned: F32 data at byte 137; save the file again",
        ),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 90868376\n",
            "is a git-lfs pointer for a file of 90868376 bytes, not the file itself; run `git lfs pull`",
        ),
    ],
)
def test_refused_with_the_file_and_the_numbers(tmp_path, content, message):
    assert refusal(tmp_path, content) == message


def test_a_text_is_told_as_one(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_text('{\n  "architectures": []}')
    with pytest.raises(CheckpointError) as raised:
        read_header(path)
    assert str(raised.value) == f"{path}: begins with the text '{{\\n  \"arc': it is no .safetensors file"


def test_a_huge_number_of_digits_is_refused(tmp_path):
    huge = b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}'
    assert refusal(tmp_path, raw_file(huge, bytes(4))).startswith(
        "its header is not sound JSON: Exceeds the limit"
    )


def test_scalars_empty_tensors_and_no_tensors_are_fine(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw_file({"s": line(shape=()), "z": line("F64", (0, 1 << 40), (4, 4))}, bytes(4)))
    assert {e.name: e.nbytes for e in read_header(path).tensors.values()} == {"s": 4, "z": 0}
    path.write_bytes(raw_file({}))
    assert read_header(path).tensors == {}


def test_only_regular_files_are_opened(tmp_path):
    fifo = tmp_path / "fifo.safetensors"
    os.mkfifo(fifo)
    for path in (fifo, tmp_path, "/dev/zero"):
        with pytest.raises(CheckpointError) as raised:
            read_header(path)
        assert str(raised.value) == f"{path}: is not a regular file"
    with pytest.raises(
        CheckpointError, match=r"nowhere\.safetensors: cannot be read: No such file or directory$"
    ):
        read_header(tmp_path / "nowhere.safetensors")


def test_unaligned_and_duplicate_are_what_the_library_lets_through(tmp_path):
    """The reasons why this reader exists beside the library's; when this fails, look again."""
    path = tmp_path / "x.safetensors"
    same = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    twice = b"{" + same + b"," + same + b"}"
    for content in (raw_file(twice, bytes(1)), raw_file({"../x": line()}, bytes(4))):
        path.write_bytes(content)
        with safe_open(path, "numpy") as library:
            assert len(library.keys()) == 1
    path.write_bytes(raw_file({"a": line(offsets=(0, 4)), "b": line(offsets=(2, 6))}, bytes(6)))
    with pytest.raises(SafetensorError):
        safe_open(path, "numpy").__enter__()


@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_tensors(tmp_path, count):
    wanted = {f"layers.{i}.weight": ("F16", (1,), 2) for i in range(count)}
    raw, _ = encode_header(wanted, {})
    header = parse_header(raw, size=len(raw) + 2 * count, path=tmp_path / "big.safetensors")
    assert len(header.tensors) == count
