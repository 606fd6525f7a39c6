"""The codebook `sqg_xor_cheb_t12`: from a 16-bit trellis state to its E4M3 label.

Everything is integer arithmetic, so the tables are the same on every platform.
"""

import functools

import torch

NAME = "sqg_xor_cheb_t12"
BITS = (2, 3, 4)
STATES = 1 << 16
# SHA-256 of the K2, K3 and K4 label tables one after another.
TABLES_SHA256 = "24f49a880d70c223573ad2f9ded95361a91e04a93e2b87cac772ebf896c02ab1"

# A 12-bit rank folds to f = rank - 2048 (positive side) or 2047 - rank (negative side); the
# label's magnitude byte is the number of breakpoints at or below f.
_BREAKPOINTS = (
    *(1, 3, 5, 7, 10, 12, 14, 16, 18, 20, 22, 24, 27, 29, 31, 33, 36, 40, 45, 49, 53, 57, 62, 66),
    *(72, 81, 89, 98, 106, 115, 123, 132, 145, 161, 178, 195, 212, 229, 246, 263, 288, 321, 355),
    *(388, 421, 454, 486, 519, 567, 630, 693, 754, 814, 873, 930, 986, 1068, 1170, 1267, 1356),
    *(1439, 1514, 1583, 1646, 1727, 1816, 1884, 1935, 1972, 1998, 2016, 2028, 2039, 2045, 2047),
)
_CPU = torch.device("cpu")
_MULTIPLIER = 0x3FA7D929
_INCREMENT = 0xC928FD8E


@functools.cache
def staircase() -> torch.Tensor:
    """T12, the E4M3 label of every 12-bit rank: [4096] uint8, monotone in value, zero as 0x00."""
    magnitude = torch.bucketize(torch.arange(2048), torch.tensor(_BREAKPOINTS), right=True)
    negative = torch.where(magnitude > 0, magnitude | 0x80, 0).flip(0)
    return torch.cat([negative, magnitude]).to(torch.uint8)


def ranks(bits: int) -> torch.Tensor:
    """The 16-bit rank of every state, a bijection: [65536] int64.

    bits: 2, 3 or 4. The top 16-bits bits of a state are hashed; the hash's top bits choose,
    xor the bit-reversed newest edge, the stratum, and its low bits the place inside it.
    """
    width = 16 - bits
    low = (1 << width) - 1
    state = torch.arange(STATES)
    history, edge = state >> bits, state & ((1 << bits) - 1)
    mixed = history ^ (history >> 11)
    mixed = mixed ^ ((mixed << 11) & low)
    product = (_MULTIPLIER * mixed + _INCREMENT) & 0xFFFFFFFF
    reversed_edge = sum(((edge >> i) & 1) << (bits - 1 - i) for i in range(bits))
    return ((reversed_edge ^ (product >> (32 - bits))) << width) | (product & low)


@functools.cache
def labels(bits: int) -> torch.Tensor:
    """The E4M3 label of every state: [65536] uint8, indexed by the unsigned state.

    bits: 2, 3 or 4.
    """
    return staircase()[ranks(bits) >> 4]


@functools.cache
def values(bits: int, device: torch.device = _CPU) -> torch.Tensor:
    """The value of every state's label: [65536] float32 on a device, between -5.5 and 5.5."""
    return labels(bits).view(torch.float8_e4m3fn).to(torch.float32).to(device)
