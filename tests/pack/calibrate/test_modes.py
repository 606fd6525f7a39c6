import pytest
import torch
from safetensors.torch import load_file

from qsrt_pack.calibrate.modes import choose_modes, errors_by_document

CASES = ["clear_win", "too_noisy", "r0_best", "few_fit", "few_confirmation"]


def test_errors_by_document_are_the_golden_ones(golden):
    data = load_file(golden / "encoder_math.safetensors")
    arguments = data["sse.reference"], data["sse.gates"], data["sse.documents"], 12
    errors = errors_by_document(data["sse.candidate"], *arguments)
    torch.testing.assert_close(errors, data["sse.sse"], rtol=1e-5, atol=1e-7)
    energy = errors_by_document(torch.zeros_like(data["sse.candidate"]), *arguments)
    torch.testing.assert_close(energy, data["sse.energy"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", CASES)
def test_choice_is_the_golden_one(golden, facts, case):
    data = load_file(golden / "encoder_math.safetensors")
    expected = facts["encoder_math"]["mode_choice"][case]
    choice = choose_modes(
        [tuple(pair) for pair in facts["encoder_math"]["modes_order"]],
        data[f"mode.{case}.confirmation"],
        data[f"mode.{case}.confirmation_rows"],
        data[f"mode.{case}.fit_rows"],
        layer=expected["layer"],
        expert=expected["expert"],
    )
    assert choice.proposed == tuple(expected["proposed"])
    assert choice.selected == tuple(expected["selected"])
    if expected["improvement"] is None:
        assert choice.improvement is None
        assert choice.interval is None
    else:
        assert choice.improvement == pytest.approx(expected["improvement"], rel=1e-9)
        assert choice.interval == pytest.approx(tuple(expected["ci95"]), rel=1e-6)
