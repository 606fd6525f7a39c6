"""Checkpoint folders that are whole, and every way in which one is not."""

import json
import os
import pickle
import shutil
import tracemalloc
from pathlib import Path

import checkpoints
import pytest
import torch
from safetensors.torch import save_file

from qsrt_pack.source import checkpoint as module
from qsrt_pack.source.checkpoint import check_finite, digest_files, open_checkpoint, read_tensor
from qsrt_runtime.format import paths
from qsrt_runtime.format.errors import FormatError

SHARD_1, SHARD_2 = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 1000\n" % (
    b"0" * 64
)


def single(folder: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    """A folder of config.json and one model.safetensors with this header."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    text = json.dumps(header).encode()
    size = len(text) if length is None else length
    (folder / "model.safetensors").write_bytes(size.to_bytes(8, "little") + text + data)
    return folder


def entry(shape: object, offsets: object, dtype: str = "U8") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def snapshot(source: Path, root: Path) -> Path:
    """The folder as a Hub cache stores it: relative links into ../../blobs."""
    folder, blobs = root / "snapshots" / "0123abcd", root / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    for file in source.iterdir():
        shutil.copy(file, blobs / f"blob-{file.name}")
        (folder / file.name).symlink_to(Path("../../blobs") / f"blob-{file.name}")
    return folder


def test_a_clean_checkpoint_opens(clean_checkpoint: Path) -> None:
    opened = open_checkpoint(clean_checkpoint)
    expected = checkpoints.tensors()
    assert opened.tensors.keys() == expected.keys()
    assert opened.shards == (SHARD_1, SHARD_2)
    assert opened.config == checkpoints.config()
    for name, tensor in expected.items():
        assert opened.tensors[name][1].shape == tuple(tensor.shape)
        assert torch.equal(read_tensor(opened, name), tensor)


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    opened = open_checkpoint(single(tmp_path / "m", {"a": entry([2], [0, 2])}, b"\1\2"))
    assert read_tensor(opened, "a").tolist() == [1, 2]


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="is not a folder"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(FormatError, match=r"config\.json is missing"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(FormatError, match=r"config\.json is a JSON list"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FormatError, match=r"config\.json: not valid JSON"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FormatError, match="has neither"):
        open_checkpoint(tmp_path)


def test_a_package_is_not_a_checkpoint(clean_package: Path) -> None:
    with pytest.raises(FormatError, match="it is a package already"):
        open_checkpoint(clean_package)


def test_st_1a_an_lfs_pointer_is_named(checkpoint: Path) -> None:
    (checkpoint / SHARD_2).write_bytes(LFS_POINTER)
    with pytest.raises(FormatError, match=f"{SHARD_2} is a Git LFS pointer"):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize("keep", ["half", "four bytes", "nothing", "all but one byte"])
def test_st_1b_a_cut_shard_is_truncated(checkpoint: Path, keep: str) -> None:
    shard = checkpoint / SHARD_2
    size = shard.stat().st_size
    left = {"half": size // 2, "four bytes": 4, "nothing": 0, "all but one byte": size - 1}
    os.truncate(shard, left[keep])
    with pytest.raises(FormatError, match=f"{SHARD_2} is truncated"):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 99_000_000, 100])
def test_st_2a_a_header_length_beyond_the_file(tmp_path: Path, length: int) -> None:
    folder = single(tmp_path / "m", {}, length=length)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=r"model\.safetensors"):
            open_checkpoint(folder)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (entry([8], [4, 12]), "tensor b overlaps"),
        (entry([8], [0, 8]), "overlaps"),
        (entry([8], [16, 8]), "tensor b: data_offsets"),
        (entry([8], [10, 18]), "tensor b leaves a gap"),
        (entry([9], [8, 17]), "truncated.*tensor b is cut"),
        (entry([4], [8, 12]), "4 bytes follow the last tensor"),
    ],
)
def test_st_2b_ranges_that_do_not_tile_the_file(tmp_path: Path, second: dict, message: str) -> None:
    header = {"a": entry([8], [0, 8]), "b": second}
    with pytest.raises(FormatError, match=rf"model\.safetensors.*{message}"):
        open_checkpoint(single(tmp_path / "m", header, bytes(16)))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (entry([9], [0, 8]), "8 bytes stored"),
        (entry([2**62, 4], [0, 8]), "is too large"),
        (entry([2**62, 4, 0], [0, 0]), "is too large"),
        (entry([2**63], [0, 8]), "not a list of sizes"),
        (entry([-8], [0, 8]), "not a list of sizes"),
        (entry([8.0], [0, 8]), "not a list of sizes"),
        (entry([1.5], [0, 8]), "not a list of sizes"),
        (entry([True, 8], [0, 8]), "not a list of sizes"),
        (entry("8", [0, 8]), "not a list of sizes"),
        (entry([8], [0, 8, 8]), "data_offsets"),
        (entry([8], [0, "8"]), "data_offsets"),
        (entry([4], [0, 8], "BF17"), "unknown dtype 'BF17'"),
        ({"dtype": "U8", "shape": [8]}, "its entry is not"),
        (7, "its entry is not"),
    ],
)
def test_st_2c_an_entry_that_makes_no_sense(tmp_path: Path, bad: object, message: str) -> None:
    with pytest.raises(FormatError, match=rf"model\.safetensors: tensor t.*{message}"):
        open_checkpoint(single(tmp_path / "m", {"t": bad}, bytes(8)))


@pytest.mark.parametrize("header", [[], "text", 1, None, {"__metadata__": {"a": 1}}])
def test_st_2c_a_header_that_is_no_object(tmp_path: Path, header: object) -> None:
    with pytest.raises(FormatError, match=r"model\.safetensors"):
        open_checkpoint(single(tmp_path / "m", header))


def test_st_2c_a_header_that_is_no_json(tmp_path: Path) -> None:
    folder = single(tmp_path / "m", {})
    for text in (b"{", b"\xff\xfe", b'{"a":1,"a":1}', b"[" * 20_000):
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(FormatError, match=r"model\.safetensors: header"):
            open_checkpoint(folder)


def test_st_2d_empty_and_rank_0_tensors_are_read(tmp_path: Path) -> None:
    header = {
        "empty": entry([0], [0, 0]),
        "scalar": entry([], [0, 1]),
        "end": entry([0, 5], [1, 1]),
    }
    opened = open_checkpoint(single(tmp_path / "m", header, b"\7"))
    assert read_tensor(opened, "empty").shape == (0,)
    assert read_tensor(opened, "end").shape == (0, 5)
    assert read_tensor(opened, "scalar").item() == 7


def test_st_6a_a_shard_that_is_not_there(checkpoint: Path) -> None:
    (checkpoint / SHARD_2).unlink()
    with pytest.raises(FormatError, match=f"{SHARD_2} is missing"):
        open_checkpoint(checkpoint)


def test_st_6a_a_tensor_that_its_shard_lacks(checkpoint: Path) -> None:
    name = "model.embed_tokens.weight"  # in shard 2
    checkpoints.edit_json(
        checkpoint / checkpoints.INDEX, lambda index: index["weight_map"].update({name: SHARD_1})
    )
    with pytest.raises(FormatError, match=f"{SHARD_1} does not hold tensor {name}"):
        open_checkpoint(checkpoint)


def test_st_6a_a_tensor_that_the_index_lacks(checkpoint: Path) -> None:
    checkpoints.edit_json(
        checkpoint / checkpoints.INDEX, lambda index: index["weight_map"].pop("model.norm.weight")
    )
    with pytest.raises(FormatError, match=r"holds tensor model\.norm\.weight.*in no shard"):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": []}', "{", '{"a":1,"a":2}'])
def test_an_index_without_a_weight_map(checkpoint: Path, text: str) -> None:
    (checkpoint / checkpoints.INDEX).write_text(text)
    with pytest.raises(FormatError, match=checkpoints.INDEX):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize(
    "stray", ["model.safetensors", "consolidated.safetensors", "old/x.safetensors"]
)
def test_st_6b_strays_are_mentioned_and_not_read(checkpoint: Path, stray: str) -> None:
    before = digest_files(open_checkpoint(checkpoint))
    (checkpoint / stray).parent.mkdir(exist_ok=True)
    (checkpoint / stray).write_bytes(b"no safetensors file at all")
    opened = open_checkpoint(checkpoint)
    assert opened.left_out == (stray,)
    assert stray not in opened.carried
    head = checkpoints.tensors()["lm_head.weight"]
    assert torch.equal(read_tensor(opened, "lm_head.weight"), head)
    assert digest_files(opened) == before


def test_st_6c_shards_without_an_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for number in (1, 3):
        name = f"model-0000{number}-of-00003.safetensors"
        save_file({f"t{number}": torch.ones(number)}, tmp_path / name)
    with pytest.raises(FormatError, match=r"model-00002-of-00003\.safetensors is missing"):
        open_checkpoint(tmp_path)
    last = tmp_path / "model-00002-of-00003.safetensors"
    save_file({"t2": torch.ones(2)}, last)
    opened = open_checkpoint(tmp_path)
    assert [read_tensor(opened, f"t{n}").numel() for n in (1, 2, 3)] == [1, 2, 3]
    save_file({"t2": torch.ones(2), "t3": torch.zeros(3)}, last)
    with pytest.raises(FormatError, match="both hold tensor t3"):
        open_checkpoint(tmp_path)


def test_st_6c_shards_of_two_sets(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("model-00001-of-00001", "other-00001-of-00001"):
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(FormatError, match="shards of 2 different sets"):
        open_checkpoint(tmp_path)


def test_st_7a_a_cache_snapshot_is_read(clean_checkpoint: Path, tmp_path: Path) -> None:
    folder = snapshot(clean_checkpoint, tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "blobs").iterdir()}
    opened = open_checkpoint(folder)
    for name, tensor in checkpoints.tensors().items():
        assert torch.equal(read_tensor(opened, name), tensor)
    assert digest_files(opened) == digest_files(open_checkpoint(clean_checkpoint))
    assert opened.carried == ("generation_config.json",)
    assert {path: path.read_bytes() for path in (tmp_path / "blobs").iterdir()} == before


def test_st_7b_a_dangling_link_is_named_with_its_target(
    clean_checkpoint: Path, tmp_path: Path
) -> None:
    folder = snapshot(clean_checkpoint, tmp_path)
    (tmp_path / "blobs" / f"blob-{SHARD_2}").unlink()
    with pytest.raises(FormatError, match=f"{SHARD_2} is a link to .*blob-{SHARD_2}.*missing"):
        open_checkpoint(folder)
    (folder / SHARD_2).unlink()
    with pytest.raises(FormatError, match=f"{SHARD_2} is missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../other/model.safetensors",
        "/abs/x.safetensors",
        "sub/../../x.safetensors",
        "..\\x.safetensors",
        "C:\\x.safetensors",
        "",
        ".",
        "./x.safetensors",
        "a//x.safetensors",
        "x\0.safetensors",
        "x\n.safetensors",
        7,
        None,
        ["x.safetensors"],
    ],
)
def test_pk_1a_an_index_that_points_elsewhere(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: object
) -> None:
    outside = checkpoint.parent / "other"
    outside.mkdir()
    for target in (outside / "model.safetensors", checkpoint.parent / "x.safetensors"):
        shutil.copy(checkpoint / SHARD_1, target)
    opened = []
    real = module.read_header
    monkeypatch.setattr(module, "read_header", lambda path: (opened.append(path), real(path))[1])
    checkpoints.edit_json(
        checkpoint / checkpoints.INDEX,
        lambda index: index["weight_map"].update({"lm_head.weight": name}),
    )
    with pytest.raises(FormatError, match=r"weight_map of lm_head\.weight: file name"):
        open_checkpoint(checkpoint)
    assert {path.parent for path in opened} <= {checkpoint.resolve()}


@pytest.mark.parametrize(
    "name", [SHARD_2, "config.json", checkpoints.INDEX, "generation_config.json"]
)
def test_pk_1c_a_link_out_of_the_folder(checkpoint: Path, name: str) -> None:
    outside = checkpoint.parent / "outside"
    (checkpoint / name).rename(outside)
    (checkpoint / name).symlink_to(outside)
    with pytest.raises(FormatError, match=f"{name} is a link to .*outside"):
        open_checkpoint(checkpoint)


def test_pk_1c_blobs_count_only_beside_snapshots(clean_checkpoint: Path, tmp_path: Path) -> None:
    folder = snapshot(clean_checkpoint, tmp_path)
    folder.parent.rename(tmp_path / "copies")
    with pytest.raises(FormatError, match="is a link to"):
        open_checkpoint(tmp_path / "copies" / folder.name)


def test_pk_1c_a_link_to_a_folder(checkpoint: Path) -> None:
    (checkpoint.parent / "elsewhere").mkdir()
    (checkpoint / "original").symlink_to(checkpoint.parent / "elsewhere")
    with pytest.raises(FormatError, match="original is a link"):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_pk_9b_a_pickle_is_never_opened(tmp_path: Path, name: str) -> None:
    canary, folder = tmp_path / "canary", tmp_path / "model"

    class Bomb:
        def __reduce__(self) -> tuple:
            return open, (str(canary), "w")

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(checkpoints.config()))
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    message = "save it as safetensors first" if name.endswith("bin") else "model.safetensors"
    with pytest.raises(FormatError, match=message):
        open_checkpoint(folder)
    assert not canary.exists()
    pickle.loads((folder / name).read_bytes()).close()
    assert canary.exists()  # the bomb would have gone off


@pytest.mark.parametrize(
    ("value", "shown"), [(float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf")]
)
def test_check_finite_names_the_first_position(tmp_path: Path, value: float, shown: str) -> None:
    tensor = torch.zeros(3, 5)
    tensor[1, 3] = tensor[2, 0] = value
    save_file({"good": torch.ones(2), "bad": tensor}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    opened = open_checkpoint(tmp_path)
    check_finite(opened, "good")
    with pytest.raises(FormatError, match=rf"tensor bad holds {shown} at \[1, 3\]"):
        check_finite(opened, "bad")


def test_digests_cover_config_index_and_shards(checkpoint: Path) -> None:
    digests = digest_files(open_checkpoint(checkpoint))
    names = ["config.json", SHARD_1, SHARD_2, checkpoints.INDEX]
    assert digests == {name: paths.sha256_file(checkpoint / name) for name in names}
    (checkpoint / "generation_config.json").write_text("{}")
    assert digest_files(open_checkpoint(checkpoint)) == digests
    read: list[int] = []
    digest_files(open_checkpoint(checkpoint), read.append)
    assert sum(read) == sum((checkpoint / name).stat().st_size for name in names)


def test_pk_1c_a_shard_behind_a_linked_folder(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (checkpoint / SHARD_2).rename(tmp_path / "elsewhere" / SHARD_2)
    (checkpoint / "w.bin").symlink_to(tmp_path / "elsewhere")
    index = checkpoint / checkpoints.INDEX
    index.write_text(index.read_text().replace(SHARD_2, f"w.bin/{SHARD_2}"))
    with pytest.raises(FormatError, match=r"w\.bin is a link to a folder"):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize("name", ["config.json", SHARD_1])
def test_a_link_to_itself(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    (checkpoint / name).symlink_to(name)
    with pytest.raises(FormatError, match=rf"{name} is a link to"):
        open_checkpoint(checkpoint)
