"""Any number of tokens: the kernels against the best bfloat16 layers of the same shape, in one run.

    python tests/bench/bench_prefill.py [--shapes fruit,qwen30b,glm,mixtral]
                                        [--tokens 1,2,4,8,16,32,...,4096]
                                        [--expanded] [--parts]

As bench_decode, whose layers, routings and figures these are, as is the bfloat16 layer for up to 16
tokens. --expanded: layers expanded to E4M3. --parts: each launch of moe_prefill by itself.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench_decode import DEVICE, SHAPES, baseline_us, graph_us, random_layer, routings, say

from qsrt_pack.bench import bf16_moe
from qsrt_pack.bench.bf16_prefill import Dense, best_us
from qsrt_runtime.expansion import expanded
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.moe_decode import moe_decode
from qsrt_runtime.moe_kernels import decodes
from qsrt_runtime.moe_prefill import block_size, moe_prefill
from qsrt_runtime.moe_reference import moe_forward_reference
from qsrt_runtime.ops.activate_routes import activate_routes
from qsrt_runtime.ops.combine_routes import combine_routes
from qsrt_runtime.ops.expand import expand
from qsrt_runtime.ops.group import group
from qsrt_runtime.ops.grouped_gemm import grouped_gemm
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import (
    SCRATCH_BYTES,
    PrefillWorkspace,
    Workspace,
    make_prefill_workspace,
    make_workspace,
)


def inputs_of(tokens: int, hidden: int, experts: int, topk: int) -> list[tuple[torch.Tensor, ...]]:
    found = []
    for ids, weights in routings(tokens, experts, topk, max(4, min(16, 64 // tokens))):
        x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16)
        found.append((x, ids, weights, torch.empty_like(x)))
    return found


def forward_of(
    layer: LayerWeights, tokens: int, topk: int
) -> tuple[Callable[..., torch.Tensor], Workspace | PrefillWorkspace]:
    sizes = (layer.geometry, topk, tokens)
    if decodes(layer, tokens, topk):
        return moe_decode, make_workspace(*sizes, torch.bfloat16, DEVICE)
    sizes += (layer.traits.inputs, torch.bfloat16, DEVICE)
    scratch = SCRATCH_BYTES if layer.labels is None else 0
    return moe_prefill, make_prefill_workspace(*sizes, scratch_bytes=scratch)


def check(
    layer: LayerWeights,
    forward: Callable[..., torch.Tensor],
    workspace: Workspace | PrefillWorkspace,
    inputs: tuple[torch.Tensor, ...],
) -> float:
    """Relative error against the reference in float32; and two calls are the same to the bit."""
    x, ids, weights, out = inputs
    for name in ("rotated", "middle", "partial", "sums"):
        if hasattr(workspace, name):
            getattr(workspace, name).fill_(float("nan"))
    first = forward(x, layer, ids, weights, workspace, torch.empty_like(out))
    if not torch.equal(first, forward(x, layer, ids, weights, workspace, out)):
        raise SystemExit("two calls differ")
    some = slice(0, 64)
    expected = moe_forward_reference(x[some].float(), layer, ids[some], weights[some])
    error = ((out[some].float() - expected).norm() / expected.norm()).item()
    if not error < 4.4e-3:
        raise SystemExit(f"{len(x)} tokens: relative error {error:.2e}")
    return error


def parts_us(layer: LayerWeights, topk: int, workspace: PrefillWorkspace, inputs: list) -> str:
    """Each launch by itself, of the experts that the scratch has room for."""
    x, ids, weights, out = inputs[0]
    block = block_size(layer, ids.numel())
    up = 0 if layer.traits.inputs == 1 else len(x)
    if layer.labels is None:
        some = len(workspace.scratch) // (2 * layer.geometry.intermediate * layer.geometry.hidden)
        labels = (workspace.scratch, workspace.scratch)
    else:
        some, labels = layer.geometry.experts, layer.matrices()
    experts = range(min(some, layer.geometry.experts))
    buffers = (workspace.first_block, workspace.scratch)
    routes = (workspace, topk, up, block)
    options = {"by_warps": True}
    moe_prefill(x, layer, ids, weights, workspace, out)
    calls = {"group": lambda: group(x, layer, ids, None, workspace, block, True, False)}
    if layer.labels is None:
        calls["expand gate, up"] = lambda: expand(layer, experts, *buffers, down=False, **options)
        calls["expand down"] = lambda: expand(layer, experts, *buffers, down=True, **options)
    calls |= {
        f"gate, up of {len(experts)}": lambda: grouped_gemm(
            workspace.rotated, layer, experts, labels[0], *routes, down=False, **options
        ),
        "activate": lambda: activate_routes(
            layer, ids, None, None, workspace, beside=False, **options
        ),
        "down": lambda: grouped_gemm(
            workspace.middle,
            layer,
            experts,
            labels[1],
            workspace,
            1,
            0,
            block,
            down=True,
            **options,
        ),
        "combine": lambda: combine_routes(layer, ids, None, weights, workspace, out, True),
    }
    return ", ".join(f"{name} {graph_us([call] * 4, 7):.1f}" for name, call in calls.items())


def _run(
    forward: Callable[..., torch.Tensor],
    layer: LayerWeights,
    workspace: Workspace | PrefillWorkspace,
    inputs: tuple[torch.Tensor, ...],
) -> None:
    x, ids, weights, out = inputs
    forward(x, layer, ids, weights, workspace, out)


def bench(name: str, tokens: list[int], is_expanded: bool, parts: bool) -> None:
    hidden, intermediate, experts, topk = SHAPES[name]
    layer = random_layer(Geometry(hidden, intermediate, experts))
    if is_expanded:
        layer = expanded(layer)
    tensors = bf16_moe.make_weights(name)
    for count in tokens:
        forward, workspace = forward_of(layer, count, topk)
        inputs = inputs_of(count, hidden, experts, topk)
        error = check(layer, forward, workspace, inputs[0])
        call = partial(_run, forward, layer, workspace)
        us = graph_us([partial(call, i) for i in inputs])
        text = f"{name:8} M={count:<4} {us:8.1f} us"
        if parts and forward is moe_prefill:
            say(f"{text}: {parts_us(layer, topk, workspace, inputs)}")
            continue
        if (name, count) in bf16_moe.BEST:
            dense, way = baseline_us(name, count, tensors)[1], "fused"
        else:
            dense, way = best_us(Dense(*tensors, count, topk), inputs, graph_us)
        say(
            f"{text}, error {error:.2e}; bfloat16 {dense:8.1f} us ({way}), "
            f"ratio of speeds {dense / us:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default=",".join(str(1 << power) for power in range(13)))
    parser.add_argument("--expanded", action="store_true")
    parser.add_argument("--parts", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.shapes.split(","):
        bench(
            name,
            [int(count) for count in arguments.tokens.split(",")],
            arguments.expanded,
            arguments.parts,
        )


if __name__ == "__main__":
    main()
