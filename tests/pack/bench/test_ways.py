"""Each way: what it computes, how it is tuned, and what it says it needs."""

import math
from dataclasses import replace

import pytest
import torch

from qsrt_pack.bench import packed
from qsrt_pack.bench.bf16_moe import choices
from qsrt_pack.bench.bf16_moe.kernel import OutOfResources
from qsrt_pack.bench.choice import Unavailable
from qsrt_pack.bench.dense import TorchGrouped, TritonFused
from qsrt_pack.bench.inputs import make_inputs
from qsrt_pack.bench.layers import DenseLayer, copied, dense_layer, random_layer
from qsrt_pack.bench.packed import Packed
from qsrt_pack.bench.shapes import Shape
from qsrt_pack.bench.ways import make_ways
from qsrt_runtime import moe_kernels
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
    for way in make_ways(layers, dense, 2, machine):
        choice = way.tune(inputs, lambda _choice: 1.0)
        assert len(choice.calls) == len(choice.outs) == 3
        for given, call, out in zip(inputs, choice.calls, choice.outs, strict=True):
            out.fill_(float("nan"))
            call()
            expected = moe_forward_reference(
                given.x.float(), layers[given.place], given.ids, given.weights
            )
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
