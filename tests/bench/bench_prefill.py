"""Many tokens: moe_prefill against the best of two bfloat16 layers of the same shape, in one run.

    python tests/bench/bench_prefill.py [--shapes fruit,qwen30b,glm,mixtral]
                                        [--tokens 16,32,64,128,256,512,1024,2048,4096] [--parts]

As bench_decode, whose layers, routings and figures these are. --parts: each launch by itself.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench_decode import DEVICE, SHAPES, graph_us, random_layer, routings, say

from qsrt_pack.bench import bf16_moe
from qsrt_pack.bench.bf16_prefill import Dense, best_us
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.moe_prefill import block_size, moe_prefill
from qsrt_runtime.moe_reference import moe_forward_reference
from qsrt_runtime.ops.activate_routes import activate_routes
from qsrt_runtime.ops.combine_routes import combine_routes
from qsrt_runtime.ops.expand import expand
from qsrt_runtime.ops.group import group
from qsrt_runtime.ops.grouped_gemm import grouped_gemm
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import PrefillWorkspace, make_prefill_workspace

SETS = 4  # of inputs; all experts together are larger than L2


def inputs_of(tokens: int, hidden: int, experts: int, topk: int) -> list[tuple[torch.Tensor, ...]]:
    found = []
    for ids, weights in routings(tokens, experts, topk, SETS):
        x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16)
        found.append((x, ids, weights, torch.empty_like(x)))
    return found


def check(layer: LayerWeights, workspace: PrefillWorkspace, inputs: tuple) -> float:
    x, ids, weights, out = inputs
    for value in (workspace.rotated, workspace.middle, workspace.sums):
        value.fill_(float("nan"))
    workspace.scratch.fill_(0x7F)
    first = moe_prefill(x, layer, ids, weights, workspace, torch.empty_like(out))
    if not torch.equal(first, moe_prefill(x, layer, ids, weights, workspace, out)):
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
    some = len(workspace.scratch) // (2 * layer.geometry.intermediate * layer.geometry.hidden)
    experts = range(min(some, layer.geometry.experts))
    moe_prefill(x, layer, ids, weights, workspace, out)
    options = {"by_warps": True, "pdl": False}
    calls = {
        "group": lambda: group(x, layer, ids, None, workspace, block, False),
        f"expand gate, up of {len(experts)}": lambda: expand(
            layer, experts, workspace, down=False, **options
        ),
        "gate, up": lambda: grouped_gemm(
            workspace.rotated, layer, experts, workspace, topk, up, block, down=False, pdl=False
        ),
        "activate": lambda: activate_routes(layer, ids, None, None, workspace, False),
        "expand down": lambda: expand(layer, experts, workspace, down=True, **options),
        "down": lambda: grouped_gemm(
            workspace.middle, layer, experts, workspace, 1, 0, block, down=True, pdl=False
        ),
        "combine": lambda: combine_routes(layer, ids, None, weights, workspace, out, False),
    }
    return ", ".join(f"{name} {graph_us([call] * 4, 7):.1f}" for name, call in calls.items())


def bench(name: str, tokens: list[int], parts: bool) -> None:
    hidden, intermediate, experts, topk = SHAPES[name]
    layer = random_layer(Geometry(hidden, intermediate, experts))
    w13, w2 = bf16_moe.make_weights(name)
    for count in tokens:
        workspace = make_prefill_workspace(
            layer.geometry, topk, count, layer.traits.inputs, torch.bfloat16, DEVICE
        )
        inputs = inputs_of(count, hidden, experts, topk)
        error = check(layer, workspace, inputs[0])
        calls = [
            lambda i=i, w=workspace: moe_prefill(i[0], layer, i[1], i[2], w, i[3]) for i in inputs
        ]
        us = graph_us(calls)
        if parts:
            say(f"{name:8} M={count:<4} {us:8.1f} us: {parts_us(layer, topk, workspace, inputs)}")
            continue
        dense, way = best_us(Dense(w13, w2, count, topk), inputs, graph_us)
        say(
            f"{name:8} M={count:<4} {us:8.1f} us, error {error:.2e}; bfloat16 {dense:8.1f} us "
            f"({way}), ratio of speeds {dense / us:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="16,32,64,128,256,512,1024,2048,4096")
    parser.add_argument("--parts", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.shapes.split(","):
        bench(name, [int(count) for count in arguments.tokens.split(",")], arguments.parts)


if __name__ == "__main__":
    main()
