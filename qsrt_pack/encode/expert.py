"""Encode one expert: order its channels, rotate, scale, search, pack, and check the result."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

import qsrt_runtime
from qsrt_pack.encode import incoherence, lockstep, permutation, refit
from qsrt_pack.encode.ldlq import (
    DAMPING,
    feedback_factor,
    ldlq,
    ldlq_two_sided,
    rotate_hessian,
)
from qsrt_pack.encode.lockstep import Found, Request, Steps
from qsrt_pack.encode.ordered import ordered_mean_square, root_mean_square
from qsrt_pack.encode.padding import pad, pad_matrices, sizes_of, unpad_matrices
from qsrt_pack.encode.viterbi import search
from qsrt_runtime.format import atom, codebook, decode, tile
from qsrt_runtime.format.geometry import RECORD, TILE, Geometry, TrueSizes
from qsrt_runtime.format.rates import (
    allowed_modes,
    record_bits,
    record_order,
    stored_channels,
)
from qsrt_runtime.format.rotation import rotate, rotate_rows, signs

DECODE_TOLERANCE = 1e-6
_SCALE_BITS = 3  # the rate at which the global scale is searched
_SAMPLED = 3  # the global scale is searched on every third tile
_FAR = 8  # binary orders of magnitude; weights of root mean square 0.005 have scales of 2**-8
_TILES_PER_RECORD = RECORD // TILE


Modes = tuple[int, int]  # of w1 and w3, and of w2
Dense = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # w1, w3 [I, H] and w2 [H, I]


@dataclass(frozen=True)
class Settings:
    """What decides an expert's bytes besides its weights.

    seed: of the sign draws.   search: a method of viterbi.METHODS.   modes: "R0" alone, or "all"
    nine combinations (four where there are two records), keeping the least weight error.
    hidden_side: whether "layer" or "expert" has signs and scales of its own on the hidden side.
    device: the kind that encodes, "cpu" or "cuda", whose roundings differ.
    calibration_sha256: the digest of the statistics that guide it, None without.
    """

    seed: int = 0
    search: str = "exact"
    modes: str = "R0"
    hidden_side: str = "layer"
    device: str = "cpu"
    calibration_sha256: str | None = None

    def fingerprinted(self) -> dict[str, Any]:
        """Every setting that can change a byte of a layer file."""
        return {
            **asdict(self),
            "package": qsrt_runtime.__version__,
            "codebook_sha256": codebook.TABLES_SHA256,
            "damping": DAMPING,
        }


@dataclass(frozen=True)
class HiddenSide:
    """What the experts of a layer share, so that a token is rotated once for all of them.

    scales: [H], row scales of every w1 and w3, see incoherence.layer_scales.
    down_size: root mean square of the median w2, which decides the power of two in their svh.
    """

    scales: torch.Tensor
    down_size: float


@dataclass(frozen=True)
class Guide:
    """What calibration says of an expert; all channels in the source's order.

    scores: [I], how much each intermediate channel counts.   inputs: [H, H], second moment of the
    inputs.   down: from decoded w1 and w3 [I, H] to the second moment of what w2 receives,
    [I, I], and the w2 [H, I] to aim at.   outputs: [H, H], second moment of the loss's gradient
    at the output, None without.   choose: from the decoded w1, w3 and w2 of each pair of rate
    modes to the pair to keep.
    """

    scores: torch.Tensor
    inputs: torch.Tensor
    down: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    choose: Callable[[Mapping[Modes, Dense]], Modes]
    outputs: torch.Tensor | None = None


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
class EncodedExpert:
    """A coded expert and what is known of its error.

    low_to_high_groups: [I/4] int64, groups of four source channels, least important first.
    nmse: |W - W'|^2 / |W|^2 of w1, w3 and w2; 0 for a matrix of zeros.
    rms: root mean square of what each decodes to.
    """

    coded: atom.Expert
    low_to_high_groups: torch.Tensor
    nmse: dict[str, float]
    rms: dict[str, float]


@dataclass(frozen=True)
class EncodedMatrix:
    """One matrix at one rate mode. dense: what it decodes to, [K, N] float32, low to high."""

    packed: atom.Matrix
    dense: torch.Tensor
    nmse: float


class MatrixError(ValueError):
    """A matrix that cannot be encoded; which one, and why."""

    def __init__(self, layer: int, expert: int, matrix: str, reason: str) -> None:
        super().__init__(f"layer {layer} expert {expert}: {matrix}: {reason}")
        self.expert, self.matrix, self.reason = expert, matrix, reason


_ByMode = dict[int, EncodedMatrix]


def modes_tried(settings: Settings, records: int) -> tuple[int, ...]:
    """The rate modes at which each matrix is coded."""
    return allowed_modes(records) if settings.modes == "all" else (0,)


def encode_expert(
    w1: torch.Tensor,
    w3: torch.Tensor,
    w2: torch.Tensor,
    *,
    layer: int,
    expert: int,
    settings: Settings,
    hidden: HiddenSide | None = None,
    guide: Guide | None = None,
) -> EncodedExpert:
    """Encode gate w1 [I, H], up w3 [I, H] and down w2 [H, I], float32, finite, on any device.

    I and H may be any: what is coded is padded with zeros that decode to exact zeros.
    hidden: what the layer shares; None: the hidden side is the expert's own.
    guide: what calibration says; None: all inputs count alike.
    Raises MatrixError for scales beyond float16, and ArithmeticError if what was packed does not
    decode to what was encoded (a defect of this program or machine, never of the input). Weights
    that are too small for float16 scales decode to zeros.
    """
    weights = {"w1": w1, "w3": w3, "w2": w2}
    steps = expert_steps(
        weights, layer=layer, expert=expert, settings=settings, hidden=hidden, guide=guide
    )
    return lockstep.run(steps, search)


def expert_steps(
    weights: Mapping[str, torch.Tensor],
    *,
    layer: int,
    expert: int,
    settings: Settings,
    hidden: HiddenSide | None = None,
    guide: Guide | None = None,
    modes: Modes | None = None,
) -> Steps[EncodedExpert]:
    """As encode_expert, for lockstep.run with other experts. modes: None: those of the settings."""
    sizes = sizes_of(weights["w1"])
    geometry = sizes.padded(1)
    weights = pad_matrices(weights, geometry)
    w1, w3, w2 = (weights[name] for name in atom.MATRICES)
    if guide is None:
        scores = permutation.weight_scores(w1, w3, w2)[: sizes.intermediate]
    else:
        scores, guide = guide.scores, _padded_guide(guide, sizes, geometry)
    if hidden is not None:
        hidden = replace(hidden, scales=pad(hidden.scales, geometry.hidden))
    scores = pad(scores, geometry.intermediate, value=permutation.LEAST)
    groups = permutation.low_to_high_groups(scores)
    order = permutation.channels_of_groups(groups)
    tried = modes_tried(settings, w1.shape[0] // RECORD)

    def steps(name: str, weight: torch.Tensor, metric: Metric | None) -> Steps[_ByMode]:
        draws = [
            _draw(size, name, side, layer, expert, settings.seed, shared=hidden is not None)
            for size, side in zip(weight.shape, _sides(name), strict=True)
        ]
        try:
            return (
                yield from matrix_steps(
                    weight.contiguous(),
                    _rate_axis(name),
                    *(draw.to(weight.device) for draw in draws),
                    modes=tried if modes is None else (modes[name == "w2"],),
                    method=settings.search,
                    metric=metric,
                    hidden=hidden,
                )
            )
        except ValueError as error:
            raise MatrixError(layer, expert, name, str(error)) from error

    metric = None if guide is None else Metric(guide.inputs)
    gates = [steps("w1", w1[order].T, metric), steps("w3", w3[order].T, metric)]
    if guide is None:
        # Without feedback all tiles of a matrix are searched at once, which is enough for a CPU.
        some = lockstep.in_turn if w1.device.type == "cpu" else lockstep.together
        found = yield from some([*gates, steps("w2", w2[:, order].T, None)])
        chosen, kept = _least_weight_error(*found)
    else:
        gate, up = yield from lockstep.together(gates)
        metrics = {m: _down_metric(guide, order, gate[m].dense, up[m].dense) for m in gate}
        found = yield from lockstep.together(
            steps("w2", w2[:, order].T, metric) for metric in metrics.values()
        )
        down = dict(zip(metrics, found, strict=True))
        chosen, kept = _least_functional_error(guide, order, gate, up, down)
    return _checked(chosen, kept, groups, geometry)


def _padded_guide(guide: Guide, sizes: TrueSizes, geometry: Geometry) -> Guide:
    """A guide that is asked about padded matrices; nothing is known of what is padding.

    Its scores stay as they are.
    """
    if not sizes.is_padded:
        return guide
    hidden, intermediate = geometry.hidden, geometry.intermediate

    def down(w1: torch.Tensor, w3: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        true = unpad_matrices({"w1": w1, "w3": w3}, sizes)
        moment, target = guide.down(true["w1"], true["w3"])
        return pad(moment, intermediate, intermediate), pad(target, hidden, intermediate)

    def choose(decoded: Mapping[Modes, Dense]) -> Modes:
        named = {m: dict(zip(atom.MATRICES, dense, strict=True)) for m, dense in decoded.items()}
        true = {m: tuple(unpad_matrices(dense, sizes).values()) for m, dense in named.items()}
        return guide.choose(true)

    outputs = guide.outputs
    return replace(
        guide,
        inputs=pad(guide.inputs, hidden, hidden),
        down=down,
        choose=choose,
        outputs=None if outputs is None else pad(outputs, hidden, hidden),
    )


def _down_metric(guide: Guide, order: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor) -> Metric:
    """What w2's error counts once w1 and w3 have been decoded, [H, I] with I low to high."""
    place = torch.argsort(order)
    moment, target = guide.down(w1.T[place], w3.T[place])
    return Metric(moment[order][:, order], guide.outputs, target[:, order].T.contiguous())


def _draw(
    size: int, matrix: str, side: str, layer: int, expert: int, seed: int, *, shared: bool
) -> torch.Tensor:
    """The signs of one side of a matrix; a shared hidden side has one draw for the layer."""
    whose = {"expert": expert, "matrix": matrix}
    if shared and side == "hidden":
        whose = {"expert": None, "matrix": None}
    return signs(size, seed=seed, layer=layer, side=side, **whose)


_Chosen = tuple[dict[str, EncodedMatrix], Modes]


def _least_weight_error(w1: _ByMode, w3: _ByMode, w2: _ByMode) -> _Chosen:
    """The matrices at the modes of least weight error; the smaller mode of equals."""
    mode13 = min(w1, key=lambda mode: (w1[mode].nmse + w3[mode].nmse, mode))
    mode2 = min(w2, key=lambda mode: (w2[mode].nmse, mode))
    return {"w1": w1[mode13], "w3": w3[mode13], "w2": w2[mode2]}, (mode13, mode2)


def _least_functional_error(
    guide: Guide, order: torch.Tensor, w1: _ByMode, w3: _ByMode, w2: dict[int, _ByMode]
) -> _Chosen:
    """The matrices at the modes that the guide chooses. w2: by the mode of w1 and w3 too."""
    place = torch.argsort(order)
    decoded = {
        (a, b): (w1[a].dense.T[place], w3[a].dense.T[place], matrix.dense.T[:, place])
        for a, by_mode in w2.items()
        for b, matrix in by_mode.items()
    }
    modes = guide.choose(decoded) if len(decoded) > 1 else next(iter(decoded))
    return {"w1": w1[modes[0]], "w3": w3[modes[0]], "w2": w2[modes[0]][modes[1]]}, modes


def _checked(
    chosen: dict[str, EncodedMatrix], modes: Modes, groups: torch.Tensor, geometry: Geometry
) -> EncodedExpert:
    """The expert of some matrices, once its bytes are checked."""
    packed = {name: m.packed for name, m in chosen.items()}
    coded = atom.Expert(**packed, mode13=modes[0], mode2=modes[1])
    _check_decode(coded, chosen, geometry)
    return EncodedExpert(
        coded,
        groups,
        nmse={name: m.nmse for name, m in chosen.items()},
        rms={name: root_mean_square(m.dense) for name, m in chosen.items()},
    )


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


def _check_decode(coded: atom.Expert, chosen: dict[str, EncodedMatrix], geometry: Geometry) -> None:
    """Decode the packed bytes and compare them with the encoder's own reconstruction."""
    modes = (coded.mode13, coded.mode2)
    bundles = atom.pack_expert(coded)
    decoded = decode.dense_expert(atom.unpack_expert(bundles, coded.shared_scales, modes, geometry))
    stored = stored_channels(geometry.records).to(bundles.device)
    for name, matrix in chosen.items():
        expected = matrix.dense[:, stored] if name != "w2" else matrix.dense[stored]
        error, norm = torch.stack([(decoded[name].T - expected).norm(), expected.norm()]).tolist()
        if not error <= DECODE_TOLERANCE * norm:
            raise ArithmeticError(
                f"{name}: the packed bytes decode with an error of {error:.2g} where the norm is "
                f"{norm:.2g}, expected a ratio of at most {DECODE_TOLERANCE}"
            )


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


def _rate_axis(name: str) -> str:
    return "in" if name == "w2" else "out"


def _sides(name: str) -> tuple[str, str]:
    """The side of a matrix's inputs, and of its outputs."""
    return ("intermediate", "hidden") if name == "w2" else ("hidden", "intermediate")
