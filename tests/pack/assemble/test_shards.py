import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qsrt_pack.assemble.shards import MAX_SHARD_BYTES, file_pieces, plan_shards, write_shards
from qsrt_runtime.format.tensorfile import read_header, tensor_data

DTYPES = {"U8": torch.uint8, "F16": torch.float16, "F32": torch.float32, "I64": torch.int64}


def bytes_spec(**sizes: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: ("U8", (size,)) for name, size in sizes.items()}


def test_shards_fill_in_the_order_of_names() -> None:
    tensors = bytes_spec(c=3, a=5, b=5, d=7, e=1)
    assert plan_shards(tensors, 10) == [["a", "b"], ["c", "d"], ["e"]]
    assert plan_shards(tensors, 9) == [["a"], ["b", "c"], ["d", "e"]]
    assert plan_shards(tensors, 21) == [["a", "b", "c", "d", "e"]]
    assert plan_shards(tensors) == [["a", "b", "c", "d", "e"]]


def test_a_tensor_above_the_limit_stands_alone() -> None:
    assert plan_shards(bytes_spec(a=1, b=11, c=1), 10) == [["a"], ["b"], ["c"]]
    assert plan_shards(bytes_spec(b=11), 10) == [["b"]]


def test_no_tensors_make_no_shard() -> None:
    assert plan_shards({}) == []


def test_empty_tensors_take_no_room() -> None:
    assert plan_shards(bytes_spec(a=10, b=0, c=1), 10) == [["a", "b"], ["c"]]


def test_the_limit_is_that_of_the_hub() -> None:
    sizes = {"a": ("BF16", (MAX_SHARD_BYTES // 2,)), "b": ("BF16", (1,))}
    assert plan_shards(sizes) == [["a"], ["b"]]


def tensors() -> dict[str, torch.Tensor]:
    """Sizes that leave wide tensors misaligned unless they come first."""
    return {
        "a.odd": torch.arange(3, dtype=torch.uint8),
        "b.half": torch.arange(5, dtype=torch.float16),
        "c.long": torch.arange(7),
        "d.scalar": torch.tensor(2.5),
        "e.empty": torch.empty(0, 4),
        "f.matrix": torch.arange(6, dtype=torch.float32).view(2, 3),
    }


def write(folder: Path, values: dict[str, torch.Tensor], max_bytes: int = 1000) -> dict:
    names = {dtype: name for name, dtype in DTYPES.items()}
    specs = {name: (names[t.dtype], tuple(t.shape)) for name, t in values.items()}

    def payload(name: str) -> Iterable[bytes]:
        data = tensor_data(values[name])
        return [data[:1], data[1:]]

    return write_shards(folder, specs, payload, max_bytes)


@pytest.mark.parametrize(("max_bytes", "count"), [(1000, 1), (60, 3), (1, 6)])
def test_what_is_written_is_read_back(tmp_path: Path, max_bytes: int, count: int) -> None:
    index = write(tmp_path, tensors(), max_bytes)
    files = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"] == {"total_size": sum(t.nbytes for t in tensors().values())}
    loaded = {file: load_file(tmp_path / file) for file in files}
    assert {name: f for f, part in loaded.items() for name in part} == index["weight_map"]
    for name, expected in tensors().items():
        found = loaded[index["weight_map"][name]][name]
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_every_tensor_is_aligned_to_its_element(tmp_path: Path) -> None:
    write(tmp_path, tensors())
    header = read_header(tmp_path / "model-00001-of-00001.safetensors")
    assert header.metadata == {"format": "pt"}
    order = ["c.long", "d.scalar", "e.empty", "f.matrix", "b.half", "a.odd"]
    assert list(header.tensors) == order
    for entry in header.tensors.values():
        assert entry.start % DTYPES[entry.dtype].itemsize == 0


def test_the_same_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    data = []
    for order in (tensors(), dict(reversed(tensors().items()))):
        folder = tmp_path / str(len(data))
        folder.mkdir()
        index = write(folder, order, 60)
        shards = [path.read_bytes() for path in sorted(folder.iterdir())]
        data.append((shards, json.dumps(index, sort_keys=True)))
    assert data[0] == data[1]


def test_file_pieces(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    assert b"".join(file_pieces(path, 10, 90)) == bytes(range(10, 90))
    assert list(file_pieces(path, 10, 10)) == []
    with pytest.raises(OSError, match="file ended at byte 100, expected 101"):
        list(file_pieces(path, 10, 101))


def test_a_failed_payload_leaves_no_shard(tmp_path: Path) -> None:
    def payload(_name: str) -> Iterable[bytes]:
        yield b"1"
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        write_shards(tmp_path, bytes_spec(a=2), payload)
    assert list(tmp_path.iterdir()) == []
