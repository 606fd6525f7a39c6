"""Sweep the bfloat16 layer for few tokens: which configuration is best by shape and batch.

    python tests/bench/bench_bf16.py [--shapes NAME ...] [--tokens M ...] [--known] [--no-pdl]
                                     [--budget SECONDS]

On the first CUDA device; checks the best of each path against plain torch, and prints the times
and the dict `BEST`; with --known it measures what `BEST` holds instead of sweeping.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from qsrt_pack.bench.bf16_moe.choices import TOKENS
from qsrt_pack.bench.bf16_moe.sweep import sweep
from qsrt_pack.bench.shapes import SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--budget", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--known", action="store_true", help="measure BEST, do not sweep")
    parser.add_argument("--no-pdl", dest="pdl", action="store_false")
    options = parser.parse_args()
    results = sweep(options.shapes, options.tokens, options.budget, options.known, options.pdl)
    sys.stdout.write("BEST = {\n")
    for result in results:
        sys.stdout.write(f"    ({result.shape!r}, {result.tokens}): {result.best!r},\n")
    sys.stdout.write("}\n")


if __name__ == "__main__":
    main()
