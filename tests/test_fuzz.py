"""Readers of JSON, headers and lists, given anything: a value or FormatError, quickly and small.

pytest tests/test_fuzz.py --hypothesis-profile long --hypothesis-show-statistics
"""

import json
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from packages import write_package

from qsrt_pack.source.checkpoint import open_checkpoint
from qsrt_pack.state import read_state
from qsrt_pack.statistics import open_statistics
from qsrt_runtime.format import evidence, manifest, paths, schema, tensorfile
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.format.package import open_package, read_evidence

SCHEMAS = sorted(
    path.name.removesuffix(".schema.json")
    for path in (Path(__file__).parents[1] / "schemas").glob("*.schema.json")
)
LARGE_MIB = 512

texts = st.text(max_size=20) | st.sampled_from(["../x", "/x", "a\0", "silu", "R0", "pt", "F32"])
numbers = st.integers() | st.floats() | st.sampled_from([0, -1, 2**63, 10**400, 1e308, 128, 256])
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(texts, inner, max_size=6),
    max_leaves=30,
)


@pytest.fixture(scope="module", autouse=True)
def _bounded_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) / 1024 < LARGE_MIB


@pytest.fixture(scope="module")
def room() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def package(room: Path) -> Path:
    return write_package(room / "package", Geometry(128, 256, 2))


def tolerated(read: Callable[[], Any]) -> Any:
    """What a reader gives, or None after a refusal in one line."""
    try:
        return read()
    except FormatError as error:
        assert str(error) and "\n" not in str(error)
        return None


def to_json(value: Any) -> bytes:
    """Also what is no JSON: infinities, lone surrogates."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def fresh(package: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return shutil.copytree(package, folder)


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """A document with one place at random replaced, removed or doubled."""
    value = json.loads(json.dumps(document))
    node = value
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return value
        key = draw(st.sampled_from(keys))
        if isinstance(node[key], dict | list) and node[key] and draw(st.booleans()):
            node = node[key]
            continue
        action = draw(st.sampled_from(["replace", "remove", "add"]))
        if action == "replace":
            node[key] = draw(values)
        elif action == "remove":
            del node[key]
        elif isinstance(node, dict):
            node[draw(texts)] = draw(values)
        else:
            node.append(draw(values))
        return value


@given(data=st.binary(max_size=200), name=st.sampled_from(SCHEMAS))
def test_json_of_any_bytes(room: Path, data: bytes, name: str) -> None:
    (room / "any.json").write_bytes(data)
    tolerated(lambda: schema.read(room / "any.json", name))


@given(value=values, name=st.sampled_from(SCHEMAS))
def test_json_of_any_value(value: Any, name: str) -> None:
    text = to_json(value)
    parsed = tolerated(lambda: schema.parse(text, "value"))
    tolerated(lambda: schema.check(parsed, name, "value"))


@given(data=st.data())
@pytest.mark.parametrize("name", [manifest.CONFIG, manifest.INDEX, manifest.MANIFEST])
def test_documents_of_a_package(package: Path, room: Path, name: str, data: st.DataObject) -> None:
    original = json.loads((package / name).read_text())
    folder = fresh(package, room / "documents")
    (folder / name).write_bytes(to_json(data.draw(changed(original) | values)))
    files = [n for n in paths.files_below(folder) if n not in (manifest.CHECKSUMS, manifest.MARKER)]
    lines = "".join(f"{paths.sha256_file(folder / n)}  {n}\n" for n in files)
    (folder / manifest.CHECKSUMS).write_text(lines)
    marker = json.loads((package / manifest.MARKER).read_text())
    marker["checksum_manifest_sha256"] = paths.sha256_file(folder / manifest.CHECKSUMS)
    marker["package_manifest_sha256"] = paths.sha256_file(folder / manifest.MANIFEST)
    marker["model_index_sha256"] = paths.sha256_file(folder / manifest.INDEX)
    (folder / manifest.MARKER).write_text(json.dumps(marker))
    tolerated(lambda: open_package(folder))


@given(data=st.data())
def test_marker(package: Path, room: Path, data: st.DataObject) -> None:
    marker = json.loads((package / manifest.MARKER).read_text())
    folder = fresh(package, room / "marker")
    (folder / manifest.MARKER).write_bytes(to_json(data.draw(changed(marker) | values)))
    tolerated(lambda: open_package(folder))


@given(data=st.data())
def test_evidence(package: Path, room: Path, data: st.DataObject) -> None:
    name = manifest.evidence_file_name(0)
    evidence = json.loads((package / name).read_text())
    opened = open_package(fresh(package, room / "evidence"))
    (opened.path / name).write_bytes(to_json(data.draw(changed(evidence) | values)))
    opened.digests[name] = paths.sha256_file(opened.path / name)
    tolerated(lambda: read_evidence(opened, 0))


@given(config=values, index=values | st.fixed_dictionaries({"weight_map": values}))
def test_config_and_index_of_a_checkpoint(room: Path, config: Any, index: Any) -> None:
    folder = room / "checkpoint"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(to_json(config))
    data = to_json(index)
    (folder / "model.safetensors.index.json").write_bytes(data)
    tolerated(lambda: open_checkpoint(folder))


@given(value=values | st.fixed_dictionaries({"schema": texts, "layers": values, "files": values}))
def test_state_and_statistics(room: Path, value: Any) -> None:
    folder = room / "states"
    folder.mkdir(exist_ok=True)
    data = to_json(value)
    for name in ("state.json", "calibration.json"):
        (folder / name).write_bytes(data)
    tolerated(lambda: read_state(folder / "state.json"))
    tolerated(lambda: open_statistics(folder))


dtypes = st.sampled_from([*sorted(tensorfile.DTYPE_BITS), "BF17", "", None])
entries = st.fixed_dictionaries(
    {
        "dtype": dtypes,
        "shape": st.lists(st.integers(0, 5), max_size=3) | values,
        "data_offsets": st.tuples(st.integers(0, 40), st.integers(0, 40)) | values,
    }
)


@st.composite
def header_files(draw: st.DrawFn) -> bytes:
    """Files with a length word, a header of entries at or beside their places, and data."""
    header: dict[str, Any] = draw(st.dictionaries(texts, entries, max_size=2))
    offset = 0
    for number in range(draw(st.integers(0, 3))):
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        dtype = draw(st.sampled_from(sorted(tensorfile.DTYPE_BITS)))
        size = tensorfile.tensor_bytes(dtype, tuple(shape))
        end = offset + size + draw(st.sampled_from([0, 0, 0, 1]))
        header[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(texts, texts, max_size=2) | values)
    text = to_json(header)
    text += draw(st.sampled_from([b"", b" ", b"x", b"\0"]))
    length = len(text) + draw(st.sampled_from([0, 0, 0, 0, 1, -1, 2**40, 2**63]))
    data = bytes(offset + draw(st.sampled_from([0, 0, 0, 1, -1])) if offset else 0)
    return (length % 2**64).to_bytes(8, "little") + text + data


@given(data=header_files() | st.binary(max_size=64))
def test_a_safetensors_header_that_is_accepted_is_one(room: Path, data: bytes) -> None:
    path = room / "any.safetensors"
    path.write_bytes(data)
    header = tolerated(lambda: tensorfile.read_header(path))
    if header is None:
        return
    ends = [entry.end for entry in header.tensors.values()]
    assert max(ends, default=len(data)) == len(data)
    if not any("FNUZ" in entry.dtype for entry in header.tensors.values()):
        found = dict(safetensors.deserialize(data))  # the library takes it, too
        assert set(found) == set(header.tensors)
        for name, entry in header.tensors.items():
            assert bytes(found[name]["data"]) == data[entry.start : entry.end]


@given(lines=st.lists(texts | st.from_regex(r"[0-9a-f]{64}  [a-z./\\]{1,9}", fullmatch=True)))
def test_a_list_of_checksums(package: Path, room: Path, lines: list[str]) -> None:
    folder = fresh(package, room / "listing")
    listing = folder / manifest.CHECKSUMS
    listing.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    marker = json.loads((folder / manifest.MARKER).read_text())
    marker["checksum_manifest_sha256"] = paths.sha256_file(listing)
    (folder / manifest.MARKER).write_text(json.dumps(marker))
    assert tolerated(lambda: open_package(folder)) is None


@given(name=st.text(max_size=30) | st.text(alphabet="./\\:aC~ \0", max_size=12) | values)
def test_a_name_that_is_accepted_stays_inside(room: Path, name: Any) -> None:
    accepted = tolerated(lambda: paths.relative_name(name, "here"))
    if accepted is not None:
        assert (room / accepted).resolve().is_relative_to(room.resolve())
        assert (room / accepted).resolve() != room.resolve()


@given(text=st.text(max_size=40) | st.binary(max_size=128).map(lambda b: b.hex()))
def test_channel_orders(text: str) -> None:
    tolerated(lambda: evidence.low_to_high(text, 256, "here"))


@pytest.mark.parametrize("count", [100_000])
def test_a_million_mismatches_take_no_minute(package: Path, room: Path, count: int) -> None:
    """Long lists and objects of wrong things, under every schema and at every place of one."""
    start = time.perf_counter()
    wrong = [{"a": number} for number in range(count)]
    value = json.loads((package / manifest.MANIFEST).read_text())
    value["geometry"]["layers"] = wrong
    for name in SCHEMAS:
        tolerated(lambda name=name: schema.check(wrong, name, "x"))
    for name in ("manifest", "published-manifest"):
        with pytest.raises(FormatError):
            schema.check(value, name, "x")
    many = {"weight_map": {str(number): number for number in range(count)}}
    with pytest.raises(FormatError):
        schema.check(many, "index", "x")
    assert time.perf_counter() - start < 60


def test_documents_of_absurd_size_are_not_read(room: Path) -> None:
    path = room / "sparse.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(FormatError, match="expected at most 100000000"):
        schema.read(path)
    path.unlink()
