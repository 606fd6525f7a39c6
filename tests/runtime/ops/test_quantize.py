"""The kernels' quantization against mxfp8, to the bit."""

import pytest
import torch
import triton
import triton.language as tl
from layers import place

from qsrt_runtime.mxfp8 import quantize_rows
from qsrt_runtime.ops.kernel import e4m3_numbers, power_of_two, quantize

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@triton.jit
def _quantize(x, values, exponents, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)
    at = row[:, None] * 32 + tl.arange(0, 32)[None, :]
    found, power = quantize(tl.load(x + at))
    tl.store(values + at, found)
    tl.store(exponents + row, power)


@triton.jit
def _numbers(labels, numbers, powers):
    at = tl.arange(0, 256)
    label = tl.load(labels + at)
    tl.store(numbers + at, e4m3_numbers(label))
    tl.store(powers + at, power_of_two(label))


def run(rows):
    values = torch.full(rows.shape, 0x55, dtype=torch.uint8, device=rows.device)
    exponents = torch.full(rows.shape[:1], 0x55, dtype=torch.uint8, device=rows.device)
    _quantize[(1,)](rows, values, exponents, ROWS=len(rows))
    return values, exponents


def check(rows):
    values, exponents = run(rows)
    expected, powers = quantize_rows(rows)
    assert torch.equal(exponents, powers[:, 0])
    assert torch.equal(values, expected.view(torch.uint8))


@pytest.mark.parametrize("name", DEVICES)
def test_blocks_of_every_size(name):  # RT-10
    """Largest sizes from the least float32 to the largest, and sizes below them, of either sign."""
    device = place(name)
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(512, 32, generator=generator)
    powers = torch.linspace(-149, 126, 512).round()
    rows = (draw.double() * torch.exp2(powers.double())[:, None]).float()
    rows[::7, ::3] *= 2.0**-8
    rows[::5, 1] = -0.0
    check(rows.to(device))


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("size", [0.0, -0.0, 6e-38, 1e-30, 3e38, 448.0, 2.0**-149, 223 * 2.0**-149])
def test_blocks_of_one_size(name, size):  # RT-10
    check(torch.full((16, 32), size, device=place(name)))


@pytest.mark.parametrize("name", DEVICES)
def test_numbers_and_ties(name):
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    given = [numbers, ties]
    given += [torch.nextafter(ties, torch.tensor(to)) for to in (1e9, -1.0)]
    rows = torch.zeros(512, 32)
    rows[:, 0] = 448
    found = torch.cat(given)
    rows[: len(found), 1], rows[: len(found), 2] = found, -found
    check(rows.to(place(name)))


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(name, wrong):
    rows = torch.ones(16, 32, device=place(name))
    rows[3, 5] = wrong
    values, exponents = run(rows)
    assert exponents.tolist() == [119] * 3 + [255] + [119] * 12
    assert values[3, 5] & 127 == 127
    assert not values[3, torch.arange(32) != 5].any()


@pytest.mark.parametrize("name", DEVICES)
def test_bytes_as_numbers(name):
    device = place(name)
    labels = torch.arange(256, dtype=torch.uint8, device=device)
    numbers, powers = (torch.full((256,), 7.0, device=device) for _ in range(2))
    _numbers[(1,)](labels, numbers, powers)
    expected = labels.view(torch.float8_e4m3fn).float()
    is_number = ~expected.isnan()
    assert torch.equal(numbers[is_number], expected[is_number])
    exponent = torch.arange(256, device=device).double()
    assert torch.equal(powers[1:255].double(), torch.exp2(exponent - 127)[1:255])
    assert powers[0] == 0
