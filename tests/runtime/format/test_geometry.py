import dataclasses

import pytest

from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry, TrueSizes, align, extent

FRUIT = Geometry(hidden=1024, intermediate=512, experts=256)
KIMI = Geometry(hidden=3584, intermediate=3072, experts=896)
TINY = Geometry(hidden=128, intermediate=256, experts=1)


def test_fruit():
    assert (FRUIT.records, FRUIT.pairs, FRUIT.slots) == (4, 2, 16)
    assert FRUIT.hidden_tiles == 64
    assert FRUIT.atoms_per_expert == 96
    assert FRUIT.weights_per_expert == 3 * 1024 * 512
    assert FRUIT.slot_stride(256) == 9_486_336
    assert FRUIT.profile == "fruit"


def test_kimi():
    assert (KIMI.records, KIMI.pairs, KIMI.slots) == (24, 12, 96)
    assert KIMI.profile == "generic"


@pytest.mark.parametrize(("hidden", "size"), [(1024, 37_056), (3584, 129_216), (128, 4_800)])
def test_bundle_bytes(hidden, size):
    geometry = Geometry(hidden, 256, 1)
    assert geometry.bundle_bytes == size
    assert geometry.trellis_bytes == 12 * hidden


@pytest.mark.parametrize(("hidden", "intermediate"), [(1024, 256), (512, 512), (1024, 1024)])
def test_profile_of_other_sizes(hidden, intermediate):
    assert Geometry(hidden, intermediate, 256).profile == "generic"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 256, 1), "hidden size 0 "),
        ((-128, 256, 1), "hidden size -128 "),
        ((64, 256, 1), "hidden size 64 "),
        ((2880, 256, 1), "hidden size 2880 "),
        ((128, 0, 1), "intermediate size 0 "),
        ((128, -256, 1), "intermediate size -256 "),
        ((128, 128, 1), "intermediate size 128 "),
        ((128, 704, 1), "intermediate size 704 "),
        ((128, 256, 0), "0 experts"),
        ((128, 256, -1), "-1 experts"),
    ],
)
def test_refused_sizes(sizes, message):
    with pytest.raises(FormatError, match=message):
        Geometry(*sizes)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TINY.hidden = 256


@pytest.mark.parametrize(
    ("size", "expected"), [(0, 0), (1, 4096), (4095, 4096), (4096, 4096), (4097, 8192)]
)
def test_align(size, expected):
    assert align(size) == expected


@pytest.mark.parametrize("kind", ["fruit_layer", "kimi_layer"])
def test_rotation_of_golden_experts(facts, kind):
    layer = facts[kind]
    sizes = layer["metadata"]
    geometry = Geometry(
        int(sizes["latent_channels"]), int(sizes["intermediate_channels"]), int(sizes["experts"])
    )
    assert geometry.slots == int(sizes["atom_slots"])
    assert geometry.bundle_bytes == int(sizes["atom_bundle_bytes"])
    stride = geometry.slot_stride(int(sizes["compressed_experts"]))
    assert stride == int(sizes["atom_slot_stride_bytes"])
    for expert, entry in layer["experts"].items():
        first = geometry.physical_slots(layer["layer"], int(expert))[0]
        assert first == entry["physical_atom_rotation"]


@pytest.mark.parametrize("geometry", [TINY, FRUIT, KIMI], ids=["1 pair", "2 pairs", "12 pairs"])
@pytest.mark.parametrize("layer", [0, 1, 13, 92])
def test_slots_of_every_expert(geometry, layer):
    slots, pairs = geometry.slots, geometry.pairs
    for expert in range(geometry.experts):
        found = geometry.physical_slots(layer, expert)
        shift = 8 * ((5 * expert + layer) % pairs)
        assert found == [(atom + shift) % slots for atom in range(slots)]
        assert sorted(found) == list(range(slots))
        assert all(slot % 8 == atom % 8 for atom, slot in enumerate(found))  # pairs stay whole


@pytest.mark.parametrize("count", [1, 2, 7, 8, 16, 96])
def test_extents_cover_every_slot_once(count):
    for parts in range(1, count + 1):
        extents = [extent(count, parts, index) for index in range(parts)]
        assert [slot for part in extents for slot in part] == list(range(count))
        sizes = [len(part) for part in extents]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1


def test_known_extents():
    assert [extent(7, 2, i) for i in range(2)] == [range(4), range(4, 7)]
    assert [extent(8, 3, i) for i in range(3)] == [range(3), range(3, 6), range(6, 8)]


@pytest.mark.parametrize(
    ("count", "parts", "index"), [(3, 4, 0), (3, 0, 0), (3, -1, 0), (3, 2, 2), (3, 2, -1)]
)
def test_refused_extents(count, parts, index):
    with pytest.raises(ValueError, match=f"part {index} of {parts} of {count}"):
        extent(count, parts, index)


@pytest.mark.parametrize(
    ("true", "stored", "is_padded"),
    [
        ((128, 256), (128, 256), False),
        ((2688, 1536), (2688, 1536), False),
        ((2880, 2880), (2944, 3072), True),
        ((128, 704), (128, 768), True),
        ((129, 256), (256, 256), True),
        ((1, 1), (128, 256), True),
        ((1856, 1856), (1920, 2048), True),
    ],
)
def test_true_sizes(true: tuple[int, int], stored: tuple[int, int], is_padded: bool) -> None:
    sizes = TrueSizes(*true)
    assert sizes.padded(3) == Geometry(*stored, 3)
    assert sizes.is_padded is is_padded
    assert sizes.weights_per_expert == 3 * true[0] * true[1]
