"""Encode one expert: order its channels, rotate, scale, search, pack, and check the result."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

import qsrt_runtime
from qsrt_pack.encode import incoherence, permutation
from qsrt_pack.encode.ldlq import DAMPING, feedback_factor, ldlq, rotate_hessian
from qsrt_pack.encode.ordered import ordered_mean_square, root_mean_square
from qsrt_pack.encode.viterbi import search
from qsrt_runtime.format import atom, codebook, decode, tile
from qsrt_runtime.format.geometry import RECORD, TILE, Geometry
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


@dataclass(frozen=True)
class Settings:
    """What decides an expert's bytes besides its weights.

    seed: of the sign draws.   search: a method of viterbi.METHODS.   modes: "R0" alone, or "all"
    nine combinations (four where there are two records), keeping the least weight error.
    """

    seed: int = 0
    search: str = "exact"
    modes: str = "R0"

    def fingerprinted(self) -> dict[str, Any]:
        """Every setting that can change a byte of a layer file."""
        return {
            **asdict(self),
            "package": qsrt_runtime.__version__,
            "codebook_sha256": codebook.TABLES_SHA256,
            "damping": DAMPING,
            "calibration_sha256": None,
            "device": "cpu",
        }


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
) -> EncodedExpert:
    """Encode gate w1 [I, H], up w3 [I, H] and down w2 [H, I], float32, finite.

    Raises ValueError for scales beyond float16, and ArithmeticError if what was packed does not
    decode to what was encoded (a defect of this program or machine, never of the input).
    """
    groups = permutation.low_to_high_groups(permutation.weight_scores(w1, w3, w2))
    order = permutation.channels_of_groups(groups)
    sources = {"w1": w1[order].T, "w3": w3[order].T, "w2": w2[:, order].T}
    candidates = {}
    for name, weight in sources.items():
        draws = [
            signs(size, seed=settings.seed, layer=layer, expert=expert, matrix=name, side=side)
            for size, side in zip(weight.shape, _sides(name), strict=True)
        ]
        candidates[name] = encode_matrix(
            weight.contiguous(),
            _rate_axis(name),
            *(draw.to(weight.device) for draw in draws),
            modes=modes_tried(settings, w1.shape[0] // RECORD),
            method=settings.search,
        )
    mode13 = _least_error(candidates["w1"], candidates["w3"])
    mode2 = _least_error(candidates["w2"])
    chosen = {
        name: by_mode[mode2 if name == "w2" else mode13] for name, by_mode in candidates.items()
    }
    coded = atom.Expert(
        **{name: m.packed for name, m in chosen.items()}, mode13=mode13, mode2=mode2
    )
    _check_decode(coded, chosen, Geometry(w1.shape[1], w1.shape[0], 1))
    return EncodedExpert(
        coded,
        groups,
        nmse={name: m.nmse for name, m in chosen.items()},
        rms={name: root_mean_square(m.dense) for name, m in chosen.items()},
    )


def encode_matrix(
    weight: torch.Tensor,
    rate_axis: str,
    input_signs: torch.Tensor,
    output_signs: torch.Tensor,
    *,
    modes: Iterable[int],
    method: str,
    hessian: torch.Tensor | None = None,
) -> dict[int, EncodedMatrix]:
    """Encode a matrix at each of some rate modes, all with one rotation and one global scale.

    weight: [K, N] float32 with the rate axis ("in": K, "out": N) from least to most important.
    input_signs: [K], output_signs: [N].   hessian: [K, K], second moment of the inputs, None for
    the identity.
    """
    rotated, suh, svh = incoherence.regularize(weight, input_signs, output_signs)
    scale, _ = incoherence.search_scale(
        scale_sample(rotated),
        coarse=lambda tiles: _quantized(tiles, _SCALE_BITS, "fast"),
        fine=lambda tiles: _quantized(tiles, _SCALE_BITS, method),
    )
    suh, svh = (suh, svh / scale) if rate_axis == "out" else (suh / scale, svh)
    suh, svh = map(_as_float16, _balanced(suh, svh))
    factor = None
    if hessian is not None:
        factor = feedback_factor(rotate_hessian(hessian, suh.float()))
    encoded = {}
    for mode in modes:
        bits = record_bits(mode, weight.shape[rate_axis == "out"] // RECORD)
        edges, values = _encode_tiles(rotated * scale, factor, rate_axis, bits, method)
        dense = rotate(rotate_rows(values) * suh.float()[:, None]) * svh.float()
        encoded[mode] = EncodedMatrix(
            packed=_pack(edges, suh, svh, rate_axis, bits),
            dense=dense,
            nmse=_nmse(weight, dense),
        )
    return encoded


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


def _encode_tiles(
    rotated: torch.Tensor,
    factor: torch.Tensor | None,
    rate_axis: str,
    bits: tuple[int, ...],
    method: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Edges [K/16, N/16, 256] uint8 and the values [K, N] they decode to."""
    rows, columns = (size // TILE for size in rotated.shape)
    tile_bits = torch.tensor(bits).repeat_interleave(_TILES_PER_RECORD)
    tile_bits = tile_bits[None].expand(rows, -1) if rate_axis == "out" else tile_bits[:, None]
    tile_bits = tile_bits.expand(rows, columns).to(rotated.device)
    edges = torch.empty(rows, columns, tile.POSITIONS, dtype=torch.uint8, device=rotated.device)

    def quantize(span: slice, target: torch.Tensor) -> torch.Tensor:
        block = slice(span.start // TILE, span.stop // TILE)
        paths = tile.to_trellis_order(_to_tiles(target).flatten(0, 1))
        values = torch.empty_like(paths)
        found = torch.empty_like(paths, dtype=torch.uint8)
        for rate in sorted(set(bits)):
            at = (tile_bits[block] == rate).flatten()
            found[at] = search(paths[at], rate, method)
            values[at] = _values(found[at], rate)
        edges[block] = found.unflatten(0, (-1, columns))
        return _from_tiles(tile.to_row_major(values).unflatten(0, (-1, columns)))

    return edges, ldlq(rotated, factor, quantize)


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
        error, norm = float((decoded[name].T - expected).norm()), float(expected.norm())
        if not error <= DECODE_TOLERANCE * norm:
            raise ArithmeticError(
                f"{name}: the packed bytes decode with an error of {error:.2g} where the norm is "
                f"{norm:.2g}, expected a ratio of at most {DECODE_TOLERANCE}"
            )


def _quantized(paths: torch.Tensor, bits: int, method: str) -> torch.Tensor:
    return _values(search(paths, bits, method), bits)


def _values(edges: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, 256] edges -> the values of their states, trellis order."""
    states = tile.states_of_edges(edges, bits)
    return codebook.values(bits).to(edges.device)[states]


def _to_tiles(matrix: torch.Tensor) -> torch.Tensor:
    """[16 a, 16 b] -> [a, b, 16, 16]."""
    return matrix.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE)).transpose(1, 2)


def _from_tiles(tiles: torch.Tensor) -> torch.Tensor:
    """[a, b, 16, 16] -> [16 a, 16 b]."""
    return tiles.transpose(1, 2).flatten(2).flatten(0, 1)


def _nmse(source: torch.Tensor, decoded: torch.Tensor) -> float:
    power = float(ordered_mean_square(source.flatten()))
    error = float(ordered_mean_square((source - decoded).flatten()))
    return error / power if power else error


def _balanced(suh: torch.Tensor, svh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Move a power of two from suh to svh where suh is far from 1, and so from float16's range.

    The products, which are all that counts, stay the same to the bit.
    """
    exponent = math.frexp(float(suh.abs().max()))[1]
    if -_FAR <= exponent <= _FAR:
        return suh, svh
    move = 2.0 ** (exponent // 2)
    return suh / move, svh * move


def _as_float16(scales: torch.Tensor) -> torch.Tensor:
    half = scales.to(torch.float16)
    if not torch.isfinite(half).all():
        raise ValueError(
            f"a weight scale of {float(scales.abs().max()):.3g} is beyond float16 (65504)"
        )
    return half


def _least_error(*families: dict[int, EncodedMatrix]) -> int:
    """The mode with the least summed error; the smaller one of equals."""
    return min(families[0], key=lambda mode: (sum(f[mode].nmse for f in families), mode))


def _rate_axis(name: str) -> str:
    return "in" if name == "w2" else "out"


def _sides(name: str) -> tuple[str, str]:
    """The side of a matrix's inputs, and of its outputs."""
    return ("intermediate", "hidden") if name == "w2" else ("hidden", "intermediate")
