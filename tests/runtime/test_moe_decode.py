"""moe_decode against the reference, under Triton's interpreter and on a GPU."""

from dataclasses import replace

import pytest
import torch
from layers import (
    BFLOAT,
    BOUND,
    DEVICES,
    GPU,
    HALF,
    SMALL,
    check_guards,
    error,
    inputs,
    place,
    poisoned,
    random_layer,
    uneven_sum,
)

from qsrt_runtime import moe_decode as module
from qsrt_runtime import moe_kernels
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.moe import moe_forward
from qsrt_runtime.moe_decode import moe_decode
from qsrt_runtime.moe_kernels import decodes, moe_forward_kernels
from qsrt_runtime.moe_prefill import moe_prefill
from qsrt_runtime.moe_reference import moe_forward_reference
from qsrt_runtime.ops import fused
from qsrt_runtime.ops.expert_gemm import expert_gemm
from qsrt_runtime.ops.fused import alone
from qsrt_runtime.ops.fused.product import product
from qsrt_runtime.ops.fused.product.quantized import quantized_product
from qsrt_runtime.ops.fused.product.quantized.ptx import LABELS
from qsrt_runtime.weights import LayerWeights, Traits, traits_of
from qsrt_runtime.workspace import make_prefill_workspace, make_workspace

ACTIVATIONS = ["a16", "a8"]


def run(x, layer, ids, weights, workspace=None, **options):
    workspace = workspace or poisoned(layer, ids.shape[1], x.dtype, max(16, len(x)))
    out = torch.full_like(x, float("nan"))
    assert moe_decode(x, layer, ids, weights, workspace, out, **options) is out
    check_guards(workspace)
    return out


def check(x, layer, ids, weights, **options):
    found = run(x, layer, ids, weights, **options)
    expected = moe_forward_reference(x.float(), layer, ids, weights, **options)
    assert expected.any()
    assert error(found, expected) < BOUND[x.dtype]
    cosine = torch.nn.functional.cosine_similarity(found.float().flatten(), expected.flatten(), 0)
    assert cosine > 0.99999
    return found


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("sides", ["one", "two", "expert"])
@pytest.mark.parametrize(
    ("geometry", "codes"),
    [
        (SMALL, None),
        (Geometry(256, 512, 3), [0x00, 0x12, 0x21]),  # every rate mode
        (Geometry(640, 768, 2), [0x11, 0x02]),  # a tile of columns that is not full; moved pairs
    ],
    ids=["small", "rates", "wide"],
)
def test_is_the_reference(name, dtype, sides, geometry, codes):
    layer = random_layer(geometry, place(name), codes=codes, sides=sides)
    assert layer.traits == Traits({"one": 1, "two": 2, "expert": 0}[sides], codes is None)
    x, ids, weights = inputs(layer, 2, 2, dtype)
    check(x, layer, ids, weights)


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("sides", ["one", "two", "expert"])
def test_traits_only_save_work(name, dtype, sides):
    layer = random_layer(SMALL, place(name), sides=sides)
    x, ids, weights = inputs(layer, 3, 2, dtype)
    found = check(x, layer, ids, weights)
    general = replace(layer, traits=Traits())
    assert error(run(x, general, ids, weights), found.float()) < BOUND[dtype]


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_weights_on_the_input(name, dtype, tokens):  # RT-8a, RT-8b
    layer = random_layer(SMALL, place(name))
    x, ids, weights = inputs(layer, tokens, 2, dtype)
    on = check(x, layer, ids, 4 * weights, weight_on_input=True)
    off = check(x, layer, ids, 4 * weights)
    assert error(on, off.float()) > 0.1  # the activation stands between


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 37, pytest.param(200, marks=GPU)])
def test_any_number_of_tokens(name, dtype, tokens):
    layer = random_layer(SMALL, place(name))
    check(*inputs_of(layer, tokens, dtype))


def inputs_of(layer, tokens, dtype, topk=3):
    x, ids, weights = inputs(layer, tokens, topk, dtype)
    return x, layer, ids, weights


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_all_tokens_on_one_expert(name, dtype):  # RT-3b
    layer = random_layer(SMALL, place(name))
    x, ids, weights = inputs(layer, 16, 2, dtype)
    ids[:] = torch.tensor([3, -1])
    check(x, layer, ids, weights)
    ids[:, 1] = 3  # the same expert twice for a token, 32 routes of it
    check(x, layer, ids, weights)


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_no_expert(name, dtype):  # RT-1a, RT-1b
    layer = random_layer(SMALL, place(name))
    x, ids, weights = inputs(layer, 4, 3, dtype)
    ids[1, 2], ids[3] = -1, -1
    weights[1, 2], weights[3] = float("nan"), float("nan")
    found = run(x, layer, ids, weights)
    assert not found[3].any()
    kept = run(x[:3], layer, ids[:3], weights[:3])
    assert torch.equal(found[:3], kept)
    narrow = run(x[1:2], layer, ids[1:2, :2].contiguous(), weights[1:2, :2].contiguous())
    assert error(found[1:2], narrow.float()) < BOUND[dtype]
    assert not run(x, layer, torch.full_like(ids, -1), weights).any()


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_ids_that_name_no_expert_are_counted(name, dtype):
    layer = random_layer(SMALL, place(name))
    x, ids, weights = inputs(layer, 2, 3, dtype)
    ids[0, 0], ids[1, 1] = -1, -1
    expected = run(x, layer, ids, weights)
    wrong = ids.long().clone()
    wrong[0, 0], wrong[1, 1] = 5, -(2**40)
    workspace = poisoned(layer, 3, dtype)
    assert torch.equal(run(x, layer, wrong, weights, workspace), expected)
    assert workspace.invalid_routes() == 2
    run(x, layer, ids, weights, workspace)
    assert workspace.invalid_routes() == 0


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("tokens", [1, 2])
def test_more_routes_than_experts(name, dtype, tokens):
    """As on a rank with few experts: a workspace of just these tokens is large enough."""
    layer = random_layer(Geometry(128, 256, 2), place(name))
    x, _, weights = inputs(layer, tokens, 2, dtype)
    ids = torch.tensor([[0, 1, -1, 0, 1, 1, -1, 0, 7]], device=x.device).repeat(tokens, 1)
    weights = torch.linspace(0.1, 0.9, 9, device=x.device).repeat(tokens, 1)
    workspace = poisoned(layer, 9, dtype, tokens)
    found = run(x, layer, ids, weights, workspace)
    assert workspace.invalid_routes() == tokens
    expected = moe_forward_reference(x.float(), layer, ids.where(ids < 7, -1), weights)
    # The roundings of an expert that comes three times are the same three times.
    assert error(found, expected) < 1.2 * BOUND[dtype]


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("sides", ["one", "expert"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_tiles_in_many_parts(name, dtype, sides, tokens):
    layer = random_layer(Geometry(1280, 256, 3), place(name), sides=sides)
    x, ids, weights = inputs(layer, tokens, 2, dtype)
    if tokens == 3:
        ids[:] = torch.tensor([[0, 1], [1, 2], [2, 0]])
    workspace = poisoned(layer, 2, dtype, programs=100)  # up to 20 parts of a tile
    found = run(x, layer, ids, weights, workspace)
    assert error(found, moe_forward_reference(x.float(), layer, ids, weights)) < BOUND[dtype]


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("traits", [Traits(), Traits(2), Traits(1)])
def test_one_row_of_scales(name, dtype, traits):
    layer = random_layer(SMALL, place(name))
    x, ids, weights = inputs(layer, 2, 3, dtype)
    one = replace(layer, shared_scales=layer.shared_scales[:, :1].contiguous(), traits=traits)
    assert error(run(x, one, ids, weights), run(x, layer, ids, weights).float()) < BOUND[dtype]


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_expert_map(name, dtype):  # RT-1c
    layer = random_layer(SMALL, place(name))
    x, ids, weights = inputs(layer, 3, 2, dtype)
    here = torch.tensor([-1, 4, 2, -1, 0, 1, 3], device=ids.device)
    places = torch.tensor([[1, 3], [6, 2], [5, 4]], device=ids.device)
    found = run(x, layer, places, weights, expert_map=here)
    assert torch.equal(found, run(x, layer, here[places], weights))
    wrong = here.int()
    wrong[1] = 5
    workspace = poisoned(layer, 2, dtype)
    lost = run(x, layer, places, weights, workspace, expert_map=wrong)
    assert workspace.invalid_routes() == 1
    here[1] = -1
    assert torch.equal(lost, run(x, layer, here[places], weights))


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_ranks_add_up(name, dtype):  # RT-11a
    geometry, device = Geometry(128, 768, 3), place(name)
    whole = random_layer(geometry, device, codes=[0x11, 0, 0x02])
    x, ids, weights = inputs(whole, 2, 2, dtype)
    shares = [range(0, 16), range(16, 24)]
    layers = [random_layer(geometry, device, codes=[0x11, 0, 0x02], slots=s) for s in shares]
    total = sum(run(x, layer, ids, weights).float() for layer in layers)
    expected = moe_forward_reference(x.float(), whole, ids, weights)
    assert error(total, expected) < BOUND[dtype]


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_a_range_of_experts_is_a_layer_of_its_own(name, dtype):
    geometry, codes = Geometry(128, 768, 5), [0x11, 0, 0x02, 0x10, 0]
    whole = random_layer(geometry, place(name), codes=codes, sides="expert")
    held, size = slice(2, 4), geometry.bundle_bytes
    part = replace(
        whole,
        layer=whole.layer + 5 * 2,
        geometry=replace(geometry, experts=2),
        format_codes=whole.format_codes[held],
        shared_scales=whole.shared_scales[:, held].contiguous(),
        atoms=whole.atoms[:, 2 * size : 4 * size].contiguous(),
        activations=whole.activations[held],
    )
    x, ids, weights = inputs(part, 3, 2, dtype)
    found = run(x, part, ids, weights)
    assert error(found, moe_forward_reference(x.float(), whole, ids + 2, weights)) < BOUND[dtype]


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_a_callers_workspace(name, dtype):
    layer = random_layer(SMALL, place(name))
    x, ids, weights = inputs(layer, 7, 2, dtype)
    for tokens in (3, 7):  # of which one has room
        workspace = poisoned(layer, 2, dtype, tokens)
        before = workspace.rotated.clone()
        found = moe_forward_kernels(x, layer, ids, weights, workspace=workspace)
        assert torch.equal(found, run(x, layer, ids, weights))
        assert torch.equal(before.nan_to_num(), workspace.rotated.nan_to_num()) == (tokens == 3)


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_more_tokens_than_a_call_takes(name, dtype, monkeypatch):
    monkeypatch.setattr(moe_kernels, "MAX_PREFILL_TOKENS", 16)
    layer = random_layer(SMALL, place(name))
    x, ids, weights = inputs(layer, 37, 3, dtype)
    found = moe_forward_kernels(x, layer, ids, weights)
    assert error(found, moe_forward_reference(x.float(), layer, ids, weights)) < BOUND[dtype]


def test_mixed_rates_have_no_large_blocks():
    uniform = random_layer(SMALL, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    mixed = replace(uniform, traits=replace(uniform.traits, uniform=False))
    assert decodes(uniform, 20, 3) and not decodes(mixed, 20, 3)


@pytest.mark.parametrize(
    ("tokens", "ways"), [(16, {"moe_decode"}), (17, {"moe_decode"}), (60, {"moe_prefill"})]
)
def test_which_way_tokens_go(tokens, ways, monkeypatch):
    layer = random_layer(SMALL, place(DEVICES[0].values[0]))
    taken = set()
    for way in ("moe_decode", "moe_prefill"):
        monkeypatch.setattr(moe_kernels, way, lambda *_, way=way, **__: taken.add(way))
    moe_forward_kernels(*inputs_of(layer, tokens, HALF))
    assert taken == ways
    assert decodes(layer, tokens, 3) == (taken == {"moe_decode"})


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_types_of_ids_and_weights(name, dtype):  # RT-7b
    layer = random_layer(SMALL, place(name))
    x, ids, weights = inputs(layer, 2, 2, dtype)
    expected = run(x, layer, ids, weights)
    assert torch.equal(run(x, layer, ids.long(), weights.double()), expected)
    for kind in (HALF, BFLOAT):
        rounded = weights.to(kind)
        assert torch.equal(run(x, layer, ids, rounded), run(x, layer, ids, rounded.float()))


def test_no_tokens():  # RT-3a
    layer = random_layer(SMALL, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    x, ids, weights = inputs(layer, 1, 2, HALF)
    assert run(x[:0], layer, ids[:0], weights[:0]).shape == (0, 128)
    empty = run(x, layer, ids[:, :0], weights[:, :0], poisoned(layer, 1, HALF))
    assert not empty.any()


@pytest.mark.parametrize(
    ("change", "error_type", "message"),
    [
        ({"x": lambda x: x.float()}, TypeError, "x is torch.float32, expected float16 or bfloat16"),
        ({"x": lambda x: x.repeat(1, 2)[:, :128]}, ValueError, "x must be contiguous"),
        ({"topk_ids": lambda t: t.T.contiguous().T}, ValueError, "topk_ids must be contiguous"),
        ({"topk_weights": lambda t: t.repeat(2, 1)[::2]}, ValueError, "topk_weights must be"),
        ({"out": lambda t: t.float()}, ValueError, r"out is \[2, 128\] torch.float32"),
        ({"out": lambda t: t[:1]}, ValueError, r"out is \[1, 128\]"),
        ({"tokens": 1}, ValueError, "2 tokens of 2 routes; the workspace is for 1 of 2"),
        ({"topk": 1}, ValueError, "2 tokens of 2 routes; the workspace is for 16 of 1"),
        ({"dtype": BFLOAT}, ValueError, "the workspace is for .* and torch.bfloat16, the call"),
        ({"out": lambda t: t.T.contiguous().T}, ValueError, "out must be contiguous"),
        ({"topk_weights": lambda t: t.to(torch.float8_e5m2)}, TypeError, "expected float16 to"),
        ({"layer": {"traits": Traits(3)}}, ValueError, "traits have 3 inputs, expected 0 to 2"),
        ({"layer": {"layer": -1}}, ValueError, "layer -1 holds"),
        ({"layer": {"slots": range(8, 16)}}, ValueError, r"holds range\(8, 16\) of 8 slots"),
        ({"layer": {"format_codes": torch.zeros(10)}}, TypeError, "format_codes are"),
    ],
)
def test_arguments_that_do_not_fit(change, error_type, message):  # RT-7a, RT-7c
    layer = random_layer(SMALL, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    x, ids, weights = inputs(layer, 2, 2, HALF)
    sizes = {"topk": 2, "dtype": HALF, "tokens": 16}
    sizes |= {k: v for k, v in change.items() if k in sizes}
    given = {"x": x, "topk_ids": ids, "topk_weights": weights, "out": torch.empty_like(x)}
    given |= {k: v(given[k]) for k, v in change.items() if k in given}
    layer = replace(layer, **change.get("layer", {}))
    with pytest.raises(error_type, match=message):
        moe_decode(layer=layer, workspace=poisoned(layer, **sizes), **given)


def test_workspaces_of_another_kind():
    layer = random_layer(SMALL, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    x, ids, weights = inputs(layer, 2, 2, HALF)
    few = make_workspace(SMALL, 2, 2, HALF, x.device)
    many = make_prefill_workspace(SMALL, 2, 2, 1, HALF, x.device)
    for forward, wrong, message in (
        (moe_decode, None, "workspace is a NoneType, expected a Workspace"),
        (moe_decode, many, "workspace is a PrefillWorkspace, expected a Workspace"),
        (moe_prefill, few, "workspace is a Workspace, expected a PrefillWorkspace"),
    ):
        with pytest.raises(TypeError, match=message):
            forward(x, layer, ids, weights, wrong, torch.empty_like(x))
    with pytest.raises(TypeError, match="out is a NoneType, expected a torch tensor"):
        moe_decode(x, layer, ids, weights, few, None)


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_views_off_their_alignment(name, dtype):  # RT-7a
    layer = random_layer(SMALL, place(name))
    x, ids, weights = inputs(layer, 2, 2, dtype)

    def shifted(value):
        return torch.cat([value.flatten()[:1], value.flatten()])[1:].view(value.shape)

    expected = run(x, layer, ids, weights)
    assert torch.equal(run(*map(shifted, [x]), layer, *map(shifted, [ids, weights])), expected)


def test_a_slab_without_some_bundles():
    layer = random_layer(SMALL, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    x, ids, weights = inputs(layer, 2, 2, HALF)
    short = replace(layer, atoms=layer.atoms[:, :12288].contiguous())
    with pytest.raises(ValueError, match="have 12288 bytes, the bundles of all experts take 24000"):
        run(x, short, ids, weights)


@pytest.mark.parametrize("name", ["format_codes", "activations", "shared_scales"])
def test_sections_that_are_strided(name):
    layer = random_layer(SMALL, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    x, ids, weights = inputs(layer, 2, 2, HALF)
    section = getattr(layer, name)
    strided = section.repeat_interleave(2, -1)[..., ::2]
    with pytest.raises(ValueError, match=f"the layer's {name} must be contiguous"):
        run(x, replace(layer, **{name: strided}), ids, weights)


@pytest.mark.parametrize("code", [0xFF, 0x30, 0x03])
def test_format_bytes_that_kernels_do_not_know(code):
    codes = torch.tensor([0, code], dtype=torch.uint8)
    with pytest.raises(FormatError, match="X4T or of a later profile"):
        traits_of(torch.zeros(3, 2, 128, dtype=HALF), codes)


@pytest.mark.parametrize(("tokens", "topk"), [(0, 1), (1025, 1), (1, 0)])
def test_workspaces_that_make_no_sense(tokens, topk):
    with pytest.raises(ValueError, match=r"expected|is for 1 to 1024 tokens"):
        make_workspace(SMALL, topk, tokens, HALF, torch.device("cpu"))


def test_workspaces_are_the_same_whatever_the_default_type_is():
    """vLLM loads a model with the model's type as the default."""
    torch.set_default_dtype(BFLOAT)
    try:
        workspace = make_workspace(SMALL, 2, 4, HALF, torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert workspace.partial.dtype == torch.float32


def check_a8(x, layer, ids, weights, **options):
    """Against the reference with quantized rows, and without."""
    found = run(x, layer, ids, weights, activation="a8", **options)
    options.pop("workspace", None)
    arguments = (x.float(), layer, ids, weights)
    assert error(found, moe_forward_reference(*arguments, activation="a8", **options)) < 3e-3
    assert 1e-2 < error(found, moe_forward_reference(*arguments, **options)) < 5.5e-2
    return found


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("sides", ["one", "two", "expert"])
@pytest.mark.parametrize(
    ("geometry", "codes"),
    [(SMALL, None), (Geometry(640, 768, 2), [0x11, 0x02])],
    ids=["small", "wide"],
)
def test_quantized_rows_are_the_reference(name, dtype, sides, geometry, codes):
    layer = random_layer(geometry, place(name), codes=codes, sides=sides)
    check_a8(*inputs_of(layer, 3, dtype, 2))


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_quantized_rows_of_any_number_of_tokens(name, dtype, tokens):
    layer = random_layer(SMALL, place(name))
    x, _, ids, weights = inputs_of(layer, tokens, dtype)
    found = check_a8(x, layer, ids, weights)
    assert torch.equal(found, run(x, layer, ids, weights, activation="a8"))  # RT-9a
    check_a8(x, layer, ids, 4 * weights, weight_on_input=True)  # RT-8b


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_quantized_rows_without_an_expert(name, dtype):  # RT-1a, RT-1b, RT-1c, RT-3a, RT-3b
    layer = random_layer(SMALL, place(name))
    x, ids, weights = inputs(layer, 4, 3, dtype)
    ids[1, 2], ids[3] = -1, -1
    weights[1, 2], weights[3] = float("nan"), float("nan")
    found = run(x, layer, ids, weights, activation="a8")
    assert not found[3].any()
    kept = run(x[:3], layer, ids[:3], weights[:3], activation="a8")
    assert torch.equal(found[:3], kept)
    assert not run(x, layer, torch.full_like(ids, -1), weights, activation="a8").any()
    everywhere = torch.tensor([-1, 4, 2, -1, 0, 1, 3], device=ids.device)
    places = torch.tensor([[1, 3, 0], [6, 2, 4], [5, 4, 2], [0, 0, 3]], device=ids.device)
    options = {"activation": "a8", "expert_map": everywhere}
    weights = weights.nan_to_num(0.5)
    mapped = run(x, layer, places, weights, **options)
    assert torch.equal(mapped, run(x, layer, everywhere[places], weights, activation="a8"))
    check_a8(x, layer, torch.full_like(ids, 3), weights)
    assert run(x[:0], layer, ids[:0], weights[:0], activation="a8").shape == (0, 128)


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_quantized_zeros_and_small_blocks(name, dtype):  # RT-10
    layer = random_layer(SMALL, place(name), sides="two")
    x, ids, weights = inputs(layer, 4, 2, dtype)
    x[0], x[1] = 0, -0.0
    x[2, 1:] = 0
    x[3] *= 2.0**-14
    found = run(x, layer, ids, weights, activation="a8")
    assert not found[:2].any()
    expected = moe_forward_reference(x.float(), layer, ids, weights, activation="a8")
    assert error(found[2:3], expected[2:3]) < 3e-3
    assert torch.allclose(found[3].float(), expected[3], rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_ranks_of_quantized_rows_add_up(name, dtype):  # RT-11a
    geometry, device = Geometry(128, 768, 3), place(name)
    whole = random_layer(geometry, device, codes=[0x11, 0, 0x02])
    x, ids, weights = inputs(whole, 2, 2, dtype)
    shares = [range(0, 16), range(16, 24)]
    layers = [random_layer(geometry, device, codes=[0x11, 0, 0x02], slots=s) for s in shares]
    total = sum(run(x, layer, ids, weights, activation="a8").float() for layer in layers)
    expected = moe_forward_reference(x.float(), whole, ids, weights, activation="a8")
    assert error(total, expected) < 3e-3


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_a_workspace_serves_both(name, dtype):
    layer = random_layer(SMALL, place(name))
    x, ids, weights = inputs(layer, 2, 2, dtype)
    workspace = poisoned(layer, 2, dtype)
    for activation in ("a16", "a8", "a16", "auto", "a8"):
        options = {"activation": activation}
        expected = run(x, layer, ids, weights, **options)
        assert torch.equal(run(x, layer, ids, weights, workspace, **options), expected)
        given = moe_forward_kernels(x, layer, ids, weights, workspace=workspace, **options)
        assert torch.equal(given, expected)


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_quantized_rows_of_many_tokens_are_refused(name, dtype):
    layer = random_layer(SMALL, place(name))
    arguments = inputs_of(layer, 17, dtype)
    for forward in (run, moe_forward_kernels, moe_forward):
        with pytest.raises(ValueError, match="'a8' takes up to 16 tokens, x has 17"):
            forward(*arguments, activation="a8")
        with pytest.raises(ValueError, match="activation is 'w8', expected 'a16', 'a8' or 'auto'"):
            forward(*arguments, activation="w8")


def on_gpu(geometry=SMALL, **options):
    return random_layer(geometry, torch.device("cuda"), **options)


def captured(calls):
    """A graph of each call, all in one memory pool."""
    graphs, pool = [], None
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            call()
        pool = graph.pool()
        graphs.append(graph)
    return graphs


@GPU
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_graphs_replay_what_eager_calls_give(activation):  # RT-6a, RT-6c
    layer = on_gpu(Geometry(256, 512, 8))
    workspace = poisoned(layer, 3, BFLOAT)
    buffers = [inputs(layer, tokens, 3, BFLOAT) for tokens in range(1, 17)]
    outs = [torch.full_like(x, float("nan")) for x, _, _ in buffers]
    calls = [
        lambda x=x, i=i, w=w, o=o: moe_decode(x, layer, i, w, workspace, o, activation=activation)
        for (x, i, w), o in zip(buffers, outs, strict=True)
    ]
    for call in calls:
        call()
    graphs = captured(calls)
    many, ids, weights = inputs(layer, 2048, 3, BFLOAT, seed=5)
    assert moe_forward(many, layer, ids, weights).isfinite().all()
    torch.cuda.empty_cache()
    poison = [torch.full((1 << 26,), float("nan"), device="cuda") for _ in range(8)]
    del poison
    for seed in (1, 2):
        for graph, out, (x, ids, weights) in zip(graphs, outs, buffers, strict=True):
            fresh = inputs(layer, len(x), 3, BFLOAT, seed=seed)
            for old, new in zip((x, ids, weights), fresh, strict=True):
                old.copy_(new)
            out.fill_(float("nan"))
            for value in (workspace.rotated, workspace.middle, workspace.partial):
                value.fill_(float("nan"))
            graph.replay()
            replayed = out.clone()
            eager = run(*fresh[:1], layer, *fresh[1:], activation=activation)
            assert torch.equal(eager, replayed)
            options = {"activation": activation}
            expected = moe_forward_reference(x.float(), layer, ids, weights, **options)
            assert error(replayed, expected) < BOUND[BFLOAT]


@GPU
@pytest.mark.parametrize("sides", ["one", "two", "expert"])
@pytest.mark.parametrize("codes", [None, [0x00, 0x12, 0x21, 0x11]], ids=["uniform", "rates"])
@pytest.mark.parametrize("tokens", [17, 129])
def test_many_tokens(tokens, codes, sides):  # RT-7a, RT-9a
    """The same bits every time, though places are given by atomics."""
    layer = on_gpu(Geometry(640, 512, 4), codes=codes, sides=sides)
    x, ids, weights = inputs(layer, tokens, 3, BFLOAT)
    found = check(x, layer, ids, weights)
    for _ in range(20):
        assert torch.equal(run(x, layer, ids, weights), found)
    shifted = torch.empty(x.numel() + 1, dtype=BFLOAT, device=x.device)[1:].view_as(x).copy_(x)
    assert torch.equal(run(shifted, layer, ids.long(), weights), found)


@GPU
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_operator_in_a_graph(activation):
    layer = on_gpu()
    x, ids, weights = inputs(layer, 4, 2, BFLOAT)
    expected = moe_forward(x, layer, ids, weights, activation=activation)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = moe_forward(x, layer, ids, weights, activation=activation)
    graph.replay()
    assert torch.equal(found, expected)


@GPU
@pytest.mark.parametrize("tokens", [14, 40, 300])
def test_a_graph_with_a_callers_workspace(tokens):
    layer = on_gpu()
    workspace = poisoned(layer, 2, BFLOAT)
    x, ids, weights = inputs(layer, tokens, 2, BFLOAT)
    expected = moe_forward_kernels(x, layer, ids, weights, workspace=workspace).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = moe_forward_kernels(x, layer, ids, weights, workspace=workspace)
    graph.replay()
    assert torch.equal(found, expected)
    check_guards(workspace)
    assert error(found, moe_forward_reference(x.float(), layer, ids, weights)) < BOUND[BFLOAT]


@GPU
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_capturing_the_first_call_is_refused(activation):  # RT-6b
    layer = on_gpu(Geometry(384, 256, 3))
    options = {"activation": activation}
    x, ids, weights = inputs(layer, 5, 2, HALF)
    workspace, out = poisoned(layer, 2, HALF), torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = x + 1
        with pytest.raises(RuntimeError, match="not compiled yet; call it once"):
            moe_decode(x, layer, ids, weights, workspace, out, **options)
    graph.replay()
    assert torch.equal(kept, x + 1)
    moe_decode(x, layer, ids, weights, workspace, out, **options)
    assert out.isfinite().all()


@GPU
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_call_allocates_and_waits_for_nothing(activation):  # RT-6d
    layer = on_gpu()
    x, ids, weights = inputs(layer, 4, 2, BFLOAT)
    workspace, out = poisoned(layer, 2, BFLOAT), torch.empty_like(x)
    options = {"activation": activation}
    moe_decode(x, layer, ids, weights, workspace, out, **options)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        moe_decode(x, layer, ids, weights, workspace, out, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@GPU
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_same_bits_while_others_work(activation):  # RT-9a
    layer = on_gpu(Geometry(512, 512, 32))
    x, ids, weights = inputs(layer, 16, 8, BFLOAT)
    workspace, out = poisoned(layer, 8, BFLOAT), torch.empty_like(x)
    options = {"activation": activation}
    expected = run(x, layer, ids, weights, **options)
    other = torch.randn(2048, 2048, device="cuda")
    stream = torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(stream):
            other = (other @ other).tanh()
        found = moe_decode(x, layer, ids, weights, workspace, out, **options)
        assert torch.equal(found, expected)


@GPU
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_slab_beyond_two_gigabytes(activation):  # RT-4
    small = on_gpu(Geometry(6144, 2048, 8))
    large = Geometry(6144, 2048, 256)
    size = large.bundle_bytes
    atoms = torch.zeros(large.slots, large.slot_stride(256), dtype=torch.uint8, device="cuda")
    assert atoms.nbytes > 1 << 31
    atoms[:, 255 * size : 256 * size] = small.atoms[:, 7 * size : 8 * size]
    scales = small.shared_scales[:, :1].expand(3, 256, large.hidden).contiguous()
    layer = LayerWeights(
        1,
        large,
        range(large.slots),
        torch.zeros(256, dtype=torch.uint8, device="cuda"),
        scales,
        atoms,
        torch.ones(256, dtype=torch.uint8, device="cuda"),
        traits=Traits(1, True),
    )
    x, ids, weights = inputs(small, 3, 1, BFLOAT)
    first = run(x, small, torch.full_like(ids, 7), weights, activation=activation)
    last = run(x, layer, torch.full_like(ids, 255), weights, activation=activation)
    assert torch.equal(last, first)
    assert first.any()


@GPU
@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("codes", [None, [0, 0x11, 0x12, 0x21, 0]], ids=["uniform", "rates"])
@pytest.mark.parametrize("sides", ["one", "two", "expert"])
def test_the_ways_agree(monkeypatch, tokens, codes, sides):
    layer = on_gpu(Geometry(640, 512, 5), codes=codes, sides=sides)
    x, ids, weights = inputs(layer, tokens, 3, BFLOAT)
    ids[-1, 1] = -1
    one_launch = check(x, layer, ids, weights)
    ways = [(alone, "MOST_PAIRS"), (alone, "ALONE_TOKENS"), (fused, "THREE_LAUNCH_WEIGHTS")]
    for host, limit in ways:  # one launch with rows for all, three, and five
        monkeypatch.setattr(host, limit, 0)
        assert error(check(x, layer, ids, weights), one_launch.float()) < BOUND[BFLOAT]
    monkeypatch.setattr(module, "ways", lambda _device: (False, False))
    assert error(check(x, layer, ids, weights), one_launch.float()) < BOUND[BFLOAT]


@GPU
@pytest.mark.parametrize("tokens", [1, 2, 9, 16])
@pytest.mark.parametrize("codes", [None, [0, 0x11, 0x12, 0x21, 0]], ids=["uniform", "rates"])
@pytest.mark.parametrize("sides", ["one", "two", "expert"])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_the_ways_of_quantized_rows_agree(monkeypatch, tokens, codes, sides, dtype):
    layer = on_gpu(Geometry(640, 512, 5), codes=codes, sides=sides)
    x, ids, weights = inputs(layer, tokens, 3, dtype)
    ids[-1, 1] = -1
    arguments = (x, layer, ids, weights)
    expected = check_a8(*arguments)
    ways = [(expert_gemm, torch.uint8)]
    if module.ways(x.device)[0]:
        ways.append((product, BFLOAT))
    if codes is None and torch.cuda.get_device_capability() in LABELS:
        ways.append((quantized_product, torch.uint8))
    for way in ways:
        monkeypatch.setattr(module, "a8_product", lambda *_, way=way: way)
        assert error(check_a8(*arguments), expected.float()) < 3e-3


@GPU
@pytest.mark.parametrize("tokens", [0, 2], ids=["three", "one"])
def test_fused_of_many_rounds(monkeypatch, tokens):
    """More records, and more channels of the output, than the warps of all programs."""
    monkeypatch.setattr(alone, "ALONE_TOKENS", tokens)
    layer = on_gpu(Geometry(2048, 4096, 3), codes=[0, 0x11, 0])
    x, ids, weights = inputs(layer, 5, 2, BFLOAT)
    ids[:, 0] = 1
    check(x, layer, ids, weights)
    check(x[:1], layer, ids[:1], weights[:1])
    check(x[:1], layer, ids[:1], weights[:1], weight_on_input=True)


@GPU
@pytest.mark.parametrize("most", [0, 4], ids=["spread", "each"])
@pytest.mark.parametrize("tokens", [2, 4], ids=["one", "three"])
def test_calls_on_two_streams(monkeypatch, tokens, most):
    """Programs that wait for each other, in one launch, need all of them on the GPU at once."""
    monkeypatch.setattr(alone, "MOST_PAIRS", most)
    layers = [on_gpu(Geometry(1024, 512, 32), seed=seed) for seed in (0, 1)]
    streams = [torch.cuda.Stream() for _ in layers]
    cases = [inputs(layer, tokens, 8, BFLOAT, seed=3) for layer in layers]
    expected = [run(x, layer, i, w) for layer, (x, i, w) in zip(layers, cases, strict=True)]
    spaces = [poisoned(layer, 8, BFLOAT) for layer in layers]
    outs = [torch.empty_like(x) for x in expected]
    torch.cuda.synchronize()
    for _ in range(200):
        for layer, stream, (x, i, w), space, out in zip(
            layers, streams, cases, spaces, outs, strict=True
        ):
            with torch.cuda.stream(stream):
                moe_decode(x, layer, i, w, space, out)
    torch.cuda.synchronize()
    for found, right in zip(outs, expected, strict=True):
        assert torch.equal(found, right)


@GPU
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, torch.float32])
def test_the_operator_on_a_gpu(dtype):
    layer = on_gpu(codes=[0, 0x11, 0, 0, 0x01])
    x, ids, weights = inputs(layer, 37, 3, dtype)
    for rows in (x, x.T.contiguous().T, torch.cat([x, x], 1)[:, :128]):
        found = moe_forward(rows, layer, ids, weights)
        expected = moe_forward_reference(x.float(), layer, ids, weights)
        assert found.dtype == dtype
        assert error(found, expected) < {**BOUND, torch.float32: 1e-5}[dtype]


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_sum_in_float32(name, dtype, activation):  # RT-9b
    layer = random_layer(SMALL, place(name))
    x = inputs(layer, 1, 2, dtype)[0]
    ids, weights = uneven_sum(x.device)
    found = run(x, layer, ids, weights, activation=activation)
    unit = moe_forward_reference(
        x.float(), layer, ids[:, :1], weights[:, 1:2], activation=activation
    )
    assert error(found, 6 * unit) < 1.2 * BOUND[dtype]
