import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from qsrt_runtime import load_package
from qsrt_runtime.format import container, decode, slab
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.format.manifest import ACTIVATIONS
from qsrt_runtime.format.rotation import rotate
from qsrt_runtime.moe_reference import (
    expert_forward_reference,
    matmul_reference,
    moe_forward_reference,
)
from qsrt_runtime.mxfp8 import dequantize_rows, quantize_rows
from qsrt_runtime.weights import LayerWeights

BOUND = 1e-5  # relative L2 between float32 implementations, stated with the golden data


def weights(stored, activations="silu"):
    if isinstance(activations, str):
        activations = (activations,) * stored.geometry.experts
    fields = {field.name: getattr(stored, field.name) for field in dataclasses.fields(slab.Slab)}
    codes = torch.tensor([ACTIVATIONS.index(a) for a in activations], dtype=torch.uint8)
    return LayerWeights(**fields, activations=codes)


def relative(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.fixture(scope="module")
def fruit(golden):
    return container.read_layer(golden / "publication/qsrt-layer-005.safetensors")


@pytest.fixture(scope="module")
def kimi(golden):
    return container.read_layer(golden / "kimi_layer.safetensors")


@pytest.fixture(scope="module")
def batch(golden):
    data = load_file(golden / "moe_fruit.safetensors")
    return data["x"], data["topk_ids"], data["topk_weights"]


@pytest.mark.parametrize("activation", ["silu", "situ"])
def test_golden_fruit(golden, fruit, activation):
    data = load_file(golden / "moe_fruit.safetensors")
    found = moe_forward_reference(
        data["x"], weights(fruit, activation), data["topk_ids"], data["topk_weights"]
    )
    assert found.dtype == torch.float32
    assert relative(found, data[f"out_{activation}"]) < BOUND


@pytest.mark.parametrize("activation", ["silu", "situ"])
def test_golden_kimi(golden, kimi, activation):
    data = load_file(golden / "moe_kimi.safetensors")
    found = moe_forward_reference(
        data["x"], weights(kimi, activation), data["topk_ids"], data["topk_weights"]
    )
    assert relative(found, data[f"out_{activation}"]) < BOUND


@pytest.mark.parametrize(("schema", "dense"), [("fruit", "silu"), ("kimi", "situ")])
def test_golden_with_quantized_rows(golden, request, schema, dense):
    """The format states what the roundings alone cost on this data: 4.8e-2."""
    data = load_file(golden / f"moe_{schema}.safetensors")
    layer = weights(request.getfixturevalue(schema), dense)
    routes = (data["topk_ids"], data["topk_weights"])
    found = moe_forward_reference(data["x"], layer, *routes, activation="a8")
    assert 4e-2 < relative(found, data[f"out_{dense}"]) < 5.5e-2


def test_quantized_rows_are_what_products_take(random_expert):
    """Of one pair in a dense product in float64, with both inputs quantized by the definition."""
    coded = random_expert(Geometry(128, 256, 1), 0, 1)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    tiles = {
        name: torch.cat([decode.record_tiles(r, axis) for r in getattr(coded, name).records], dim)
        for name, axis, dim in (("w1", "out", 1), ("w3", "out", 1), ("w2", "in", 0))
    }
    middle = 1
    for name in ("w1", "w3"):
        matrix = getattr(coded, name)
        row = dequantize_rows(*quantize_rows(rotate(x * matrix.suh.float())))
        product = row.double() @ tiles[name].double()
        value = rotate(product.float()) * matrix.svh.float()
        middle = middle * (torch.nn.functional.silu(value) if name == "w1" else value)
    row = dequantize_rows(*quantize_rows(rotate(middle * coded.w2.suh.float())))
    expected = rotate((row.double() @ tiles["w2"].double()).float()) * coded.w2.svh.float()
    found = expert_forward_reference(x, coded, "silu", a8=True)
    assert relative(found, expected) < 1e-3  # a sum's rounding may move a number to its neighbour
    assert relative(expert_forward_reference(x, coded, "silu"), expected) > 2e-2


def test_rows_are_quantized_before_the_weight_on_the_input(fruit, batch):
    x, ids, topk_weights = batch
    options = {"activation": "a8", "weight_on_input": True}
    found = moe_forward_reference(x, weights(fruit), ids, topk_weights, **options)
    exact = moe_forward_reference(x, weights(fruit), ids, topk_weights, weight_on_input=True)
    assert 3e-2 < relative(found, exact) < 5.5e-2


@pytest.mark.parametrize("activation", ["a4", "auto", None])
def test_an_activation_that_there_is_not(fruit, batch, activation):
    with pytest.raises(ValueError, match=f"activation is {activation!r}, expected 'a16' or 'a8'"):
        moe_forward_reference(batch[0], weights(fruit), *batch[1:], activation=activation)


def test_tiny_and_zero_rows_quantized(fruit, batch):  # RT-10
    x, ids, topk_weights = (t[:4].clone() for t in batch)
    x[0], x[1] = 0, -0.0
    x[2, 128:256] = 0
    x[3, :32] *= 1e-30
    found = moe_forward_reference(x, weights(fruit), ids, topk_weights, activation="a8")
    assert not found[:2].any()
    assert found.isfinite().all()
    expected = moe_forward_reference(x, weights(fruit), ids, topk_weights)
    assert relative(found[2:], expected[2:]) < 5.5e-2


@pytest.mark.parametrize("modes", [(0, 0), (0, 2), (1, 1), (2, 0)])
@pytest.mark.parametrize("activation", ["silu", "situ"])
def test_one_expert_against_its_dense_matrices(random_expert, modes, activation):
    coded = random_expert(Geometry(128, 768, 1), *modes)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    dense = {name: w.double() for name, w in decode.dense_expert(coded).items()}
    gate, up = x.double() @ dense["w1"].T, x.double() @ dense["w3"].T
    if activation == "silu":
        middle = gate * torch.sigmoid(gate) * up
    else:
        middle = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
    for name, axis, row in (("w1", "out", x), ("w3", "out", x), ("w2", "in", middle.float())):
        found = matmul_reference(row, getattr(coded, name), axis)
        assert relative(found, row.double() @ dense[name].T) < BOUND
    found = expert_forward_reference(x, coded, activation)
    assert found.shape == (5, 128)
    assert relative(found, middle @ dense["w2"].T) < BOUND


def test_activation_of_each_expert(fruit, batch):
    x, ids = batch[0], batch[1][:, :1]
    ones = torch.ones(ids.shape)
    silu, situ, mixed = (
        moe_forward_reference(x, weights(fruit, activations), ids, ones)
        for activations in ("silu", "situ", ("silu", "situ", "situ", "silu"))
    )
    is_situ = torch.isin(ids[:, 0], torch.tensor([1, 2]))
    assert is_situ.any()
    assert not is_situ.all()
    assert torch.equal(mixed, torch.where(is_situ[:, None], situ, silu))
    assert not torch.equal(silu, situ)


def test_left_out_routes_add_nothing(fruit, batch):
    x, ids, topk_weights = batch
    expected = moe_forward_reference(x, weights(fruit), ids[:, :1], topk_weights[:, :1])
    ids, topk_weights = ids.clone(), topk_weights.clone()
    ids[:, 1], topk_weights[:, 1] = -1, torch.nan
    found = moe_forward_reference(x, weights(fruit), ids, topk_weights)
    assert torch.equal(found, expected)


def test_rows_of_left_out_routes_are_zero(fruit, batch):
    x, ids, topk_weights = batch
    ids = ids.clone()
    ids[3] = -1
    x = x.clone()
    x[3] = torch.nan
    found = moe_forward_reference(x, weights(fruit), ids, topk_weights)
    assert not found[3].any()
    assert torch.isfinite(found).all()
    everything = moe_forward_reference(x, weights(fruit), torch.full_like(ids, -1), topk_weights)
    assert torch.equal(everything, torch.zeros_like(x))


@pytest.mark.parametrize(("tokens", "topk"), [(0, 2), (0, 0), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_to_do(fruit, tokens, topk, dtype):
    x = torch.ones(tokens, 1024, dtype=dtype)
    ids = torch.zeros(tokens, topk, dtype=torch.int64)
    found = moe_forward_reference(x, weights(fruit), ids, torch.zeros(tokens, topk))
    assert (found.dtype, found.shape) == (dtype, (tokens, 1024))
    assert not found.any()


@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_all_tokens_on_one_expert(fruit, batch, tokens):
    x = batch[0][:tokens]
    ids = torch.full((tokens, 1), 3)
    found = moe_forward_reference(x, weights(fruit), ids, torch.full((tokens, 1), 0.25))
    dense = decode.dense_expert(slab.unpack_expert(fruit, 3))
    gate, up = x @ dense["w1"].T, x @ dense["w3"].T
    expected = 0.25 * (torch.nn.functional.silu(gate) * up) @ dense["w2"].T
    assert relative(found, expected) < BOUND


def test_weight_is_applied_once(fruit, batch):
    x, ids = batch[0], batch[1][:, :1]
    one, quarter, four = (
        moe_forward_reference(x, weights(fruit), ids, torch.full(ids.shape, value))
        for value in (1.0, 0.25, 4.0)
    )
    assert torch.equal(quarter, one * 0.25)
    assert torch.equal(four, one * 4)


def test_an_expert_named_twice_counts_twice(fruit, batch):
    x = batch[0][:3]
    once = moe_forward_reference(
        x, weights(fruit), torch.zeros(3, 1, dtype=torch.int64), torch.full((3, 1), 2.0)
    )
    twice = moe_forward_reference(
        x, weights(fruit), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    )
    assert relative(twice, once) < BOUND


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_are_computed_in_float32(fruit, batch, dtype):
    x, ids, topk_weights = batch
    x = (x * 0.1).to(dtype)
    found = moe_forward_reference(x, weights(fruit), ids, topk_weights)
    assert found.dtype == dtype
    expected = moe_forward_reference(x.float(), weights(fruit), ids, topk_weights)
    assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "weights_dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16]
)
def test_dtypes_of_routes(fruit, batch, ids_dtype, weights_dtype):
    x, ids, topk_weights = batch
    topk_weights = topk_weights.to(weights_dtype)
    found = moe_forward_reference(x, weights(fruit), ids.to(ids_dtype), topk_weights)
    expected = moe_forward_reference(x, weights(fruit), ids, topk_weights.float())
    assert torch.equal(found, expected)


def test_strided_input(fruit, batch):
    x, ids, topk_weights = batch
    expected = moe_forward_reference(x, weights(fruit), ids, topk_weights)
    wide = torch.full((24, 2048), torch.nan)
    wide[:, :1024] = x
    tall = torch.full((48, 1024), torch.nan)
    tall[::2] = x
    for view in (wide[:, :1024], tall[::2], x.T.contiguous().T):
        assert not view.is_contiguous()
        assert torch.equal(moe_forward_reference(view, weights(fruit), ids, topk_weights), expected)


def test_same_bits_twice_and_arguments_untouched(fruit, batch):
    before = [tensor.clone() for tensor in batch]
    first, second = (moe_forward_reference(batch[0], weights(fruit), *batch[1:]) for _ in range(2))
    assert torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(before, batch, strict=True))


IDS, WEIGHTS = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(3, 1023)}, ValueError, r"x has shape \[3, 1023\], expected \[T, 1024\]"),
        ({"x": torch.ones(1024)}, ValueError, r"x has shape \[1024\]"),
        ({"x": torch.ones(1, 3, 1024)}, ValueError, r"x has shape \[1, 3, 1024\]"),
        ({"x": torch.ones(4, 1024)}, ValueError, r"both be \[4, k\]"),
        ({"topk_weights": torch.ones(3, 3)}, ValueError, r"topk_weights \[3, 3\]"),
        ({"topk_weights": torch.ones(3)}, ValueError, r"topk_weights \[3\]"),
        ({"topk_ids": IDS[:, 0], "topk_weights": WEIGHTS[:, 0]}, ValueError, r"topk_ids \[3\]"),
        ({"topk_ids": IDS + 4}, ValueError, r"topk_ids lie in 4\.\.4, expected -1\.\.3"),
        ({"topk_ids": IDS - 2}, ValueError, r"topk_ids lie in -2\.\.-2, expected -1\.\.3"),
        ({"topk_ids": IDS.float()}, TypeError, "topk_ids is torch.float32"),
        ({"topk_ids": IDS.to(torch.int16)}, TypeError, "topk_ids is torch.int16"),
        ({"topk_ids": IDS.bool()}, TypeError, "topk_ids is torch.bool"),
        ({"x": torch.ones(3, 1024).double()}, TypeError, "x is torch.float64"),
        ({"x": torch.ones(3, 1024).int()}, TypeError, "x is torch.int32"),
        ({"topk_weights": WEIGHTS.int()}, TypeError, "topk_weights is torch.int32"),
    ],
)
def test_refused_arguments(fruit, change, error, message):
    arguments = {"x": torch.ones(3, 1024), "topk_ids": IDS, "topk_weights": WEIGHTS} | change
    with pytest.raises(error, match=message):
        moe_forward_reference(layer=weights(fruit), **arguments)


def test_exact_expert_is_refused_by_name(kimi):
    x, ids = torch.ones(2, 128), torch.tensor([[0], [1]])
    with pytest.raises(FormatError, match="layer 7 expert 1 is an X4T expert"):
        moe_forward_reference(x, weights(kimi), ids, torch.ones(2, 1))
    found = moe_forward_reference(x, weights(kimi), torch.tensor([[0], [2]]), torch.ones(2, 1))
    assert torch.isfinite(found).all()


def test_inputs_that_want_a_gradient(package):
    layer = load_package(package).layers[0]
    x = torch.ones(2, 128, requires_grad=True)
    ids, weights = torch.tensor([[0, 1], [2, 3]]), torch.full((2, 2), 0.5, requires_grad=True)
    out = moe_forward_reference(x, layer, ids, weights)
    assert not out.requires_grad
    assert torch.equal(out, moe_forward_reference(x.detach(), layer, ids, weights.detach()))
