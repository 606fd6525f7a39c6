import dataclasses

import pytest
import torch

from qsrt_runtime.format import decode, slab
from qsrt_runtime.format.container import LayerWriter, read_layer
from qsrt_runtime.format.geometry import Geometry, extent

GEOMETRY = Geometry(128, 7 * 256, 3)


@pytest.fixture(scope="module")
def stored(tmp_path_factory, random_expert):
    path = tmp_path_factory.mktemp("slab") / "layer"
    with LayerWriter(path, GEOMETRY, 4, "5" * 64, "e" * 64) as writer:
        for expert in range(3):
            writer.write_expert(expert, random_expert(GEOMETRY, expert, 2 - expert, seed=expert))
    return read_layer(path)


def part(whole, slots):
    return dataclasses.replace(whole, slots=slots, atoms=whole.atoms[slots.start : slots.stop])


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("expert", [0, 1, 2])
def test_every_pair_is_held_once(stored, ranks, expert):
    found = []
    for rank in range(ranks):
        pairs = extent(GEOMETRY.pairs, ranks, rank)
        held = part(stored, range(8 * pairs.start, 8 * pairs.stop))
        found += slab.expert_pairs(held, expert)
        assert len(slab.expert_pairs(held, expert)) == len(pairs)
    assert sorted(found) == list(range(7))


@pytest.mark.parametrize("expert", [0, 1, 2])
def test_a_part_has_the_channels_of_its_pairs(stored, expert):
    whole = decode.dense_expert(slab.unpack_expert(stored, expert))
    for slots in (range(0, 8), range(16, 40), range(8, 56)):
        held = part(stored, slots)
        channels = [256 * p + i for p in slab.expert_pairs(held, expert) for i in range(256)]
        dense = decode.dense_expert(slab.unpack_expert(held, expert))
        assert torch.equal(dense["w1"], whole["w1"][channels])
        assert torch.equal(dense["w3"], whole["w3"][channels])
        assert torch.equal(dense["w2"], whole["w2"][:, channels])


def test_no_slots(stored):
    held = part(stored, range(0))
    assert slab.expert_pairs(held, 1) == []
    assert slab.expert_bundles(held, 1).shape == (0, GEOMETRY.bundle_bytes)
