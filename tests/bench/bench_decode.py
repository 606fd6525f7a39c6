"""Decoding a few tokens: moe_decode against a bfloat16 layer of the same shape, in one run.

    python tests/bench/bench_decode.py [--shapes fruit,qwen30b,glm,mixtral] [--tokens 1,2,4,8,16]
                                       [--variants] [--a8]

Layers of random words. Every figure is the median of CUDA graph replays over several sets of
inputs, whose experts together are larger than L2, in microseconds a layer. Both sides take hidden
states, ids and weights. Each shape is first checked against the reference. --a8 times W4A8, by each
product that this GPU has for it, beside W4A16.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from qsrt_pack.bench import bf16_moe
from qsrt_runtime import moe_decode as decode
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.moe_decode import moe_decode
from qsrt_runtime.moe_reference import moe_forward_reference
from qsrt_runtime.ops import fused
from qsrt_runtime.ops.expert_gemm import expert_gemm
from qsrt_runtime.ops.fused import alone, product
from qsrt_runtime.ops.fused.product.quantized import quantized_product
from qsrt_runtime.ops.fused.product.quantized.ptx import LABELS
from qsrt_runtime.ops.warps.ptx import BY_ARITHMETIC
from qsrt_runtime.weights import LayerWeights, traits_of
from qsrt_runtime.workspace import Workspace, make_workspace

SHAPES = {  # H, I, E, top-k
    "fruit": (1024, 512, 256, 8),
    "qwen30b": (2048, 768, 128, 8),
    "glm": (6144, 2048, 32, 8),
    "mixtral": (4096, 14336, 8, 2),
}
DEVICE = torch.device("cuda")
PATTERNS = (*BY_ARITHMETIC.values(), (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14))
LAUNCHES = {  # THREE_LAUNCH_WEIGHTS
    "three launches": 1 << 62,
    "five": 0,
}
REPEATS = 15
Call = Callable[[], object]


def random_layer(geometry: Geometry, codes: torch.Tensor | None = None) -> LayerWeights:
    """A layer of random words, with finite scales that all experts share; on the GPU."""
    experts, hidden, size = geometry.experts, geometry.hidden, geometry.bundle_bytes
    generator = torch.Generator(DEVICE).manual_seed(0)

    def scales(*shape: int) -> torch.Tensor:
        draw = torch.rand(shape, generator=generator, device=DEVICE) + 0.5
        return (draw * (draw * 1024 % 2 - 1).sign() / 16).half()

    shape = (geometry.slots, geometry.slot_stride(experts) // 4)
    words = torch.randint(-(2**31), 2**31 - 1, shape, generator=generator, device=DEVICE)
    atoms = words.int().view(torch.uint8)
    for expert in range(experts):
        local = slice(expert * size + 36 * hidden, (expert + 1) * size)
        atoms[:, local] = scales(geometry.slots, 96).view(torch.uint8)
    shared = scales(3, 1, hidden)
    shared[1] = shared[0]
    shared = shared.expand(3, experts, hidden).contiguous()
    if codes is None:
        codes = torch.zeros(experts, dtype=torch.uint8)
    codes = codes.to(DEVICE)
    plain = torch.zeros(experts, dtype=torch.uint8, device=DEVICE)
    slots = range(geometry.slots)
    return LayerWeights(
        0, geometry, slots, codes, shared, atoms, plain, traits=traits_of(shared, codes)
    )


def routings(tokens: int, experts: int, topk: int, sets: int) -> list[tuple[torch.Tensor, ...]]:
    """Ids and weights; consecutive tokens take experts that others have not had, if they can."""
    generator = torch.Generator().manual_seed(0)
    found, left = [], []
    for _ in range(sets):
        rows = []
        for _ in range(tokens):
            if tokens * topk > experts or len(left) < topk:
                left = torch.randperm(experts, generator=generator).tolist()
            rows.append(left[:topk])
            left = left[topk:]
        weights = torch.rand(tokens, topk, generator=generator) + 0.1
        weights /= weights.sum(1, keepdim=True)
        found.append((torch.tensor(rows, dtype=torch.int32, device=DEVICE), weights.to(DEVICE)))
    return found


def graph_us(calls: list[Call], repeats: int = REPEATS) -> float:
    """Median microseconds of one call, in replays of a graph of all."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(calls))
    return statistics.median(times)


def check(
    layer: LayerWeights,
    topk: int,
    workspace: Workspace,
    tokens: int,
    dtype: torch.dtype,
    activation: str = "a16",
) -> float:
    """Relative error against the reference in float32; and two calls are the same to the bit.

    Of "a8" against the reference with quantized rows.
    """
    ids, weights = routings(tokens, layer.geometry.experts, topk, 1)[0]
    x = torch.randn(tokens, layer.geometry.hidden, device=DEVICE, dtype=dtype)
    for value in (workspace.rotated, workspace.middle, workspace.partial):
        value.fill_(float("nan"))
    options = {"activation": activation}
    outs = [torch.empty_like(x) for _ in range(2)]
    for out in outs:
        moe_decode(x, layer, ids, weights, workspace, out, **options)
    if not torch.equal(*outs):
        raise SystemExit("two calls differ")
    expected = moe_forward_reference(x.float(), layer, ids, weights, **options)
    error = ((outs[0].float() - expected).norm() / expected.norm()).item()
    if not error < 4.4e-3:
        raise SystemExit(f"{tokens} tokens: relative error {error:.2e}")
    return error


def calls_of(
    layer: LayerWeights, topk: int, workspace: Workspace, tokens: int, activation: str = "a16"
) -> list[Call]:
    sets = max(2, min(16, 64 // tokens))
    calls = []
    for ids, weights in routings(tokens, layer.geometry.experts, topk, sets):
        x = torch.randn(tokens, layer.geometry.hidden, device=DEVICE, dtype=torch.bfloat16)
        out = torch.empty_like(x)
        arguments = (x, layer, ids, weights, workspace, out)
        calls.append(partial(moe_decode, *arguments, activation=activation))
    return calls


def baseline_us(name: str, tokens: int, tensors: list[torch.Tensor]) -> tuple[float, float, float]:
    """The best bfloat16 layer: routing outside, routing inside; and outside without overlap.

    One token goes by a path that needs no routing.
    """
    path, config = bf16_moe.BEST[name, tokens]
    bench = bf16_moe.Bench(name, tokens, tensors)
    outside = bench.time(path, config)
    apart = bf16_moe.Bench(name, tokens, tensors, pdl=False).time(path, config)
    if path == "gemv":
        return outside, outside, apart
    calls = [
        lambda inputs=inputs, launches=launches: [
            inputs[3].run(inputs[1]),
            *(launch.run() for launch in launches),
        ]
        for inputs, launches in zip(bench.inputs, bench.launches(path, config), strict=True)
    ]
    return outside, bf16_moe.graph_time(calls), apart


def bench(name: str, tokens: list[int]) -> None:
    hidden, intermediate, experts, topk = SHAPES[name]
    geometry = Geometry(hidden, intermediate, experts)
    layer = random_layer(geometry)
    workspace = make_workspace(geometry, topk, 16, torch.bfloat16, DEVICE)
    tensors = bf16_moe.make_weights(name)
    for count in tokens:
        error = check(layer, topk, workspace, count, torch.bfloat16)
        us = graph_us(calls_of(layer, topk, workspace, count))
        outside, inside, apart = baseline_us(name, count, tensors)
        noted = bf16_moe.TARGETS.get((name, count))
        say(
            f"{name:8} M={count:<2} {us:7.1f} us, error {error:.2e}; bfloat16 {inside:7.1f} us "
            f"(routing outside {outside:.1f}, launches apart {apart:.1f}, noted before {noted}), "
            f"ratio of speeds {inside / us:.2f}"
        )


def compile_all(name: str) -> None:
    """Fill Triton's cache, so that shapes can be compiled by several processes."""
    hidden, intermediate, experts, topk = SHAPES[name]
    layer = random_layer(Geometry(hidden, intermediate, experts))
    workspace = make_workspace(layer.geometry, topk, 16, torch.bfloat16, DEVICE)
    for count in (1, 2, 4, 8, 16):
        calls_of(layer, topk, workspace, count)[0]()
    torch.cuda.synchronize()


@contextmanager
def in_launches(limit: int) -> Iterator[None]:
    """Calls go in three launches up to so many weights, others in five."""
    with patch.object(alone, "ALONE_TOKENS", 0), patch.object(fused, "THREE_LAUNCH_WEIGHTS", limit):
        yield


def bench_variants(name: str, tokens: list[int]) -> None:
    """What arithmetic_pairs and launches were chosen by, and what overlap and warps gain."""
    hidden, intermediate, experts, topk = SHAPES[name]
    geometry = Geometry(hidden, intermediate, experts)
    layer = random_layer(geometry)
    workspace = make_workspace(geometry, topk, 16, torch.bfloat16, DEVICE)
    for count in tokens:
        found = []
        for pairs in PATTERNS:
            chosen = {"arithmetic_pairs": lambda *_, pairs=pairs: pairs}
            with ExitStack() as patches:
                for module in (alone, fused, product):
                    patches.enter_context(patch.multiple(module, **chosen))
                us = graph_us(calls_of(layer, topk, workspace, count), 7)
            found.append(f"pairs {','.join(map(str, pairs))} by arithmetic {us:.1f}")
        for what, limit in LAUNCHES.items():
            with in_launches(limit):
                us = graph_us(calls_of(layer, topk, workspace, count), 7)
            found.append(f"{what} {us:.1f}")
        with patch.object(decode, "ways", lambda _device: (True, False)):
            us = graph_us(calls_of(layer, topk, workspace, count), 7)
        found.append(f"launches one after another {us:.1f}")
        with patch.object(decode, "ways", lambda _device: (False, True)):
            us = graph_us(calls_of(layer, topk, workspace, count), 7)
        found.append(f"plain {us:.1f}")
        say(f"{name:8} M={count:<2} " + ", ".join(found))


def bench_a8(name: str, tokens: list[int]) -> None:
    """What arithmetic.QUICKER and moe_decode.a8_product are to say."""
    hidden, intermediate, experts, topk = SHAPES[name]
    layer = random_layer(Geometry(hidden, intermediate, experts))
    workspace = make_workspace(layer.geometry, topk, 16, torch.bfloat16, DEVICE)
    chosen = decode.a8_product(layer, DEVICE)
    ways = {"bytes, plain": (expert_gemm, torch.uint8)}
    if decode.ways(DEVICE)[0]:
        ways["numbers in bfloat16"] = (product.product, torch.bfloat16)
    if torch.cuda.get_device_capability() in LABELS:
        ways["bytes by warps"] = (quantized_product, torch.uint8)
    for count in tokens:
        us = graph_us(calls_of(layer, topk, workspace, count))
        found = [f"W4A16 {us:.1f} us"]
        with in_launches(LAUNCHES["five"]):
            us = graph_us(calls_of(layer, topk, workspace, count))
        found.append(f"in five launches {us:.1f}")
        for what, way in ways.items():
            with patch.object(decode, "a8_product", lambda *_, way=way: way):
                error = check(layer, topk, workspace, count, torch.bfloat16, "a8")
                us = graph_us(calls_of(layer, topk, workspace, count, "a8"))
            is_chosen = " (chosen)" if way == chosen else ""
            found.append(f"W4A8 by {what}{is_chosen} {us:.1f}, error {error:.2e}")
        say(f"{name:8} M={count:<2} " + ", ".join(found))


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,2,4,8,16")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--a8", action="store_true", help="W4A8 beside W4A16")
    parser.add_argument("--compile", action="store_true", help="run everything once, untimed")
    arguments = parser.parse_args()
    tokens = [int(count) for count in arguments.tokens.split(",")]
    for name in arguments.shapes.split(","):
        if arguments.compile:
            compile_all(name)
        elif arguments.a8:
            bench_a8(name, tokens)
        elif arguments.variants:
            bench_variants(name, tokens)
        else:
            bench(name, tokens)


if __name__ == "__main__":
    main()
