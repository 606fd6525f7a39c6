import hashlib
import os

import pytest

from qsrt_runtime.format import paths
from qsrt_runtime.format.errors import FormatError


@pytest.mark.parametrize(
    "name",
    [
        "../other/model.safetensors",
        "/abs/x.safetensors",
        "sub/../../x.safetensors",
        "sub/../x.safetensors",
        "..\\x.safetensors",
        "sub\\x.safetensors",
        "C:\\x.safetensors",
        "C:x.safetensors",
        "c:/x.safetensors",
        "",
        "x\0.safetensors",
        "x\n.safetensors",
        "x\r.safetensors",
        ".",
        "..",
        "./x",
        "sub/./x",
        "sub//x",
        "sub/",
        "/",
        "//x",
        "sub/..",
        5,
        None,
        b"x",
        ["x"],
    ],
)
def test_refused_names(name):
    with pytest.raises(FormatError) as caught:
        paths.relative_name(name, "some/index.json")
    assert str(caught.value).startswith("some/index.json: file name ")
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["x.safetensors", "sub/x.safetensors", ".gitattributes", "...", "a..b", "a b", "ü", "~x", "-x"],
)
def test_accepted_names(name):
    assert paths.relative_name(name, "index") == name


def test_regular_file(tmp_path):
    (tmp_path / "x").write_bytes(b"1")
    paths.regular_file(tmp_path / "x", tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe", "missing"):
        with pytest.raises(FormatError, match=f"{name} is missing or not a regular file"):
            paths.regular_file(tmp_path / name, tmp_path)


@pytest.mark.parametrize("target", ["inside", "../outside", "/etc/hostname", "missing", "."])
def test_links_are_refused(tmp_path, target):
    root = tmp_path / "folder"
    root.mkdir()
    for path in (root / "inside", tmp_path / "outside"):
        path.write_bytes(b"1")
    (root / "link").symlink_to(target)
    with pytest.raises(FormatError, match=f"link is a link to {target}, outside the folder"):
        paths.regular_file(root / "link", root)


@pytest.fixture
def snapshot(tmp_path, hub_snapshot):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for name in ("x", "y", "sub/z"):
        (folder / name).write_text(name)
    return hub_snapshot(folder)


def test_links_of_a_hub_cache(snapshot):
    for name in ("x", "y", "sub/z"):
        assert (snapshot / name).is_symlink()
        paths.regular_file(snapshot / name, snapshot)
    assert paths.files_below(snapshot) == ["sub/z", "x", "y"]
    assert paths.sha256_file(snapshot / "x") == hashlib.sha256(b"x").hexdigest()


def test_dangling_link_of_a_hub_cache(snapshot):
    blob = (snapshot / "x").resolve()
    blob.unlink()
    with pytest.raises(FormatError, match=f"x is a link to {blob}, which is missing"):
        paths.regular_file(snapshot / "x", snapshot)


@pytest.mark.parametrize("target", ["../../other", "../y", "../../refs/main", "../../blobs"])
def test_links_out_of_a_hub_cache(snapshot, target):
    (snapshot.parent.parent / "other").write_bytes(b"1")
    (snapshot / "x").unlink()
    (snapshot / "x").symlink_to(target)
    with pytest.raises(FormatError, match="outside the folder"):
        paths.regular_file(snapshot / "x", snapshot)


def test_blob_that_leads_out_of_a_hub_cache(snapshot, tmp_path):
    (tmp_path / "secret").write_bytes(b"1")
    blob = (snapshot / "x").resolve()
    blob.unlink()
    blob.symlink_to(tmp_path / "secret")
    with pytest.raises(FormatError, match="outside the folder"):
        paths.regular_file(snapshot / "x", snapshot)


def test_blobs_count_only_beside_snapshots(snapshot):
    moved = snapshot.parent.rename(snapshot.parent.with_name("elsewhere")) / snapshot.name
    with pytest.raises(FormatError, match="outside the folder"):
        paths.regular_file(moved / "x", moved)


def test_files_below(tmp_path):
    for name in ("b", ".hidden", "a/c", "a/.cache/huggingface/x", ".cache/other/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    for name in (".cache/huggingface/download/x.lock", ".cache/huggingface/.gitignore"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "folder link").symlink_to("a")
    (tmp_path / "empty").mkdir()
    assert paths.files_below(tmp_path) == [
        ".cache/other/x",
        ".hidden",
        "a/.cache/huggingface/x",
        "a/c",
        "b",
        "folder link",
    ]


def test_cache_that_is_a_link_is_listed(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/huggingface").symlink_to(tmp_path / "target")
    assert paths.files_below(tmp_path) == [".cache/huggingface"]


def test_sha256_file(tmp_path):
    data = bytes(range(256)) * (3 << 14)  # three chunks
    (tmp_path / "x").write_bytes(data)
    steps = []
    found = paths.sha256_file(tmp_path / "x", steps.append)
    assert found == hashlib.sha256(data).hexdigest()
    assert len(steps) > 1
    assert sum(steps) == len(data)


def test_write_file(tmp_path):
    path = tmp_path / "x"
    for data in (b"first", b"", b"second"):
        paths.write_file(path, data)
        assert path.read_bytes() == data
        assert list(tmp_path.iterdir()) == [path]
    assert paths.partial_name(path) == tmp_path / "x.partial"


@pytest.mark.parametrize("before", [None, b"old"])
def test_write_pieces_leaves_nothing_on_error(tmp_path, before):
    path = tmp_path / "x"
    if before is not None:
        path.write_bytes(before)

    def pieces():
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        paths.write_pieces(path, pieces())
    assert [p.name for p in tmp_path.iterdir()] == ([] if before is None else ["x"])
    assert before is None or path.read_bytes() == before


def test_write_pieces(tmp_path):
    paths.write_pieces(tmp_path / "x", (bytes([i]) for i in range(5)))
    assert (tmp_path / "x").read_bytes() == bytes(range(5))


def test_many_digests_at_once(tmp_path):
    names = [f"{number}/file" for number in range(20)]
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(bytes([number]) * (number << 16))
    counts = []
    found = paths.sha256_files(tmp_path, names, counts.append)
    assert list(found) == names and sum(counts) == sum(n << 16 for n in range(20))
    for name, digest in found.items():
        assert digest == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()


def test_many_digests_end_at_the_first_error(tmp_path):
    with (tmp_path / "endless").open("wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(FileNotFoundError, match="missing"):
        paths.sha256_files(tmp_path, ["missing", "endless"])


def test_documents_are_small_regular_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatError, match="pipe is not a regular file"):
        paths.read_document(tmp_path / "pipe")
    with pytest.raises(FormatError, match="none is missing"):
        paths.read_document(tmp_path / "none")
