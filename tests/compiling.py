"""Compiles kernels for GPUs that are not here, and prints what came of each as a line of JSON.

A process of its own runs it: in the tests' own, Triton may be the interpreter.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from qsrt_runtime.format.geometry import LOCAL_BYTES, Geometry
from qsrt_runtime.ops.activate.kernel import activate_kernel
from qsrt_runtime.ops.activate_routes.kernel import activate_routes_kernel
from qsrt_runtime.ops.activate_routes.warps.kernel import activate_routes_warps_kernel
from qsrt_runtime.ops.combine.kernel import combine_kernel
from qsrt_runtime.ops.combine_routes.kernel import combine_routes_kernel
from qsrt_runtime.ops.combine_routes.warps.kernel import combine_routes_warps_kernel
from qsrt_runtime.ops.expand.kernel import expand_kernel
from qsrt_runtime.ops.expand.warps.kernel import expand_warps_kernel
from qsrt_runtime.ops.expand.warps.ptx import group
from qsrt_runtime.ops.expert_gemm.kernel import plain_kernel
from qsrt_runtime.ops.fused.alone import division
from qsrt_runtime.ops.fused.alone import ptx as alone_ptx
from qsrt_runtime.ops.fused.alone.kernel import alone_kernel
from qsrt_runtime.ops.fused.kernel import fused_kernel
from qsrt_runtime.ops.fused.product import ptx
from qsrt_runtime.ops.fused.product.kernel import product_kernel
from qsrt_runtime.ops.fused.product.quantized import ptx as quantized_ptx
from qsrt_runtime.ops.fused.product.quantized.kernel import quantized_kernel
from qsrt_runtime.ops.fused.product.wide.kernel import wide_kernel
from qsrt_runtime.ops.group.kernel import group_kernel
from qsrt_runtime.ops.grouped_gemm import tiles
from qsrt_runtime.ops.grouped_gemm.kernel import grouped_gemm_kernel
from qsrt_runtime.ops.grouped_gemm.ptx import convert
from qsrt_runtime.ops.label_gemm import ptx as labels_ptx
from qsrt_runtime.ops.label_gemm.kernel import label_gemm_kernel
from qsrt_runtime.ops.prepare.kernel import prepare_kernel
from qsrt_runtime.ops.warps.ptx import BY_ARITHMETIC, copy

GEOMETRY = Geometry(1024, 512, 64)
TYPES = {
    **dict.fromkeys(("x", "labels", "rotated"), "*bf16"),
    **dict.fromkeys(("codes", "activations", "exponents"), "*u8"),
    "scales": "*fp16",
    "partial": "*fp32",
    "weights": "*fp32",
}
INTEGERS = (
    *("num_rows", "num_routes", "num_ids", "num_experts"),
    *("programs", "num_tokens", "layer", "first_pair", "matrix_rows"),
    *("first_expert", "end_expert"),
)
COMMON = {
    "PROGRAMS": 132,
    "HIDDEN": 1024,
    "BUNDLE": GEOMETRY.bundle_bytes,
    "LOCAL": GEOMETRY.bundle_bytes - LOCAL_BYTES,
    "SLOT_STRIDE": GEOMETRY.slot_stride(64),
    "PAIRS": 2,
    "SCALE_ROWS": 64,
    "TOPK": 16,
    "HAS_MAP": True,
    "SINGLE": False,
    "BY_ROUTE": True,
    "WEIGH": True,
    "PARTS": 2,
    "PLACES": 8,
    "QUANTIZED": False,
}
# Whether routes are blocks of their own, pairs by arithmetic, stage.
FUSED = {
    **{f"grouped_{i}": (False, BY_ARITHMETIC[4], i) for i in range(3)},
    **{f"several_{i}": (False, BY_ARITHMETIC[5], i) for i in range(3)},
    **{f"one_token_{i}": (True, BY_ARITHMETIC[4], i) for i in range(3)},
}
# Tokens and programs: of few programs each needs rows of many pairs, which all make then.
ALONE = {"1": (1, 132), "2": (2, 132), "spread": (2, 8)}
CAPABILITIES = {  # others' are 80 and 90
    **dict.fromkeys(("product", "product_several", "wide"), (90,)),
    **dict.fromkeys((f"fused_{name}" for name in FUSED), (90,)),
    **dict.fromkeys((f"alone_{name}" for name in ALONE), (90,)),
    **dict.fromkeys(("expand_warps", "expand_warps_uniform"), (90,)),
    **dict.fromkeys(("prepare_a8", "activate_a8", "plain_a8"), (89, 90)),
    **dict.fromkeys(("prepare_a8_numbers", "activate_a8_numbers"), (90,)),
    **dict.fromkeys(("quantized", "quantized_down"), (89, 90)),
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
PRODUCTS = ptx.products(True)
PRODUCT_PAIRS = {
    "product": BY_ARITHMETIC[4],
    "product_several": BY_ARITHMETIC[5],
}
GEMM = {"TILES": 2, "STEPS": 16, "DIVISOR": 1, "DOWN": False}
KERNELS = {
    "prepare": (prepare_kernel, {"INPUTS": 2, "BLOCKS": 2, "ROUTES": 256}, {}, 4),
    "activate": (
        activate_kernel,
        {"BETA": 4.0, "LINEAR_BETA": 25.0},
        {"out": "*bf16", "slab": "*u8"},
        4,
    ),
    "combine": (
        combine_kernel,
        {"TILES": 2, "STEPS": 8, "CHOICES": 16, "CHUNK": 2},
        {"out": "*bf16"},
        4,
    ),
    "group": (
        group_kernel,
        {
            **{"INPUTS": 2, "BLOCKS": 2, "EXPERTS": 64, "ROUTES": 4096, "BLOCK": 128},
            **{"BY_WORD": False, "HAS_PLACES": True, "WARPS": 0},
        },
        {},
        4,
    ),
    "expand": (
        expand_kernel,
        {"ROWS": 1024, "STEPS": 16, "DOWN": False, "UNIFORM": False, "WIDTH": 128},
        {"labels": "*u8", "out": "*u8"},
        4,
    ),
    "expand_warps_uniform": (
        expand_warps_kernel,
        {
            **{"ROWS": 1024, "TILES": 2, "STEPS": 16, "DOWN": False, "UNIFORM": True},
            "GROUP": group(BY_ARITHMETIC[4]),
            "BESIDE": True,
        },
        {"labels": "*u8", "out": "*u8"},
        32,
    ),
    "expand_warps": (
        expand_warps_kernel,
        {
            **{"ROWS": 1024, "TILES": 2, "STEPS": 16, "DOWN": False, "UNIFORM": False},
            "GROUP": group(BY_ARITHMETIC[4]),
            "BESIDE": True,
        },
        {"labels": "*u8", "out": "*u8"},
        32,
    ),
    **{
        f"grouped_gemm_{block}": (
            grouped_gemm_kernel,
            {
                **{"ROWS": 1024, "DEPTH": 1024, "DIVISOR": 8, "DOWN": False, "BLOCK": block},
                **{"WIDTH": tiles(block, False)[0], "STAGES": tiles(block, False)[2], "GROUP": 8},
                **{f"CONVERT{i}": convert(i, torch.bfloat16) for i in range(4)},
            },
            {"out": "*fp32", "weights": "*i32"},
            tiles(block, False)[1],
        )
        for block in (16, 32, 64, 128)
    },
    "activate_routes": (
        activate_routes_kernel,
        {"BETA": 4.0, "LINEAR_BETA": 25.0},
        {"out": "*bf16", "slab": "*u8", "sums": "*fp32"},
        4,
    ),
    "group_warps": (
        group_kernel,
        {
            **{"INPUTS": 2, "BLOCKS": 2, "EXPERTS": 64, "ROUTES": 4096, "BLOCK": 128},
            **{"BY_WORD": True, "HAS_PLACES": False, "WARPS": 32},
        },
        {},
        32,
    ),
    "activate_routes_warps": (
        activate_routes_warps_kernel,
        {"BETA": 4.0, "LINEAR_BETA": 25.0, "WARPS": 4, "BESIDE": False},
        {"out": "*bf16", "slab": "*u8", "sums": "*fp32"},
        4,
    ),
    "combine_routes_warps": (
        combine_routes_warps_kernel,
        {"WARPS": 4},
        {"out": "*bf16", "sums": "*bf16"},
        4,
    ),
    "combine_routes": (combine_routes_kernel, {}, {"out": "*bf16", "sums": "*bf16"}, 4),
    "plain": (plain_kernel, {**GEMM, "UNIFORM": False, "WIDTH": 128}, {"out": "*fp32"}, 8),
    **{
        name: (
            product_kernel,
            {**GEMM, "UNIFORM": True, "STEP": ptx.step(pairs, True), "PRODUCTS": PRODUCTS},
            {"out": "*fp32"},
            32,
        )
        for name, pairs in PRODUCT_PAIRS.items()
    },
    "wide": (
        wide_kernel,
        {
            **{"TILES": 2, "STEPS": 16, "DIVISOR": 8, "DOWN": False, "PLACES": 32},
            **{"STEP2": ptx.wide_step(BY_ARITHMETIC[4], True, 2)},
            **{"STEP4": ptx.wide_step(BY_ARITHMETIC[4], True, 4)},
        },
        {"out": "*fp32"},
        32,
    ),
    "label_gemm": (
        label_gemm_kernel,
        {
            **{"ROWS": 1024, "TILES": 2, "STEPS": 16, "DIVISOR": 8, "DOWN": False},
            **{"LOAD": labels_ptx.load(8192), "STEP": labels_ptx.step(torch.bfloat16)},
        },
        {"out": "*fp32", "weights": "*i32"},
        32,
    ),
    "prepare_a8": (
        prepare_kernel,
        {"INPUTS": 2, "BLOCKS": 2, "ROUTES": 256, "QUANTIZED": True},
        {"rotated": "*u8"},
        4,
    ),
    "activate_a8": (
        activate_kernel,
        {"BETA": 4.0, "LINEAR_BETA": 25.0, "QUANTIZED": True},
        {"out": "*u8", "slab": "*u8"},
        4,
    ),
    "prepare_a8_numbers": (
        prepare_kernel,
        {"INPUTS": 2, "BLOCKS": 2, "ROUTES": 256, "QUANTIZED": True},
        {},
        4,
    ),
    "activate_a8_numbers": (
        activate_kernel,
        {"BETA": 4.0, "LINEAR_BETA": 25.0, "QUANTIZED": True},
        {"out": "*bf16", "slab": "*u8"},
        4,
    ),
    "plain_a8": (
        plain_kernel,
        {**GEMM, "UNIFORM": False, "WIDTH": 128},
        {"out": "*fp32", "x": "*u8", "labels": "*u8"},
        8,
    ),
    "quantized": (
        quantized_kernel,
        GEMM,
        {"out": "*fp32", "x": "*u8", "labels": "*u8"},
        32,
    ),
    "quantized_down": (
        quantized_kernel,
        {**GEMM, "DOWN": True, "STEPS": 8},
        {"out": "*fp32", "x": "*u8", "labels": "*u8"},
        32,
    ),
    **{
        f"alone_{name}": (
            alone_kernel,
            {
                **{"HELD": 2, "CHOICES": 16, "UNIFORM": True, "TOKENS": tokens, "INPUTS": 2},
                **{"BETA": 4.0, "LINEAR_BETA": 25.0, "WEIGH": "output"},
                **{"STEP": ptx.step(BY_ARITHMETIC[4], True, alone_ptx.LABELS)},
                **{"PRODUCTS": PRODUCTS, **division(1024, 2, 16 * tokens, programs)},
            },
            {"out": "*bf16", "ids": "*i64"},
            32,
        )
        for name, (tokens, programs) in ALONE.items()
    },
    **{
        f"fused_{name}": (
            fused_kernel,
            {
                **{"HELD": 2, "DIVISOR": 16, "CHOICES": 16, "UNIFORM": True, "SINGLE": single},
                **{"STAGE": stage, "BY_ROUTE": not single},
                **{"BETA": 4.0, "LINEAR_BETA": 25.0, "WEIGH": "output"},
                **{"STEP": ptx.step(pairs, True), "PRODUCTS": PRODUCTS},
                "LONG": name.startswith("several"),
            },
            {"out": "*bf16", "middle": "*bf16", "gate_up": "*fp32", "down": "*fp32"},
            32,
        )
        for name, (single, pairs, stage) in FUSED.items()
    },
}


def compiled(name: str, capability: int) -> dict[str, object]:
    """Shared memory, registers' spills and stores to shared memory of one kernel."""
    kernel, constants, types, warps = KERNELS[name]
    labels = quantized_ptx.LABELS.get(divmod(capability, 10), 0)
    by_bytes = {"COPY": copy(labels), "STEP": quantized_ptx.step(BY_ARITHMETIC[4], labels)}
    constants = COMMON | by_bytes | constants | {"PDL": capability >= 90}
    names = kernel.arg_names
    types = {"slab": "*i32"} | TYPES | types
    signature = {}
    for argument in names:
        if argument in constants:
            signature[argument] = "constexpr"
        else:
            kind = "i32" if argument in INTEGERS else "*i32"
            signature[argument] = types.get(argument, kind)
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*"
    }
    values = {(names.index(k),): v for k, v in constants.items() if k in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    found = triton.compile(source, target=target, options={"num_warps": warps})
    text = found.asm["ptx"]
    return {
        "kernel": name,
        "capability": capability,
        "shared": found.metadata.shared,
        "stores": len(re.findall(r"\bst\.shared", text)),
        "layouts": found.asm["ttgir"].count("convert_layout"),
        "e4m3": len(re.findall(r"mma\.sync\S*\.e4m3\.e4m3", text)),
        "flushes": len(re.findall(r"\b(?:add|sub|mul|fma|max|min)\.\S*ftz", text)),
        "barriers": len(re.findall(r"\bbar(?:rier)?\.", text)),
        "written_barriers": len(re.findall(r"\b(?:gpu|ttg)\.barrier", found.asm["ttgir"])),
        **usage(found.asm["cubin"]),
    }


def usage(cubin: bytes) -> dict[str, int | None]:
    """Bytes of a thread's registers that lie in memory, and of shared memory that the kernel itself
    sets aside; None where Triton has no cuobjdump.
    """
    if not CUOBJDUMP.is_file():
        return {"stack": None, "static": None}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        name: int(re.search(rf"{word}:(\d+)", printed)[1])
        for name, word in (("stack", "STACK"), ("static", "SHARED"))
    }


if __name__ == "__main__":
    for name in KERNELS:
        for capability in CAPABILITIES.get(name, (80, 90)):
            sys.stdout.write(json.dumps(compiled(name, capability)) + "\n")
