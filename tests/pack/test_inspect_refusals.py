"""What inspect refuses, in one line."""

import os
from collections.abc import Callable
from pathlib import Path

import checkpoints
import pytest
import torch

from qsrt_pack.inspect import inspect
from qsrt_pack.validate import validate
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.package import seal
from qsrt_runtime.format.tensorfile import read_header

LAYER_0, LAYER_1 = "qsrt-layer-000.safetensors", "qsrt-layer-001.safetensors"
GOLDEN_LAYER = "publication/qsrt-layer-005.safetensors"


def run(path: Path) -> dict:
    return inspect(path, show_progress=False)


def refused(path: Path, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        run(path)
    assert "\n" not in str(caught.value)


def overwrite(file: Path, tensor: str, offset: int, data: bytes) -> None:
    """Write into a tensor of a safetensors file."""
    entry = read_header(file).tensors[tensor]
    with file.open("r+b") as stream:
        stream.seek(entry.start + offset)
        stream.write(data)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1e308, "mixed: its evidence states errors too large to average"),
        (10**400, r"\$\.experts\[3\]\.nmse\.w1: 1000.*0 is not of type 'number'"),
    ],
    ids=["sum", "integer"],
)
def test_errors_that_have_no_mean_are_refused(mixed: Path, value: float, message: str) -> None:
    evidence = mixed / "qsrt-layer-001.json"
    checkpoints.edit_json(
        evidence, lambda v: [item["nmse"].update(w1=value) for item in v["experts"]]
    )
    seal(mixed)
    refused(mixed, message)


def test_the_slab_is_not_read(package: Path) -> None:
    before = run(package)
    overwrite(package / LAYER_1, "qsrt_atoms", 3 * 12 * 128, b"\x00\x7e")  # a scale
    overwrite(package / LAYER_1, "qsrt_atoms", 4 * 4800, b"\1")  # padding
    assert run(package) == before
    with pytest.raises(FormatError, match="is damaged"):
        validate(package, show_progress=False)
    assert run(package / LAYER_1)["experts"] == 4


@pytest.mark.parametrize(
    "name",
    [
        *("qsrt-layer-000.json", "qsrt-layer-001.json", "qsrt-manifest.json", "config.json"),
        *("model.safetensors.index.json", "MANIFEST.sha256"),
    ],
)
def test_documents_and_evidence_are_verified(package: Path, name: str) -> None:
    data = bytearray((package / name).read_bytes())
    data[len(data) // 2] ^= 2
    (package / name).write_bytes(data)
    refused(package, f"{name} is damaged")


def test_layers_that_disagree_with_the_manifest(package: Path) -> None:
    (package / LAYER_0).rename(package.parent / "spare")
    (package / LAYER_1).rename(package / LAYER_0)
    (package.parent / "spare").rename(package / LAYER_1)
    refused(package, f"{LAYER_0}: layer is 1, qsrt-manifest.json says 0")


def test_format_codes_that_disagree_with_the_evidence(package: Path, mixed: Path) -> None:
    overwrite(package / LAYER_1, "_qsrt_format_section", 2, b"\x10")
    refused(package, r"qsrt-layer-001\.json: expert 2 is not R0")
    overwrite(mixed / LAYER_1, "_qsrt_format_section", 2, b"\x00")
    refused(mixed, "modes of expert 2 is .*R2.*, the layer file says .*R0")


def test_base_shards_are_compared_with_their_index(package: Path) -> None:
    shard = package / "model-00001-of-00001.safetensors"
    data = shard.read_bytes()
    assert b"lm_head" in data
    shard.write_bytes(data.replace(b"lm_head", b"lm_tail", 1))
    refused(package, "tensor lm_head.weight is in model.safetensors.index.json but not in")


def _missing(path: Path, _golden: Path) -> Path:
    return path


def _no_seal(path: Path, _golden: Path) -> Path:
    path.mkdir()
    return path


def _random(path: Path, _golden: Path) -> Path:
    path.write_bytes(torch.arange(256, dtype=torch.uint8).numpy().tobytes() * 4)
    return path


def _empty(path: Path, _golden: Path) -> Path:
    path.touch()
    return path


def _text(path: Path, _golden: Path) -> Path:
    path.write_bytes((2).to_bytes(8, "little") + b"[]")
    return path


def _cut(path: Path, golden: Path) -> Path:
    path.write_bytes((golden / GOLDEN_LAYER).read_bytes()[:-4096])
    return path


def _cut_in_the_header(path: Path, golden: Path) -> Path:
    path.write_bytes((golden / GOLDEN_LAYER).read_bytes()[:500])
    return path


def _unknown_schema(path: Path, golden: Path) -> Path:
    data = (golden / GOLDEN_LAYER).read_bytes()
    path.write_bytes(data.replace(b"qsrt_atoms_v1", b"qsrt_atoms_v2", 1))
    return path


def _pipe(path: Path, _golden: Path) -> Path:
    os.mkfifo(path)
    return path


def _link_loop(path: Path, _golden: Path) -> Path:
    path.symlink_to(path.name)
    return path


def _link_to_a_package(path: Path, golden: Path) -> Path:
    path.symlink_to(golden / "publication")
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_missing, "it is not a folder or regular file; give a package or layer file"),
        (_no_seal, r"it has no QSRT_COMPLETE\.json: it is not a package"),
        (_random, r"it is not a safetensors file: it begins with b"),
        (_empty, "it is truncated: 0 bytes"),
        (_text, "it: the header is a JSON list"),
        (_cut, "it is truncated: its tensors end at byte 2454536, the file has 2450440"),
        (_cut_in_the_header, "it is truncated: its header ends at byte 1032"),
        (_unknown_schema, "it: schema 'kquant_fruit_qsrt_atoms_v2' is not one of"),
        (_pipe, "it is not a folder or regular file"),
        (_link_loop, "it is not a folder or regular file"),
        (_link_to_a_package, "it is not a folder but a link"),
    ],
)
def test_what_is_no_package_or_layer_file(
    make: Callable[[Path, Path], Path], message: str, golden: Path, tmp_path: Path
) -> None:
    refused(make(tmp_path / "it", golden), message)


def test_checkpoints_are_refused(clean_checkpoint: Path) -> None:
    refused(clean_checkpoint, r"has no QSRT_COMPLETE\.json")
    refused(clean_checkpoint / "model-00001-of-00002.safetensors", "schema None is not one of")
    refused(clean_checkpoint / "config.json", r"config\.json is not a safetensors file: .*b'\{")


@pytest.mark.parametrize("cut", ["layer", "package"])
def test_a_cut_file_of_a_package(package: Path, cut: str) -> None:
    os.truncate(package / LAYER_1, 100_000)
    path = package / LAYER_1 if cut == "layer" else package
    refused(path, f"{LAYER_1} (is truncated|has 100000 bytes)")
