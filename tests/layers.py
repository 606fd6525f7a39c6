"""Layers of random words and inputs for the runtime's kernels."""

from dataclasses import replace

import pytest
import torch

from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.weights import LayerWeights, traits_of
from qsrt_runtime.workspace import COLUMNS, PLACES, PrefillWorkspace, make_workspace

HALF, BFLOAT = torch.float16, torch.bfloat16
BOUND = {HALF: 6e-4, BFLOAT: 4.4e-3}
GPU = pytest.mark.gpu
# The interpreter's bfloat16 product is wrong, so that type runs on a GPU alone.
DEVICES = [
    pytest.param("cpu", HALF, id="cpu-float16"),
    pytest.param("cuda", HALF, marks=GPU, id="cuda-float16"),
    pytest.param("cuda", BFLOAT, marks=GPU, id="cuda-bfloat16"),
]
SMALL = Geometry(128, 256, 5)
BAD = {torch.int32: 1 << 30, torch.uint8: 0x7F}  # the latter is E4M3's NaN
GUARD = 1 << 16  # elements behind each buffer of a workspace


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


def poisoned(layer, topk, dtype, tokens=16, programs=None):
    """A workspace in which what is not written, or is written beyond its end, is noticed.

    programs: of the products, None for those of the device.
    """
    workspace = make_workspace(layer.geometry, topk, tokens, dtype, layer.atoms.device)
    if programs is not None:
        more = max(0, programs - workspace.programs) * PLACES * COLUMNS
        partial = workspace.partial.new_empty(2, workspace.partial.shape[1] + more)
        sent = workspace.sent.new_empty(2, workspace.sent.shape[1] + programs, COLUMNS, 2)
        calls = workspace.calls.new_empty(programs)
        workspace = replace(workspace, programs=programs, partial=partial, sent=sent, calls=calls)
    workspace = guard(workspace)
    for counter in (workspace.sent, workspace.sent_rows, workspace.calls):
        counter.zero_()
    return workspace


def guard(workspace):
    """The same buffers full of what is noticed, with a guard behind each."""
    guarded = {}
    for name, value in vars(workspace).items():
        if isinstance(value, torch.Tensor):
            bad = float("nan") if value.is_floating_point() else BAD[value.dtype]
            whole = torch.full(
                (value.numel() + GUARD,), bad, dtype=value.dtype, device=value.device
            )
            guarded[name] = whole[: value.numel()].view(value.shape)
    if isinstance(workspace, PrefillWorkspace):  # the same memory
        guarded["down_sums"] = guarded["sums"].view(workspace.down_sums.dtype)
    return replace(workspace, **guarded)


def check_guards(workspace):
    """Nothing was written beyond a buffer's end."""
    for name, value in vars(workspace).items():
        if isinstance(value, torch.Tensor) and name != "down_sums":
            behind = value.new_empty(0).set_(value.untyped_storage())[value.numel() :]
            assert len(behind) == GUARD
            bad = behind.isnan() if behind.is_floating_point() else behind == BAD[value.dtype]
            assert bad.all()


def error(found, expected):
    return ((found.float() - expected).norm() / expected.norm()).item()


def uneven_sum(device):
    """Ids and weights of one token: expert 2 eight times, whose weights are 6 if nothing is lost.

    Summed in less than float32, the ones vanish beside 256 (RT-9b).
    """
    weights = torch.tensor([[256.0, 1, 1, 1, 1, 1, 1, -256]], device=device)
    return torch.full((1, 8), 2, dtype=torch.int32, device=device), weights
