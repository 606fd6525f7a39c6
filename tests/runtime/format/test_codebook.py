import hashlib
import statistics

import pytest
import torch
from safetensors.torch import load_file

from qsrt_runtime.format import codebook

BITS = (2, 3, 4)


def sha256(table):
    return hashlib.sha256(bytes(table.tolist())).hexdigest()


def test_hashes(facts):
    found = {"t12": sha256(codebook.staircase())}
    found |= {f"table_k{bits}": sha256(codebook.labels(bits)) for bits in BITS}
    joined = torch.cat([codebook.labels(bits) for bits in BITS])
    found["direct_k2k3k4_concat"] = sha256(joined)
    assert found == facts["codebook_sha256"]
    assert found["direct_k2k3k4_concat"] == codebook.TABLES_SHA256
    assert codebook.NAME == "sqg_xor_cheb_t12"
    assert codebook.BITS == BITS
    assert codebook.STATES == 65_536


@pytest.mark.parametrize("bits", BITS)
def test_labels_equal_the_golden_table(golden, facts, bits):
    tables = load_file(golden / "codebook.safetensors")
    found = codebook.labels(bits)
    assert found.dtype == torch.uint8
    assert torch.equal(found, tables[f"table_k{bits}"])
    assert len(found.unique()) == facts[f"table_k{bits}_distinct_labels"]


def test_staircase_equals_the_golden_one(golden):
    assert torch.equal(codebook.staircase(), load_file(golden / "codebook.safetensors")["t12"])


def test_staircase_follows_from_the_normal_quantile():
    quantile = statistics.NormalDist().inv_cdf
    real = torch.tensor(
        [1.5 * quantile((r + 0.5) / 65536) for r in range(65536)], dtype=torch.float64
    )
    full = real.to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)
    full = torch.where(full == 0x80, 0, full)
    most_frequent = [statistics.multimode(group) for group in full.view(4096, 16).tolist()]
    assert codebook.staircase().tolist() == [min(modes) for modes in most_frequent]


@pytest.mark.parametrize("bits", BITS)
def test_ranks_are_a_bijection_of_all_states(bits):
    assert torch.equal(codebook.ranks(bits).sort().values, torch.arange(65536))


@pytest.mark.parametrize("bits", BITS)
def test_rank_of_every_state_by_the_formula(bits):
    width, ranks = 16 - bits, []
    for state in range(65536):
        m = state >> bits
        m ^= m >> 11
        m ^= (m << 11) & ((1 << width) - 1)
        p = (0x3FA7D929 * m + 0xC928FD8E) % (1 << 32)
        reversed_edge = int(f"{state & ((1 << bits) - 1):0{bits}b}"[::-1], 2)
        ranks.append((reversed_edge ^ (p >> (32 - bits))) << width | p & ((1 << width) - 1))
    assert codebook.ranks(bits).tolist() == ranks


@pytest.mark.parametrize("bits", BITS)
def test_siblings_lie_in_different_strata(bits):
    """The 2**bits states that share a history cover every top value of the rank once."""
    strata = (codebook.ranks(bits) >> (16 - bits)).view(-1, 1 << bits)
    assert torch.equal(strata.sort(dim=1).values, torch.arange(1 << bits).expand_as(strata))


@pytest.mark.parametrize("bits", BITS)
def test_values(bits):
    values = codebook.values(bits)
    assert values.dtype == torch.float32
    assert values.shape == (65536,)
    assert torch.isfinite(values).all()
    assert (values.min().item(), values.max().item()) == (-5.5, 5.5)
    assert values.double().mean().item() == 0
    assert values.double().std(unbiased=False).item() == pytest.approx(1.49858, abs=5e-6)
    assert not (codebook.labels(bits) == 0x80).any()  # zero is 0x00 only


def test_staircase_is_monotone_and_odd():
    values = codebook.staircase().view(torch.float8_e4m3fn).float()
    assert (values.diff() >= 0).all()
    assert torch.equal(values, -values.flip(0))
