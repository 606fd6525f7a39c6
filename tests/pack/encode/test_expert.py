"""One expert of 128 x 256, encoded by the fast search and decoded again."""

from dataclasses import replace

import pytest
import torch

from qsrt_pack.encode import matrix as matrices
from qsrt_pack.encode.expert import EncodedExpert, Settings, encode_expert, modes_tried
from qsrt_pack.encode.permutation import channels_of_groups
from qsrt_runtime.format import atom, decode
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.format.rates import stored_channels

HIDDEN, INTERMEDIATE = 128, 256
FAST, ALL = Settings(search="fast"), Settings(search="fast", modes="all")
SHAPES = {
    "w1": (INTERMEDIATE, HIDDEN),
    "w3": (INTERMEDIATE, HIDDEN),
    "w2": (HIDDEN, INTERMEDIATE),
}
Weights = dict[str, torch.Tensor]


def normal_weights(seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.05 * torch.randn(*s, generator=generator) for name, s in SHAPES.items()}


def uneven_weights() -> Weights:
    """Every other group of eight channels is ten times as large: two bits do for the others."""
    loud = torch.where(torch.arange(INTERMEDIATE) // 8 % 2 == 0, 10.0, 1.0)
    weights = normal_weights(1)
    weights["w1"] *= loud[:, None]
    weights["w3"] *= loud[:, None]
    weights["w2"] *= loud
    return weights


def encode(weights: Weights, settings: Settings = FAST, *, expert: int = 0) -> EncodedExpert:
    return encode_expert(**weights, layer=3, expert=expert, settings=settings)


def stored(encoded: EncodedExpert) -> bytes:
    """Everything that a layer file holds of an expert."""
    coded = encoded.coded
    parts = (atom.pack_expert(coded), coded.shared_scales.view(torch.uint8))
    return b"".join(part.numpy().tobytes() for part in parts)


def source_order(encoded: EncodedExpert) -> Weights:
    """The decoded matrices with their channels where the source has them."""
    channel = channels_of_groups(encoded.low_to_high_groups)[stored_channels(2)]
    dense = decode.dense_expert(encoded.coded)
    restored = {name: torch.empty_like(weight) for name, weight in dense.items()}
    for name in ("w1", "w3"):
        restored[name][channel] = dense[name]
    restored["w2"][:, channel] = dense["w2"]
    return restored


def nmse(source: torch.Tensor, decoded: torch.Tensor) -> float:
    power = source.double().square().sum()
    return float((source - decoded).double().square().sum() / power)


@pytest.fixture(scope="module")
def encoded() -> EncodedExpert:
    return encode(normal_weights())


@pytest.fixture(scope="module")
def uneven() -> dict[str, EncodedExpert]:
    return {modes: encode(uneven_weights(), replace(FAST, modes=modes)) for modes in ("R0", "all")}


def test_round_trip(encoded: EncodedExpert) -> None:
    assert (encoded.coded.mode13, encoded.coded.mode2) == (0, 0)
    for name, decoded in source_order(encoded).items():
        found = nmse(normal_weights()[name], decoded)
        assert encoded.nmse[name] == pytest.approx(found, rel=1e-6)
        # 3 bits of a normal source cannot go below 2**-6 = 0.0156.
        assert 0.0156 < found < 0.03


def test_round_trip_of_all_modes(uneven: dict[str, EncodedExpert]) -> None:
    best = uneven["all"]
    assert (best.coded.mode13, best.coded.mode2) == (1, 1)
    assert [words.shape[-1] for words in best.coded.w1.records] == [32, 64]
    for name, decoded in source_order(best).items():
        found = nmse(uneven_weights()[name], decoded)
        assert best.nmse[name] == pytest.approx(found, rel=1e-6)


def test_all_modes_are_never_worse_than_r0(
    encoded: EncodedExpert, uneven: dict[str, EncodedExpert]
) -> None:
    even = {"R0": encoded, "all": encode(normal_weights(), ALL)}
    for pair in (even, uneven):
        r0, best = pair["R0"].nmse, pair["all"].nmse
        assert best["w1"] + best["w3"] <= r0["w1"] + r0["w3"]
        assert best["w2"] <= r0["w2"]
    assert uneven["all"].nmse["w2"] < 0.7 * uneven["R0"].nmse["w2"]
    assert stored(even["all"]) == stored(encoded)  # where R0 is best, nothing else is changed


def test_modes_tried() -> None:
    assert modes_tried(Settings(modes="R0"), 4) == (0,)
    assert modes_tried(Settings(modes="all"), 2) == (0, 1)
    assert modes_tried(Settings(modes="all"), 4) == (0, 1, 2)


def test_the_order_is_shared_and_by_importance(uneven: dict[str, EncodedExpert]) -> None:
    groups = uneven["R0"].low_to_high_groups
    assert sorted(groups.tolist()) == list(range(64))
    assert set((groups[32:] // 2 % 2).tolist()) == {0}  # the loud half


def test_same_input_same_bytes(encoded: EncodedExpert) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    try:
        assert stored(encode(normal_weights())) == stored(encoded)
    finally:
        torch.set_num_threads(threads)


def test_signs_depend_on_seed_and_expert(encoded: EncodedExpert) -> None:
    others = [encode(normal_weights(), replace(FAST, seed=1)), encode(normal_weights(), expert=1)]
    assert len({stored(encoded), *map(stored, others)}) == 3
    for other in others:
        assert not torch.equal(other.coded.w1.suh.sign(), encoded.coded.w1.suh.sign())
        assert not torch.equal(other.coded.w2.svh.sign(), encoded.coded.w2.svh.sign())


@pytest.mark.parametrize("settings", [FAST, ALL])
def test_qn_3a_an_expert_of_zeros(settings: Settings) -> None:
    encoded = encode({name: torch.zeros(shape) for name, shape in SHAPES.items()}, settings)
    for matrix in (encoded.coded.w1, encoded.coded.w3, encoded.coded.w2):
        assert torch.isfinite(matrix.suh).all()
        assert torch.isfinite(matrix.svh).all()
    assert all(not decoded.any() for decoded in decode.dense_expert(encoded.coded).values())
    assert encoded.nmse == {"w1": 0.0, "w3": 0.0, "w2": 0.0}
    assert (encoded.coded.mode13, encoded.coded.mode2) == (0, 0)


@pytest.mark.parametrize("zero", SHAPES)
def test_one_matrix_of_zeros(zero: str) -> None:
    weights = normal_weights()
    weights[zero] = torch.zeros(SHAPES[zero])
    encoded = encode(weights)
    decoded = source_order(encoded)
    assert not decoded[zero].any()
    assert encoded.nmse[zero] == 0
    for name in set(SHAPES) - {zero}:
        assert nmse(weights[name], decoded[name]) < 0.03


def test_qn_3b_zeros_among_normal_values(encoded: EncodedExpert) -> None:
    weights = normal_weights()
    gate, up, down = weights["w1"], weights["w3"], weights["w2"]
    gate[5] = 0
    down[:, 9] = 0
    up[64:80, 16:32] = 0
    decoded = source_order(encode(weights))
    assert not decoded["w1"][5].any()
    assert not decoded["w2"][:, 9].any()
    # Every other zero carries the error of its neighbours: 2 % of the power, some more by chance.
    assert 0 < decoded["w3"][64:80, 16:32].square().mean() < 0.04 * up.square().mean()
    for name, weight in weights.items():
        keep = weight != 0
        found = nmse(weight[keep], decoded[name][keep])
        assert found < 1.05 * encoded.nmse[name]


@pytest.mark.parametrize("part", ["words", "suh", "svh"])
def test_what_does_not_decode_to_what_was_encoded_is_an_error(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    real = matrices._pack

    def damaged(*arguments: object) -> atom.Matrix:
        packed = real(*arguments)
        if part == "words":
            packed.records[1][7, 3, 0] ^= 64
            return packed
        vector = getattr(packed, part).clone()
        vector[100] *= -1
        return replace(packed, **{part: vector})

    monkeypatch.setattr(matrices, "_pack", damaged)
    with pytest.raises(ArithmeticError, match="w1: the packed bytes decode with an error of"):
        encode(normal_weights())


@pytest.mark.parametrize("name", SHAPES)
def test_scales_beyond_float16_are_refused(name: str) -> None:
    weights = normal_weights()
    weights[name] = weights[name] * 1e12
    with pytest.raises(ValueError, match="is beyond float16"):
        encode(weights)


@pytest.mark.parametrize("factor", [1e-8, 1e-7, 1e-3, 1e4, 1e5, 1e7])
def test_the_error_does_not_depend_on_the_size(encoded: EncodedExpert, factor: float) -> None:
    scaled = encode({name: weight * factor for name, weight in normal_weights().items()})
    for name, found in scaled.nmse.items():
        assert found == pytest.approx(encoded.nmse[name], rel=0.05)


@pytest.mark.parametrize("factor", [20, 100, 1000])
@pytest.mark.parametrize("place", [5, (7, 5)], ids=["channel", "weight"])
def test_what_is_huge_leaves_the_others_alone(factor: float, place: int | tuple) -> None:
    """Columns that are far apart have scales of their own, without calibration too."""
    weights = normal_weights()
    weights["w1"].T[place if place == (7, 5) else (slice(None), 5)] *= factor
    decoded = source_order(encode(weights))["w1"]
    others = torch.arange(INTERMEDIATE) != 5
    assert nmse(weights["w1"][5], decoded[5]) < 0.03
    assert nmse(weights["w1"][others], decoded[others]) < (0.03 if factor < 1000 else 0.1)


def test_powers_of_two_change_the_scales_alone() -> None:
    """However far from 1 a matrix is, it is the same numbers that are coded."""
    first, second = (
        encode({name: weight * 2.0**exponent for name, weight in normal_weights().items()}).coded
        for exponent in (-20, 30)
    )
    for name in SHAPES:
        one, other = getattr(first, name), getattr(second, name)
        assert all(torch.equal(*pair) for pair in zip(one.records, other.records, strict=True))
        scales = [m.suh.double()[:, None] * m.svh.double() for m in (one, other)]
        assert torch.allclose(scales[0] * 2.0**50, scales[1], rtol=2**-8)


@pytest.mark.parametrize("modes", ["R0", "all"])
def test_padding_comes_first_and_decodes_to_zeros(modes: str) -> None:
    sizes = (200, 96)
    weights = {name: w[: sizes[0], : sizes[1]] for name, w in normal_weights().items()}
    weights["w2"] = normal_weights()["w2"][: sizes[1], : sizes[0]].clone()
    weights = {name: weight.clone() for name, weight in weights.items()}
    weights["w1"][:8], weights["w3"][:8], weights["w2"][:, :8] = 0, 0, 0
    encoded = encode(weights, replace(FAST, modes=modes))
    groups = encoded.low_to_high_groups.tolist()
    assert groups[:16] == [*range(50, 64), 0, 1]  # before channels of the source that are 0
    for name, decoded in source_order(encoded).items():
        matrix, weight = (m.T if name == "w2" else m for m in (decoded, weights[name]))
        assert matrix.shape == (256, 128)
        assert not matrix[200:].any()
        assert not matrix[:, 96:].any()
        assert not matrix[:8].any()
        assert nmse(weight, matrix[:200, :96]) == pytest.approx(encoded.nmse[name], rel=1e-6)
        assert encoded.nmse[name] < 0.03


@pytest.mark.parametrize("intermediate", [250, 255, 257])
def test_a_group_of_channels_may_be_part_padding(intermediate: int) -> None:
    generator = torch.Generator().manual_seed(6)
    shapes = [(intermediate, 128)] * 2 + [(128, intermediate)]
    w1, w3, w2 = (torch.randn(*shape, generator=generator) for shape in shapes)
    encoded = encode_expert(w1, w3, w2, layer=0, expert=0, settings=FAST)
    stored = 256 if intermediate < 256 else 512
    full = (stored - intermediate) // 4
    assert encoded.low_to_high_groups[:full].tolist() == list(
        range(stored // 4 - full, stored // 4)
    )
    channel = channels_of_groups(encoded.low_to_high_groups)[stored_channels(stored // 128)]
    dense = decode.dense_expert(encoded.coded)
    assert not dense["w1"][channel >= intermediate].any()
    kept = channel < intermediate
    assert nmse(w1[channel[kept]], dense["w1"][kept]) < 0.03


def test_geometry_of_four_records() -> None:
    generator = torch.Generator().manual_seed(4)
    w1, w3, w2 = (torch.randn(*s, generator=generator) for s in [(512, 128)] * 2 + [(128, 512)])
    w1[:128] *= 0.1
    w1[384:] *= 10
    encoded = encode_expert(w1, w3, w2, layer=0, expert=0, settings=ALL)
    modes = (encoded.coded.mode13, encoded.coded.mode2)
    assert modes[0] > 0
    bundles = atom.pack_expert(encoded.coded)
    unpacked = atom.unpack_expert(
        bundles, encoded.coded.shared_scales, modes, Geometry(128, 512, 1)
    )
    channel = channels_of_groups(encoded.low_to_high_groups)[stored_channels(4)]
    decoded = decode.dense_expert(unpacked)["w1"]
    assert nmse(w1[channel], decoded) == pytest.approx(encoded.nmse["w1"], rel=1e-6)


def test_bytes_do_not_depend_on_the_number_of_threads() -> None:
    generator = torch.Generator().manual_seed(5)
    w1, w3 = (torch.randn(256, 128, generator=generator) for _ in range(2))
    w2 = torch.randn(128, 256, generator=generator)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            encoded = encode_expert(
                w1, w3, w2, layer=0, expert=0, settings=Settings(search="fast", modes="all")
            )
            found.append((atom.pack_expert(encoded.coded), encoded.nmse))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
