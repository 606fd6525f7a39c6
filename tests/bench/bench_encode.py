"""How fast a GPU encodes: the tile search at each rate, and whole conversions.

    python tests/bench/bench_encode.py [--folder FOLDER] [--experts 32]

Prints a table and, as its last line, the figures as JSON. FOLDER (by default a temporary one)
takes a synthetic checkpoint of one layer of GLM-like experts, 6144 x 2048, 75 MB each, and its
package. Without a GPU it runs the plain kernel on a few tiles under Triton's interpreter and
compares them with the reference; it exits 1 where they differ.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import triton
import triton.language as tl

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import checkpoints  # noqa: E402

from qsrt_pack import job  # noqa: E402
from qsrt_pack.encode import lockstep  # noqa: E402
from qsrt_pack.encode.expert import Guide, Settings, expert_steps  # noqa: E402
from qsrt_pack.encode.viterbi import search  # noqa: E402
from qsrt_pack.encode.viterbi.kernel import search_kernel  # noqa: E402
from qsrt_pack.encode.viterbi.reference import search_reference  # noqa: E402
from qsrt_runtime.format import codebook, tile  # noqa: E402

SCALES = {2: 1.5, 3: 1.46, 4: 1.4}  # of a normal source, where the error is least
TILES, CHECKED = 132 * 4 * 16, 64
HIDDEN, INTERMEDIATE = 6144, 2048
WEIGHTS = 3 * HIDDEN * INTERMEDIATE
Report = dict[str, object]


def median_seconds(work: Callable[[], object], repeats: int = 7) -> float:
    """Median of device times, after one run that compiles."""
    work()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def squared_errors(targets: torch.Tensor, edges: torch.Tensor, bits: int) -> torch.Tensor:
    """Of each tile, in float64."""
    values = codebook.values(bits, targets.device)[tile.states_of_edges(edges, bits)]
    return (targets.double() - values.double()).square().sum(1)


def noise(count: int, bits: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(bits)
    return (SCALES[bits] * torch.randn(count, 256, generator=generator)).to(device)


def check_interpreted() -> bool:
    """The plain kernel against the reference, on the CPU."""
    same = True
    for bits in (2, 3, 4):
        targets = noise(2, bits, "cpu")
        equal = torch.equal(search_kernel(targets, bits), search_reference(targets, bits))
        sys.stdout.write(f"K{bits}: 2 tiles, {'as the reference' if equal else 'DIFFERENT'}\n")
        same &= equal
    return same


def tile_search(bits: int) -> Report:
    """From rotated tiles to packed words, and how near the reference the paths are."""
    targets = noise(TILES, bits, "cuda")

    def work() -> torch.Tensor:
        return tile.pack_edges(search_kernel(targets, bits), bits)

    seconds = median_seconds(work)
    found = squared_errors(targets, tile.edges(work(), bits), bits)
    few = targets[:CHECKED]
    reference = squared_errors(few, search_reference(few, bits), bits)
    return {
        "what": f"tiles K{bits}",
        "million_weights_per_second": targets.numel() / seconds / 1e6,
        "mse": float(found.sum() / targets.double().square().sum()),
        "mean_error_over_reference": float((found[:CHECKED] / reference).mean()),
    }


@triton.jit
def arithmetic(OUT, rounds, OPERATIONS: tl.constexpr):
    """Rounds of the packed search's arithmetic on eight independent words of each thread."""
    thread = tl.arange(0, 512)
    a, b, c, d = thread, thread + 1, thread + 2, thread + 3
    e, f, g, h = thread + 4, thread + 5, thread + 6, thread + 7
    for _ in range(rounds):
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            OPERATIONS,
            "=r,=r,=r,=r,=r,=r,=r,=r,0,1,2,3,4,5,6,7",
            [a, b, c, d, e, f, g, h],
            dtype=(tl.int32,) * 8,
            is_pure=False,
            pack=1,
        )
    tl.store(OUT + tl.program_id(0) * 512 + thread, a + b + c + d + e + f + g + h)


def arithmetic_rate() -> Report:
    """How fast the search could be if it did nothing but its arithmetic.

    For two edges: a subtraction, a multiply-add, half a minimum of three (of two words each, on
    words of two halves); a weight costs 2 * 65,536 edges.
    """
    lines = []
    for word in range(64):
        x, y, z = f"${word % 8}", f"${(word + 3) % 8}", f"${(word + 5) % 8}"
        lines.append(f"sub.f16x2 {x}, {y}, {x}; fma.rn.f16x2 {x}, {x}, {x}, {z};")
        if word % 2:
            lines.append(f"min.f16x2 {x}, {x}, {y}; min.f16x2 {x}, {x}, {z};")
    processors, rounds = torch.cuda.get_device_properties(0).multi_processor_count, 2000
    out = torch.empty(processors * 512, dtype=torch.int32, device="cuda")
    text = "\n".join(lines)
    seconds = median_seconds(lambda: arithmetic[(processors,)](out, rounds, text, num_warps=16))
    edges = processors * 512 * rounds * 64 * 2 / seconds
    return {"what": "arithmetic alone", "million_weights_per_second": edges / 2 / 65536 / 1e6}


def copy_rate() -> Report:
    """The device's own copy, bytes read and written."""
    a = torch.randn(1 << 28, device="cuda")
    b = torch.empty_like(a)
    seconds = median_seconds(lambda: torch.add(a, 1, out=b))
    return {"what": "copy", "terabytes_per_second": 2 * a.nbytes / seconds / 1e12}


def feedback(experts: int = 4) -> Report:
    """Some GLM-like experts with a Hessian for every matrix, in lockstep."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return 0.02 * torch.randn(*shape, generator=generator, device="cuda")

    rows = {size: draw(2 * size, size) for size in (HIDDEN, INTERMEDIATE)}
    moments = {size: x.T @ x for size, x in rows.items()}
    shapes = {"w1": (INTERMEDIATE, HIDDEN), "w3": (INTERMEDIATE, HIDDEN)}
    shapes["w2"] = (HIDDEN, INTERMEDIATE)
    weights = [{name: draw(*shape) for name, shape in shapes.items()} for _ in range(experts)]

    def guide(w: dict[str, torch.Tensor]) -> Guide:
        return Guide(
            scores=torch.arange(INTERMEDIATE, dtype=torch.float64, device="cuda"),
            inputs=moments[HIDDEN],
            down=lambda _gate, _up: (moments[INTERMEDIATE], w["w2"]),
            choose=lambda decoded: next(iter(decoded)),
        )

    def work() -> None:
        steps = [
            expert_steps(w, layer=0, expert=i, settings=Settings(device="cuda"), guide=guide(w))
            for i, w in enumerate(weights)
        ]
        lockstep.run(lockstep.together(steps), search)
        torch.cuda.synchronize()

    work()  # compiles
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    rate = experts * WEIGHTS / seconds / 1e6
    return {"what": f"LDLQ, {experts} experts", "million_weights_per_second": rate}


def write_model(folder: Path, experts: int, layers: int = 1) -> Path:
    """A checkpoint of GLM-like experts, random normal, bfloat16."""
    value = checkpoints.config(
        num_hidden_layers=layers,
        num_experts=experts,
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        head_dim=HIDDEN // 4,
    )
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        weight = 0.02 * torch.randn(*shape, generator=generator, device="cuda")
        return weight.to(torch.bfloat16).cpu()

    weights = {}
    for layer, expert in itertools.product(range(layers), range(experts)):
        weights[f"model.layers.{layer}.mlp.gate.weight"] = draw(experts, HIDDEN)
        for part in checkpoints.PARTS:
            shape = (HIDDEN, INTERMEDIATE) if part == "down_proj" else (INTERMEDIATE, HIDDEN)
            weights[checkpoints.expert_key(layer, expert, part)] = draw(*shape)
    return checkpoints.write_checkpoint(folder, config_value=value, weights=weights, shards=8)


def conversion(folder: Path, experts: int) -> list[Report]:
    """A whole convert, from reading to the seal, twice; the second run's figures."""
    model = write_model(folder / "model", experts)
    device = (torch.device("cuda", 0),)
    for _ in range(2):
        start = time.perf_counter()
        prepared = job.prepare(
            model, folder / "out", Settings(device="cuda"), overwrite=True, devices=device
        )
        planned = time.perf_counter()
        job.run(prepared)
        end = time.perf_counter()
    total = experts * WEIGHTS / 1e6
    return [
        {
            "what": f"convert, {experts} experts",
            "million_weights_per_second": total / (end - start),
        },
        {"what": "of it checks and plan", "seconds": planned - start},
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--experts", type=int, default=32)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        return not check_interpreted()
    reports = [tile_search(bits) for bits in (3, 2, 4)] + [arithmetic_rate(), copy_rate()]
    reports.append(feedback())
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        reports += conversion(Path(folder), arguments.experts)
    for report in reports:
        figures = [f"{key} {v:.6g}" for key, v in report.items() if isinstance(v, float)]
        sys.stdout.write(f"{report['what']:24}{', '.join(figures)}\n")
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    sys.stdout.write(json.dumps({**facts, "reports": reports}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
