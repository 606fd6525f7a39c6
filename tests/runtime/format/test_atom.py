import hashlib

import pytest
import torch
from safetensors.torch import load_file

from qsrt_runtime.format import atom, container, rates, slab
from qsrt_runtime.format.geometry import Geometry

MODE_PAIRS = [(mode13, mode2) for mode13 in rates.MODES for mode2 in rates.MODES]
GEOMETRIES = [Geometry(128, 256, 1), Geometry(256, 512, 1), Geometry(384, 1280, 1)]


def sha256(tensor):
    data = tensor.contiguous().view(torch.uint8).flatten().tolist()
    return hashlib.sha256(bytes(data)).hexdigest()


def payload(matrix, rate_axis):
    """The pair payload: each record's tiles in row-major order of [K tiles, N tiles]."""
    records = matrix.records
    if rate_axis == "out":
        records = [record.transpose(0, 1) for record in records]
    return torch.cat([record.flatten() for record in records])


def records_of_pairs(pairs, mode, rate_axis):
    """The records of a golden matrix from its pair payload, H=1024, I=512."""
    bits, offset, records = rates.stored_bits(mode, 4), 0, []
    for count in bits:
        words = pairs.flatten()[offset : offset + 8 * 64 * 16 * count]
        offset += len(words)
        if rate_axis == "out":
            records.append(words.view(64, 8, -1).transpose(0, 1))
        else:
            records.append(words.view(8, 64, -1))
    return tuple(records)


def same(one, two):
    assert (one.mode13, one.mode2) == (two.mode13, two.mode2)
    for name in atom.MATRICES:
        a, b = getattr(one, name), getattr(two, name)
        assert torch.equal(a.suh, b.suh)
        assert torch.equal(a.svh, b.svh)
        assert len(a.records) == len(b.records)
        assert all(torch.equal(x, y) for x, y in zip(a.records, b.records, strict=True))


@pytest.mark.parametrize(
    ("geometry", "modes"),
    [
        (geometry, modes)
        for geometry in GEOMETRIES
        for modes in MODE_PAIRS
        if max(modes) in rates.allowed_modes(geometry.records)
    ],
    ids=lambda value: getattr(value, "intermediate", None),
)
def test_round_trip(random_expert, geometry, modes):
    expert = random_expert(geometry, *modes)
    bundles = atom.pack_expert(expert)
    assert (bundles.dtype, bundles.shape) == (
        torch.uint8,
        (geometry.slots, geometry.bundle_bytes),
    )
    found = atom.unpack_expert(bundles, expert.shared_scales, modes, geometry)
    same(found, expert)
    assert torch.equal(atom.pack_expert(found), bundles)


@pytest.mark.parametrize("modes", MODE_PAIRS)
def test_any_bytes_are_an_expert(modes):
    geometry = Geometry(128, 512, 1)
    generator = torch.Generator().manual_seed(0)
    shape = (geometry.slots, geometry.bundle_bytes)
    bundles = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    expert = atom.unpack_expert(bundles, torch.zeros(3, 128).half(), modes, geometry)
    assert torch.equal(atom.pack_expert(expert), bundles)


def test_place_of_each_part(random_expert):
    """The offsets of FORMAT section 4, each read by hand from the bytes of one atom."""
    geometry = Geometry(128, 512, 1)
    expert = random_expert(geometry, 1, 2)
    bundles = atom.pack_expert(expert)
    for number, bundle in enumerate(bundles):
        pair, stripe = divmod(number, 8)
        for i, name in enumerate(atom.MATRICES):
            low, high = getattr(expert, name).records[2 * pair : 2 * pair + 2]
            trellis = bundle[12 * 128 * i : 12 * 128 * (i + 1)].view(torch.int16)
            assert torch.equal(trellis, torch.cat([low[stripe].flatten(), high[stripe].flatten()]))
        for i, vector in enumerate([expert.w1.svh, expert.w3.svh, expert.w2.suh]):
            scales = bundle[36 * 128 + 64 * i :][:64].view(torch.float16)
            first = 256 * pair + 16 * stripe
            expected = torch.cat([vector[first : first + 16], vector[first + 128 : first + 144]])
            assert torch.equal(scales, expected)


def test_shared_scales(random_expert):
    expert = random_expert(Geometry(128, 256, 1), 0, 0)
    expected = torch.stack([expert.w1.suh, expert.w3.suh, expert.w2.svh])
    assert torch.equal(expert.shared_scales, expected)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_record_bits_of(bits):
    assert atom.record_bits_of(torch.zeros(8, 8, 16 * bits, dtype=torch.int16)) == bits


@pytest.mark.parametrize("expert", range(4))
def test_golden_fruit_expert(golden, facts, expert):
    layer = container.read_layer(golden / facts["fruit_layer"]["file"])
    entry = facts["fruit_layer"]["experts"][str(expert)]
    bundles = slab.expert_bundles(layer, expert)
    assert sha256(bundles) == entry["logical_bundle_sha256"]
    coded = slab.unpack_expert(layer, expert)
    assert [coded.mode13, coded.mode2] == entry["format"]
    assert torch.equal(atom.pack_expert(coded), bundles)
    for name in atom.MATRICES:
        matrix = getattr(coded, name)
        words = payload(matrix, "in" if name == "w2" else "out")
        assert sha256(words) == entry[name]["pairs_sha256"]
        assert sha256(matrix.suh) == entry[name]["suh_sha256"]
        assert sha256(matrix.svh) == entry[name]["svh_sha256"]


@pytest.mark.parametrize("expert", [0, 2])
def test_golden_kimi_expert(golden, facts, expert):
    layer = container.read_layer(golden / "kimi_layer.safetensors")
    entry = facts["kimi_layer"]["experts"][str(expert)]
    coded = slab.unpack_expert(layer, expert)
    assert [coded.mode13, coded.mode2] == entry["format"]
    for name in atom.MATRICES:
        matrix = getattr(coded, name)
        words = payload(matrix, "in" if name == "w2" else "out")
        assert sha256(words) == entry[name]["trellis_sha256"]
        assert sha256(matrix.suh) == entry[name]["suh_sha256"]
        assert sha256(matrix.svh) == entry[name]["svh_sha256"]
        assert [atom.record_bits_of(r) for r in matrix.records] == entry[name]["record_bits"]


@pytest.mark.parametrize("modes", MODE_PAIRS)
def test_golden_atoms_of_pairs(full_golden, facts, modes):
    data = {name: load_file(full_golden / f"matrix_{name}.safetensors") for name in ("w1", "w2")}

    def matrix(name, mode, rate_axis):
        part = {key: data[name][f"R{mode}.{key}"] for key in ("pairs", "suh", "svh")}
        expected = facts["matrices"][f"{name}.R{mode}"]
        assert sha256(part["pairs"]) == expected["pairs_sha256"]
        records = records_of_pairs(part["pairs"], mode, rate_axis)
        return atom.Matrix(records, part["suh"], part["svh"])

    gate, down = matrix("w1", modes[0], "out"), matrix("w2", modes[1], "in")
    bundles = atom.pack_expert(atom.Expert(gate, gate, down, *modes))
    size = 12 * 1024
    for name, mode, part, scale in (("w1", modes[0], 0, 0), ("w2", modes[1], 2, 2)):
        atoms = bundles[:, part * size : (part + 1) * size].contiguous()
        assert torch.equal(atoms.view(torch.int16), data[name][f"R{mode}.atoms"])
        assert sha256(atoms) == facts["matrices"][f"{name}.R{mode}"]["atoms_sha256"]
        local = bundles[:, 3 * size + 64 * scale :][:, :64].contiguous().view(torch.float16)
        assert torch.equal(local, data[name][f"R{mode}.local_scale_atoms"])
