"""moe_decode against the reference, under Triton's interpreter and on a GPU."""

import pytest
import torch

from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.moe_decode import moe_decode
from qsrt_runtime.moe_reference import moe_forward_reference
from qsrt_runtime.weights import LayerWeights, Traits, traits_of
from qsrt_runtime.workspace import make_workspace

HALF, BFLOAT = torch.float16, torch.bfloat16
BOUND = {HALF: 6e-4, BFLOAT: 4.4e-3}
GPU = pytest.mark.gpu
# The interpreter's bfloat16 product is wrong, so that type runs on a GPU alone.
PLACES = [
    pytest.param("cpu", HALF, id="cpu-float16"),
    pytest.param("cuda", HALF, marks=GPU, id="cuda-float16"),
    pytest.param("cuda", BFLOAT, marks=GPU, id="cuda-bfloat16"),
]
SMALL = Geometry(128, 256, 5)


def place(name):
    if name == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels run on the GPU here, not in the interpreter")
    return torch.device(name)


def random_layer(geometry, device, *, codes=None, sides="one", layer=1, seed=0, slots=None):
    """Random words and scales. sides: hidden scales of "one" input, "two", or each "expert"'s."""
    generator = torch.Generator().manual_seed(seed)
    experts, hidden, size = geometry.experts, geometry.hidden, geometry.bundle_bytes

    def scales(*shape):
        draw = torch.randn(shape, generator=generator)
        return ((0.5 + draw.abs()) * draw.sign() / 4).half()

    shape = (geometry.slots, geometry.slot_stride(experts))
    atoms = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    for expert in range(experts):
        local = slice(expert * size + 36 * hidden, (expert + 1) * size)
        atoms[:, local] = scales(geometry.slots, 96).view(torch.uint8)
    shared = scales(3, experts if sides == "expert" else 1, hidden)
    if sides == "one":
        shared[1] = shared[0]
    shared = shared.expand(3, experts, hidden).contiguous()
    codes = torch.tensor(codes or [0] * experts, dtype=torch.uint8)
    activations = torch.arange(experts, dtype=torch.uint8) % 2
    slots = slots or range(geometry.slots)
    tensors = [codes, shared, atoms[slots.start : slots.stop].contiguous(), activations]
    return LayerWeights(
        layer, geometry, slots, *(t.to(device) for t in tensors), traits=traits_of(shared, codes)
    )


def inputs(layer, tokens, topk, dtype, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, layer.geometry.hidden, generator=generator).to(dtype)
    rows = [torch.randperm(layer.geometry.experts, generator=generator) for _ in range(tokens)]
    ids = torch.stack([row[:topk] for row in rows]).int()
    weights = torch.rand(tokens, topk, generator=generator)
    device = layer.atoms.device
    return x.to(device), ids.to(device), weights.to(device)


def poisoned(layer, topk, dtype, tokens=16):
    """A workspace in which what is not written is noticed."""
    workspace = make_workspace(layer.geometry, topk, tokens, dtype, layer.atoms.device)
    for value in (workspace.rotated, workspace.middle, workspace.partial):
        value.fill_(float("nan"))
    for value in (workspace.block_experts, workspace.block_routes, workspace.route_places):
        value.fill_(1 << 30)
    return workspace


def run(x, layer, ids, weights, workspace=None, **options):
    workspace = workspace or poisoned(layer, ids.shape[1], x.dtype)
    return moe_decode(
        x, layer, ids, weights, workspace, torch.full_like(x, float("nan")), **options
    )


def error(found, expected):
    return ((found.float() - expected).norm() / expected.norm()).item()


def check(x, layer, ids, weights, **options):
    found = run(x, layer, ids, weights, **options)
    expected = moe_forward_reference(x.float(), layer, ids, weights, **options)
    assert expected.any()
    assert error(found, expected) < BOUND[x.dtype]
    cosine = torch.nn.functional.cosine_similarity(found.float().flatten(), expected.flatten(), 0)
    assert cosine > 0.99999
    return found


@pytest.mark.parametrize(("name", "dtype"), PLACES)
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
    x, ids, weights = inputs(layer, 3, 2, dtype)
    found = check(x, layer, ids, weights)
    check(x, layer, ids, weights, weight_on_input=True)
    general = LayerWeights(**{**vars(layer), "traits": Traits()})
    assert error(run(x, general, ids, weights), found.float()) < BOUND[dtype]


@pytest.mark.parametrize(("name", "dtype"), PLACES)
@pytest.mark.parametrize("tokens", [1, 2, 7, 16])
def test_any_number_of_tokens(name, dtype, tokens):
    layer = random_layer(SMALL, place(name))
    check(*inputs_of(layer, tokens, dtype))


def inputs_of(layer, tokens, dtype):
    x, ids, weights = inputs(layer, tokens, 3, dtype)
    return x, layer, ids, weights


@pytest.mark.parametrize(("name", "dtype"), PLACES)
def test_all_tokens_on_one_expert(name, dtype):  # RT-3b
    layer = random_layer(SMALL, place(name))
    x, ids, weights = inputs(layer, 16, 2, dtype)
    ids[:] = torch.tensor([3, -1])
    check(x, layer, ids, weights)
    ids[:, 1] = 3  # the same expert twice for a token, 32 routes of it
    check(x, layer, ids, weights)


@pytest.mark.parametrize(("name", "dtype"), PLACES)
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


@pytest.mark.parametrize(("name", "dtype"), PLACES)
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


@pytest.mark.parametrize(("name", "dtype"), PLACES)
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


@pytest.mark.parametrize(("name", "dtype"), PLACES)
def test_ranks_add_up(name, dtype):  # RT-11a
    geometry, device = Geometry(128, 768, 3), place(name)
    whole = random_layer(geometry, device, codes=[0x11, 0, 0x02])
    x, ids, weights = inputs(whole, 2, 2, dtype)
    shares = [range(0, 16), range(16, 24)]
    layers = [random_layer(geometry, device, codes=[0x11, 0, 0x02], slots=s) for s in shares]
    total = sum(run(x, layer, ids, weights).float() for layer in layers)
    expected = moe_forward_reference(x.float(), whole, ids, weights)
    assert error(total, expected) < BOUND[dtype]


@pytest.mark.parametrize(("name", "dtype"), PLACES)
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
    ],
)
def test_arguments_that_do_not_fit(change, error_type, message):  # RT-7a, RT-7c
    layer = random_layer(SMALL, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    x, ids, weights = inputs(layer, 2, 2, HALF)
    sizes = {"topk": 2, "dtype": HALF, "tokens": 16}
    sizes |= {k: v for k, v in change.items() if k in sizes}
    given = {"x": x, "topk_ids": ids, "topk_weights": weights, "out": torch.empty_like(x)}
    given |= {k: v(given[k]) for k, v in change.items() if k in given}
    with pytest.raises(error_type, match=message):
        moe_decode(layer=layer, workspace=poisoned(layer, **sizes), **given)


@pytest.mark.parametrize(("name", "dtype"), PLACES)
def test_views_off_their_alignment(name, dtype):  # RT-7a
    layer = random_layer(SMALL, place(name))
    x, ids, weights = inputs(layer, 2, 2, dtype)

    def shifted(value):
        return torch.cat([value.flatten()[:1], value.flatten()])[1:].view(value.shape)

    expected = run(x, layer, ids, weights)
    assert torch.equal(run(*map(shifted, [x]), layer, *map(shifted, [ids, weights])), expected)


@pytest.mark.parametrize(("tokens", "topk"), [(0, 1), (17, 1), (1, 0)])
def test_workspaces_that_make_no_sense(tokens, topk):
    with pytest.raises(ValueError, match=r"expected|is for 1 to 16 tokens"):
        make_workspace(SMALL, topk, tokens, HALF, torch.device("cpu"))
