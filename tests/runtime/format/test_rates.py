import pytest
import torch
from safetensors.torch import load_file

from qsrt_runtime.format import rates
from qsrt_runtime.format.errors import FormatError

# Bits of the first four records in stored order, FORMAT section 3; the rest has 3.
STORED = {0: (3, 3, 3, 3), 1: (2, 4, 3, 3), 2: (2, 4, 2, 4)}


def test_record_orders():
    assert rates.record_order(2) == (0, 1)
    assert rates.record_order(4) == (0, 3, 1, 2)
    expected = [k for pair in range(12) for k in (pair, 23 - pair)]
    assert rates.record_order(24) == tuple(expected)
    assert rates.record_order(24)[-2:] == (11, 12)


@pytest.mark.parametrize("mode", rates.MODES)
@pytest.mark.parametrize("records", [4, 6, 24])
def test_bits_of_every_mode(records, mode):
    low_to_high = rates.record_bits(mode, records)
    assert low_to_high == tuple(sorted(low_to_high))
    assert (low_to_high.count(2), low_to_high.count(4)) == (mode, mode)
    stored = rates.stored_bits(mode, records)
    assert stored == STORED[mode] + (3,) * (records - 4)
    assert all(low + high == 6 for low, high in zip(stored[::2], stored[1::2], strict=True))
    kinds = rates.pair_kinds(mode, records)
    assert kinds == ("P24",) * mode + ("P33",) * (records // 2 - mode)


def test_two_records_have_no_second_mode():
    assert rates.allowed_modes(2) == (0, 1)
    assert rates.stored_bits(0, 2) == (3, 3)
    assert rates.stored_bits(1, 2) == (2, 4)
    with pytest.raises(FormatError, match="R2 does not exist for 2 records"):
        rates.record_bits(2, 2)


@pytest.mark.parametrize("mode", [-1, 3, 4])
def test_unknown_modes(mode):
    assert rates.allowed_modes(24) == rates.MODES
    with pytest.raises(FormatError, match=f"rate mode R{mode} does not exist"):
        rates.record_bits(mode, 24)


@pytest.mark.parametrize("mode", ["w1.R0", "w1.R1", "w1.R2", "w2.R0", "w2.R1", "w2.R2"])
def test_golden_matrices(facts, mode):
    entry = facts["matrices"][mode]
    records = len(entry["record_order"])
    assert list(rates.record_order(records)) == entry["record_order"]
    assert list(rates.stored_bits(int(mode[-1]), records)) == entry["record_bits"]
    assert list(rates.pair_kinds(int(mode[-1]), records)) == entry["pair_kinds"]


def test_golden_kimi_matrices(facts):
    for expert in facts["kimi_layer"]["experts"].values():
        for matrix, mode in zip(("w1", "w3", "w2"), (0, 0, 1), strict=True):
            entry = expert[matrix]
            assert list(rates.stored_bits(expert["format"][mode], 24)) == entry["record_bits"]
            assert list(rates.pair_kinds(expert["format"][mode], 24)) == entry["pair_kinds"]


@pytest.mark.parametrize("records", [2, 4, 24])
def test_stored_channels(records):
    found = rates.stored_channels(records)
    assert torch.equal(found.sort().values, torch.arange(128 * records))
    order = rates.record_order(records)
    expected = [128 * order[j // 128] + j % 128 for j in range(128 * records)]
    assert found.tolist() == expected


@pytest.mark.parametrize("matrix", ["w1", "w2"])
@pytest.mark.parametrize("mode", rates.MODES)
def test_stored_channels_give_the_golden_permutation(full_golden, matrix, mode):
    data = load_file(full_golden / f"matrix_{matrix}.safetensors")
    low_to_high = data[f"R{mode}.low_to_high_permutation"]
    found = low_to_high[rates.stored_channels(4)]
    assert torch.equal(found, data[f"R{mode}.physical_permutation"])


@pytest.mark.parametrize("mode13", rates.MODES)
@pytest.mark.parametrize("mode2", rates.MODES)
def test_format_code_round_trip(mode13, mode2):
    code = rates.format_code(mode13, mode2)
    assert code == 16 * mode13 + mode2
    assert rates.modes_of_code(code, 4, "expert 0") == (mode13, mode2)


def test_every_code_is_read_or_refused_by_name():
    allowed = {16 * mode13 + mode2 for mode13 in range(3) for mode2 in range(3)}
    for code in set(range(256)) - allowed - {0xFF}:
        with pytest.raises(FormatError, match=f"layer 3 expert 1: format byte 0x{code:02X}"):
            rates.modes_of_code(code, 24, "layer 3 expert 1")


@pytest.mark.parametrize(("code", "nibble"), [(0x30, 3), (0x03, 3), (0x41, 4), (0x24, 4)])
def test_later_profiles_are_refused_by_name(code, nibble):
    with pytest.raises(FormatError, match=f"rate nibble {nibble} of a later profile"):
        rates.modes_of_code(code, 4, "expert 0")


def test_x4t_is_refused_by_name():
    with pytest.raises(FormatError, match="layer 3 expert 1 is an X4T expert"):
        rates.modes_of_code(0xFF, 4, "layer 3 expert 1")


@pytest.mark.parametrize("code", [0x20, 0x02, 0x22, 0x21, 0x12])
def test_second_mode_is_refused_for_two_records(code):
    with pytest.raises(FormatError, match="expert 0: rate mode R2 needs 4 records"):
        rates.modes_of_code(code, 2, "expert 0")
