"""Quantized rows against numbers worked out by hand."""

import pytest
import torch

from qsrt_runtime.mxfp8 import dequantize_rows, quantize_rows

TINY = 2.0**-149  # the least float32


def block(*first, rest=0.0):
    row = torch.full((32,), rest)
    row[: len(first)] = torch.tensor(first)
    return row


def bytes_of(values):
    return values.view(torch.uint8)


@pytest.mark.parametrize(
    ("size", "exponent"),
    [
        (448.0, 127),  # 448 * fl(1/448) is 1 to the bit
        (448.00003, 128),
        (447.99997, 127),
        (1.0, 119),  # 1/448 lies between 2^-9 and 2^-8
        (2.0**-126, 1),  # s below the normal numbers: its exponent byte is 0, its mantissa is not
        (2.0**-118, 1),  # s = 2^-126.8
        (2.0**-117, 2),  # s = 2^-125.8
        (448 * TINY, 1),
        (224 * TINY, 1),  # s is a little above half of the least float32: fl(1/448) is above 1/448
        (223 * TINY, 0),  # s is below half of it, and rounds to 0
        (TINY, 0),
        (0.0, 0),
        (6e-38, 1),
        (1e-30, 19),  # s = 2.2e-33 between 2^-109 and 2^-108
        (3e38, 247),  # s = 6.7e35 between 2^119 and 2^120
    ],
)
def test_exponents(size, exponent):
    for sign in (1, -1):
        values, found = quantize_rows(block(0.0, sign * size))
        assert found.tolist() == [exponent]
        assert dequantize_rows(values, found).isfinite().all()


@pytest.mark.parametrize(
    ("value", "byte"),
    [
        (448.0, 0x7E),
        (-448.0, 0xFE),
        (1.0, 0x38),
        (1.0625, 0x38),  # a tie between 1 and 1.125, to even
        (1.1875, 0x3A),  # a tie between 1.125 and 1.25
        (1.0626, 0x39),
        (2.0**-6, 0x08),
        (2.0**-9, 0x01),
        (2.0**-10, 0x00),  # a tie between 0 and the least, to even
        (1.001 * 2.0**-10, 0x01),
        (3 * 2.0**-10, 0x02),  # a tie between 1 and 2 of the least
        (15 * 2.0**-10, 0x08),  # a tie between 7 and 8: over to the normal numbers
        (-(2.0**-10), 0x80),
        (-0.0, 0x80),
        (0.0, 0x00),
        (TINY, 0x00),
        (431.9, 0x7D),
        (432.0, 0x7E),  # a tie between 416 and 448
    ],
)
def test_numbers_at_scale_one(value, byte):
    """The block's largest is 448, so that its power of two is 1."""
    values, exponents = quantize_rows(block(448.0, value))
    assert exponents.tolist() == [127]
    assert bytes_of(values)[1] == byte


def test_every_number_and_tie():
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (numbers[1:] + numbers[:-1]) / 2
    above, below = (torch.nextafter(between, torch.tensor(to)) for to in (1e9, -1.0))
    even = torch.arange(126) + torch.arange(126) % 2
    for given, expected in (
        (numbers, torch.arange(127)),
        (between, even),
        (above, torch.arange(1, 127)),
        (below, torch.arange(126)),
    ):
        rows = torch.full((len(given), 32), 448.0)
        rows[:, 5], rows[:, 6] = given, -given
        values, _ = quantize_rows(rows)
        assert torch.equal(bytes_of(values)[:, 5].long(), expected)
        assert torch.equal(bytes_of(values)[:, 6].long(), expected + 128)


def test_what_is_beyond_the_largest_becomes_the_largest():
    """s is rounded: a largest size a little above 448 powers of two need not take the next one."""
    sizes = torch.full((64,), 448.0 * 2**5)
    for i in range(1, 64):
        sizes[i] = torch.nextafter(sizes[i - 1], torch.tensor(1e9))
    rows = torch.zeros(64, 32)
    rows[:, 0] = sizes
    values, exponents = quantize_rows(rows)
    assert set(exponents.flatten().tolist()) <= {132, 133}
    assert (dequantize_rows(values, exponents)[:, 0] == 448 * 2**5).all()


def test_the_largest_float():
    """It rounds up to 256 * 2^120, which float32 does not have."""
    values, exponents = quantize_rows(block(torch.finfo(torch.float32).max))
    assert (exponents.item(), values[0].item()) == (247, 256.0)


@pytest.mark.parametrize("size", [6e-38, 1e-30, 3e38, 0.0, -0.0])
def test_other_blocks_do_not_change(size):  # RT-10
    row = torch.randn(4 * 32, generator=torch.Generator().manual_seed(0))
    values, exponents = quantize_rows(row)
    other = row.clone()
    other[32:64] *= size / row[32:64].abs().max()
    found, changed = quantize_rows(other)
    kept = torch.tensor([0, 2, 3])
    assert torch.equal(changed[kept], exponents[kept])
    apart = bytes_of(found).view(4, 32)[kept], bytes_of(values).view(4, 32)[kept]
    assert torch.equal(*apart)
    restored = dequantize_rows(found, changed)
    assert restored.isfinite().all()
    block = restored[32:64]
    if size:
        assert (block - other[32:64]).abs().max() <= abs(size) / 16
        assert block.any()
    else:
        assert changed[1] == 0
        assert not block.any()


def test_zeros():  # RT-10
    for zero in (0.0, -0.0):
        values, exponents = quantize_rows(torch.full((3, 64), zero))
        assert exponents.tolist() == [[0, 0]] * 3
        assert not dequantize_rows(values, exponents).any()


@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(wrong):
    row = torch.ones(64)
    row[40] = wrong
    values, exponents = quantize_rows(row)
    assert exponents.tolist() == [119, 255]
    restored = dequantize_rows(values, exponents)
    assert torch.equal(restored[:32], row[:32])
    assert not restored[32:].isfinite().any()


def test_rounding_of_normal_numbers():
    """Of 4 significant bits: at most 1/16 of a number, about 2.7e-2 of a row of them."""
    row = torch.randn(1 << 14, generator=torch.Generator().manual_seed(1))
    restored = dequantize_rows(*quantize_rows(row))
    assert 2e-2 < ((restored - row).norm() / row.norm()).item() < 3e-2
