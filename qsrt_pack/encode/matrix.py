"""Encode one matrix: rotate, scale, search at its rate modes, and pack."""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch

from qsrt_pack.encode import incoherence, lockstep, refit
from qsrt_pack.encode.ldlq import feedback_factor, ldlq, ldlq_two_sided, rotate_hessian
from qsrt_pack.encode.lockstep import Found, Request, Steps
from qsrt_pack.encode.ordered import ordered_mean_square, root_mean_square
from qsrt_runtime.format import atom, tile
from qsrt_runtime.format.geometry import RECORD, TILE
from qsrt_runtime.format.rates import record_bits, record_order, stored_channels
from qsrt_runtime.format.rotation import rotate, rotate_rows

_SCALE_BITS = 3  # the rate at which the global scale is searched
_SAMPLED = 3  # the global scale is searched on every third tile
_FAR = 8  # binary orders of magnitude; weights of root mean square 0.005 have scales of 2**-8
_TILES_PER_RECORD = RECORD // TILE


@dataclass(frozen=True)
class HiddenSide:
    """What the experts of a layer share, so that a token is rotated once for all of them.

    scales: [H], row scales of every w1 and w3, see incoherence.layer_scales.
    down_size: root mean square of the median w2, which decides the power of two in their svh.
    """

    scales: torch.Tensor
    down_size: float


@dataclass(frozen=True)
class Metric:
    """What the error of a matrix [K, N] counts: tr(E^T inputs E outputs).

    inputs: [K, K], outputs: [N, N], None for the identity.   target: [K, N], the matrix to aim
    at, None for the source's own.
    """

    inputs: torch.Tensor
    outputs: torch.Tensor | None = None
    target: torch.Tensor | None = None


@dataclass(frozen=True)
class EncodedMatrix:
    """One matrix at one rate mode. dense: what it decodes to, [K, N] float32, low to high."""

    packed: atom.Matrix
    dense: torch.Tensor
    nmse: float


def matrix_steps(
    weight: torch.Tensor,
    rate_axis: str,
    input_signs: torch.Tensor,
    output_signs: torch.Tensor,
    *,
    modes: Iterable[int],
    method: str,
    metric: Metric | None = None,
    hidden: HiddenSide | None = None,
) -> Steps[dict[int, EncodedMatrix]]:
    """Encode a matrix at each of some rate modes, all with one rotation and one global scale.

    weight: [K, N] float32 with the rate axis ("in": K, "out": N) from least to most important.
    input_signs: [K], output_signs: [N].   metric: what its error counts, None: all alike.
    hidden: what the layer shares, None: nothing.
    A matrix far from 1 is encoded smaller or larger by a power of two, which its scales share, so
    that both of them stay in float16's range as long as they can.
    """
    has_shared_rows = hidden is not None and rate_axis == "out"  # whose inputs are hidden
    scales = hidden.scales if has_shared_rows else None
    target = weight if metric is None or metric.target is None else metric.target
    if hidden is None:
        size = root_mean_square(target)
    else:
        size = float(scales.max()) if has_shared_rows else hidden.down_size
    exponent = _exponent(size)
    near = _times_power(target, -exponent)
    metric = metric and _near_metric(metric)
    has_own_columns = rate_axis == "out" or hidden is None
    columns = None
    if has_own_columns and (metric is not None or incoherence.is_uneven(near)):
        columns = incoherence.column_scales(near)
    if scales is not None:
        scales = _times_power(scales, -exponent)
    rotated, suh, svh = incoherence.regularize(near, input_signs, output_signs, scales, columns)
    scale = yield from _scale_steps(rotated, method)
    suh, svh = (suh, svh / scale) if rate_axis == "out" else (suh / scale, svh)
    suh = _as_float16(_times_power(suh, exponent - exponent // 2))
    svh = _as_float16(_times_power(svh, exponent // 2))
    factors = (None, None) if metric is None else _factors(metric, suh.float(), svh.float())
    rates = {mode: record_bits(mode, weight.shape[rate_axis == "out"] // RECORD) for mode in modes}
    coded = yield from lockstep.together(
        _tile_steps(rotated * scale, factors, rate_axis, bits, method) for bits in rates.values()
    )
    encoded = {}
    for (mode, bits), (edges, values) in zip(rates.items(), coded, strict=True):
        inner = rotate(rotate_rows(values))
        fitted = (suh, svh)
        if metric is not None:
            fitted = _refit(inner, target, metric, suh, svh, rate_axis, hidden is not None)
        dense = inner * fitted[0].float()[:, None] * fitted[1].float()
        packed = _pack(edges, *fitted, rate_axis, bits)
        encoded[mode] = EncodedMatrix(packed, dense, _nmse(weight, dense))
    return encoded


def _factors(
    metric: Metric, suh: torch.Tensor, svh: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The feedback factors of a metric's two sides, as the rotated matrix sees them."""
    inputs = feedback_factor(rotate_hessian(metric.inputs, suh))
    if metric.outputs is None:
        return inputs, None
    return inputs, feedback_factor(rotate_hessian(metric.outputs, svh))


def _refit(
    inner: torch.Tensor,
    target: torch.Tensor,
    metric: Metric,
    suh: torch.Tensor,
    svh: torch.Tensor,
    rate_axis: str,
    shared: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of least error for tiles that are coded; those of a shared hidden side stay.

    inner: [K, N], the decoded matrix less its scales.   Returns suh [K] and svh [N], float16.
    """
    if rate_axis == "out" or not shared:
        svh = _as_float16(
            refit.output_scales(inner * suh.float()[:, None], target, svh.float(), metric.inputs)
        )
    if rate_axis == "in" or not shared:
        scaled = inner * svh.float()
        suh = _as_float16(
            refit.input_scales(scaled, target, suh.float(), metric.inputs, metric.outputs)
        )
    return suh, svh


def _scale_steps(rotated: torch.Tensor, method: str) -> Steps[float]:
    """The global scale of a rotated matrix. The coarse grid takes the fast search on a CPU."""
    coarse = "fast" if rotated.device.type == "cpu" else method
    steps, values = incoherence.search_scale(scale_sample(rotated)), None
    while True:
        try:
            fine, tiles = steps.send(values)
        except StopIteration as end:
            return end.value[0]
        (found,) = yield [Request(tiles, _SCALE_BITS, method if fine else coarse)]
        values = found.values


def scale_sample(rotated: torch.Tensor) -> torch.Tensor:
    """The tiles on which the global scale is searched, [n, 256]: a third of the published ones.

    All of them move the error of a matrix by less than 0.1%, and cost more than its encoding
    where it is small.
    """
    return incoherence.scale_search_tiles(rotated)[::_SAMPLED]


def scale_search_weights(inputs: int, outputs: int) -> tuple[int, int]:
    """Weights that the scale search of a matrix quantizes coarsely and finely."""
    sample = -(-incoherence.scale_search_tile_count(inputs, outputs) // _SAMPLED)
    coarse, fine = incoherence.scale_search_count(sample)
    return coarse * tile.POSITIONS, fine * tile.POSITIONS


def _tile_steps(
    rotated: torch.Tensor,
    factors: tuple[torch.Tensor | None, torch.Tensor | None],
    rate_axis: str,
    bits: tuple[int, ...],
    method: str,
) -> Steps[tuple[torch.Tensor, torch.Tensor]]:
    """Edges [K/16, N/16, 256] uint8 and the values [K, N] they decode to."""
    inputs, outputs = factors
    if outputs is not None:
        return (yield from _two_sided_steps(rotated, inputs, outputs, bits, method))
    rows, columns = (size // TILE for size in rotated.shape)
    edges = torch.empty(rows, columns, tile.POSITIONS, dtype=torch.uint8, device=rotated.device)
    by_rate = functools.cache(partial(_tiles_by_rate, bits, rate_axis, columns, rotated.device))
    steps, values = ldlq(rotated, inputs), None
    while True:
        try:
            span, target = steps.send(values)
        except StopIteration as end:
            return edges, end.value
        first, last = span.start // TILE, span.stop // TILE
        paths = tile.to_trellis_order(tile.of_matrix(target).flatten(0, 1))
        # With the rates on the output axis, all rows of tiles are alike.
        groups = by_rate(first, last) if rate_axis == "in" else by_rate(0, last - first)
        found = yield from _search_steps(paths, groups, method)
        edges[first:last] = found.edges.unflatten(0, (-1, columns))
        values = tile.to_matrix(tile.to_row_major(found.values).unflatten(0, (-1, columns)))


def _two_sided_steps(
    rotated: torch.Tensor,
    inputs: torch.Tensor,
    outputs: torch.Tensor,
    bits: tuple[int, ...],
    method: str,
) -> Steps[tuple[torch.Tensor, torch.Tensor]]:
    """As _tile_steps, with the rates on the input axis and error feedback along both."""
    rows, columns = (size // TILE for size in rotated.shape)
    edges = torch.empty(rows, columns, tile.POSITIONS, dtype=torch.uint8, device=rotated.device)
    rates = torch.tensor(bits).repeat_interleave(_TILES_PER_RECORD)
    steps, values = ldlq_two_sided(rotated, inputs, outputs), None
    while True:
        try:
            i, j, targets = steps.send(values)
        except StopIteration as end:
            return edges, end.value
        paths = tile.to_trellis_order(targets)
        groups = _places_by_rate(rates[i.cpu()], rotated.device)
        found = yield from _search_steps(paths, groups, method)
        edges[i, j] = found.edges
        values = tile.to_row_major(found.values)


_Groups = list[tuple[int, torch.Tensor]]


def _tiles_by_rate(
    bits: tuple[int, ...],
    rate_axis: str,
    columns: int,
    device: torch.device,
    first: int,
    last: int,
) -> _Groups:
    """The rates in some rows of tiles, each with the places [m] int64 of the tiles that have it."""
    rates = torch.tensor(bits).repeat_interleave(_TILES_PER_RECORD)
    if rate_axis == "in":
        rates = rates[first:last].repeat_interleave(columns)
    else:
        rates = rates.repeat(last - first)
    return _places_by_rate(rates, device)


def _places_by_rate(rates: torch.Tensor, device: torch.device) -> _Groups:
    return [(rate, (rates == rate).nonzero()[:, 0].to(device)) for rate in rates.unique().tolist()]


def _search_steps(paths: torch.Tensor, groups: _Groups, method: str) -> Steps[Found]:
    """Search tiles [n, 256] at their own rates."""
    if len(groups) == 1:
        return (yield [Request(paths, groups[0][0], method)])[0]
    parts = yield [Request(paths[places], rate, method) for rate, places in groups]
    found = Found(torch.empty_like(paths, dtype=torch.uint8), torch.empty_like(paths))
    for (_, places), part in zip(groups, parts, strict=True):
        found.edges[places], found.values[places] = part
    return found


def _pack(
    edges: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    rate_axis: str,
    bits: tuple[int, ...],
) -> atom.Matrix:
    """Edges [K/16, N/16, 256] low to high -> records of stripes in stored order."""
    by_stripe = edges.transpose(0, 1) if rate_axis == "out" else edges
    records = []
    for record in record_order(len(bits)):
        stripes = by_stripe[record * _TILES_PER_RECORD : (record + 1) * _TILES_PER_RECORD]
        words = tile.pack_edges(stripes.flatten(0, 1), bits[record])
        records.append(words.unflatten(0, (_TILES_PER_RECORD, -1)))
    stored = stored_channels(len(bits)).to(suh.device)
    if rate_axis == "out":
        return atom.Matrix(tuple(records), suh, svh[stored])
    return atom.Matrix(tuple(records), suh[stored], svh)


def _nmse(source: torch.Tensor, decoded: torch.Tensor) -> float:
    both = [ordered_mean_square(x.flatten()) for x in (source, source - decoded)]
    power, error = torch.stack(both).tolist()
    return error / power if power else error


def _exponent(size: float) -> int:
    """The binary exponent of a size that is far from 1, 0 for one that is near or is 0."""
    exponent = math.frexp(size)[1]
    return 0 if -_FAR <= exponent <= _FAR else exponent


def _times_power(x: torch.Tensor, exponent: int) -> torch.Tensor:
    """x times 2**exponent, which alone may be beyond float32."""
    half = exponent // 2
    return x * 2.0**half * 2.0 ** (exponent - half) if exponent else x


def _near_metric(metric: Metric) -> Metric:
    """A metric whose moments are near 1; the scale of an error is of no account."""
    inputs, outputs = (
        None if m is None else _times_power(m, -_exponent(float(m.diagonal().max())))
        for m in (metric.inputs, metric.outputs)
    )
    return replace(metric, inputs=inputs, outputs=outputs)


def _as_float16(scales: torch.Tensor) -> torch.Tensor:
    half = scales.to(torch.float16)
    if not torch.isfinite(half).all():
        raise ValueError(
            f"a weight scale of {float(scales.abs().max()):.3g} is beyond float16 (65504); "
            "weights of up to 1e6 can be packed"
        )
    return half
