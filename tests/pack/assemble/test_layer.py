from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qsrt_pack.assemble.layer import expert_evidence, layer_evidence
from qsrt_runtime.format import atom, paths
from qsrt_runtime.format.container import LayerWriter, read_layer
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.evidence import check_evidence_experts, low_to_high
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.format.rates import stored_bits
from qsrt_runtime.format.slab import expert_modes

GEOMETRY = Geometry(hidden=128, intermediate=256, experts=3)
SOURCE, ENCODER = "a" * 64, "b" * 64
GROUPS = torch.arange(63, -1, -1)
NMSE = {"w1": 0.015, "w3": 0.016, "w2": 0.017}
MANIFEST = {
    "geometry": {"hidden_size": 128, "intermediate_size": 256},
    "producer": {"encoder": {"settings": {"modes": "all"}}},
}
RMS = {"w1": 0.02, "w3": 0.03, "w2": 0.04}


def random_matrix(mode: int, generator: torch.Generator, rows: int, columns: int) -> atom.Matrix:
    records = [
        torch.randint(-(2**15), 2**15, (8, 8, 16 * bits), generator=generator).to(torch.int16)
        for bits in stored_bits(mode, 2)
    ]
    scales = [torch.rand(size, generator=generator).half() + 0.5 for size in (rows, columns)]
    return atom.Matrix(tuple(records), *scales)


def random_expert(seed: int, mode13: int = 0, mode2: int = 0) -> atom.Expert:
    """Any words are valid: nothing needs to be searched."""
    generator = torch.Generator().manual_seed(seed)
    return atom.Expert(
        w1=random_matrix(mode13, generator, 128, 256),
        w3=random_matrix(mode13, generator, 128, 256),
        w2=random_matrix(mode2, generator, 256, 128),
        mode13=mode13,
        mode2=mode2,
    )


def entry_of(number: int, expert: atom.Expert) -> dict:
    return expert_evidence(number, expert, GROUPS, NMSE, RMS)


def write(path: Path, experts: list[atom.Expert]) -> LayerWriter:
    with LayerWriter(path, GEOMETRY, 7, SOURCE, ENCODER) as writer:
        for number, expert in enumerate(experts):
            writer.write_expert(number, expert)
    return writer


def test_an_experts_entry() -> None:
    entry = entry_of(2, random_expert(0, mode13=1))
    order = entry.pop("low_to_high")
    assert entry == {
        "expert": 2,
        "mode13": "R1",
        "mode2": "R0",
        "nmse": NMSE,
        "rms": RMS,
        "functional_nmse": None,
        "tokens": None,
        "fallback": None,
        "zero_matrices": [],
    }
    channels = low_to_high(order, 256, "test")
    assert torch.equal(channels[::4], 4 * GROUPS)
    assert torch.equal(channels[3::4], 4 * GROUPS + 3)


@pytest.mark.parametrize("zero", [[], ["w1"], ["w2", "w3"], ["w1", "w2", "w3"]])
def test_matrices_of_zeros_are_listed(zero: list[str]) -> None:
    expert = random_expert(0)
    blank = {
        name: replace(matrix, svh=torch.zeros_like(matrix.svh))
        for name in zero
        for matrix in [getattr(expert, name)]
    }
    assert entry_of(0, replace(expert, **blank))["zero_matrices"] == zero


def test_a_layers_evidence_is_that_of_its_file(tmp_path: Path) -> None:
    experts = [random_expert(0), random_expert(1, 1, 0), random_expert(2, 1, 1)]
    path = tmp_path / "qsrt-layer-007.safetensors"
    writer = write(path, experts)
    entries = [entry_of(number, expert) for number, expert in enumerate(experts)]
    evidence = layer_evidence(writer, "fast", entries)
    assert evidence["safetensors_file"] == path.name
    assert evidence["safetensors_bytes"] == path.stat().st_size
    assert evidence["safetensors_sha256"] == paths.sha256_file(path)
    assert (evidence["source_sha256"], evidence["encoder_fingerprint"]) == (SOURCE, ENCODER)
    assert (evidence["layer"], evidence["search"]) == (7, "fast")
    assert (evidence["expert_count"], evidence["expert_ids"]) == (3, [0, 1, 2])
    assert evidence["experts"] == entries
    layer = read_layer(path)
    check_evidence_experts(evidence, layer, MANIFEST, "test")
    assert [expert_modes(layer, number) for number in range(3)] == [(0, 0), (1, 0), (1, 1)]
    evidence["experts"][1]["mode13"] = "R0"
    with pytest.raises(FormatError, match="modes of expert 1"):
        check_evidence_experts(evidence, layer, MANIFEST, "test")


def test_evidence_beyond_the_schema_is_refused(tmp_path: Path) -> None:
    experts = [random_expert(number) for number in range(3)]
    writer = write(tmp_path / "qsrt-layer-007.safetensors", experts)
    entries = [entry_of(number, expert) for number, expert in enumerate(experts)]
    entries[2]["nmse"] = {"w1": 0.0}
    with pytest.raises(FormatError, match=r"qsrt-layer-007\.json: \$\.experts\[2\]"):
        layer_evidence(writer, "fast", entries)
