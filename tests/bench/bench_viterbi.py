"""Speed and error of the trellis searches on the CPU, on standard normal weights.

    python tests/bench/bench_viterbi.py [--tiles 1024] [--repeats 3] [--threads N]

Each line: method, bits, threads, best and median weights a second, and at the best of the scales
tried the mean squared error over the mean square. The alternatives are timed in turn, so that
what else the machine does falls on all of them.
"""

import statistics
import time

import click
import torch

from qsrt_pack.encode.viterbi import METHODS, search
from qsrt_runtime.format import codebook

# The fast search wants smaller ones than the exact: it finds less near the codebook's edge.
SCALES = {2: (1.4, 1.45, 1.5, 1.55), 3: (1.34, 1.38, 1.42, 1.46), 4: (1.28, 1.32, 1.36, 1.4)}


def error(targets: torch.Tensor, edges: torch.Tensor, bits: int) -> float:
    """Mean squared error of closed paths over the mean square of the targets, [n, 256] both."""
    states = sum(edges.long().roll(i, 1) << (i * bits) for i in range(-(-16 // bits)))
    distance = codebook.values(bits)[states & 0xFFFF] - targets
    return float(distance.double().square().sum() / targets.double().square().sum())


def measure(weights: torch.Tensor, bits: int, repeats: int) -> None:
    """Time the methods in turn on one tensor of weights, [n, 256] float32, and print their rows."""
    seconds = {method: [] for method in METHODS}
    errors = {method: {} for method in METHODS}
    for method in METHODS:
        search(weights[:1], bits, method)  # compiles
    for repeat in range(max(repeats, len(SCALES[bits]))):
        scale = SCALES[bits][repeat % len(SCALES[bits])]
        for method in METHODS:
            start = time.perf_counter()
            edges = search(weights * scale, bits, method)
            seconds[method].append(time.perf_counter() - start)
            errors[method][scale] = error(weights * scale, edges, bits)
    for method in METHODS:
        best = weights.numel() / min(seconds[method])
        median = weights.numel() / statistics.median(seconds[method])
        scale = min(errors[method], key=errors[method].get)
        click.echo(
            f"{method:6} {bits:4} {torch.get_num_threads():7} {best:12,.0f} {median:12,.0f} "
            f"{errors[method][scale]:9.5f} {scale:6.2f}"
        )


@click.command()
@click.option("--tiles", default=1024, help="Tiles of 256 weights.")
@click.option("--repeats", default=3, help="Times each search runs, at least once a scale.")
@click.option("--threads", default=torch.get_num_threads(), help="Threads to search on.")
def main(tiles: int, repeats: int, threads: int) -> None:
    """Print one row for each method and rate."""
    torch.set_num_threads(threads)
    weights = torch.randn(tiles, 256, generator=torch.Generator().manual_seed(0))
    click.echo(f"{weights.numel():,} weights")
    click.echo("method bits threads best/second    median/s       MSE  scale")
    for bits in codebook.BITS:
        measure(weights, bits, repeats)


if __name__ == "__main__":
    main()
