"""One small call of every kernel of moe_decode, for compute-sanitizer.

compute-sanitizer --tool memcheck python tests/bench/check_decode.py
compute-sanitizer --tool racecheck python tests/bench/check_decode.py
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests" / "runtime"))

from test_moe_decode import BFLOAT, check, inputs, random_layer

from qsrt_runtime.format.geometry import Geometry


def main() -> None:
    device = torch.device("cuda")
    for codes, sides in (([0] * 5, "one"), ([0, 0x11, 0x12, 0x21, 0], "expert")):
        layer = random_layer(Geometry(640, 512, 5), device, codes=codes, sides=sides)
        for tokens in (1, 11):
            x, ids, weights = inputs(layer, tokens, 3, BFLOAT)
            ids[-1, 1] = -1
            check(x, layer, ids, weights)
    torch.cuda.synchronize()
    sys.stdout.write("checked\n")


if __name__ == "__main__":
    main()
