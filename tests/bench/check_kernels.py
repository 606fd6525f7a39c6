"""Small calls of moe_decode and moe_prefill by each way of an sm_90, for compute-sanitizer.

compute-sanitizer --tool memcheck python tests/bench/check_kernels.py
compute-sanitizer --tool racecheck python tests/bench/check_kernels.py decode

Or a8, labels, prefill; by default all four. Racecheck takes long: it is best run by several
processes, one of each.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from layers import BFLOAT, BOUND, error, inputs, poisoned, random_layer

from qsrt_runtime import moe_decode as decode
from qsrt_runtime import moe_prefill as prefill
from qsrt_runtime.expansion import expanded
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.moe_reference import moe_forward_reference
from qsrt_runtime.ops import fused
from qsrt_runtime.ops.expert_gemm import expert_gemm
from qsrt_runtime.ops.fused import alone
from qsrt_runtime.ops.fused.product import product
from qsrt_runtime.ops.fused.product.quantized import quantized_product
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import make_prefill_workspace

# Tokens up to which there is one launch and weights up to which there are three; by warps,
# dependent launches; pairs of down's steps up to which, in one launch, each program makes its rows.
WAYS = (
    ((2, 1 << 30), (True, True), 4),
    ((2, 1 << 30), (True, True), 0),
    ((0, 1 << 30), (True, True), 4),
    ((0, 0), (True, True), 4),
    ((0, 0), (False, False), 4),
)

FEW = (1, 2, 11)
TOKENS = {
    "decode": (*FEW, 40),  # the last in blocks of 32 places, where pairs are of 3 bits
    "a8": FEW,
    "labels": FEW,
    "prefill": (70,),
}


def check_decode(layer: LayerWeights, tokens: int) -> None:
    x, ids, weights = inputs(layer, tokens, 3, BFLOAT)
    ids[-1, 1] = -1
    expected = moe_forward_reference(x.float(), layer, ids, weights)
    for limits, ways, pairs in WAYS:
        alone.ALONE_TOKENS, fused.THREE_LAUNCH_WEIGHTS = limits
        alone.MOST_PAIRS = pairs
        decode.ways = lambda _device, ways=ways: ways
        out = torch.empty_like(x)
        workspace = poisoned(layer, 3, BFLOAT, max(tokens, 16))
        decode.moe_decode(x, layer, ids, weights, workspace, out)
        if not error(out, expected) < BOUND[BFLOAT]:
            raise SystemExit("wrong")


def check_a8(layer: LayerWeights, tokens: int) -> None:
    """By each product of quantized rows that an sm_90 has."""
    decode.ways = lambda _device: (True, True)
    x, ids, weights = inputs(layer, tokens, 3, BFLOAT)
    ids[-1, 1] = -1
    expected = moe_forward_reference(x.float(), layer, ids, weights, activation="a8")
    ways = [(product, BFLOAT), (expert_gemm, torch.uint8)]
    if layer.traits.uniform:
        ways.append((quantized_product, torch.uint8))
    for way in ways:
        decode.a8_product = lambda *_, way=way: way
        out, workspace = torch.empty_like(x), poisoned(layer, 3, BFLOAT)
        decode.moe_decode(x, layer, ids, weights, workspace, out, activation="a8")
        if not error(out, expected) < 3e-3:
            raise SystemExit("wrong")


def check_labels(layer: LayerWeights, tokens: int) -> None:
    """Expanded: the labels, and the product of few tokens."""
    decode.ways = lambda _device: (True, True)
    x, ids, weights = inputs(layer, tokens, 3, BFLOAT)
    ids[-1, 1] = -1
    expected = moe_forward_reference(x.float(), layer, ids, weights)
    wide, out = expanded(layer), torch.empty_like(x)
    decode.moe_decode(x, wide, ids, weights, poisoned(wide, 3, BFLOAT), out)
    if not error(out, expected) < BOUND[BFLOAT]:
        raise SystemExit("wrong")


def check_prefill(layer: LayerWeights, tokens: int) -> None:
    x, ids, weights = inputs(layer, tokens, 3, BFLOAT)
    ids[-1, 1] = -1
    expected = moe_forward_reference(x.float(), layer, ids, weights)
    sizes = (layer.geometry, 3, tokens, layer.traits.inputs, BFLOAT, x.device)
    for ways in ((True, True), (False, False)):
        prefill.ways = lambda _device, ways=ways: ways
        out = torch.empty_like(x)
        prefill.moe_prefill(x, layer, ids, weights, make_prefill_workspace(*sizes), out)
        if not error(out, expected) < BOUND[BFLOAT]:
            raise SystemExit("wrong")


CHECKS = {"decode": check_decode, "a8": check_a8, "labels": check_labels, "prefill": check_prefill}


def main() -> None:
    wanted = sys.argv[1:] or list(CHECKS)
    device = torch.device("cuda")
    for codes, sides in (([0] * 5, "one"), ([0, 0x11, 0x12, 0x21, 0], "expert")):
        layer = random_layer(Geometry(640, 512, 5), device, codes=codes, sides=sides)
        for name in wanted:
            for tokens in TOKENS[name]:
                CHECKS[name](layer, tokens)
    torch.cuda.synchronize()
    sys.stdout.write(f"checked {', '.join(wanted)}\n")


if __name__ == "__main__":
    main()
