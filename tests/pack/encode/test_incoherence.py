from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qsrt_pack.encode.incoherence import (
    TARGET_RMS,
    is_uneven,
    layer_scales,
    regularize,
    scale_search_count,
    scale_search_tiles,
    search_scale,
)
from qsrt_pack.encode.lockstep import serve
from qsrt_runtime.format.rotation import rotate, rotate_rows
from qsrt_runtime.format.tile import to_trellis_order

Tensors = dict[str, torch.Tensor]
Quantize = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def data(golden: Path) -> Tensors:
    return load_file(golden / "encoder_math.safetensors")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def draw_signs(count: int, seed: int = 0) -> torch.Tensor:
    return normal(count, seed=seed).sign()


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def halves(values: torch.Tensor) -> torch.Tensor:
    """The stand-in quantizer of the golden data."""
    return (2 * values).round().div(2).clamp(-4, 4)


def searched(tiles: torch.Tensor, coarse: Quantize, fine: Quantize) -> tuple[float, float]:
    """search_scale by two quantizers."""
    return serve(search_scale(tiles), lambda is_fine, x: (fine if is_fine else coarse)(x))


def restored(rotated: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor) -> torch.Tensor:
    return rotate(rotate_rows(rotated) * suh[:, None]) * svh


def test_regularize_is_the_published_one(data: Tensors) -> None:
    # The published scale divides by a negative target, so the input signs are those of -su.
    input_signs = -data["reg.su"].sign()
    rotated, suh, svh = regularize(data["reg.weight"], input_signs, data["reg.sv_signs"])
    assert relative(rotated, data["reg.regularized"]) < 1e-6
    assert relative(suh, data["reg.su"]) < 1e-6
    assert torch.equal(svh, data["reg.sv"])


def test_float16_scales_are_the_published_ones(data: Tensors) -> None:
    input_signs = -data["reg.su"].sign()
    _, suh, svh = regularize(data["reg.weight"], input_signs, data["reg.sv_signs"])
    assert torch.equal(suh.half(), data["reg.fc1_su_fp16"])
    assert torch.equal((svh / 0.9375).half(), data["reg.fc1_sv_fp16"])
    assert torch.equal((suh / 0.9375).half(), data["reg.fc2_su_fp16"])
    assert torch.equal(svh.half(), data["reg.fc2_sv_fp16"])


def test_scale_search_tiles_are_the_published_ones(data: Tensors) -> None:
    tiles = scale_search_tiles(data["reg.regularized"])
    assert torch.equal(tiles, data["reg.scale_search_tiles"])


def test_scale_search_finds_the_published_scale(data: Tensors, facts: dict) -> None:
    scale, error = searched(data["reg.scale_search_tiles"], halves, halves)
    expected = facts["encoder_math"]["scale_search_standin"]
    assert scale == pytest.approx(expected["scale"], rel=1e-6)
    assert error == pytest.approx(expected["mse"], rel=1e-6)


@pytest.mark.parametrize("shape", [(128, 256), (256, 128), (384, 256)])
def test_regularize_loses_nothing(shape: tuple[int, int]) -> None:
    weight = normal(*shape) * torch.logspace(-3, 3, shape[0])[:, None]
    signs = draw_signs(shape[0]), draw_signs(shape[1], seed=1)
    rotated, suh, svh = regularize(weight, *signs)
    assert relative(restored(rotated, suh, svh), weight) < 1e-6
    assert float(rotated.double().square().mean().sqrt()) == pytest.approx(-TARGET_RMS, rel=1e-4)
    assert torch.equal(suh.sign(), -signs[0])
    assert torch.equal(svh, signs[1])


@pytest.mark.parametrize(
    "empty", [(slice(3, 4), slice(None)), (slice(0, 128), slice(None)), (slice(None), slice(None))]
)
def test_zero_rows(empty: tuple[slice, slice]) -> None:
    weight = normal(256, 128)
    weight[empty] = 0
    rotated, suh, svh = regularize(weight, draw_signs(256), draw_signs(128))
    assert torch.isfinite(rotated).all()
    assert torch.isfinite(suh).all()
    assert not suh[empty[0]].any()  # so zeros are exact whatever the tiles decode to
    assert suh[255 if empty[0].stop else 0] != 0 or not weight.any()
    assert (restored(rotated, suh, svh) - weight).norm() <= 1e-6 * weight.norm()


@pytest.mark.parametrize("empty", [slice(3, 4), slice(0, 128), slice(None)])
def test_zero_columns(empty: slice) -> None:
    weight = normal(128, 256)
    weight[:, empty] = 0
    rotated, suh, svh = regularize(weight, draw_signs(128), draw_signs(256))
    assert torch.isfinite(rotated).all()
    assert torch.isfinite(suh).all()
    expected = draw_signs(256)
    expected[empty] = 0
    assert torch.equal(svh, expected)
    assert (restored(rotated, suh, svh) - weight).norm() <= 1e-6 * weight.norm()


@pytest.mark.parametrize(
    ("factor", "expected"), [(0.0, False), (1.0, False), (3.0, False), (30.0, True), (1e6, True)]
)
def test_is_uneven(factor: float, expected: bool) -> None:
    weight = normal(128, 256)
    weight[:, 200:] = 0  # which counts for nothing
    weight[:, 9] *= factor
    assert is_uneven(weight) is expected
    assert is_uneven(torch.zeros(128, 256)) is False


def test_tiles_are_the_diagonal_and_the_extremes() -> None:
    # Tile (i, j) of 8 x 16 holds the number 16 i + j everywhere.
    numbers = torch.arange(128.0).view(8, 16)
    tiles = scale_search_tiles(numbers.repeat_interleave(16, 0).repeat_interleave(16, 1))
    diagonal = [16 * (s % 8) + (s + more) % 16 for s in range(16) for more in range(3)]
    assert tiles[:, 0].tolist() == [*diagonal, *range(127, 119, -1), *range(8)]
    assert (tiles == tiles[:, :1]).all()


def test_tiles_are_in_trellis_order() -> None:
    matrix = normal(128, 128)
    first = to_trellis_order(matrix[:16, :16][None])
    assert torch.equal(scale_search_tiles(matrix)[:1], first)


@pytest.mark.parametrize("tiles", [1, 3, 40, 64])
def test_scale_search_count_counts_what_is_quantized(tiles: int) -> None:
    quantized = {"coarse": 0, "fine": 0}

    def quantize(kind: str, values: torch.Tensor) -> torch.Tensor:
        quantized[kind] += len(values)
        return halves(values)

    searched(normal(tiles, 256), partial(quantize, "coarse"), partial(quantize, "fine"))
    assert (quantized["coarse"], quantized["fine"]) == scale_search_count(tiles)


def test_the_coarse_grid_takes_every_third_tile() -> None:
    # A third of the tiles is best at 1.7, the others at 0.5; the fine grid sees them all.
    tiles = torch.ones(9, 256)
    tiles[::3] = 2

    def coarse(values: torch.Tensor) -> torch.Tensor:
        return values * (1 + (values.amax(1, keepdim=True) / 2 - 1.7))

    scale, _ = searched(tiles, coarse, halves)
    assert 1.5 < scale < 1.9


def search_error(error: Callable[[float], float]) -> tuple[float, float]:
    """The search on tiles of ones by a quantizer whose error at scale g is error(g)."""

    def quantize(tiles: torch.Tensor) -> torch.Tensor:
        errors = torch.tensor([error(float(scale)) for scale in tiles[:, 0]])
        return tiles * (1 + errors[:, None] ** 0.5)

    return searched(torch.ones(6, 256), quantize, quantize)


@pytest.mark.parametrize("best", [1.3, 1.33, 1.24, 0.52])
def test_the_vertex_of_the_parabola(best: float) -> None:
    scale, error = search_error(lambda g: (g - best) ** 2)
    assert scale == pytest.approx(best, abs=1e-4)
    assert error < 0.04**2


@pytest.mark.parametrize(("slope", "expected"), [(1, 0.025), (-1, 2.05)])
def test_the_search_ends_at_the_grid(slope: int, expected: float) -> None:
    # The fine grid around 0.1 and 1.9; scales at or below zero are not tried.
    scale, _ = search_error(lambda g: 3 + slope * g)
    assert scale == pytest.approx(expected)


def test_the_parabola_moves_half_a_step_at_most() -> None:
    # The errors around 1.3 are 4, 1 and 1, whose vertex lies half a step on.
    scale, _ = search_error(lambda g: 4.0 if g < 1.26 else 1.0)
    assert scale == pytest.approx(1.3 + 0.5 * 0.075)


def test_tiles_of_zeros_have_scale_one() -> None:
    def never(tiles: torch.Tensor) -> torch.Tensor:
        raise AssertionError("quantized zeros")

    assert searched(torch.zeros(64, 256), never, never) == (1.0, 0.0)


def powers_of(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return [weight.double().square().mean(1) for weight in weights]


def test_shared_row_scales_lose_nothing_and_give_one_size() -> None:
    rows = torch.logspace(-1, 1, 256)[:, None]
    weights = [normal(256, 128, seed=seed) * rows * 10.0**seed for seed in range(3)]
    scales = layer_scales(powers_of(weights))
    found = []
    for weight in weights:
        rotated, suh, svh = regularize(weight, draw_signs(256), draw_signs(128, 1), scales)
        assert relative(restored(rotated, suh, svh), weight) < 1e-6
        size = float(rotated.double().square().mean().sqrt())
        assert size == pytest.approx(-TARGET_RMS, rel=1e-4)
        found.append(suh)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[0].sign(), -draw_signs(256))


def test_shared_row_scales_follow_every_matrix_alike() -> None:
    profile = torch.logspace(-1, 1, 128, dtype=torch.float64)
    powers = [profile, 1e20 * profile.flip(0), 4 * torch.ones(128, dtype=torch.float64)]
    scales = layer_scales(powers)
    shapes = [power / power.mean() for power in powers]
    expected = (sum(shapes) / 3).sqrt() * 4**0.5 / -TARGET_RMS  # the middle size of three
    assert 0.1 < profile.mean() < 4 < 1e19
    assert relative(scales, expected) < 1e-6


def test_matrices_of_zeros_do_not_count() -> None:
    power = torch.logspace(-1, 1, 128, dtype=torch.float64)
    assert torch.equal(layer_scales([power, torch.zeros_like(power)]), layer_scales([power]))
    assert torch.equal(layer_scales([torch.zeros(128).double()]), torch.ones(128))


def test_zero_rows_stay_zero_under_shared_scales() -> None:
    weight = normal(256, 128)
    weight[7] = 0
    rotated, suh, svh = regularize(weight, draw_signs(256), draw_signs(128), torch.ones(256))
    assert suh[7].half() == 0
    assert (suh[8:].abs() == 1).all()
    assert not restored(rotated, suh.half().float(), svh)[7].any()
    rotated, suh, svh = regularize(
        torch.zeros(128, 128), draw_signs(128), draw_signs(128), torch.ones(128)
    )
    assert torch.isfinite(rotated).all()
    assert not svh.any()
