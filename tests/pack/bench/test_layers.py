"""The layers that calls go through, and what they decode to."""

import torch
from packages import write_package

from qsrt_pack.bench.layers import MOST_LAYERS, copied, dense_layer, layers_in_turn, random_layer
from qsrt_pack.bench.shapes import Shape, parse_shape
from qsrt_runtime.format.geometry import Geometry, TrueSizes
from qsrt_runtime.load import load_package
from qsrt_runtime.moe_reference import moe_forward_reference

CPU = torch.device("cpu")


def dense_forward(x, dense, ids, weights):
    """The layer as any textbook has it, float64."""
    out = torch.zeros(len(x), dense.w2.shape[1], dtype=torch.float64)
    for row, (experts, shares) in enumerate(zip(ids.tolist(), weights, strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            gate, up = (dense.w13[expert].double() @ x[row].double()).chunk(2)
            middle = torch.nn.functional.silu(gate) * up
            out[row] += share.double() * (dense.w2[expert].double() @ middle)
    return out


def is_same_layer(layer, sizes):
    x = torch.randn(3, sizes.hidden, generator=torch.Generator().manual_seed(0))
    ids, weights = torch.tensor([[0, 1], [2, 0], [1, 2]]), torch.rand(3, 2) + 0.1
    dense = dense_layer(layer, sizes, torch.float32)
    experts, inner = layer.geometry.experts, sizes.intermediate
    assert dense.w13.shape == (experts, 2 * inner, sizes.hidden)
    assert dense.w2.shape == (experts, sizes.hidden, inner)
    found = dense_forward(x, dense, ids, weights)
    expected = moe_forward_reference(x, layer, ids, weights).double()
    assert expected.any()
    return (found - expected).norm() < 1e-5 * expected.norm()


def test_random_words_decode_to_the_same_layer():
    layer = random_layer(Geometry(256, 512, 3), CPU)
    assert layer.traits.inputs == 1 and layer.traits.uniform
    assert is_same_layer(layer, TrueSizes(256, 512))


def test_a_padded_package_decodes_to_the_models_own_sizes(tmp_path):
    sizes = TrueSizes(200, 300)
    folder = write_package(tmp_path / "p", sizes.padded(3), true_sizes=sizes)
    assert is_same_layer(load_package(folder).layers[0], sizes)


def test_as_many_layers_as_exceed_the_cache():
    shape = parse_shape("H=1024,I=512,E=256,k=8")
    size = shape.packed_bytes
    assert size == 16 * 256 * 3 * (12 * 1024 + 64)
    assert [layers_in_turn(shape, size * n // 4) for n in (0, 1, 4, 5, 9)] == [1, 1, 4, 5, 9]
    assert layers_in_turn(shape, size * 1000) == MOST_LAYERS
    assert layers_in_turn(Shape(Geometry(128, 256, 1), TrueSizes(128, 256), 1), 1) == 1


def test_too_few_layers_are_copied():
    layers = [random_layer(Geometry(128, 256, 2), CPU) for _ in range(2)]
    found = copied(layers, 5)
    assert found[:2] == layers and len(found) == 5
    assert len({layer.atoms.data_ptr() for layer in found}) == 5
    assert all(torch.equal(layer.atoms, layers[0].atoms) for layer in found)
    assert copied(layers, 1) == layers[:1]
