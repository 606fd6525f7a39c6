import pytest
import torch
from safetensors.torch import load_file

from qsrt_runtime.format import codebook, tile

BITS = (2, 3, 4)


@pytest.fixture(scope="module")
def tiles(golden):
    return load_file(golden / "tiles.safetensors")


def random_edges(n, bits, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, (n, 256), dtype=torch.uint8, generator=generator)


def stored_words(edges, bits):
    """Section 2 of the format, letter by letter, for one tile."""
    stream = "".join(f"{edge:0{bits}b}" for edge in edges)
    words = [int(stream[i : i + 16], 2) for i in range(0, len(stream), 16)]
    words[0::2], words[1::2] = words[1::2], words[0::2]
    return [word - (1 << 16) if word >> 15 else word for word in words]


def stored_states(edges, bits):
    """The recurrence s = (s << K | edge) mod 2**16, run around the circle until it has closed."""
    state, states = 0, []
    for edge in [*edges, *edges]:
        state = (state << bits | edge) & 0xFFFF
        states.append(state)
    return states[256:]


@pytest.mark.parametrize("bits", BITS)
def test_golden_tiles(tiles, bits):
    words, states = tiles[f"k{bits}.words"], tiles[f"k{bits}.states"]
    assert torch.equal(tile.pack_edges(tiles[f"k{bits}.edges"], bits), words)
    assert torch.equal(tile.edges(words, bits), tiles[f"k{bits}.edges"])
    assert torch.equal(tile.states(words, bits), states)
    assert torch.equal(tile.states_of_edges(tiles[f"k{bits}.edges"], bits), states)
    assert torch.equal(codebook.labels(bits)[states], tiles[f"k{bits}.labels"])
    assert torch.equal(tile.values(words, bits), tiles[f"k{bits}.tile"])


def test_golden_place(tiles):
    assert torch.equal(tile.row_major_place(), tiles["sequence_to_row_major"].long())


def test_place_is_a_permutation_with_its_inverse():
    place = tile.row_major_place()
    assert place[:10].tolist() == [0, 16, 128, 144, 8, 24, 136, 152, 32, 48]
    assert torch.equal(place[tile.trellis_position()], torch.arange(256))
    assert torch.equal(tile.trellis_position()[place], torch.arange(256))


@pytest.mark.parametrize("n", [0, 1, 3])
def test_orders_are_inverse(n):
    tiles = torch.arange(n * 256).view(n, 16, 16)
    path = tile.to_trellis_order(tiles)
    assert path.shape == (n, 256)
    assert torch.equal(tile.to_row_major(path), tiles)
    if n:
        place = tile.row_major_place().tolist()
        assert path[0].tolist() == [tiles[0, p // 16, p % 16].item() for p in place]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [0, 1, 13])
def test_round_trip_of_random_edges(n, bits):
    edges = random_edges(n, bits, seed=n)
    words = tile.pack_edges(edges, bits)
    assert (words.dtype, words.shape) == (torch.int16, (n, 16 * bits))
    assert words.tolist() == [stored_words(row, bits) for row in edges.tolist()]
    assert torch.equal(tile.edges(words, bits), edges)
    states = tile.states(words, bits)
    assert states.shape == (n, 256)
    assert states.tolist() == [stored_states(row, bits) for row in edges.tolist()]
    assert torch.equal(tile.states_of_edges(edges, bits), states)
    values = tile.values(words, bits)
    assert (values.dtype, values.shape) == (torch.float32, (n, 16, 16))


@pytest.mark.parametrize("bits", BITS)
def test_any_words_are_a_valid_path(bits):
    generator = torch.Generator().manual_seed(bits)
    words = torch.randint(
        -(1 << 15), 1 << 15, (7, 16 * bits), dtype=torch.int16, generator=generator
    )
    assert torch.equal(tile.pack_edges(tile.edges(words, bits), bits), words)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("position", [0, 1, 17, 128, 255])
def test_one_edge_moves_only_the_states_that_see_it(position, bits):
    edges = torch.zeros(1, 256, dtype=torch.uint8)
    edges[0, position] = 1
    states = tile.states(tile.pack_edges(edges, bits), bits)[0].tolist()
    window = -(-16 // bits)
    expected = {(position + age) % 256: (1 << bits * age) & 0xFFFF for age in range(window)}
    assert {i: s for i, s in enumerate(states) if s} == expected


@pytest.mark.parametrize("bits", BITS)
def test_words_are_little_endian_units_of_32_bits(bits):
    """Read as little-endian uint32, the path runs from each top bit down."""
    edges = random_edges(1, bits, seed=5)
    words = tile.pack_edges(edges, bits)[0]
    data = b"".join((w & 0xFFFF).to_bytes(2, "little") for w in words.tolist())
    units = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
    stream = "".join(f"{unit:032b}" for unit in units)
    assert stream == "".join(f"{edge:0{bits}b}" for edge in edges[0].tolist())


@pytest.mark.parametrize("bits", BITS)
def test_states_are_int32(bits):
    edges = random_edges(1, bits)
    assert tile.states_of_edges(edges, bits).dtype == torch.int32
    assert tile.states(tile.pack_edges(edges, bits), bits).dtype == torch.int32


def test_a_matrix_is_cut_row_by_row_and_put_together_again() -> None:
    matrix = torch.arange(32 * 48).view(32, 48)
    tiles = tile.of_matrix(matrix)
    assert tiles.shape == (2, 3, 16, 16)
    assert torch.equal(tiles[1, 2], matrix[16:, 32:])
    assert torch.equal(tile.to_matrix(tiles), matrix)
