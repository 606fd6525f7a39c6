"""The operator: what torch says of it, and the runtime cases of routes, views and dtypes."""

import dataclasses

import pytest
import torch

from qsrt_runtime import load_package
from qsrt_runtime.format.container import LayerWriter, read_layer
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.format.slab import Slab
from qsrt_runtime.moe import moe_forward
from qsrt_runtime.moe_reference import moe_forward_reference
from qsrt_runtime.weights import LayerWeights

HIDDEN, TOKENS = 128, 4


@pytest.fixture(scope="module", params=[None, "e4m3"], ids=["packed", "expanded"])
def layer(clean_package, request):
    return load_package(clean_package, expand=request.param).layers[1]


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    weights, ids = torch.rand(TOKENS, 4, generator=generator).topk(2)
    return x, ids, weights


def arguments(layer, x, ids, weights, expert_map=None, weight_on_input=False, activation="auto"):
    """The operator's own arguments."""
    held = (layer.atoms, layer.format_codes, layer.shared_scales, layer.activations)
    held += (layer.labels,)
    place = (layer.layer, layer.slots.start, layer.geometry.intermediate)
    traits = (layer.traits.inputs, layer.traits.uniform)
    return (x, ids, weights, expert_map, *held, *place, *traits, weight_on_input, activation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mapped", [False, True])
def test_operator_keeps_torchs_rules(layer, batch, dtype, mapped):
    x, ids, weights = batch
    expert_map = torch.tensor([3, -1, 0, 1], dtype=torch.int32) if mapped else None
    wanted = arguments(layer, x.to(dtype), ids, weights, expert_map, weight_on_input=mapped)
    torch.library.opcheck(torch.ops.qsrt.moe_forward.default, wanted)


@pytest.fixture
def stored(layer):
    if layer.labels is not None:
        pytest.skip("an expanded layer has no a8")
    return layer


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_operator_with_quantized_rows(stored, batch, dtype):
    x, ids, weights = batch
    wanted = arguments(stored, x.to(dtype), ids, weights, activation="a8")
    torch.library.opcheck(torch.ops.qsrt.moe_forward.default, wanted)


def test_activations(stored, batch):
    x, ids, weights = batch
    x = x.half()
    found = {a: moe_forward(x, stored, ids, weights, activation=a) for a in ("a16", "a8", "auto")}
    for name in ("a16", "a8"):
        expected = moe_forward_reference(x, stored, ids, weights, activation=name)
        assert torch.equal(found[name], expected)
    assert torch.equal(found["auto"], found["a16"])  # on a CPU
    assert not torch.equal(found["a8"], found["a16"])
    assert torch.equal(moe_forward(x, stored, ids, weights), found["auto"])


@pytest.mark.parametrize(
    ("dtype", "tokens", "activation", "message"),
    [
        (torch.float32, 4, "a8", "'a8' takes float16 or bfloat16 rows, x is torch.float32"),
        (torch.float16, 17, "a8", "'a8' takes up to 16 tokens, x has 17"),
        (torch.float16, 4, "fp8", "activation is 'fp8', expected 'a16', 'a8' or 'auto'"),
        (torch.float16, 4, None, "activation is None, expected 'a16', 'a8' or 'auto'"),
        (torch.float16, 4, b"a8", "activation is b'a8', expected 'a16', 'a8' or 'auto'"),
    ],
)
def test_refused_activations(layer, dtype, tokens, activation, message):
    x, ids = torch.ones(tokens, HIDDEN, dtype=dtype), torch.zeros(tokens, 2, dtype=torch.int64)

    def forward(x):
        return moe_forward(x, layer, ids, torch.ones(tokens, 2), activation=activation)

    with pytest.raises(ValueError, match=message):
        forward(x)
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager", dynamic=False)
    with pytest.raises(Exception, match=message):
        compiled(x)


@pytest.mark.parametrize("shape", [(), (HIDDEN,)])
def test_shapes_come_before_activations(layer, shape):
    x, ids = torch.ones(shape, dtype=torch.float16), torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^x has shape \["):
        moe_forward(x, layer, ids, torch.ones(4, 2), activation="a8")


def test_quantized_rows_compile(stored, batch):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def forward(x, ids, weights):
        return moe_forward(x, stored, ids, weights, activation="a8")

    x, ids, weights = batch
    expected = moe_forward(x.half(), stored, ids, weights, activation="a8")
    assert torch.equal(forward(x.half(), ids, weights), expected)


def test_is_the_reference(layer, batch):
    x, ids, weights = batch
    options = {"expert_map": torch.tensor([1, 2, -1, 0]), "weight_on_input": True}
    for given in ({}, options):
        expected = moe_forward_reference(x, layer, ids, weights, **given)
        assert torch.equal(moe_forward(x, layer, ids, weights, **given), expected)
        assert expected.abs().max() > 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(layer, batch, dynamic):
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
    def forward(x, ids, weights):
        return 2 * moe_forward(x + 1, layer, ids, weights)

    x, ids, weights = batch
    for rows in (TOKENS, 2):
        expected = 2 * moe_forward(x[:rows] + 1, layer, ids[:rows], weights[:rows])
        assert torch.equal(forward(x[:rows], ids[:rows], weights[:rows]), expected)


def test_compiles_once_for_any_number_of_tokens(layer, batch):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def forward(x, ids, weights):
        return moe_forward(x, layer, ids, weights)

    for value in batch:
        torch._dynamo.mark_dynamic(value, 0)  # an error where a graph is for one number
    assert torch.equal(forward(*batch), moe_forward(batch[0], layer, *batch[1:]))


def test_compiling_refuses_what_running_refuses(layer, batch):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def forward(x, ids, weights):
        return moe_forward(x, layer, ids, weights)

    x, ids, weights = batch
    with pytest.raises(Exception, match=r"x has shape \[4, 127\]"):
        forward(x[:, :127], ids, weights)


def test_there_is_no_backward(layer, batch):
    x, ids, weights = batch
    out = moe_forward(x.requires_grad_(), layer, ids, weights)
    with pytest.raises(RuntimeError, match=r"no backward; run them under torch\.no_grad"):
        out.sum().backward()


def test_left_out_routes(layer, batch):  # RT-1a
    x, ids, weights = batch
    ids[0, 1], ids[2, 0] = -1, -1
    weights[0, 1] = weights[2, 0] = torch.nan
    found = moe_forward(x, layer, ids, weights)
    for row, kept in ((0, 0), (2, 1)):
        route = (ids[row : row + 1, kept : kept + 1], weights[row : row + 1, kept : kept + 1])
        alone = moe_forward(x[row : row + 1], layer, *route)
        torch.testing.assert_close(found[row : row + 1], alone, rtol=1e-5, atol=0)
    zeroed = torch.where(ids < 0, 0.0, weights)  # the same experts run on the same rows
    assert torch.equal(found, moe_forward(x, layer, ids, zeroed))


def test_rows_without_routes_are_zero(layer, batch):  # RT-1b
    x, ids, weights = batch
    ids[1], x[1] = -1, torch.nan
    found = moe_forward(x, layer, ids, weights)
    assert torch.equal(found[1], torch.zeros(HIDDEN))
    assert found[[0, 2, 3]].isfinite().all()
    assert not moe_forward(x, layer, torch.full_like(ids, -1), weights).any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_expert_map(layer, batch, dtype):  # RT-1c
    x, ids, weights = batch
    # Eight experts over all, of which this layer has 1, 4, 6 and 7 in another order.
    expert_map = torch.tensor([-1, 2, -1, -1, 0, -1, 3, 1], dtype=dtype)
    everywhere = torch.tensor([[1, 4], [0, 6], [2, 3], [7, -1]], dtype=dtype)
    here = torch.tensor([[2, 0], [-1, 3], [-1, -1], [1, -1]])
    found = moe_forward(x, layer, everywhere, weights, expert_map=expert_map)
    assert torch.equal(found, moe_forward(x, layer, here, weights))
    for ids, name in ((everywhere + 1, "1..8, expected -1..7"), (everywhere - 1, "-2..6")):
        with pytest.raises(ValueError, match=f"topk_ids lie in {name}".replace(".", r"\.")):
            moe_forward(x, layer, torch.where(ids == 0, 1, ids), weights, expert_map=expert_map)
    with pytest.raises(ValueError, match=r"expert_map lie in -1\.\.4"):
        moe_forward(x, layer, everywhere, weights, expert_map=expert_map + (expert_map > 2))


def test_empty_expert_map(layer, batch):
    x, ids, weights = batch
    nothing = torch.empty(0, dtype=torch.int64)
    assert not moe_forward(x, layer, torch.full_like(ids, -1), weights, expert_map=nothing).any()
    with pytest.raises(ValueError, match=r"expected -1\.\.-1"):
        moe_forward(x, layer, ids, weights, expert_map=nothing)


def test_autocast_changes_nothing(layer, batch):
    x, ids, weights = batch
    expected = moe_forward(x, layer, ids, weights)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(moe_forward(x, layer, ids, weights), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_no_tokens(layer, dtype):  # RT-3a
    nothing = torch.zeros(0, 2)
    found = moe_forward(torch.zeros(0, HIDDEN, dtype=dtype), layer, nothing.long(), nothing)
    assert (found.shape, found.dtype, found.device) == ((0, HIDDEN), dtype, layer.atoms.device)


def test_one_of_five_experts(tmp_path, random_expert, batch):  # RT-3b
    geometry = Geometry(HIDDEN, 512, 5)
    with LayerWriter(tmp_path / "layer", geometry, 2, "5" * 64, "e" * 64) as writer:
        for expert in range(5):
            writer.write_expert(expert, random_expert(geometry, expert % 3, 0, seed=expert))
    stored = read_layer(tmp_path / "layer")
    held = {field.name: getattr(stored, field.name) for field in dataclasses.fields(Slab)}
    held |= {"atoms": stored.atoms.clone(), "activations": torch.zeros(5, dtype=torch.uint8)}
    layer = LayerWeights(**held)
    x, _, weights = batch
    ids = torch.full((TOKENS, 1), 3)
    found = moe_forward(x, layer, ids, weights[:, :1])
    spoiled = layer.atoms.clone()
    size = geometry.bundle_bytes
    spoiled[:, : 3 * size] = spoiled[:, 4 * size :] = 0xFF  # every other expert's words and scales
    other = dataclasses.replace(layer, atoms=spoiled)
    assert torch.equal(moe_forward(x, other, ids, weights[:, :1]), found)
    assert found.isfinite().all()
    assert found.any()


def test_views_of_the_input(layer, batch):  # RT-7a
    x, ids, weights = batch
    expected = moe_forward(x, layer, ids, weights)
    wide = torch.full((TOKENS, 2 * HIDDEN), torch.nan)
    wide[:, :HIDDEN] = x
    tall = torch.full((2 * TOKENS, HIDDEN), torch.nan)
    tall[::2] = x
    shifted = torch.empty(TOKENS * HIDDEN + 1)[1:].view(TOKENS, HIDDEN).copy_(x)
    for view in (wide[:, :HIDDEN], tall[::2], x.T.contiguous().T, shifted):
        assert torch.equal(moe_forward(view, layer, ids, weights), expected)
    ids_view, weights_view = ids.T.contiguous().T, torch.stack([weights, weights], -1)[..., 0]
    assert torch.equal(moe_forward(x, layer, ids_view, weights_view), expected)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_of_routes(layer, batch, ids_dtype, dtype):  # RT-7b
    x, ids, weights = batch
    weights = (weights / 3).to(dtype)
    found = moe_forward(x, layer, ids.to(ids_dtype), weights)
    assert torch.equal(found, moe_forward(x, layer, ids, weights.float()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_of_the_input(layer, batch, dtype):  # RT-7b
    x, ids, weights = batch
    found = moe_forward(x.to(dtype), layer, ids, weights)
    assert torch.equal(found, moe_forward(x.to(dtype).float(), layer, ids, weights).to(dtype))


IDS, WEIGHTS = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"topk_weights": torch.ones(3, 3)}, ValueError, r"topk_weights \[3, 3\]"),
        ({"x": torch.ones(3, 127)}, ValueError, r"x has shape \[3, 127\], expected \[T, 128\]"),
        ({"x": torch.ones(3, 128, device="meta")}, ValueError, "x is on meta, the layer on cpu"),
        ({"topk_ids": IDS.to("meta")}, ValueError, "topk_ids is on meta"),
        ({"topk_weights": WEIGHTS.to("meta")}, ValueError, "topk_weights is on meta"),
        ({"expert_map": IDS[0].to("meta")}, ValueError, "expert_map is on meta"),
        ({"expert_map": IDS}, ValueError, r"expert_map has shape \[3, 2\]"),
        ({"expert_map": WEIGHTS[0]}, TypeError, "expert_map is torch.float32"),
        ({"x": torch.ones(3, 128).double()}, TypeError, "x is torch.float64"),
        ({"topk_ids": IDS.to(torch.uint8)}, TypeError, "topk_ids is torch.uint8"),
        ({"topk_weights": WEIGHTS.long()}, TypeError, "topk_weights is torch.int64"),
        ({"topk_ids": IDS + 4}, ValueError, r"topk_ids lie in 4\.\.4, expected -1\.\.3"),
    ],
)
def test_refused_arguments(layer, change, error, message):  # RT-7b, RT-7c
    given = {"x": torch.ones(3, 128), "topk_ids": IDS, "topk_weights": WEIGHTS} | change
    with pytest.raises(error, match=message):
        moe_forward(layer=layer, **given)


@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_weights", "expert_map"])
def test_what_is_no_tensor(layer, name):
    given = {"x": torch.ones(3, 128), "topk_ids": IDS, "topk_weights": WEIGHTS} | {name: [1, 2]}
    with pytest.raises(TypeError, match=f"{name} is a list, expected a torch tensor"):
        moe_forward(layer=layer, **given)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda w: {"activations": w.activations.to("meta")},
            ValueError,
            "activations are on meta",
        ),
        (lambda w: {"format_codes": w.format_codes[:3]}, ValueError, "have shape"),
        (lambda w: {"activations": w.activations[:3]}, ValueError, "activations have shape"),
        (lambda w: {"activations": w.activations.long()}, TypeError, "expected torch.uint8"),
        (lambda w: {"shared_scales": w.shared_scales[:, :2]}, ValueError, "shared_scales have"),
        (lambda w: {"shared_scales": w.shared_scales.bfloat16()}, TypeError, "torch.bfloat16"),
        (lambda w: {"atoms": w.atoms[:, :100].contiguous()}, ValueError, "atoms have shape"),
        (lambda w: {"atoms": w.atoms[0]}, ValueError, "atoms have shape"),
        (lambda w: {"atoms": w.atoms[:4], "slots": range(4)}, ValueError, "not whole pairs"),
        (lambda w: {"atoms": w.atoms[4:], "slots": range(4, 8)}, ValueError, "not whole pairs"),
        (lambda w: {"atoms": w.atoms[:0], "slots": range(0)}, ValueError, "not whole pairs"),
    ],
)
@pytest.mark.parametrize("forward", [moe_forward, moe_forward_reference])
def test_layer_that_does_not_fit_itself(layer, change, error, message, forward):
    with pytest.raises(error, match=message):
        forward(torch.ones(3, 128), dataclasses.replace(layer, **change(layer)), IDS, WEIGHTS)


@pytest.mark.parametrize("offset", [1, 8])
def test_slab_at_an_odd_offset(layer, offset):  # RT-7c
    moved = torch.empty(layer.atoms.numel() + offset, dtype=torch.uint8)[offset:]
    moved = moved.view(layer.atoms.shape).copy_(layer.atoms)
    for atoms in (moved, layer.atoms.T.contiguous().T):
        other = dataclasses.replace(layer, atoms=atoms)
        with pytest.raises(ValueError, match="slab must be contiguous and start at 16 bytes"):
            moe_forward(torch.ones(3, 128), other, IDS, WEIGHTS)


def test_weight_is_applied_once(layer, batch):  # RT-8a
    x, ids, _ = batch
    one, quarter, four = (
        moe_forward(x, layer, ids[:, :1], torch.full((TOKENS, 1), value))
        for value in (1.0, 0.25, 4.0)
    )
    assert torch.equal(quarter, one * 0.25)
    assert torch.equal(four, one * 4)
    for value in (0.25, 4.0):
        weights = torch.full((TOKENS, 1), value)
        found = moe_forward(x, layer, ids[:, :1], weights, weight_on_input=True)
        assert torch.equal(found, moe_forward(x * value, layer, ids[:, :1], torch.ones(TOKENS, 1)))
        assert not torch.equal(found, one * value)


def test_weight_on_input_with_two_experts(layer, batch):  # RT-8b
    x, ids, weights = batch
    found = moe_forward(x, layer, ids, weights, weight_on_input=True)
    one = torch.ones(TOKENS, 1)
    expected = sum(
        moe_forward(x * weights[:, c : c + 1], layer, ids[:, c : c + 1], one) for c in (0, 1)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_sum_in_float32(layer):  # RT-9b
    x = torch.ones(1, HIDDEN, dtype=torch.bfloat16)
    unit = moe_forward(x.float(), layer, torch.tensor([[2]]), torch.ones(1, 1))
    weights = torch.tensor([[256.0, 1, 1, 1, 1, 1, 1, -256]])
    found = moe_forward(x, layer, torch.full((1, 8), 2), weights)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), 6 * unit, rtol=2**-8, atol=1e-5)


def test_a_package_is_no_layer(clean_package, batch):
    x, ids, weights = batch
    with pytest.raises(TypeError, match=r"layer is a LoadedPackage, expected one of a package's"):
        moe_forward(x, load_package(clean_package), ids, weights)
