import pytest
import torch
from safetensors.torch import load_file

from qsrt_pack.calibrate.hessian import second_moment, shrink_to_identity


@pytest.mark.parametrize("case", ["few", "many"])
def test_second_moment_and_shrinkage_are_the_golden_ones(golden, facts, case):
    data = load_file(golden / "encoder_math.safetensors")
    expected = facts["encoder_math"][f"h2_{case}"]
    rows, gates = (data[name][: expected["rows"]] for name in ("h2.rows", "h2.gates"))
    moment = second_moment(rows, gates)
    torch.testing.assert_close(moment.float(), data[f"h2_{case}.covariance"], rtol=1e-5, atol=1e-6)
    shrunk, alpha = shrink_to_identity(moment, gates)
    assert alpha == pytest.approx(expected["local_alpha"], rel=1e-6)
    torch.testing.assert_close(shrunk.float(), data[f"h2_{case}.shrunk"], rtol=1e-5, atol=1e-6)


def test_one_row_counts_for_nothing_of_its_own():
    gates = torch.tensor([0.5])
    shrunk, alpha = shrink_to_identity(second_moment(torch.ones(1, 4), gates), gates)
    assert alpha < 0.6
    assert torch.allclose(shrunk.diagonal(), torch.ones(4, dtype=torch.float64))


def test_an_identity_moment_stays_the_identity():
    eye = torch.eye(8, dtype=torch.float64)
    shrunk, _ = shrink_to_identity(eye, torch.ones(100))
    assert torch.allclose(shrunk, eye)
