"""moe_prefill against the reference, under Triton's interpreter and on a GPU."""

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
    guard,
    inputs,
    place,
    random_layer,
    uneven_sum,
)

from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.moe_prefill import block_size, moe_prefill
from qsrt_runtime.moe_reference import moe_forward_reference
from qsrt_runtime.weights import Traits
from qsrt_runtime.workspace import make_prefill_workspace


def poisoned(layer, topk, dtype, tokens, **options):
    inputs, device = layer.traits.inputs, layer.atoms.device
    return guard(
        make_prefill_workspace(layer.geometry, topk, tokens, inputs, dtype, device, **options)
    )


def run(x, layer, ids, weights, workspace=None, **options):
    workspace = workspace or poisoned(layer, max(1, ids.shape[1]), x.dtype, max(1, len(x)))
    out = torch.full_like(x, float("nan"))
    assert moe_prefill(x, layer, ids, weights, workspace, out, **options) is out
    check_guards(workspace)
    return out


def check(x, layer, ids, weights, **options):
    found = run(x, layer, ids, weights, **options)
    expected = moe_forward_reference(x.float(), layer, ids, weights, **options)
    assert expected.any()
    assert error(found, expected) < BOUND[x.dtype]
    return found


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize(
    ("geometry", "codes", "sides"),
    [
        (SMALL, None, "one"),
        (SMALL, None, "two"),
        (SMALL, None, "expert"),
        (Geometry(256, 512, 3), [0x00, 0x12, 0x21], "expert"),  # every rate mode
        # A tile of columns that is not full; moved pairs.
        (Geometry(640, 768, 2), [0x11, 0x02], "one"),
        (Geometry(1280, 256, 3), None, "one"),  # sums of down are larger than those of gate and up
    ],
    ids=["one", "two", "expert", "rates", "wide", "deep"],
)
def test_is_the_reference(name, dtype, geometry, codes, sides):
    layer = random_layer(geometry, place(name), codes=codes, sides=sides)
    x, ids, weights = inputs(layer, 20, 2, dtype)
    check(x, layer, ids, weights)


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("tokens", [1, 33])
def test_any_number_of_tokens(name, dtype, tokens):
    layer = random_layer(SMALL, place(name))
    x, ids, weights = inputs(layer, tokens, 3, dtype)
    check(x, layer, ids, weights)


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_few_experts_at_a_time(name, dtype):
    layer = random_layer(SMALL, place(name))
    x, ids, weights = inputs(layer, 20, 2, dtype)
    one = 2 * SMALL.intermediate * SMALL.hidden
    expected = run(x, layer, ids, weights)
    for scratch in (1, 2 * one, 3 * one + 5):
        workspace = poisoned(layer, 2, dtype, 20, scratch_bytes=scratch)
        assert torch.equal(run(x, layer, ids, weights, workspace), expected)


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_all_tokens_on_one_expert(name, dtype):  # RT-3b
    layer = random_layer(SMALL, place(name))
    x, ids, weights = inputs(layer, 34, 2, dtype)
    ids[:] = 3
    assert block_size(layer, ids.numel()) < ids.numel()  # several blocks of it
    check(x, layer, ids, weights)


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_no_expert(name, dtype):  # RT-1a, RT-1b
    layer = random_layer(SMALL, place(name))
    x, ids, weights = inputs(layer, 8, 3, dtype)
    ids[1, 2], ids[3] = -1, -1
    weights[1, 2], weights[3] = float("nan"), float("nan")
    found = run(x, layer, ids, weights)
    assert not found[3].any()
    assert torch.equal(found[:3], run(x[:3], layer, ids[:3], weights[:3]))
    assert not run(x, layer, torch.full_like(ids, -1), weights).any()


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_ids_that_name_no_expert_are_counted(name, dtype):
    layer = random_layer(SMALL, place(name))
    x, ids, weights = inputs(layer, 8, 3, dtype)
    ids[0, 0], ids[1, 1] = -1, -1
    expected = run(x, layer, ids, weights)
    wrong = ids.long().clone()
    wrong[0, 0], wrong[1, 1] = 5, -(2**40)
    workspace = poisoned(layer, 3, dtype, 8)
    assert torch.equal(run(x, layer, wrong, weights, workspace), expected)
    assert workspace.invalid_routes() == 2


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_expert_map(name, dtype):  # RT-1c
    layer = random_layer(SMALL, place(name))
    x, ids, weights = inputs(layer, 8, 2, dtype)
    here = torch.tensor([-1, 4, 2, -1, 0, 1, 3], device=ids.device)
    places = torch.stack([torch.randperm(7)[:2] for _ in range(8)]).to(ids.device)
    found = run(x, layer, places, weights, expert_map=here)
    assert torch.equal(found, run(x, layer, here[places], weights))


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_weights_on_the_input(name, dtype):  # RT-8a, RT-8b
    layer = random_layer(SMALL, place(name))
    x, ids, weights = inputs(layer, 8, 2, dtype)
    on = check(x, layer, ids, 4 * weights, weight_on_input=True)
    off = check(x, layer, ids, 4 * weights)
    assert error(on, off.float()) > 0.1


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_ranks_add_up(name, dtype):  # RT-11a
    geometry, device, codes = Geometry(128, 768, 3), place(name), [0x11, 0, 0x02]
    whole = random_layer(geometry, device, codes=codes)
    x, ids, weights = inputs(whole, 8, 2, dtype)
    shares = [range(0, 16), range(16, 24)]
    layers = [random_layer(geometry, device, codes=codes, slots=s) for s in shares]
    total = sum(run(x, layer, ids, weights).float() for layer in layers)
    assert error(total, moe_forward_reference(x.float(), whole, ids, weights)) < BOUND[dtype]


@pytest.mark.parametrize(
    ("change", "error_type", "message"),
    [
        ({"tokens": 1}, ValueError, "2 tokens of 2 routes; the workspace is for 1 of 2"),
        ({"topk": 1}, ValueError, "2 tokens of 2 routes; the workspace is for 2 of 1"),
        ({"dtype": BFLOAT}, ValueError, "the workspace is for .* and torch.bfloat16, the call"),
        ({"traits": Traits(2)}, ValueError, "the layer's traits have 1 inputs; the workspace"),
    ],
)
def test_workspaces_that_do_not_fit(change, error_type, message):
    layer = random_layer(SMALL, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    x, ids, weights = inputs(layer, 2, 2, HALF)
    sizes = {"topk": 2, "dtype": HALF, "tokens": 2}
    sizes |= {k: v for k, v in change.items() if k in sizes}
    workspace = poisoned(replace(layer, traits=change.get("traits", layer.traits)), **sizes)
    with pytest.raises(error_type, match=message):
        run(x, layer, ids, weights, workspace)


@pytest.mark.parametrize(("tokens", "topk"), [(0, 1), (4097, 1), (1, 0)])
def test_workspaces_that_make_no_sense(tokens, topk):
    with pytest.raises(ValueError, match=r"expected|is for 1 to 4096 tokens"):
        make_prefill_workspace(SMALL, topk, tokens, 1, HALF, torch.device("cpu"))


@GPU
@pytest.mark.parametrize("tokens", [17, 129, 700])
def test_the_same_bits_and_at_any_address(tokens):  # RT-7a, RT-7b, RT-9a
    layer = random_layer(Geometry(640, 512, 4), torch.device("cuda"), codes=[0, 0x12, 0x21, 0])
    x, ids, weights = inputs(layer, tokens, 3, BFLOAT)
    found = check(x, layer, ids, weights)
    for _ in range(20):
        assert torch.equal(run(x, layer, ids, weights), found)
    shifted = torch.empty(x.numel() + 1, dtype=BFLOAT, device=x.device)[1:].view_as(x).copy_(x)
    assert torch.equal(run(shifted, layer, ids.long(), weights.double()), found)


@GPU
def test_graphs_and_their_first_call():  # RT-6
    layer = random_layer(Geometry(384, 512, 6), torch.device("cuda"))
    x, ids, weights = inputs(layer, 40, 2, BFLOAT)
    one = 2 * layer.geometry.intermediate * layer.geometry.hidden
    for scratch in (6 * one, 2 * one):  # of down in one share and in two
        sizes = (layer.geometry, 2, 40, 1, BFLOAT, x.device)
        workspace, out = make_prefill_workspace(*sizes, scratch_bytes=scratch), torch.empty_like(x)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            kept = x + 1
            with pytest.raises(RuntimeError, match="not compiled yet; call it once"):
                moe_prefill(x, layer, ids, weights, workspace, out)
        assert kept.shape == x.shape
        moe_prefill(x, layer, ids, weights, workspace, out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            moe_prefill(x, layer, ids, weights, workspace, out)
        for seed in (1, 2):
            for old, new in zip(
                (x, ids, weights), inputs(layer, 40, 2, BFLOAT, seed=seed), strict=True
            ):
                old.copy_(new)
            moe_prefill(x, layer, ids, weights, workspace, out)
            eager = out.clone()
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, eager)


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_sum_in_float32(name, dtype):  # RT-9b
    layer = random_layer(SMALL, place(name))
    x = inputs(layer, 1, 2, dtype)[0]
    ids, weights = uneven_sum(x.device)
    found = run(x, layer, ids, weights)
    unit = moe_forward_reference(x.float(), layer, ids[:, :1], weights[:, 1:2])
    assert error(found, 6 * unit) < 1.2 * BOUND[dtype]
