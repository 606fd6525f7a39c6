"""The launches of moe_decode and moe_prefill against their references, interpreted or on a GPU."""

from dataclasses import replace

import pytest
import torch
from layers import (
    BFLOAT,
    BOUND,
    DEVICES,
    check_guards,
    error,
    guard,
    inputs,
    place,
    poisoned,
    random_layer,
)

from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.launching import ways
from qsrt_runtime.mxfp8 import dequantize_rows, quantize_rows
from qsrt_runtime.ops import group as groups
from qsrt_runtime.ops.activate import activate
from qsrt_runtime.ops.activate.reference import activate_reference
from qsrt_runtime.ops.combine import combine
from qsrt_runtime.ops.combine.reference import combine_reference
from qsrt_runtime.ops.expand import expand
from qsrt_runtime.ops.expand.reference import expand_reference
from qsrt_runtime.ops.expert_gemm import expert_gemm
from qsrt_runtime.ops.expert_gemm.reference import (
    down_reference,
    gate_up_reference,
    in_slot_order,
)
from qsrt_runtime.ops.fused.product import product
from qsrt_runtime.ops.fused.product.quantized import quantized_product
from qsrt_runtime.ops.fused.product.quantized.ptx import LABELS
from qsrt_runtime.ops.group import group
from qsrt_runtime.ops.group.reference import group_reference
from qsrt_runtime.ops.grouped_gemm import grouped_gemm
from qsrt_runtime.ops.grouped_gemm.reference import grouped_gemm_reference
from qsrt_runtime.ops.prepare import prepare
from qsrt_runtime.ops.prepare.reference import map_routes_reference, rotate_rows_reference
from qsrt_runtime.workspace import COLUMNS, PLACES, make_prefill_workspace, quantized

TOPK = 2


def natural(rows):
    """Rows whose tiles are in fragment order, in the channels' own."""
    place = torch.tensor([0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15])
    return rows.unflatten(-1, (-1, 16))[..., place.to(rows.device)].flatten(-2).float()


def in_fragment_order(rows):
    order = torch.tensor([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])
    return rows.unflatten(-1, (-1, 16))[..., order.to(rows.device)].flatten(-2)


def summed(workspace, places, blocks, tiles, steps):
    """The parts of each route's tiles, added: [R, COLUMNS tiles]."""
    unit = max(1, -(-blocks * tiles * steps // workspace.programs))
    partial = workspace.partial.flatten()
    partial = partial[: len(partial) // (PLACES * COLUMNS) * PLACES * COLUMNS]
    partial = partial.view(-1, PLACES, COLUMNS)
    rows = []
    for at in places:
        block, place = divmod(at, PLACES)
        for tile in range(block * tiles, (block + 1) * tiles):
            programs = range(tile * steps // unit, (tile * steps + steps - 1) // unit + 1)
            rows.append(sum(partial[p + tile, place] for p in programs))
    return torch.stack(rows).unflatten(0, (-1, tiles)).flatten(1)


def case(name, dtype, sides, tokens):
    layer = random_layer(GEOMETRY, place(name), codes=[0x00, 0x12, 0x21], sides=sides)
    x, ids, weights = inputs(layer, tokens, TOPK, dtype)
    return layer, x, ids, weights, ids.flatten().tolist(), poisoned(layer, TOPK, dtype)


GEOMETRY = Geometry(256, 512, 3)


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("tokens", [2, 16])
def test_routes(name, dtype, tokens):
    layer, x, ids, _, _, workspace = case(name, dtype, "one", tokens)
    ids[0, 1], ids[-1] = -1, 2
    prepare(x, layer, ids, None, workspace, False)
    blocks, routes, places = map_routes_reference(ids.flatten().tolist())
    assert workspace.counts.tolist() == [len(blocks), 0]
    assert workspace.block_experts[: len(blocks)].tolist() == blocks
    assert workspace.block_routes[: len(blocks) * PLACES].view(-1, PLACES).tolist() == routes
    assert workspace.route_places[: ids.numel()].tolist() == places


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("tokens", [1, 17, 40])
@pytest.mark.parametrize(("block", "decodes"), [(8, True), (32, True), (16, False)])
def test_sorted_routes(name, dtype, tokens, block, decodes, monkeypatch):
    """Of decoding an expert's routes stand in their own order, of prefill in any."""
    monkeypatch.setattr(groups, "ROUTES", 16)  # at once: several times
    layer, device = random_layer(GEOMETRY, place(name)), place(name)
    x, ids, _ = inputs(layer, tokens, TOPK, dtype)
    ids[0, 1], ids[-1] = -1, 2
    if decodes:
        workspace = poisoned(layer, TOPK, dtype, max(tokens, 17))
        order = workspace.block_routes
    else:
        made = make_prefill_workspace(GEOMETRY, TOPK, tokens, 1, dtype, device)
        workspace = guard(made)
        order = workspace.order
    group(x, layer, ids, None, workspace, block, ways(device)[0], False)
    first, block_experts, blocks = group_reference(ids.flatten().tolist(), 3, block)
    assert workspace.counts.tolist() == [len(blocks), 0]
    assert workspace.first_block.tolist() == first
    assert workspace.block_experts[: len(blocks)].tolist() == block_experts
    found = order.flatten()[: len(blocks) * block].tolist()
    for expert in range(3):  # empty places last
        those = found[first[expert] * block : first[expert + 1] * block]
        routes = [r for some in blocks[first[expert] : first[expert + 1]] for r in some]
        count = sum(route >= 0 for route in routes)
        assert (those if decodes else sorted(those[:count]))[:count] == routes[:count]
        assert those[count:] == routes[count:]
    if decodes:
        for route, at in enumerate(workspace.route_places[: ids.numel()].tolist()):
            assert (found[at] == route) if ids.flatten()[route] >= 0 else at == -1
    check_guards(workspace)


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("codes", [[0x00, 0x12, 0x21], None], ids=["rates", "uniform"])
def test_expanded_matrices(name, dtype, codes):
    layer = random_layer(GEOMETRY, place(name), codes=codes)
    device = layer.atoms.device
    workspace = guard(make_prefill_workspace(GEOMETRY, 1, 1, 1, dtype, device))
    workspace.first_block[:] = torch.tensor([0, 1, 1, 2])  # expert 1 has no routes
    for down in (False, True):
        for by_warps in {False, ways(device)[0]}:
            workspace.scratch.fill_(0x7F)
            buffers = (workspace.first_block, workspace.scratch)
            expand(layer, range(3), *buffers, down=down, by_warps=by_warps)
            found = workspace.scratch[: (1 if down else 2) * 3 * 512 * 256]
            found = found.view(torch.float8_e4m3fn).view(3, -1, 8 if down else 4, 8, 64)
            found = natural(found.transpose(2, 3).flatten(3).flatten(1, 2))
            for expert in (0, 2):
                order = in_slot_order(layer, expert)
                expected = expand_reference(layer, expert, order)[down]
                assert torch.equal(found[expert], expected)
            assert found[1].isnan().all()
    check_guards(workspace)


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_grouped_products(name, dtype, block):
    layer, device = random_layer(GEOMETRY, place(name)), place(name)
    by_warps = ways(device)[0]
    tokens = block // 16 * 17 if device.type == "cuda" else 17
    x, ids, _ = inputs(layer, tokens, TOPK, dtype)
    experts = ids.flatten().tolist()
    workspace = guard(make_prefill_workspace(GEOMETRY, TOPK, tokens, 1, dtype, device))
    group(x, layer, ids, None, workspace, block, by_warps, False)
    workspace.middle.copy_(torch.randn(workspace.middle.shape, device=device))
    for down in (False, True):
        labels = workspace.scratch
        options = {"down": down, "by_warps": by_warps}
        expand(layer, range(3), workspace.first_block, labels, **options)
        rows = workspace.middle if down else workspace.rotated
        sizes = (1 if down else TOPK, 0, block)
        grouped_gemm(rows, layer, range(3), labels, workspace, *sizes, **options)
        words = rows.unflatten(1, (-1, 4, 16)).transpose(2, 3).flatten(1)  # from word order
        own = words if down else words.repeat_interleave(TOPK, 0)
        orders = [in_slot_order(layer, expert) for expert in range(3)]
        weights = [expand_reference(layer, e, o)[down] for e, o in enumerate(orders)]
        expected = grouped_gemm_reference(natural(own), torch.stack(weights), experts)
        found = workspace.down_sums if down else workspace.sums
        assert error(found[: expected.numel()].view_as(expected), expected) < BOUND[dtype]


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("sides", ["one", "two", "expert"])
def test_rotated_rows(name, dtype, sides):
    layer, x, ids, _, experts, workspace = case(name, dtype, sides, 3)
    prepare(x, layer, ids, None, workspace, False)
    gate, up = rotate_rows_reference(x, layer, experts)
    step = 1 if sides == "expert" else TOPK
    count = len(experts) // step
    found = natural(workspace.rotated)
    assert error(found[:count], gate[::step]) < BOUND[dtype]
    if sides != "one":
        assert error(found[count : 2 * count], up[::step]) < BOUND[dtype]


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("gemm", [expert_gemm, product])
def test_products(name, dtype, tokens, gemm):
    if gemm is product and not ways(place(name))[0]:
        pytest.skip("products go by warps on sm_90")
    layer, x, ids, _, experts, workspace = case(name, dtype, "one", tokens)
    prepare(x, layer, ids, None, workspace, False)
    blocks, _, places = map_routes_reference(experts)
    rows = natural(workspace.rotated)
    for down in (False, True):
        source, divisor = (workspace.middle, 1) if down else (workspace.rotated, TOPK)
        if down:
            middle = torch.randn(source.shape, device=x.device).to(dtype)
            source.copy_(in_fragment_order(middle))
            rows = middle.float()
        gemm(source, layer, ids, None, workspace, divisor, 0, PLACES, down=down, pdl=False)
        tiles, steps = (1, 8) if down else (2, 4)
        found = summed(workspace, places, len(blocks), tiles, steps)
        for route, expert in enumerate(experts):
            row = rows[route // divisor : route // divisor + 1]
            if down:
                expected = down_reference(row, layer, expert)
                assert error(found[route, :256], expected[0]) < 1e-5
            else:
                expected = gate_up_reference(row, row, layer, expert)
                assert error(found[route], expected[0]) < 1e-5


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("weigh", [False, True])
def test_activation(name, dtype, weigh):
    layer, x, ids, weights, experts, workspace = case(name, dtype, "one", 3)
    prepare(x, layer, ids, None, workspace, False)
    blocks, _, places = map_routes_reference(experts)
    workspace = replace(workspace, programs=len(blocks) * 2 * 4)  # one for each step
    workspace = replace(workspace, partial=workspace.partial.new_zeros(2, 100, PLACES, COLUMNS))
    sums = 3 * torch.randn(len(experts), 2 * COLUMNS, device=x.device)
    for route, at in enumerate(places):
        block, place_ = divmod(at, PLACES)
        for i in range(2):
            tile = 2 * block + i
            workspace.partial[0, 4 * tile + tile, place_] = sums[route, i * COLUMNS :][:COLUMNS]
    activate(layer, ids, None, weights if weigh else None, workspace, PLACES, False)
    found = natural(workspace.middle)
    factors = weights.flatten() if weigh else torch.ones(len(experts), device=x.device)
    for i, expert in enumerate(experts):
        order = in_slot_order(layer, expert)
        expected = activate_reference(sums[i : i + 1], layer, expert, order, factors[i : i + 1])
        assert error(found[i], expected[0]) < BOUND[dtype]


KINDS = [torch.uint8, BFLOAT]


def numbers(workspace, buffer, kind, down=False):
    """What quantized rows stand for, in the channels' own order; of down records after records."""
    rows, exponents = quantized(getattr(workspace, buffer), kind)
    if kind == torch.uint8:
        rows = rows.view(torch.float8_e4m3fn)
    rows = natural(rows)
    if down:  # from slots of 32 channels to records of 128
        rows = rows.unflatten(-1, (-1, 8, 2, 16)).transpose(2, 3).flatten(1)
    if kind != torch.uint8:
        return rows
    if down:  # from both records' of two slots each
        exponents = exponents.unflatten(-1, (-1, 4, 2)).transpose(2, 3).flatten(1)
    return dequantize_rows(rows, exponents)


def is_close(found, exact):
    """The exact rows quantized, but for numbers and powers at an edge, which are few."""
    expected = dequantize_rows(*quantize_rows(exact))
    return error(found, expected) < 5e-3 and error(found, exact) > 2e-2


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("sides", ["one", "two", "expert"])
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_rotated_rows(name, dtype, sides, kind):
    layer, x, ids, _, experts, workspace = case(name, dtype, sides, 3)
    prepare(x, layer, ids, None, workspace, False, kind)
    gate, up = rotate_rows_reference(x, layer, experts)
    step = 1 if sides == "expert" else TOPK
    count = len(experts) // step
    found = numbers(workspace, "rotated", kind)
    assert is_close(found[:count], gate[::step])
    if sides != "one":
        assert is_close(found[count : 2 * count], up[::step])
    check_guards(workspace)


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_rows_are_exact(name, dtype, kind):  # RT-10
    """Rows of one channel are rotated without a rounding but one, the same everywhere."""
    layer, _, ids, _, experts, workspace = case(name, dtype, "one", 5)
    x = torch.zeros(5, 256, dtype=dtype, device=ids.device)
    for row, size in enumerate((0.0, -0.0, 6e-8, 2e4, -1.7)):
        x[row, 17] = size
        x[row, 128 + row] = -3 * size
    prepare(x, layer, ids, None, workspace, False, kind)
    gate, _ = rotate_rows_reference(x, layer, experts)
    values, exponents = quantize_rows(gate[::TOPK])
    found = numbers(workspace, "rotated", kind)[:5]
    assert torch.equal(found, dequantize_rows(values, exponents))
    assert not found[:2].any()
    if kind == torch.uint8:
        assert torch.equal(quantized(workspace.rotated, kind)[1][:5], exponents)


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("gemm", [expert_gemm, quantized_product])
def test_quantized_products(name, dtype, tokens, gemm):
    device, bound = place(name), 1e-5
    if gemm is quantized_product:
        if device.type != "cuda" or torch.cuda.get_device_capability(device) not in LABELS:
            pytest.skip("quantized rows go by warps on sm_89 and sm_90")
        layer = random_layer(GEOMETRY, device)
        if torch.cuda.get_device_capability(device) == (8, 9):  # adds in fewer bits
            bound = 2e-4
    else:
        layer = random_layer(GEOMETRY, device, codes=[0x00, 0x12, 0x21])
    x, ids, _ = inputs(layer, tokens, TOPK, dtype)
    experts, workspace = ids.flatten().tolist(), poisoned(layer, TOPK, dtype)
    prepare(x, layer, ids, None, workspace, False, torch.uint8)
    blocks, _, places = map_routes_reference(experts)
    for down in (False, True):
        buffer, divisor = ("middle", 1) if down else ("rotated", TOPK)
        source, exponents = quantized(getattr(workspace, buffer), torch.uint8)
        if down:
            shape = source.shape
            source.copy_(torch.randint(0, 127, shape, dtype=torch.uint8, device=device))
            sign = torch.randint(0, 2, shape, dtype=torch.uint8, device=device)
            source.bitwise_or_(sign << 7)
            exponents.copy_(torch.randint(117, 138, exponents.shape, device=device))
        rows = numbers(workspace, buffer, torch.uint8, down)
        options = {"down": down, "pdl": False, "exponents": exponents}
        gemm(source, layer, ids, None, workspace, divisor, 0, PLACES, **options)
        tiles, steps = (1, 8) if down else (2, 4)
        found = summed(workspace, places, len(blocks), tiles, steps)
        for route, expert in enumerate(experts):
            row = rows[route // divisor : route // divisor + 1]
            if down:
                by_slot = row.unflatten(1, (-1, 2, 8, 16)).transpose(2, 3).flatten(1)
                expected = down_reference(by_slot, layer, expert)
                assert error(found[route, :256], expected[0]) < bound
            else:
                expected = gate_up_reference(row, row, layer, expert)
                assert error(found[route], expected[0]) < bound
    check_guards(workspace)


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_activation(name, dtype, weigh, kind):
    layer, x, ids, weights, experts, workspace = case(name, dtype, "one", 3)
    prepare(x, layer, ids, None, workspace, False)
    blocks, _, places = map_routes_reference(experts)
    workspace = replace(workspace, programs=len(blocks) * 2 * 4)  # one for each step
    workspace = replace(workspace, partial=workspace.partial.new_zeros(2, 100, PLACES, COLUMNS))
    sums = 3 * torch.randn(len(experts), 2 * COLUMNS, device=x.device)
    for route, at in enumerate(places):
        block, place_ = divmod(at, PLACES)
        for i in range(2):
            tile = 2 * block + i
            workspace.partial[0, 4 * tile + tile, place_] = sums[route, i * COLUMNS :][:COLUMNS]
    activate(layer, ids, None, weights if weigh else None, workspace, PLACES, False, kind)
    found = numbers(workspace, "middle", kind, down=True)
    factors = weights.flatten() if weigh else torch.ones(len(experts), device=x.device)
    expected = torch.cat(
        [
            activate_reference(
                sums[i : i + 1], layer, expert, in_slot_order(layer, expert), factors[i : i + 1]
            )
            for i, expert in enumerate(experts)
        ]
    )
    expected = expected.unflatten(1, (-1, 8, 2, 16)).transpose(2, 3).flatten(1)
    assert is_close(found[: len(experts)], expected)


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("sides", ["one", "expert"])
def test_combination(name, dtype, sides):
    layer, x, ids, weights, experts, workspace = case(name, dtype, sides, 3)
    prepare(x, layer, ids, None, workspace, False)
    blocks, _, places = map_routes_reference(experts)
    workspace = replace(workspace, programs=len(blocks) * 8)
    workspace = replace(workspace, partial=workspace.partial.new_zeros(2, 100, PLACES, COLUMNS))
    sums = torch.randn(len(experts), 256, device=x.device)
    for route, at in enumerate(places):
        block, place_ = divmod(at, PLACES)
        workspace.partial[0, 8 * block + block, place_, :256] = sums[route]
    out = torch.full_like(x, float("nan"))
    combine(layer, ids, None, weights, workspace, out, PLACES, False)
    assert error(out, combine_reference(sums, layer, experts, weights)) < BOUND[dtype]
