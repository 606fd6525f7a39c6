"""Compiles the dense layers' kernels for GPUs that are not here; a line of JSON for each.

A process of its own runs it: in the tests' own, Triton may be the interpreter.
"""

import json
import sys
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from qsrt_pack.bench.bf16_moe import kernel as few
from qsrt_pack.bench.bf16_prefill import TILES
from qsrt_pack.bench.bf16_prefill import kernel as many

HIDDEN, INTER, TOP_K = 2048, 768, 8
TYPES = {
    **dict.fromkeys(("x", "w13", "w2", "act", "out", "parts"), "*bf16"),
    **dict.fromkeys(("partial", "route_weights"), "*fp32"),
    **dict.fromkeys(("routes", "max_blocks", "num_routes", "num_experts"), "i32"),
}
SIZES = {"TOP_K": TOP_K, "HIDDEN": HIDDEN, "INTER": INTER}
GEMM = {"ROWS": 16, "BLOCK_N": 32, "BLOCK_K": 128, "STAGES": 3}
PREFETCH = {"FIRST": 528, "LINES": 4}
PRODUCT = {"ROWS": INTER, "DEPTH": HIDDEN, "DIVISOR": TOP_K, "EXPERTS": 128, "GROUP": 8}


def product(tile: tuple[int, ...], gated: bool) -> tuple[Any, dict, dict, dict]:
    block, width, step, warps, stages = tile
    sizes = PRODUCT | {"BLOCK": block, "STEP": step, "GATED": gated}
    sizes["WIDTH"] = min(width, 128) if gated else width
    options = {"num_warps": warps, "num_stages": stages}
    return many.product_kernel, sizes, {"weights": "*bf16"}, options


KERNELS = {
    "route": (few.route_kernel, {"LANES": 128, "ROWS": 16}, {}, {"num_warps": 16}),
    "fc1_gemm": (few.fc1_gemm, SIZES | GEMM, {}, {"num_warps": 4}),
    "fc2_gemm": (few.fc2_gemm, SIZES | GEMM | PREFETCH | {"SPLIT": 1}, {}, {"num_warps": 4}),
    "combine": (
        few.combine_kernel,
        SIZES | {"SPLIT": 1, "BLOCK_N": 256},
        {"weights": "*fp32"},
        {"num_warps": 2},
    ),
    "fc1_gemv": (few.fc1_gemv, SIZES | {"BLOCK_N": 2, "BLOCK_K": 1024}, {}, {"num_warps": 4}),
    "fc2_gemv": (
        few.fc2_gemv,
        SIZES | PREFETCH | {"BLOCK_N": 2, "BLOCK_K": 512, "UNROLL": True, "AHEAD": 8},
        {"weights": "*fp32"},
        {"num_warps": 2},
    ),
    "sort": (many.sort_kernel, {"EXPERTS": 128, "ROUTES": 4096, "BLOCK": 64}, {}, {}),
    "sum": (many.sum_kernel, {"HIDDEN": HIDDEN, "TOPK": TOP_K, "WIDTH": 256}, {}, {}),
    **{
        f"product {tile} {'gated' if gated else 'plain'}": product(tile, gated)
        for tile in TILES
        for gated in (True, False)
    },
}


def compiled(name: str, capability: int) -> dict[str, object]:
    """Shared memory that one kernel takes."""
    kernel, constants, types, options = KERNELS[name]
    constants = constants | {"GDC": capability >= 90}
    names = kernel.arg_names
    types = dict.fromkeys(constants, "constexpr") | TYPES | types
    signature = {argument: types.get(argument, "*i32") for argument in names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*"
    }
    values = {(names.index(k),): v for k, v in constants.items() if k in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    found = triton.compile(source, target=target, options=options)
    return {"kernel": name, "capability": capability, "shared": found.metadata.shared}


if __name__ == "__main__":
    for name in KERNELS:
        for capability in (80, 90):
            sys.stdout.write(json.dumps(compiled(name, capability)) + "\n")
