"""The rotation between lanes, by its PTX, which a few lines here interpret for 32 lanes."""

import re

import pytest
import torch

from qsrt_runtime.format.rotation import rotate
from qsrt_runtime.ops.warps import ptx

LANES = torch.arange(32)
TURNED = (LANES << 1 & 31) | (LANES >> 4)


def run(text, numbers):
    """The outputs $0..$3 of inputs [32, 4] in $4..$7 and the lane in $8."""
    values = {f"${4 + i}": numbers[:, i] for i in range(4)} | {"$8": LANES}
    two = {"add.f32": torch.add, "sub.f32": torch.sub, "and.b32": torch.bitwise_and}
    for statement in re.findall(r"[.a-z][^;{}]*;", text):
        operation, _, rest = statement[:-1].partition(" ")
        if operation.startswith("."):
            continue
        target, *sources = rest.split(",")
        found = [values[s] if s in values else torch.tensor(int(s, 0)) for s in sources]
        if operation in two:
            values[target] = two[operation](*found)
        elif operation == "mov.f32":
            values[target] = found[0]
        elif operation == "setp.ne.b32":
            values[target] = found[0] != found[1]
        elif operation == "selp.f32":
            values[target] = torch.where(found[2], found[0], found[1])
        else:
            assert operation == "shfl.sync.bfly.b32", statement
            values[target] = found[0][LANES ^ int(sources[1])]
    return torch.stack([values[f"${i}"] for i in range(4)], 1)


def signs(pairs, last, odd):
    """As lane_signs: [32, 4], where the slots of `odd` hold the differences of the last step."""
    parity = torch.tensor([bin(v).count("1") & 1 for v in (LANES & TURNED & pairs).tolist()])
    sums = 1 - 2 * parity
    rest = sums * (1 - 2 * (LANES >> last & 1))
    return torch.stack([rest if slot in odd else sums for slot in range(4)], 1)


def fragment(channel):
    inside = channel & 15
    return channel - inside + ((inside & 7) >> 1) * 4 + (inside & 1) + 2 * (inside >> 3)


def word(channel):
    place = fragment(channel)
    return place - (place & 63) + (place & 3) * 16 + ((place & 63) >> 2)


def bit(number):
    return LANES >> number & 1


@pytest.mark.parametrize(
    ("swaps", "first", "sign", "place", "order"),
    [
        (ptx.IN_PLACE, 4 * LANES, (15, 3, (1, 3)), 4 * TURNED, range(4)),
        (
            *(ptx.TO_WORDS, 4 * LANES, (30, 0, (1, 3))),
            64 * bit(3) + 16 * bit(4) + 32 * bit(0) + 4 * bit(1) + 8 * bit(2),
            (0, 2, 1, 3),
        ),
        (
            *(ptx.TO_FRAGMENTS, 4 * LANES, (27, 1, (2, 3))),
            16 * bit(3) + 32 * bit(4) + 64 * bit(0) + 4 * bit(2) + 8 * bit(1),
            range(4),
        ),
        (
            *(ptx.TURNED_TO_WORDS, 4 * TURNED, (15, 4, (1, 3))),
            8 * bit(0) + 64 * (LANES >> 1 & 3) + 16 * (LANES >> 3),
            (0, 2, 1, 3),
        ),
    ],
    ids=["in place", "words", "fragments", "turned to words"],
)
def test_lanes_rotate(swaps, first, sign, place, order):
    x = torch.randn(128, dtype=torch.float64)
    found = run(ptx.rotate(swaps), x[first[:, None] + torch.arange(4)]) * signs(*sign)
    expected = rotate(x) * 128**0.5
    channel = torch.arange(128)
    if swaps is ptx.IN_PLACE:
        target = channel
    elif swaps is ptx.TO_FRAGMENTS:
        target = fragment(channel)
    elif swaps is ptx.TO_WORDS:
        target = word(channel)
    else:  # the record of one side of a pair, whose slots' channels stand between the other's
        target = word(channel // 16 * 32 + channel % 16)
    places = place[:, None] + torch.arange(4)
    result = torch.full((256,), torch.nan, dtype=torch.float64)
    result[places] = found[:, list(order)]
    assert torch.allclose(result[target], expected)
