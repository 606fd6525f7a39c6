"""Encode one expert: order its channels, encode its matrices, and check what they are packed to."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import qsrt_runtime
from qsrt_pack.encode import lockstep, permutation
from qsrt_pack.encode.ldlq import DAMPING
from qsrt_pack.encode.lockstep import Steps
from qsrt_pack.encode.matrix import EncodedMatrix, HiddenSide, Metric, matrix_steps
from qsrt_pack.encode.ordered import root_mean_square
from qsrt_pack.encode.padding import pad, pad_matrices, sizes_of, unpad_matrices
from qsrt_pack.encode.viterbi import search
from qsrt_runtime.format import atom, codebook, decode
from qsrt_runtime.format.geometry import RECORD, Geometry, TrueSizes
from qsrt_runtime.format.rates import allowed_modes, stored_channels
from qsrt_runtime.format.rotation import signs

DECODE_TOLERANCE = 1e-6
Modes = tuple[int, int]  # of w1 and w3, and of w2
Dense = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # w1, w3 [I, H] and w2 [H, I]


@dataclass(frozen=True)
class Settings:
    """What decides an expert's bytes besides its weights.

    seed: of the sign draws.   search: a method of viterbi.METHODS.   modes: "R0" alone, or "all"
    nine combinations (four where there are two records), keeping the least weight error.
    hidden_side: whether "layer" or "expert" has signs and scales of its own on the hidden side.
    device: the kind that encodes, see viterbi.device_kind; their roundings differ.
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
    _check_kernels(coded, chosen, geometry)
    return EncodedExpert(
        coded,
        groups,
        nmse={name: m.nmse for name, m in chosen.items()},
        rms={name: root_mean_square(m.dense) for name, m in chosen.items()},
    )


def _check_kernels(
    coded: atom.Expert, chosen: dict[str, EncodedMatrix], geometry: Geometry
) -> None:
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


def _rate_axis(name: str) -> str:
    return "in" if name == "w2" else "out"


def _sides(name: str) -> tuple[str, str]:
    """The side of a matrix's inputs, and of its outputs."""
    return ("intermediate", "hidden") if name == "w2" else ("hidden", "intermediate")
