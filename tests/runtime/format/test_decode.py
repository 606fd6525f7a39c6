import dataclasses
import math

import pytest
import torch
from safetensors.torch import load_file

from qsrt_runtime.format import atom, container, decode, rates, slab, tile
from qsrt_runtime.format.geometry import Geometry

AXES = {"w1": "out", "w3": "out", "w2": "in"}
DENSE = 1e-6  # relative L2 of a float32 decode, stated with the golden data
HALF = 1e-3  # the same of a decode stored in fp16


def relative(found, expected):
    expected = expected.double()
    return ((found.double() - expected).norm() / expected.norm()).item()


def check_sums(found, expected):
    """Sums of a matrix within relative L2 DENSE, so by Cauchy-Schwarz within DENSE*sqrt(n)*|x|."""
    found = found.double()
    sumsq = (found**2).sum().item()
    assert abs(sumsq - expected["sumsq"]) <= 2.1 * DENSE * sumsq
    assert abs(found.sum().item() - expected["sum"]) <= DENSE * math.sqrt(found.numel() * sumsq)
    assert found.abs().max().item() == pytest.approx(expected["absmax"], rel=DENSE)
    for lines, sums in ((found, "row_sums_head"), (found.T, "col_sums_head")):
        for line, total in zip(lines, expected.get(sums, ()), strict=False):
            bound = DENSE * math.sqrt(len(line)) * line.norm().item()
            assert abs(line.sum().item() - total) <= bound


def golden_matrix(full_golden, name, mode):
    """One matrix of the golden encoder's part files, with the tensors of its mode."""
    data = load_file(full_golden / f"matrix_{name}.safetensors")
    data = {key[3:]: value for key, value in data.items() if key.startswith(f"R{mode}.")}
    sides = data["atoms"].unflatten(0, (2, 8))
    records = []
    for pair, low_bits in enumerate(rates.stored_bits(mode, 4)[::2]):
        low = 64 * 16 * low_bits
        records += [sides[pair, :, :low].view(8, 64, -1), sides[pair, :, low:].view(8, 64, -1)]
    return atom.Matrix(tuple(records), data["suh"], data["svh"]), data


@pytest.mark.parametrize("name", AXES)
@pytest.mark.parametrize("expert", range(4))
def test_golden_fruit_checksums(golden, facts, expert, name):
    layer = container.read_layer(golden / facts["fruit_layer"]["file"])
    coded = slab.unpack_expert(layer, expert)
    dense = decode.dense_matrix(getattr(coded, name), AXES[name])
    assert dense.dtype == torch.float32
    assert dense.shape == ((1024, 512) if name == "w2" else (512, 1024))
    check_sums(dense, facts["fruit_layer"]["experts"][str(expert)][name])


@pytest.mark.parametrize("expert", [0, 2])
def test_golden_kimi_checksums(golden, facts, expert):
    layer = container.read_layer(golden / "kimi_layer.safetensors")
    dense = decode.dense_expert(slab.unpack_expert(layer, expert))
    assert list(dense) == ["w1", "w3", "w2"]
    for name, matrix in dense.items():
        assert matrix.shape == ((128, 3072) if name == "w2" else (3072, 128))
        check_sums(matrix, facts["kimi_layer"]["experts"][str(expert)][name])


@pytest.mark.parametrize(
    ("layer_file", "dense_file", "expert"),
    [
        ("publication/qsrt-layer-005.safetensors", "fruit_layer_dense.safetensors", 3),
        ("kimi_layer.safetensors", "kimi_layer_dense.safetensors", 0),
    ],
)
def test_golden_dense_experts(full_golden, layer_file, dense_file, expert):
    expected = load_file(full_golden / dense_file)
    layer = container.read_layer(full_golden / layer_file)
    for name, found in decode.dense_expert(slab.unpack_expert(layer, expert)).items():
        assert relative(found, expected[f"expert{expert}.{name}"]) < HALF


@pytest.mark.parametrize("name", ["w1", "w2"])
def test_golden_matrix(full_golden, name):
    matrix, data = golden_matrix(full_golden, name, 1)
    tiles = decode.matrix_tiles(matrix, AXES[name])
    assert torch.equal(tiles, data["regularized_e4m3"].view(torch.float8_e4m3fn).float())
    assert relative(decode.dense_matrix(matrix, AXES[name]), data["dense_physical"]) < DENSE


@pytest.mark.parametrize("mode", rates.MODES)
@pytest.mark.parametrize("name", ["w1", "w2"])
def test_golden_matrix_checksums_and_source_order(full_golden, facts, name, mode):
    matrix, data = golden_matrix(full_golden, name, mode)
    dense = decode.dense_matrix(matrix, AXES[name])
    check_sums(dense, facts["matrices"][f"{name}.R{mode}"]["dense_physical"])
    axis = 1 if name == "w2" else 0
    original = torch.full_like(dense, torch.nan)
    original.index_copy_(axis, data["physical_permutation"].long(), dense)
    check_sums(original, facts["matrices"][f"{name}.R{mode}"]["dense_original"])
    assert relative(original.narrow(axis, 0, 16), data["dense_original_slice"]) < DENSE


@pytest.mark.parametrize("modes", [(0, 1), (1, 0)])
def test_against_a_dense_product(random_expert, modes):
    """diag(suh) B T B diag(svh) with dense Hadamard matrices and every tile laid by hand."""
    geometry = Geometry(256, 256, 1)
    expert = random_expert(geometry, *modes)
    block = torch.ones(1, 1, dtype=torch.float64)
    while len(block) < 128:
        block = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), block)
    rotation = torch.block_diag(block, block) / math.sqrt(128)
    for name, axis in AXES.items():
        matrix = getattr(expert, name)
        placed = torch.full((256, 256), torch.nan, dtype=torch.float64)
        for number, words in enumerate(matrix.records):
            bits = words.shape[-1] // 16
            for stripe in range(8):
                for hidden in range(16):
                    row, column = 16 * hidden, 128 * number + 16 * stripe
                    if axis == "in":
                        row, column = column, row
                    value = tile.values(words[stripe, hidden : hidden + 1], bits)[0]
                    placed[row : row + 16, column : column + 16] = value
        assert torch.equal(decode.matrix_tiles(matrix, axis).double(), placed)
        expected = matrix.suh.double()[:, None] * (rotation @ placed @ rotation)
        expected = (expected * matrix.svh.double()).T
        assert relative(decode.dense_matrix(matrix, axis), expected) < DENSE


def test_zero_scales_give_exact_zeros(random_expert):
    expert = random_expert(Geometry(128, 256, 1), 1, 1)
    expert.w1.svh[5:9] = 0
    expert.w1.suh[17] = 0
    dense = decode.dense_matrix(expert.w1, "out")
    assert not dense[5:9].any()
    assert not dense[:, 17].any()
    assert dense[0, 0] != 0


@pytest.mark.gpu
def test_a_gpu_decodes_the_same_bits(golden):
    layer = container.read_layer(golden / "publication/qsrt-layer-005.safetensors")
    on_gpu = {"atoms": layer.atoms.cuda(), "shared_scales": layer.shared_scales.cuda()}
    moved = dataclasses.replace(layer, **on_gpu)
    for expert in range(4):
        expected = decode.dense_expert(slab.unpack_expert(layer, expert))
        found = decode.dense_expert(slab.unpack_expert(moved, expert))
        for matrix, weight in expected.items():
            assert torch.equal(found[matrix].cpu(), weight)
