import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qsrt_runtime.format import tensorfile
from qsrt_runtime.format.errors import FormatError

BIG = 1 << 62


def file_bytes(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="U8", shape=(4,), start=0, end=4):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def refused(tmp_path, data, *parts):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        tensorfile.read_header(path)
    message = str(caught.value)
    assert str(path) in message
    for part in parts:
        assert part in message


def test_reads_what_safetensors_writes(tmp_path):
    path = tmp_path / "weights.safetensors"
    tensors = {
        "marker": torch.empty(0, dtype=torch.int64),
        "scalar": torch.tensor(3.0),
        "matrix": torch.arange(6, dtype=torch.float16).view(2, 3),
        "labels": torch.zeros(5, dtype=torch.float8_e4m3fn),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    header = tensorfile.read_header(path)
    assert header.path == path
    assert header.metadata == {"format": "pt"}
    found = {name: (e.dtype, e.shape, e.end - e.start) for name, e in header.tensors.items()}
    assert found == {
        "marker": ("I64", (0,), 0),
        "scalar": ("F32", (), 4),
        "matrix": ("F16", (2, 3), 12),
        "labels": ("F8_E4M3", (5,), 5),
    }
    data, matrix = path.read_bytes(), header.tensors["matrix"]
    assert data[matrix.start : matrix.end] == tensorfile.tensor_data(tensors["matrix"])


@pytest.mark.parametrize("metadata", [{}, {"__metadata__": {}}, {"__metadata__": {"a": "b"}}])
def test_no_tensors(tmp_path, metadata):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(file_bytes(metadata))
    header = tensorfile.read_header(path)
    assert header.tensors == {}
    assert header.metadata == metadata.get("__metadata__", {})


def test_tensors_come_in_file_order(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(file_bytes({"b": entry(start=4, end=8), "a": entry()}, bytes(8)))
    assert list(tensorfile.read_header(path).tensors) == ["a", "b"]


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "truncated: 0 bytes"),
        (bytes(4), "truncated: 4 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "LFS pointer"),
        (b'{\n  "a": 1}', r"is not a safetensors file: it begins with b'{\n  "),
        ((1 << 63).to_bytes(8, "little") + b"{}", "is not a safetensors file"),
        ((100_000_001).to_bytes(8, "little") + b"{}", r"begins with b'\x01\xe1\xf5\x05"),
        ((3).to_bytes(8, "little") + b"{}", "header ends at byte 11, the file has 10"),
        (bytes(8), "header: not valid JSON"),
        (file_bytes(b"{"), "header: not valid JSON"),
        (file_bytes(b"\xff\xfe{}"), "header: not valid JSON"),
        (file_bytes(b"[]"), "JSON list"),
        (file_bytes(b"null"), "JSON NoneType"),
        (file_bytes(b'{"a":1,"a":1}'), "key 'a' stands twice"),
        (file_bytes(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested too deep"),
        (file_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
        (file_bytes({"__metadata__": "a"}), "__metadata__"),
        (file_bytes({"__metadata__": [1]}), "__metadata__"),
    ],
)
def test_refused_files(tmp_path, data, part):
    refused(tmp_path, data, part)


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 50, -5, -1])
def test_cut_anywhere(tmp_path, cut):
    whole = file_bytes({"a": entry(), "b": entry(start=4, end=8)}, bytes(8))
    refused(tmp_path, whole[:cut], "truncated")


def test_cut_names_the_tensor(tmp_path):
    refused(tmp_path, file_bytes({"a": entry()}, bytes(3)), "truncated", "tensor a is cut")


@pytest.mark.parametrize(
    ("tensors", "parts"),
    [
        ({"a": entry(), "b": entry(start=2, end=6)}, ["tensor b overlaps"]),
        ({"a": entry(), "b": entry()}, ["tensor b overlaps"]),
        ({"a": entry(), "b": entry(start=5, end=9)}, ["tensor b leaves a gap"]),
        ({"a": entry(start=1, end=5)}, ["tensor a leaves a gap"]),
        ({"a": entry(start=4, end=0)}, ["tensor a", "data_offsets"]),
        ({"a": entry(start=-4, end=0)}, ["tensor a", "data_offsets"]),
        ({"a": entry(start=0.0, end=4)}, ["tensor a", "data_offsets"]),
        ({"a": entry(shape=(100,), end=100)}, ["truncated", "tensor a"]),
        ({"a": entry()}, ["4 bytes follow the last tensor"]),
        ({}, ["8 bytes follow the last tensor"]),
        ({"a": entry(shape=(5,))}, ["tensor a", "4 bytes stored"]),
        ({"a": entry(dtype="F16")}, ["tensor a", "4 bytes stored"]),
        ({"a": entry(shape=())}, ["tensor a", "4 bytes stored"]),
        ({"a": entry(shape=(BIG, 4))}, ["tensor a", "is too large"]),
        ({"a": entry(shape=(1 << 63, 0), end=0)}, ["tensor a", "shape"]),
        ({"a": entry(shape=(-2, -2))}, ["tensor a", "shape"]),
        ({"a": entry(shape=(-4,))}, ["tensor a", "shape"]),
        ({"a": entry(shape=(4.0,))}, ["tensor a", "shape"]),
        ({"a": entry(shape=(1.5,))}, ["tensor a", "shape"]),
        ({"a": entry(shape=("4",))}, ["tensor a", "shape"]),
        ({"a": entry(shape=(True, 4))}, ["tensor a", "shape"]),
        ({"a": entry(shape=(1,) * 33 + (4,))}, ["tensor a", "shape"]),
        ({"a": entry() | {"shape": 4}}, ["tensor a", "shape"]),
        ({"a": entry() | {"shape": None}}, ["tensor a", "shape"]),
        ({"a": entry(dtype="BF17")}, ["tensor a", "unknown dtype 'BF17'"]),
        ({"a": entry(dtype=3)}, ["tensor a", "unknown dtype 3"]),
        ({"a": entry(dtype=["U8"])}, ["tensor a", "unknown dtype"]),
        ({"a": entry(dtype="F4", shape=(3,), end=2)}, ["tensor a", "takes 12 bits"]),
        ({"a": entry(dtype="F4", shape=(3,), end=1)}, ["tensor a", "takes 12 bits"]),
        ({"a": entry() | {"data_offsets": [0]}}, ["tensor a", "data_offsets"]),
        ({"a": entry() | {"data_offsets": [0, 2, 4]}}, ["tensor a", "data_offsets"]),
        ({"a": entry() | {"data_offsets": None}}, ["tensor a", "data_offsets"]),
        ({"a": entry() | {"more": 1}}, ["tensor a", "entry"]),
        ({"a": {"dtype": "U8", "shape": [4]}}, ["tensor a", "entry"]),
        ({"a": 4}, ["tensor a", "entry"]),
    ],
)
def test_refused_tensors(tmp_path, tensors, parts):
    refused(tmp_path, file_bytes(tensors, bytes(8)), *parts)


def test_missing_file_and_folder(tmp_path):
    for path in (tmp_path / "missing.safetensors", tmp_path):
        with pytest.raises(FormatError, match=str(path)):
            tensorfile.read_header(path)


@pytest.mark.parametrize("value", [b"[]", b"0", b'""', b"false"])
def test_falsy_metadata_is_refused(tmp_path, value):
    refused(tmp_path, file_bytes(b'{"__metadata__":' + value + b"}"), "__metadata__")


def test_written_header(tmp_path):
    layout = tensorfile.layout({"z": ("U8", (3,)), "a": ("F16", (2, 0)), "m": ("F32", (2, 1))})
    assert layout == {
        "z": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "a": {"dtype": "F16", "shape": [2, 0], "data_offsets": [3, 3]},
        "m": {"dtype": "F32", "shape": [2, 1], "data_offsets": [3, 11]},
    }
    found = tensorfile.header_bytes({"b": "ü", "a": "1"}, layout)
    assert found[8:].startswith(b'{"__metadata__":{"a":"1","b":"\xc3\xbc"},"z":{"dtype":"U8",')
    assert len(found) % 8 == 0
    assert int.from_bytes(found[:8], "little") == len(found) - 8
    assert found.rstrip(b" ").endswith(b"}}")
    path = tmp_path / "weights.safetensors"
    path.write_bytes(found + bytes(range(11)))
    assert list(tensorfile.read_header(path).tensors) == ["z", "a", "m"]
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"a": "1", "b": "ü"}
    assert load_file(path)["z"].tolist() == [0, 1, 2]
    assert load_file(path)["m"].shape == (2, 1)


@pytest.mark.parametrize("length", range(9))
def test_header_is_padded_to_eight_bytes(length):
    found = tensorfile.header_bytes({"a": "x" * length}, {})
    text = b'{"__metadata__":{"a":"' + b"x" * length + b'"}}'
    assert found[8:] == text + b" " * (-len(text) % 8)


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("U8", (), 1),
        ("BF16", (3, 5), 30),
        ("F4", (3,), 2),
        ("F6_E2M3", (4,), 3),
        ("F64", (0, 9), 0),
        ("I64", (2,), 16),
    ],
)
def test_tensor_bytes(dtype, shape, size):
    assert tensorfile.tensor_bytes(dtype, shape) == size


def test_tensor_data():
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3)
    assert tensorfile.tensor_data(tensor) == bytes([0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0])
    assert tensorfile.tensor_data(tensor.T) == bytes([0, 0, 3, 0, 1, 0, 4, 0, 2, 0, 5, 0])
    assert tensorfile.tensor_data(tensor[1:, 1:2]) == bytes([4, 0])
    assert tensorfile.tensor_data(torch.empty(0)) == b""
