import hashlib
import json

import pytest
import torch
from packages import write_package
from safetensors.torch import load_file

from qsrt_runtime.format import atom, container, manifest, slab, tensorfile
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry, extent

TINY = Geometry(hidden=128, intermediate=256, experts=2)  # 8 slots of 12,288 bytes
LAYER, SOURCE, ENCODER = 3, "5" * 64, "e" * 64
SECTION, SCALES, ATOMS = "_qsrt_format_section", "_qsrt_shared_scale_section", "qsrt_atoms"
TENSORS = (SECTION, SCALES, ATOMS)


def write_layer(path, experts, geometry=TINY, layer=LAYER, order=None):
    with container.LayerWriter(path, geometry, layer, SOURCE, ENCODER) as writer:
        for expert in order or range(len(experts)):
            writer.write_expert(expert, experts[expert])
    return writer


def metadata_of(path):
    return tensorfile.read_header(path).metadata


def same_expert(one, two):
    return torch.equal(atom.pack_expert(one), atom.pack_expert(two)) and torch.equal(
        one.shared_scales, two.shared_scales
    )


def test_golden_fruit_layer(golden, facts):
    path = golden / facts["fruit_layer"]["file"]
    layer = container.read_layer(path)
    assert (layer.layer, layer.schema) == (5, container.FRUIT)
    assert layer.geometry == Geometry(1024, 512, 4)
    stored = load_file(path)
    assert torch.equal(layer.atoms, stored[ATOMS])
    assert torch.equal(layer.format_codes, stored[SECTION][:4])
    scales = stored[SCALES][: 3 * 4 * 1024 * 2].view(torch.float16)
    assert torch.equal(layer.shared_scales, scales.view(3, 4, 1024))
    formats = [list(slab.expert_modes(layer, expert)) for expert in range(4)]
    assert formats == facts["fruit_layer"]["formats"]
    assert layer.source_sha256 == facts["fruit_layer"]["metadata"]["source_sha256"]
    assert layer.encoder_fingerprint == facts["fruit_layer"]["metadata"]["encoder_fingerprint"]


def test_golden_kimi_layer(golden):
    path = golden / "kimi_layer.safetensors"
    layer = container.read_layer(path)
    assert (layer.layer, layer.schema) == (7, container.KIMI)
    assert layer.geometry == Geometry(128, 3072, 3)
    assert layer.format_codes.tolist() == [0x12, 0xFF, 0x20]
    assert layer.shared_scales.shape == (3, 1, 128)
    assert (layer.source_sha256, layer.encoder_fingerprint) == (None, None)
    assert torch.equal(layer.atoms, load_file(path)[ATOMS])
    for expert in (0, 2):
        shared = slab.unpack_expert(layer, expert).shared_scales
        assert torch.equal(shared, layer.shared_scales[:, 0])
    for use in (slab.expert_modes, slab.unpack_expert):
        with pytest.raises(FormatError, match="layer 7 expert 1 is an X4T expert"):
            use(layer, 1)


def test_golden_metadata(facts):
    expected = facts["fruit_layer"]["metadata"]
    found = container.layer_metadata(
        Geometry(1024, 512, 4), 5, 4, expected["source_sha256"], expected["encoder_fingerprint"]
    )
    assert found == expected


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 0, 2, 1)])
def test_written_golden_layer(golden, facts, tmp_path, order):
    golden_path = golden / facts["fruit_layer"]["file"]
    layer = container.read_layer(golden_path)
    path = tmp_path / "layer.safetensors"
    with container.LayerWriter(
        path, layer.geometry, 5, layer.source_sha256, layer.encoder_fingerprint
    ) as writer:
        for expert in order:
            writer.write_expert(expert, slab.unpack_expert(layer, expert))
    expected, found = golden_path.read_bytes(), path.read_bytes()
    data = 4096 + 24576 + 16 * 151552
    assert found[-data:] == expected[-data:]
    assert metadata_of(path) == metadata_of(golden_path)
    again = container.read_layer(path)
    assert torch.equal(again.atoms, layer.atoms)
    assert writer.size == len(found) == container.layer_file_bytes(layer.geometry, 5)
    assert writer.sha256 == hashlib.sha256(found).hexdigest()


def test_size_of_the_canonical_layer():
    geometry = Geometry(1024, 512, 256)
    metadata = container.layer_metadata(geometry, 3, 256, SOURCE, ENCODER)
    assert len(container.layer_header(metadata, geometry)) == 8 + 1040
    assert container.layer_file_bytes(geometry, 3) == 153_359_384


@pytest.mark.parametrize("layer", [9, 10, 100])
@pytest.mark.parametrize("sizes", [(384, 256, 2), (128, 256, 64)])  # slots with padding, without
def test_a_layer_whose_number_makes_the_header_longer(tmp_path, sizes, layer):
    geometry = Geometry(*sizes)
    folder = write_package(tmp_path / "package", geometry, layers=(0, layer))
    path = folder / manifest.layer_file_name(layer)
    assert path.stat().st_size == container.layer_file_bytes(geometry, layer)
    assert container.read_layer(path).layer == layer
    is_longer = layer > 9
    assert (container.layer_file_bytes(geometry, 0) < path.stat().st_size) == is_longer


def test_a_thousand_experts_have_a_small_header():
    geometry = Geometry(128, 256, 1000)
    metadata = container.layer_metadata(geometry, 3, 1000, SOURCE, ENCODER)
    assert len(container.layer_header(metadata, geometry)) < 2000


def test_header_bytes(tiny_layer):
    length = int.from_bytes(tiny_layer[:8], "little")
    header = json.loads(tiny_layer[8 : 8 + length])
    assert list(header) == ["__metadata__", *TENSORS]
    assert list(header["__metadata__"]) == sorted(header["__metadata__"])
    text = json.dumps(header, separators=(",", ":")).encode()
    assert tiny_layer[8 : 8 + length] == text + b" " * (-len(text) % 8)
    assert header[SECTION] == {"dtype": "U8", "shape": [4096], "data_offsets": [0, 4096]}
    assert header[SCALES] == {"dtype": "U8", "shape": [4096], "data_offsets": [4096, 8192]}
    assert header[ATOMS]["shape"] == [8, 12288]


def test_same_bytes_twice(tiny_experts, tiny_layer, tmp_path):
    for name, order in (("a", (0, 1)), ("b", (1, 0))):
        write_layer(tmp_path / name, tiny_experts, order=order)
        assert (tmp_path / name).read_bytes() == tiny_layer
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_tiny_layer_reads_back(damaged_layer, tiny_experts):
    layer = container.read_layer(damaged_layer())
    assert (layer.layer, layer.source_sha256, layer.encoder_fingerprint) == (3, SOURCE, ENCODER)
    assert layer.format_codes.tolist() == [0x01, 0x10]
    assert all(same_expert(slab.unpack_expert(layer, e), tiny_experts[e]) for e in (0, 1))


@pytest.mark.parametrize("layer", [0, 5])
def test_bundles_stand_in_their_slots(random_expert, tmp_path, layer):
    geometry = Geometry(128, 1280, 3)  # 5 pairs
    experts = [random_expert(geometry, e, 2 - e, seed=e) for e in range(3)]
    write_layer(tmp_path / "layer", experts, geometry, layer)
    stored = container.read_layer(tmp_path / "layer")
    for expert, coded in enumerate(experts):
        bundles = atom.pack_expert(coded)
        for number in range(40):
            slot = (number + 8 * ((5 * expert + layer) % 5)) % 40
            row = stored.atoms[slot, 4800 * expert : 4800 * (expert + 1)]
            assert torch.equal(row, bundles[number])
        assert torch.equal(slab.expert_bundles(stored, expert), bundles)
        assert torch.equal(stored.shared_scales[:, expert], coded.shared_scales)


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_slots_argument(damaged_layer, parts):
    path = damaged_layer()
    whole = container.read_layer(path)
    for index in range(parts):
        share = extent(8, parts, index)
        found = container.read_layer(path, slots=share)
        assert torch.equal(found.atoms, whole.atoms[share.start : share.stop])
        assert torch.equal(found.shared_scales, whole.shared_scales)


def test_slots_outside_the_share_are_not_looked_at(damaged_layer):
    path = damaged_layer(flips={(ATOMS, -1): 1})
    with pytest.raises(FormatError, match="padding"):
        container.read_layer(path)
    assert len(container.read_layer(path, slots=range(7)).atoms) == 7
    with pytest.raises(FormatError, match="padding"):
        container.read_layer(path, slots=range(7, 8))


@pytest.mark.parametrize("slots", [range(0), range(3, 3), range(8, 8)])
def test_no_slots(damaged_layer, slots):
    whole = container.read_layer(damaged_layer())
    # A scale that is not finite and padding that is not zero, both in the slab.
    path = damaged_layer(flips={(ATOMS, 4800 - 1): 0x7E, (ATOMS, -1): 1})
    found = container.read_layer(path, slots=slots)
    assert (found.atoms.shape, found.atoms.dtype) == ((0, 12288), torch.uint8)
    assert torch.equal(found.format_codes, whole.format_codes)
    assert torch.equal(found.shared_scales, whole.shared_scales)


@pytest.mark.parametrize(
    ("flips", "message"),
    [
        ({(SECTION, 2): 1}, "_qsrt_format_section has padding"),
        ({(SECTION, 1): 0x30}, "nibble 3"),
        ({(SCALES, -1): 1}, "_qsrt_shared_scale_section has padding"),
        ({(SCALES, 1): 0x7E}, "scale that is not finite"),
    ],
)
def test_sections_are_checked_without_slots(damaged_layer, flips, message):
    with pytest.raises(FormatError, match=message):
        container.read_layer(damaged_layer(flips=flips), slots=range(0))


def test_a_slab_cut_short_is_seen_without_slots(tiny_layer, tmp_path):
    (tmp_path / "layer").write_bytes(tiny_layer[:-1])
    with pytest.raises(FormatError, match="truncated"):
        container.read_layer(tmp_path / "layer", slots=range(0))


@pytest.mark.parametrize(
    "slots",
    [range(6, 10), range(8, 9), range(-2, 3), range(0, 8, 2), range(9, 9), range(3, 1)],
)
def test_slots_that_are_not_there(damaged_layer, slots):
    with pytest.raises(ValueError, match="slots"):
        container.read_layer(damaged_layer(), slots=slots)


def test_writer_refuses_a_missing_expert(tiny_experts, tmp_path):
    path = tmp_path / "layer.safetensors"
    path.write_bytes(b"old")
    with (
        pytest.raises(FormatError, match="layer 3: expert 1 was not written"),
        container.LayerWriter(path, TINY, LAYER, SOURCE, ENCODER) as writer,
    ):
        writer.write_expert(0, tiny_experts[0])
    assert [p.name for p in tmp_path.iterdir()] == ["layer.safetensors"]
    assert path.read_bytes() == b"old"


def test_writer_leaves_nothing_on_error(tiny_experts, tmp_path):
    class StopError(Exception):
        pass

    with (
        pytest.raises(StopError),
        container.LayerWriter(tmp_path / "layer", TINY, LAYER, SOURCE, ENCODER) as writer,
    ):
        writer.write_expert(0, tiny_experts[0])
        writer.write_expert(1, tiny_experts[1])
        assert not (tmp_path / "layer").exists()
        raise StopError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("matrix", "vector"), [(m, v) for m in ("w1", "w3", "w2") for v in ("suh", "svh")]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_writer_refuses_scales_that_are_not_finite(random_expert, tmp_path, matrix, vector, value):
    coded = random_expert(TINY, 0, 0)
    getattr(getattr(coded, matrix), vector)[-1] = value
    with (
        pytest.raises(FormatError, match="layer 3 expert 1: a scale is not finite"),
        container.LayerWriter(tmp_path / "layer", TINY, LAYER, SOURCE, ENCODER) as writer,
    ):
        writer.write_expert(1, coded)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "encoder"), [("A" * 64, ENCODER), ("a" * 63, ENCODER), (SOURCE, ""), (SOURCE, "x")]
)
def test_writer_refuses_digests(tmp_path, source, encoder):
    with pytest.raises(FormatError, match=r"source_sha256|encoder_fingerprint"):
        container.LayerWriter(tmp_path / "layer", TINY, LAYER, source, encoder)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("expert", [-1, 2])
def test_writer_refuses_an_expert_that_is_not_there(tiny_experts, tmp_path, expert):
    with (
        pytest.raises(ValueError, match=f"expert {expert}"),
        container.LayerWriter(tmp_path / "layer", TINY, LAYER, SOURCE, ENCODER) as writer,
    ):
        for number in (0, 1, expert):
            writer.write_expert(number, tiny_experts[0])


def test_a_larger_stride_is_read(tiny_layer, tmp_path):
    length = int.from_bytes(tiny_layer[:8], "little")
    header, data = json.loads(tiny_layer[8 : 8 + length]), tiny_layer[8 + length :]
    start, end = header["qsrt_atoms"]["data_offsets"]
    rows = [data[at : at + 12288] + bytes(4096) for at in range(start, end, 12288)]
    header["qsrt_atoms"] |= {"shape": [8, 16384], "data_offsets": [start, start + 8 * 16384]}
    header["__metadata__"]["atom_slot_stride_bytes"] = "16384"
    text = json.dumps(header).encode()
    path = tmp_path / "wide.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[:start] + b"".join(rows))
    (tmp_path / "tiny.safetensors").write_bytes(tiny_layer)
    wide, tiny = container.read_layer(path), container.read_layer(tmp_path / "tiny.safetensors")
    assert wide.atoms.shape == (8, 16384)
    for expert in range(2):
        assert torch.equal(*(slab.expert_bundles(layer, expert) for layer in (wide, tiny)))
