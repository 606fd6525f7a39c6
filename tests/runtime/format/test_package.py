import dataclasses
import re
import shutil

import pytest
from checkpoints import edit_json
from safetensors.torch import load_file, save_file

from qsrt_runtime.format import paths
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.format.package import (
    check_base,
    open_package,
    read_package_layer,
    seal,
    verify_files,
)

CONFIG, INDEX, MANIFEST = "config.json", "model.safetensors.index.json", "qsrt-manifest.json"
CHECKSUMS, MARKER = "MANIFEST.sha256", "QSRT_COMPLETE.json"
SHARD = "model-00001-of-00001.safetensors"
LAYERS = ["qsrt-layer-000.safetensors", "qsrt-layer-001.safetensors"]
EVIDENCE = "qsrt-layer-000.json"


def flip(path, offset, bit=0):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def test_golden_publication(golden, read_all):
    package = read_all(golden / "publication")
    assert package.geometry == Geometry(1024, 512, 4)
    assert package.layers == [5]
    assert package.layer_name(5) == "qsrt-layer-005.safetensors"
    assert package.evidence_name(5) == "qsrt-layer-005.json"
    assert package.seal_sha256 == paths.sha256_file(golden / "publication" / MARKER)
    check_base(package)
    assert len(package.digests) == 5


def test_tiny_package(package, read_all):
    opened = read_all(package)
    assert opened.geometry == Geometry(128, 256, 4)
    assert opened.layers == [0, 1]
    assert opened.documents.is_ours
    listed = {p.name for p in package.iterdir()} - {CHECKSUMS, MARKER}
    assert set(opened.digests) == listed
    check_base(opened)
    with pytest.raises(dataclasses.FrozenInstanceError):
        opened.path = package


def test_package_in_a_hub_cache(package, hub_snapshot, read_all):
    snapshot = hub_snapshot(package)
    assert (snapshot / MARKER).is_symlink()
    assert read_all(snapshot).layers == [0, 1]


def test_dangling_link_in_a_hub_cache(package, hub_snapshot, refused):
    snapshot = hub_snapshot(package)
    (snapshot / LAYERS[1]).resolve().unlink()
    refused(snapshot, LAYERS[1], "which is missing")


@pytest.mark.parametrize("place", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize(
    "name",
    [*LAYERS, MANIFEST, CONFIG, INDEX, MARKER, CHECKSUMS, EVIDENCE, SHARD, ".gitattributes"],
)
def test_one_bit(package, name, place, refused):
    size = (package / name).stat().st_size
    flip(package / name, int(place * (size - 1)), bit=2)
    refused(package, name)


@pytest.mark.parametrize("name", [MANIFEST, CONFIG, INDEX, MARKER, CHECKSUMS])
def test_one_bit_of_a_document_is_seen_on_opening(package, name):
    flip(package / name, 100)
    with pytest.raises(FormatError, match=re.escape(name)):
        open_package(package)


def test_one_bit_of_bytes_all_over_the_seal(publication):
    data = (publication / MARKER).read_bytes()
    for offset in range(0, len(data), 3):
        flip(publication / MARKER, offset, bit=offset % 8)
        with pytest.raises(FormatError):
            open_package(publication)
        (publication / MARKER).write_bytes(data)
    open_package(publication)


def test_verify_files_counts_bytes(package):
    opened, steps = open_package(package), []
    verify_files(opened, [SHARD], steps.append)
    assert sum(steps) == (package / SHARD).stat().st_size


def swap(one, two):
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def test_swapped_layer_files(package, refused):
    swap(package / LAYERS[0], package / LAYERS[1])
    refused(package, LAYERS[0], "is damaged")
    with pytest.raises(FormatError, match=f"{LAYERS[1]} is damaged"):
        read_package_layer(open_package(package), 1)


def test_swapped_layer_files_with_checksums_redone(package, reseal, refused):
    swap(package / LAYERS[0], package / LAYERS[1])
    reseal(package)
    with pytest.raises(FormatError, match=f"{LAYERS[0]}: layer is 1, {MANIFEST} says 0"):
        read_package_layer(open_package(package), 0)
    refused(package, EVIDENCE, "safetensors_sha256")


def test_swapped_evidence_with_checksums_redone(package, reseal, refused):
    swap(package / EVIDENCE, package / "qsrt-layer-001.json")
    reseal(package)
    refused(package, EVIDENCE, "layer is 1")


@pytest.mark.parametrize("name", [*LAYERS, CONFIG, INDEX, MANIFEST, EVIDENCE, SHARD, CHECKSUMS])
def test_missing_file(package, name):
    (package / name).unlink()
    with pytest.raises(FormatError, match=f"{re.escape(name)} is missing"):
        open_package(package)


def test_missing_seal(package):
    (package / MARKER).unlink()
    with pytest.raises(FormatError, match=f"has no {MARKER}"):
        open_package(package)


@pytest.mark.parametrize("name", [CONFIG, INDEX, MANIFEST, MARKER, EVIDENCE, SHARD])
def test_empty_file(package, name, refused):
    (package / name).write_bytes(b"")
    refused(package, name)


def test_empty_layer_file(package, refused):
    (package / LAYERS[1]).write_bytes(b"")
    refused(package, "qsrt-layer-001.safetensors has 0 bytes", "layers.1.bytes is 173048")


@pytest.mark.parametrize("name", [LAYERS[1], EVIDENCE])
def test_unlisted_layer_files(package, name, refused, relist):
    relist(package, lambda text: re.sub(f"(?m)^.*  {name}\n", "", text))
    refused(package, name, f"is not in {CHECKSUMS}")
    (package / name).unlink()
    refused(package, MANIFEST, name, f"is not in {CHECKSUMS}")


@pytest.mark.parametrize(
    "name",
    ["x", ".DS_Store", ".cache/other", ".cache/huggingface2/x", "sub/.cache/huggingface/x"],
)
def test_extra_file(package, name, refused):
    (package / name).parent.mkdir(parents=True, exist_ok=True)
    (package / name).write_bytes(b"")
    refused(package, f"{name} is not in {CHECKSUMS}")


def test_what_a_download_leaves_is_ignored(package, read_all):
    folder = package / ".cache/huggingface/download"
    folder.mkdir(parents=True)
    (folder / "config.json.metadata").write_bytes(b"")
    (folder.parent / ".gitignore").write_text("*")
    read_all(package)


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (lambda text: "", "line 1 is not"),
        (lambda text: text + "\n", "line 11 is not"),
        (lambda text: text.replace("  config.json", " config.json"), "line 2 is not"),
        (lambda text: text.replace("  config.json", " *config.json"), "line 2 is not"),
        (lambda text: text.replace("  config.json", "\tconfig.json"), "line 2 is not"),
        (lambda text: "0" + text, "line 1 is not"),
        (lambda text: text[1:], "line 1 is not"),
        (lambda text: "G" + text[1:], "line 1 is not"),
        (lambda text: text[:64].upper() + text[64:], "line 1 is not"),
        (lambda text: text.replace("\n", "\r\n"), "line 1"),
        (lambda text: text + text.splitlines()[1] + "\n", "must not list config.json"),
        (lambda text: text + "0" * 64 + f"  {MARKER}\n", f"must not list {MARKER}"),
        (lambda text: text + "0" * 64 + f"  {CHECKSUMS}\n", f"must not list {CHECKSUMS}"),
        (lambda text: text + "0" * 64 + "  \n", "file name ''"),
        (lambda text: text + "0" * 64 + "  /etc/hostname\n", "file name '/etc/hostname'"),
        (lambda text: text + "0" * 64 + "  ../x\n", "file name '../x'"),
        (lambda text: text + "0" * 64 + "  sub/../../x\n", "file name"),
        (lambda text: text + "0" * 64 + "  ./config.json\n", "file name './config.json'"),
        (lambda text: text + "0" * 64 + "  ..\\x\n", "file name"),
        (lambda text: text + "0" * 64 + "  C:\\x\n", "file name"),
        (lambda text: text + "0" * 64 + "  x\0\n", "file name"),
        (lambda text: text + "0" * 64 + "  \udcff\n", "not UTF-8"),
        (lambda text: text + "0" * 64 + "  x\n", "x is missing"),
        (lambda text: re.sub("(?m)^.*  config.json\n", "", text), "does not list config.json"),
        (lambda text: re.sub(f"(?m)^.*  {INDEX}\n", "", text), f"does not list {INDEX}"),
        (lambda text: re.sub(f"(?m)^.*  {MANIFEST}\n", "", text), f"does not list {MANIFEST}"),
    ],
)
def test_checksum_lines(package, edit, part, refused, relist):
    relist(package, edit)
    refused(package, part)


def test_checksum_lines_may_end_without_a_newline(package, read_all, relist):
    relist(package, lambda text: text.removesuffix("\n"))
    read_all(package)


@pytest.mark.parametrize("name", [LAYERS[0], CONFIG, MARKER, CHECKSUMS, MANIFEST, ".gitattributes"])
def test_linked_file(package, tmp_path, name, refused):
    shutil.move(package / name, tmp_path / "elsewhere")
    (package / name).symlink_to(tmp_path / "elsewhere")
    refused(package, name, "is a link to")


def test_linked_folder(package, tmp_path, refused):
    (tmp_path / "elsewhere").mkdir()
    (package / "sub").symlink_to(tmp_path / "elsewhere")
    refused(package, "sub is a link to")


def test_package_that_is_a_link(package, tmp_path):
    (tmp_path / "link").symlink_to(package)
    with pytest.raises(FormatError, match="link is not a folder but a link"):
        open_package(tmp_path / "link")


@pytest.mark.parametrize("name", ["missing", "file"])
def test_package_that_is_no_folder(tmp_path, name):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FormatError, match=f"{name} is not a folder"):
        open_package(tmp_path / name)


def test_seal_that_is_a_folder(package, refused):
    (package / MARKER).unlink()
    (package / MARKER).mkdir()
    refused(package, MARKER)


@pytest.mark.parametrize("decoy", [False, True])
def test_layer_files_in_a_folder(publication, reseal, decoy, read_all):
    """With the decoy, another file of that name, the wrong bytes are verified."""
    name, evidence = "qsrt-layer-005.safetensors", "qsrt-layer-005.json"
    (publication / "sub").mkdir()
    for file, field in ((name, "qsrt_atoms"), (evidence, "evidence")):
        shutil.move(publication / file, publication / "sub" / file)
        edit_json(
            publication / MANIFEST,
            lambda m, field=field, file=file: m["layers"]["5"].update({field: f"sub/{file}"}),
        )
    edit_json(
        publication / "sub" / evidence,
        lambda value: value.update(safetensors_file=f"sub/{name}"),
    )
    if decoy:
        for file in (name, evidence):
            shutil.copy(publication / "sub" / file, publication / file)
    reseal(publication)
    assert read_all(publication).layers == [5]
    flip(publication / "sub" / name, -160_000)
    with pytest.raises(FormatError, match=f"sub/{name} is damaged"):
        read_package_layer(open_package(publication), 5)


@pytest.mark.parametrize("which", ["package", "publication"])
def test_seal_gives_the_same_bytes(request, which, read_all):
    folder = request.getfixturevalue(which)
    expected = {name: (folder / name).read_bytes() for name in (CHECKSUMS, MARKER)}
    for name in expected:
        (folder / name).unlink()
    cache = folder / ".cache/huggingface"
    cache.mkdir(parents=True)
    (cache / "x").write_bytes(b"1")
    seal(folder)
    assert {name: (folder / name).read_bytes() for name in expected} == expected
    read_all(folder)


def test_seal_again_after_a_change(package, read_all):
    before = open_package(package).seal_sha256
    (package / "README.md").write_text("text")
    seal(package)
    assert "README.md" in read_all(package).digests
    assert open_package(package).seal_sha256 != before


def test_seal_refuses_documents_that_disagree(package):
    (package / MARKER).unlink()
    edit_json(package / MANIFEST, lambda manifest: manifest["geometry"].update(topk=9))
    with pytest.raises(FormatError, match=r"geometry\.topk is 9"):
        seal(package)
    assert not (package / MARKER).exists()


def test_base_shard_that_is_not_listed(package, reseal, refused):
    edit_json(package / INDEX, lambda i: i["weight_map"].update({"a.weight": "x.safetensors"}))
    reseal(package)
    refused(package, INDEX, "shard x.safetensors is not in the package")


def test_tensor_that_the_shard_lacks(package, reseal, refused):
    edit_json(package / INDEX, lambda index: index["weight_map"].update({"a.weight": SHARD}))
    reseal(package)
    refused(package, f"tensor a.weight is in {INDEX} but not in {SHARD}")


def test_tensor_that_the_index_lacks(package, reseal, refused):
    edit_json(package / INDEX, lambda index: index["weight_map"].pop("lm_head.weight"))
    reseal(package)
    refused(package, f"tensor lm_head.weight is in {SHARD} but not in {INDEX}")


def test_base_shard_that_is_cut(package, reseal, refused):
    data = (package / SHARD).read_bytes()
    (package / SHARD).write_bytes(data[:-1])
    reseal(package)
    refused(package, SHARD, "truncated")


def test_base_of_two_shards(package, reseal):
    tensors = load_file(package / SHARD)
    second = {"lm_head.weight": tensors.pop("lm_head.weight")}
    save_file(tensors, package / SHARD)
    save_file(second, package / "second.safetensors")
    edit_json(
        package / INDEX,
        lambda index: index["weight_map"].update({"lm_head.weight": "second.safetensors"}),
    )
    reseal(package)
    check_base(open_package(package))
    edit_json(package / INDEX, lambda index: index["metadata"].update(total_size=7))
    reseal(package)
    with pytest.raises(FormatError, match=r"metadata\.total_size is 7"):
        check_base(open_package(package))
