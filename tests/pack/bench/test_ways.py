"""Each way: what it computes, how it is tuned, and what it says it needs."""

import math
from dataclasses import replace

import pytest
import torch

from qsrt_pack.bench import packed
from qsrt_pack.bench.bf16_moe import choices
from qsrt_pack.bench.bf16_moe.kernel import OutOfResources
from qsrt_pack.bench.choice import Unavailable, tensor_bytes
from qsrt_pack.bench.dense import TorchGrouped, TritonFused
from qsrt_pack.bench.inputs import make_inputs
from qsrt_pack.bench.layers import DenseLayer, copied, dense_layer, random_layer
from qsrt_pack.bench.packed import Packed
from qsrt_pack.bench.shapes import Shape
from qsrt_pack.bench.ways import ASKED_FOR, make_ways
from qsrt_runtime import moe_kernels
from qsrt_runtime.expansion import expanded
from qsrt_runtime.format.geometry import Geometry, TrueSizes
from qsrt_runtime.moe_kernels import FEW_ROWS
from qsrt_runtime.moe_reference import moe_forward_reference
from qsrt_runtime.weights import Traits
from qsrt_runtime.workspace import (
    FEW_TOKENS,
    MAX_PREFILL_TOKENS,
    MAX_TOKENS,
    PrefillWorkspace,
    Workspace,
)

CPU, HALF = torch.device("cpu"), torch.float16
SHAPE = Shape(Geometry(128, 256, 4), TrueSizes(128, 256), 2)


@pytest.fixture(scope="module")
def layers():
    return copied([random_layer(SHAPE.geometry, CPU)], 2)


@pytest.fixture(scope="module")
def dense(layers):
    return [dense_layer(layer, SHAPE.sizes, HALF) for layer in layers]


def inputs_of(tokens, calls=3):
    return make_inputs(SHAPE, tokens, calls, 2, HALF, CPU)


@pytest.mark.usefixtures("interpreted", "one_choice")
@pytest.mark.parametrize("tokens", [1, 18])
def test_every_call_gives_the_layer(layers, dense, machine, tokens, monkeypatch):
    monkeypatch.setattr(packed, "MAX_PREFILL_TOKENS", 10)  # so that 18 go in two parts
    inputs = inputs_of(tokens)
    ways = make_ways(layers, dense, 2, machine, ASKED_FOR)
    assert [way.name for way in ways] == ["qsrt", "qsrt a8", "qsrt expanded", "torch", "triton"]
    for way in ways:
        if way.name == "qsrt a8" and tokens > FEW_TOKENS:
            continue
        choice = way.tune(inputs, lambda _choice: 1.0)
        activation = "a8" if way.name == "qsrt a8" else "a16"
        assert choice.activation == activation
        assert len(choice.calls) == len(choice.outs) == 3
        for given, call, out in zip(inputs, choice.calls, choice.outs, strict=True):
            out.fill_(float("nan"))
            call()
            routed = (layers[given.place], given.ids, given.weights)
            expected = moe_forward_reference(given.x.float(), *routed, activation=activation)
            assert (out.float() - expected).norm() < 3e-3 * expected.norm()


@pytest.mark.parametrize(
    ("tokens", "experts", "kind", "room"),
    [
        (FEW_TOKENS, 1, Workspace, FEW_TOKENS),
        (FEW_ROWS * 20, 40, Workspace, FEW_ROWS * 20),
        (FEW_ROWS * 20 + 1, 40, PrefillWorkspace, FEW_ROWS * 20 + 1),
        (MAX_TOKENS, MAX_TOKENS, Workspace, MAX_TOKENS),
        (MAX_TOKENS + 1, MAX_TOKENS, PrefillWorkspace, MAX_TOKENS + 1),
        (MAX_PREFILL_TOKENS + 1, 4, PrefillWorkspace, MAX_PREFILL_TOKENS),
    ],
)
def test_workspaces_are_as_large_as_they_can_be(tokens, experts, kind, room):
    geometry = Geometry(128, 256, experts)
    way = Packed([replace(random_layer(SHAPE.geometry, CPU), geometry=geometry)], 2)
    workspace = way._workspace(tokens, HALF, torch.device("meta"))
    assert (type(workspace), workspace.tokens) == (kind, room)
    real = way._workspace(20, HALF, CPU)
    held = [value.nbytes for value in vars(real).values() if isinstance(value, torch.Tensor)]
    assert way.buffer_bytes(20, HALF) == sum(held)


@pytest.mark.parametrize("experts", [2, 9, 60])
@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("tokens", [16, 17, 18, 19, 36, 37, 120, 180, 181, 600, 601])
def test_moe_forward_agrees(monkeypatch, tokens, topk, experts):
    taken = []
    for forward in (packed.moe_decode, packed.moe_prefill):
        name = forward.__name__
        monkeypatch.setattr(moe_kernels, name, lambda *_, name=name, **__: taken.append(name))
    layer = random_layer(Geometry(128, 256, experts), CPU)
    x, ids = torch.zeros(tokens, 128, dtype=HALF), torch.zeros(tokens, topk, dtype=torch.int32)
    moe_kernels.moe_forward_kernels(x, layer, ids, torch.zeros(tokens, topk))
    workspace = Packed([layer], topk)._workspace(tokens, HALF, CPU)
    decodes = isinstance(workspace, Workspace)
    assert taken == ["moe_decode" if decodes else "moe_prefill"]


def test_ways_are_made_where_asked_for(layers, machine, monkeypatch):
    made = []
    monkeypatch.setattr(packed, "expanded", lambda layer: made.append(layer) or expanded(layer))
    names = {
        (): ["qsrt"],
        ("a8",): ["qsrt", "qsrt a8"],
        ("expanded", "a8", "expanded"): ["qsrt", "qsrt a8", "qsrt expanded"],
    }
    for also, expected in names.items():
        assert made == []
        assert [way.name for way in make_ways(layers, [], 2, machine, also)] == expected
    assert made == layers  # once each


def test_an_expanded_layer_is_as_large_as_its_labels_and_local_scales(layers, machine):
    stored, wide = make_ways(layers, [], 2, machine, ["expanded"])
    assert stored.expert_bytes == 8 * 3 * (12 * 128 + 64)
    assert wide.expert_bytes == 3 * 128 * 256 + 8 * 3 * 64
    held = [tensor_bytes(replace(each, shared_scales=None)) for each in wide.layers]
    assert held == [4 * wide.expert_bytes + 2 * 4] * 2  # format codes and activations
    pointers = {tensor.data_ptr() for each in wide.layers for tensor in (each.labels, each.atoms)}
    assert len(pointers) == 4
    assert len(wide._workspace(400, HALF, CPU).scratch) == 0
    assert wide.buffer_bytes(400, HALF) == stored.buffer_bytes(400, HALF) - 4 * 2 * 128 * 256


def test_no_memory_for_expanded_layers(layers, with_free, monkeypatch):
    (way,) = make_ways(layers, [], 2, with_free(800_000), ["expanded"])[1:]
    reason = r"labels take 0\.00 GB of memory, 0\.00 GB are free"
    assert way.expert_bytes == 3 * 128 * 256 + 8 * 3 * 64
    for refused in (lambda: way.buffer_bytes(1, HALF), lambda: way.tune([], lambda _choice: 1.0)):
        with pytest.raises(Unavailable, match=reason):
            refused()
    enough = int(2 * 4 * way.expert_bytes / 0.9)
    for free, is_there in ((enough - 10, False), (enough + 10, True)):
        found = make_ways(layers, [], 2, with_free(free), ["expanded"])[1]
        assert isinstance(found, packed.Packed) is is_there

    def fail(_layer):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(packed, "expanded", fail)
    with pytest.raises(Unavailable, match="ran out of memory"):
        make_ways(layers, [], 2, with_free(enough + 10), ["expanded"])[1].buffer_bytes(1, HALF)


def test_quantized_rows_take_few_tokens_and_tensor_cores_with_e4m3(layers, machine, monkeypatch):
    stored, way = make_ways(layers, [], 2, machine, ["a8"])
    assert way.expert_bytes == stored.expert_bytes
    assert way.buffer_bytes(FEW_TOKENS, HALF) == stored.buffer_bytes(FEW_TOKENS, HALF)
    for tokens in (FEW_TOKENS + 1, 65_536):
        with pytest.raises(Unavailable, match="takes up to 16 tokens"):
            way.buffer_bytes(tokens, HALF)

    def refusal(capability):
        found = make_ways(layers, [], 2, replace(machine, capability=capability), ["a8"])[1]
        assert found.expert_bytes == stored.expert_bytes
        with pytest.raises(Unavailable) as raised:
            found.buffer_bytes(1, HALF)
        return str(raised.value)

    assert refusal((8, 6)) == "takes an NVIDIA GPU of capability 8.9 or newer"
    for capability in ((8, 9), (9, 0), (12, 0)):
        ways = make_ways(layers, [], 2, replace(machine, capability=capability), ["a8"])
        assert ways[1].buffer_bytes(1, HALF) > 0
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert refusal((9, 4)) == "takes an NVIDIA GPU of capability 8.9 or newer"


def test_layers_of_other_traits_share_a_workspace_for_any(layers):
    other = replace(layers[1], traits=Traits(0, True))
    assert Packed(layers, 2)._workspace(400, HALF, CPU).inputs == 1
    assert Packed([layers[0], other], 2)._workspace(400, HALF, CPU).inputs == 0


@pytest.mark.usefixtures("few_choices")
@pytest.mark.parametrize(
    ("tokens", "times", "best"),
    [
        (3, {"gemm (16, 64, 1, 1) (64, 64, 1, 1, 2)": 4}, "gemm (16, 64, 1, 1) (64, 64, 1, 1, 2)"),
        (1, {"gemv (4, 1) (2, 1)": 2}, "gemv (4, 1) (2, 1)"),
        (16, {}, "gemm (16, 64, 1, 1) (32, 64, 1, 1, 1)"),
        (
            *(16, {"grouped (32, 128, 64, 4, 1) (32, 128, 64, 4, 1)": 3}),
            "grouped (32, 128, 64, 4, 1) (32, 128, 64, 4, 1)",
        ),
    ],
)
def test_the_fastest_choice_is_taken(dense, tokens, times, best):
    tried = []

    def measure(choice):
        tried.append(choice.name)
        return times.get(choice.name, 9)

    assert TritonFused(dense, 2, pdl=True).tune(inputs_of(tokens), measure).name == best
    assert len(set(tried)) == len(tried) == {1: 4, 3: 2, 16: 4}[tokens]


@pytest.mark.usefixtures("few_choices")
def test_what_does_not_fit_the_gpu_is_passed_over(dense):
    def measure(choice):
        if choice.name.startswith("gemm"):
            raise OutOfResources(1 << 20, 1 << 10, "shared memory")
        return 5.0

    way = TritonFused(dense, 2, pdl=True)
    assert way.tune(inputs_of(16), measure).name.startswith("grouped (16, ")
    with pytest.raises(Unavailable, match="no blocks divide 128 x 256 and fit this GPU"):
        way.tune(inputs_of(3), measure)


def test_sizes_that_blocks_do_not_divide():
    w2 = torch.empty(4, 200, 300, dtype=HALF)
    way = TritonFused([DenseLayer(torch.empty(4, 600, 200, dtype=HALF), w2)], 2, pdl=True)
    shape = Shape(TrueSizes(200, 300).padded(4), TrueSizes(200, 300), 2)
    for tokens in (4, 100):
        with pytest.raises(Unavailable, match="no blocks divide 200 x 300"):
            way.tune(make_inputs(shape, tokens, 4, 1, HALF, CPU), lambda _choice: 1.0)
    found = choices.candidates(2880, 2880, 4)["gemm"]
    assert found["fc1"] and found["fc2"]
    assert all(2880 % n == 0 == 2880 % k for n, k, *_ in [*found["fc1"], *found["fc2"]])


def test_launches_overlap_from_sm_90_on(layers, dense, machine):
    for capability, overlaps in (((9, 0), True), ((10, 0), True), ((8, 9), False)):
        found = make_ways(layers, dense, 2, replace(machine, capability=capability))[2]
        assert found.pdl is overlaps
    assert [way.name for way in make_ways(layers, [], 2, machine)] == ["qsrt"]


def test_what_torch_cannot_do_here(dense):
    def measure(_choice):
        raise RuntimeError("not for this GPU\nat line 7")

    with pytest.raises(Unavailable, match=r"^not for this GPU$"):
        TorchGrouped(dense, 2).tune(inputs_of(3), measure)


def test_buffers_grow_with_tokens_and_layers(dense):
    way = TritonFused(dense, 2, pdl=True)
    few, many = way.buffer_bytes(4, HALF), way.buffer_bytes(4096, HALF)
    assert few == 2 * 8 * (256 * 2 + 4 * 4 * 128)
    assert many > 2 * 8192 * (256 + 128) * 2
    assert TritonFused(dense[:1], 2, pdl=True).buffer_bytes(4096, HALF) == many // 2
    assert not math.isinf(TorchGrouped(dense, 2).buffer_bytes(4096, HALF))
