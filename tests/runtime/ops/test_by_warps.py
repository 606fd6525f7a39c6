"""The products by warps: whole kernels, their PTX interpreted."""

from types import SimpleNamespace

import pytest
import torch
import warps
from layers import BFLOAT, BOUND, HALF, check_guards, error, inputs, poisoned, random_layer

from qsrt_runtime import moe_decode
from qsrt_runtime.expansion import expanded
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.moe_reference import moe_forward_reference
from qsrt_runtime.ops import fused
from qsrt_runtime.ops.expert_gemm import expert_gemm
from qsrt_runtime.ops.fused import alone, product
from qsrt_runtime.ops.fused.alone.ptx import AT_ONCE
from qsrt_runtime.ops.fused.product import quantized as module
from qsrt_runtime.ops.fused.product.quantized import kernel as kernel_module
from qsrt_runtime.ops.label_gemm import kernel as label_kernel
from qsrt_runtime.ops.label_gemm import label_gemm
from qsrt_runtime.ops.prepare import prepare
from qsrt_runtime.ops.warps.ptx import BY_ARITHMETIC
from qsrt_runtime.weights import Traits
from qsrt_runtime.workspace import COLUMNS, PLACES, quantized

GEOMETRY = Geometry(640, 256, 3)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU here")


def interpret(monkeypatch, capability):
    """Have both products run as on a GPU of this capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    for host, name in ((module, "quantized_kernel"), (product, "product_kernel")):
        kernel = warps.Launched(getattr(host, name), host.SHARED_BYTES)
        monkeypatch.setattr(host, name, kernel)
    return warps.interpret(monkeypatch, product.kernel, kernel_module)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("down", [False, True])
def test_is_the_plain_product(monkeypatch, capability, tokens, down):
    machine = interpret(monkeypatch, capability)
    layer = random_layer(GEOMETRY, torch.device("cpu"), sides="two")
    x, ids, _ = inputs(layer, tokens, 2, HALF)
    ids[:, 0] = 2
    ids[-1, 1] = -1
    found = []
    for gemm in (expert_gemm, module.quantized_product):
        workspace = poisoned(layer, 2, HALF)
        prepare(x, layer, ids, None, workspace, False, torch.uint8)
        rows, exponents = quantized(workspace.middle if down else workspace.rotated, torch.uint8)
        if down:
            generator = torch.Generator().manual_seed(0)
            draw = torch.randint(0, 254, rows.shape, generator=generator, dtype=torch.uint8)
            rows.copy_(draw + (draw > 126).byte())  # no NaN
            powers = torch.randint(110, 140, exponents.shape, generator=generator)
            exponents.copy_(powers)
        options = {"down": down, "pdl": False, "exponents": exponents}
        divisor, up = (1, 0) if down else (2, tokens)
        workspace.partial.fill_(-7.0)
        gemm(rows, layer, ids, None, workspace, divisor, up, PLACES, **options)
        check_guards(workspace)
        found.append(workspace.partial)
    assert machine.loads
    whole = found[0].numel() // (PLACES * COLUMNS) * PLACES * COLUMNS
    plain, by_warps = (each.flatten()[:whole].view(-1, COLUMNS) for each in found)
    written = by_warps != -7
    assert error(by_warps[written], plain[written]) < 1e-6
    missing = ~written & (plain != -7)
    assert not missing[:, : GEOMETRY.hidden % COLUMNS].any()
    assert missing.any() == down  # channels beyond the hidden ones


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize(
    ("geometry", "slots"),
    [(GEOMETRY, None), (Geometry(128, 768, 3), range(8, 24)), (Geometry(128, 256, 2), None)],
    ids=["part", "rank", "short"],
)
def test_labels_give_the_plain_product(monkeypatch, dtype, tokens, down, geometry, slots):
    """Of rows in E4M3's numbers, whose products are exact; words are read ahead, none outside."""
    machine = warps.interpret(monkeypatch, label_kernel)
    packed = random_layer(geometry, torch.device("cpu"), sides="two", slots=slots)
    layer = expanded(packed)
    machine.allowed = layer.matrices()[down]
    x, ids, _ = inputs(layer, tokens, 2, dtype)
    ids[:, 0], ids[-1, 1] = geometry.experts - 1, -1
    workspace = poisoned(layer, 2, dtype)
    prepare(x, layer, ids, None, workspace, False)
    rows = workspace.middle if down else workspace.rotated
    draw = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1))
    rows.copy_(draw.to(torch.float8_e4m3fn))
    divisor, up = (1, 0) if down else (2, tokens)
    found = []
    for gemm, weights in ((expert_gemm, packed), (label_gemm, layer)):
        workspace.partial.fill_(-7.0)
        given = rows.half() if gemm is expert_gemm else rows  # for the interpreter's products
        gemm(given, weights, ids, None, workspace, divisor, up, PLACES, down=down, pdl=False)
        check_guards(workspace)
        found.append(workspace.partial.clone())
    assert machine.loads
    whole = found[0].numel() // (PLACES * COLUMNS) * PLACES * COLUMNS
    plain, by_warps = (each.flatten()[:whole].view(-1, COLUMNS) for each in found)
    written = by_warps != -7
    assert written.any()
    assert error(by_warps[written], plain[written]) < 1e-6
    assert down or not (~written & (plain != -7)).any()


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(
    ("activation", "capability", "dtype"),
    [("a16", (9, 0), HALF), ("a8", (9, 0), HALF), ("a8", (9, 0), BFLOAT), ("a8", (8, 9), HALF)],
)
def test_all_launches(monkeypatch, tokens, activation, capability, dtype):
    """The interpreter cuts off what bfloat16 has no room for, which W4A16 does not bear."""
    is_sm_90 = capability == (9, 0)
    machine = interpret(monkeypatch, capability)
    monkeypatch.setattr(moe_decode, "ways", lambda _device: (is_sm_90, False))
    monkeypatch.setattr(fused, "THREE_LAUNCH_WEIGHTS", 0)
    if not is_sm_90:
        way = (module.quantized_product, torch.uint8)
        monkeypatch.setattr(moe_decode, "a8_product", lambda *_: way)
    layer = random_layer(Geometry(256, 256, 3), torch.device("cpu"), sides="expert")
    x, ids, weights = inputs(layer, tokens, 2, dtype)
    workspace, out = poisoned(layer, 2, dtype), torch.full_like(x, float("nan"))
    options = {"activation": activation}
    moe_decode.moe_decode(x, layer, ids, weights, workspace, out, **options)
    assert machine.loads
    expected = moe_forward_reference(x.float(), layer, ids, weights, **options)
    assert error(out, expected) < BOUND[dtype]
    check_guards(workspace)


@pytest.fixture(params=["one", "spread", "three"])
def launches(monkeypatch, request):
    """Have calls of few routes go in one launch, each program making the rows it needs or all of
    them a share, where a call's scales and tokens allow it; or in three.
    """
    warps.interpret(monkeypatch, product.kernel)
    monkeypatch.setattr(moe_decode, "ways", lambda _device: (True, False))
    monkeypatch.setattr(alone, "MOST_PAIRS", 0 if request.param == "spread" else 1 << 20)
    if request.param == "three":
        monkeypatch.setattr(alone, "ALONE_TOKENS", 0)
        monkeypatch.setattr(fused, "LONG_WEIGHTS", 0)
    for host, name in ((fused, "fused_kernel"), (alone, "alone_kernel")):
        launched = warps.Launched(getattr(host, name), product.SHARED_BYTES)
        monkeypatch.setattr(host, name, launched)
    return request.param


def check_fused(layer, x, ids, weights, named, bound=BOUND[HALF], **options):
    """Against the reference with `named`, ids all of which name an expert or are -1."""
    workspace = poisoned(layer, ids.shape[1], HALF, tokens=len(ids), programs=3)
    out = torch.full_like(x, float("nan"))
    moe_decode.moe_decode(x, layer, ids, weights, workspace, out, **options)
    options.pop("expert_map", None)
    expected = moe_forward_reference(x.float(), layer, named, weights, **options)
    assert error(out, expected) < bound
    check_guards(workspace)
    return workspace


@pytest.mark.parametrize(
    ("tokens", "on_input", "options"),
    [
        (1, False, {"sides": "one"}),
        (1, True, {"sides": "two", "slots": range(8, 24)}),
        (1, False, {"sides": "expert", "codes": [0, 0x01, 0x10]}),
        (2, False, {"sides": "one"}),
        (2, True, {"sides": "two", "slots": range(8, 24)}),
        (2, False, {"sides": "expert"}),
        (3, True, {"sides": "one"}),
        (9, False, {"sides": "expert"}),
    ],
    ids=str,
)
def test_fused(launches, tokens, on_input, options):
    geometry = Geometry(640, 768 if "slots" in options else 256, 3)
    layer = random_layer(geometry, torch.device("cpu"), **options)
    x, ids, weights = inputs(layer, tokens, 3, HALF)
    ids[-1, 1] = -1
    check_fused(layer, x, ids, weights, ids, weight_on_input=on_input)


def test_fused_of_more_routes_than_experts(launches):
    """And of ids that name none."""
    layer = random_layer(Geometry(128, 256, 2), torch.device("cpu"))
    x, _, _ = inputs(layer, 2, 2, HALF)
    ids = torch.tensor([[0, 1, -1, 0, 1, 1, -1, 0, 2**33], [1, 0, -(2**40), 0, 1, -1, 0, 2, 0]])
    weights = torch.rand(2, 9, generator=torch.Generator().manual_seed(0))
    named = torch.where((ids < 0) | (ids > 1), -1, ids)
    workspace = check_fused(layer, x, ids, weights, named, 1.2 * BOUND[HALF])
    assert workspace.invalid_routes() == 3


def test_fused_with_a_map(launches):
    layer = random_layer(Geometry(256, 256, 3), torch.device("cpu"), sides="two")
    x, _, weights = inputs(layer, 2, 3, HALF)
    ids = torch.tensor([[1, 3, 6], [6, 2, 9]], dtype=torch.int32)
    expert_map = torch.tensor([-1, 2, 5, -1, 0, 1, 1], dtype=torch.int32)
    named = torch.tensor([[2, -1, 1], [1, -1, -1]])
    workspace = check_fused(layer, x, ids, weights, named, expert_map=expert_map)
    assert workspace.invalid_routes() == 2


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_each_pair_by_arithmetic_and_from_shared_memory(monkeypatch, dtype, first):
    """Of rows of ones and zeros, whose sums are exact in any type."""
    warps.interpret(monkeypatch, product.kernel)
    launched = warps.Launched(product.product_kernel, product.SHARED_BYTES)
    monkeypatch.setattr(product, "product_kernel", launched)
    pairs = tuple(range(first, 16, 2))
    monkeypatch.setattr(product, "arithmetic_pairs", lambda *_: pairs)
    layer = random_layer(Geometry(128, 256, 2), torch.device("cpu"))
    x, ids, _ = inputs(layer, 1, 2, dtype)
    workspace = poisoned(layer, 2, dtype)
    prepare(x, layer, ids, None, workspace, False)
    found = []
    for gemm, kind in ((expert_gemm, HALF), (product.product, dtype)):
        rows = torch.zeros_like(workspace.rotated, dtype=kind)
        rows[:, 5::7] = 1
        workspace.partial.fill_(-7.0)
        options = {"down": False, "pdl": False}
        gemm(rows, layer, ids, None, workspace, 2, 0, PLACES, **options)
        check_guards(workspace)
        found.append(workspace.partial.clone())
    assert (found[0] != -7).any()
    assert error(found[1], found[0]) < 1e-6


FOUR, FIVE = BY_ARITHMETIC[4], BY_ARITHMETIC[5]


@pytest.mark.parametrize(
    ("sizes", "held", "inputs", "tokens", "topk", "is_alone", "in_three", "pairs"),
    [
        ((1024, 512, 256), 16, 1, 1, 8, True, True, FOUR),
        ((1024, 512, 256), 16, 2, 2, 8, True, True, FOUR),
        ((1024, 512, 256), 16, 0, 2, 8, False, True, FOUR),  # scales of each expert
        ((1024, 512, 256), 16, 1, 3, 8, False, True, FOUR),
        ((2048, 768, 128), 24, 1, 2, 8, True, True, FOUR),
        ((6144, 2048, 32), 64, 1, 2, 8, True, True, FOUR),
        ((6144, 2048, 32), 64, 2, 2, 8, False, True, FOUR),  # rows of gate and of up: 48 KB
        ((4096, 14336, 8), 448, 1, 2, 2, True, True, FOUR),
        ((6144, 2048, 32), 64, 1, 4, 8, False, False, FOUR),
        ((6144, 2048, 32), 64, 1, 8, 8, False, False, FIVE),
        ((128, 256, 64), 8, 1, 2, 33, False, False, FOUR),
    ],
    ids=str,
)
def test_choices(sizes, held, inputs, tokens, topk, is_alone, in_three, pairs):
    traits = Traits(inputs, True)
    layer = SimpleNamespace(geometry=Geometry(*sizes), slots=range(held), traits=traits)
    ids = torch.zeros(tokens, topk, dtype=torch.int32)
    assert alone.takes(layer, ids, 132) == is_alone
    assert fused.takes(layer, ids) == in_three
    assert product.arithmetic_pairs(layer, ids) == pairs


@pytest.mark.parametrize("programs", [1, 7, 132])
def test_division(programs):
    """No tile has more parts than are read, and no program's steps more pairs than rows are made of
    at once, or are given memory.
    """
    generator = torch.Generator().manual_seed(programs)
    met = set()
    for _ in range(300):
        hidden, held, routes = (
            int(torch.randint(1, most, (), generator=generator)) for most in (49, 60, 17)
        )
        hidden *= 128
        found = alone.division(hidden, held, routes, programs)
        down_tiles = -(-hidden // COLUMNS)
        for steps, tiles, unit, parts in (
            (
                hidden // 64,
                held,
                found["UP_UNIT"],
                found["UP_ROUNDS"] * AT_ONCE * 4 // found["TILES"],
            ),
            (4 * held, down_tiles, found["DOWN_UNIT"], found["DOWN_ROUNDS"] * AT_ONCE),
        ):
            assert unit * programs >= routes * tiles * steps
            first = torch.arange(routes * tiles) * steps
            most = ((first + steps - 1) // unit - first // unit + 1).max()
            assert most <= parts
        start = torch.arange(programs) * found["DOWN_UNIT"]
        start = start[start < routes * down_tiles * 4 * held]
        end = (start + found["DOWN_UNIT"]).clamp(max=routes * down_tiles * 4 * held)
        pairs = ((end + 3) // 4 - start // 4).max()
        assert pairs <= (found["DOWN_UNIT"] + 6) // 4
        assert found["SPREAD"] or pairs <= alone.MOST_PAIRS
        met.add((found["SPREAD"], found["TILES"]))
    assert len(met) > 1
