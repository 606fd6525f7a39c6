"""Rate modes R0, R1, R2: which record of a matrix has how many bits, and in which order.

"Low to high" is the order of importance, "stored" the order on disk, which interleaves it from
the outside in so that records 2p and 2p+1 form pair p with six bits a coefficient pair.
"""

import torch

from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import RECORD

MODES = (0, 1, 2)
X4T = 0xFF  # format code of an expert that is kept exact in a side file


def allowed_modes(records: int) -> tuple[int, ...]:
    """The modes a matrix of so many records can have: a mode needs that many pairs."""
    return tuple(mode for mode in MODES if 2 * mode <= records)


def record_bits(mode: int, records: int) -> tuple[int, ...]:
    """Bits of each record from least to most important."""
    if mode not in allowed_modes(records):
        raise FormatError(f"rate mode R{mode} does not exist for {records} records")
    return (2,) * mode + (3,) * (records - 2 * mode) + (4,) * mode


def record_order(records: int) -> tuple[int, ...]:
    """The record, counted low to high, at each stored place: 0, R-1, 1, R-2, ..."""
    return tuple(k // 2 if k % 2 == 0 else records - 1 - k // 2 for k in range(records))


def stored_bits(mode: int, records: int) -> tuple[int, ...]:
    """Bits of each record in stored order."""
    bits = record_bits(mode, records)
    return tuple(bits[k] for k in record_order(records))


def pair_kinds(mode: int, records: int) -> tuple[str, ...]:
    """`P24` or `P33` for each pair in stored order."""
    bits = stored_bits(mode, records)
    return tuple("P24" if bits[2 * p] == 2 else "P33" for p in range(records // 2))


def stored_channels(records: int) -> torch.Tensor:
    """The low-to-high channel at each stored place: [128 * records] int64."""
    order = torch.tensor(record_order(records))
    return (order[:, None] * RECORD + torch.arange(RECORD)).flatten()


def format_code(mode13: int, mode2: int) -> int:
    """The format byte of an expert whose w1 and w3 have mode13 and whose w2 has mode2."""
    return mode13 << 4 | mode2


def modes_of_code(code: int, records: int, where: str) -> tuple[int, int]:
    """(mode of w1 and w3, mode of w2) of a format byte; `where` names the expert in errors."""
    if code == X4T:
        raise FormatError(
            f"{where} is an X4T expert (exact MXFP4 weights in a side file), "
            "which this version does not read"
        )
    modes = (code >> 4, code & 0xF)
    for mode in modes:
        if mode not in MODES:
            raise FormatError(
                f"{where}: format byte 0x{code:02X} has rate nibble {mode} of a later profile; "
                "this version reads 0, 1 and 2"
            )
        if mode not in allowed_modes(records):
            raise FormatError(
                f"{where}: rate mode R{mode} needs {2 * mode} records of {RECORD} channels, "
                f"the layer has {records}"
            )
    return modes
