"""Small calls of moe_decode by each way of an sm_90, for compute-sanitizer.

compute-sanitizer --tool memcheck python tests/bench/check_decode.py
compute-sanitizer --tool racecheck python tests/bench/check_decode.py
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from layers import BFLOAT, BOUND, error, inputs, poisoned, random_layer

from qsrt_runtime import moe_decode as module
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.moe_decode import moe_decode
from qsrt_runtime.moe_reference import moe_forward_reference
from qsrt_runtime.ops import fused


def main() -> None:
    device = torch.device("cuda")
    for codes, sides in (([0] * 5, "one"), ([0, 0x11, 0x12, 0x21, 0], "expert")):
        layer = random_layer(Geometry(640, 512, 5), device, codes=codes, sides=sides)
        for tokens in (1, 11):
            x, ids, weights = inputs(layer, tokens, 3, BFLOAT)
            ids[-1, 1] = -1
            expected = moe_forward_reference(x.float(), layer, ids, weights)
            for limit, ways in ((1 << 27, (True, True)), (0, (True, True)), (0, (False, False))):
                fused.MAX_WEIGHTS = limit
                module.ways = lambda _device, ways=ways: ways
                out = torch.empty_like(x)
                moe_decode(x, layer, ids, weights, poisoned(layer, 3, BFLOAT), out)
                if not error(out, expected) < BOUND[BFLOAT]:
                    raise SystemExit("wrong")
    torch.cuda.synchronize()
    sys.stdout.write("checked\n")


if __name__ == "__main__":
    main()
