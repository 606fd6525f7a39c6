import base64
import copy

import pytest
import torch

from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.evidence import (
    check_evidence,
    check_evidence_experts,
    encode_low_to_high,
    low_to_high,
)
from qsrt_runtime.format.package import open_package, read_evidence, read_package_layer

OTHER = "0123456789abcdef" * 4


@pytest.fixture(scope="module")
def published(golden):
    return open_package(golden / "publication")


@pytest.fixture(scope="module")
def ours(clean_package):
    return open_package(clean_package)


EVIDENCE = {
    "layer": 1,
    "codebook": "other",
    "profile_id": 2,
    "schema": "other",
    "encoder_fingerprint": OTHER,
    "source_sha256": OTHER,
    "expert_count": 3,
    "expert_ids": [1, 0, 2, 3],
    "safetensors_file": "x.safetensors",
    "safetensors_bytes": 1,
    "safetensors_sha256": OTHER,
}


@pytest.mark.parametrize(("field", "new"), [*EVIDENCE.items(), ("search", "exact")])
def test_evidence_fields(ours, field, new):
    evidence = read_evidence(ours, 0)
    check_evidence(evidence, 0, ours.documents, "file")
    with pytest.raises(FormatError, match=f"file: {field} is "):
        check_evidence(evidence | {field: new}, 0, ours.documents, "file")


@pytest.mark.parametrize(("field", "new"), EVIDENCE.items())
def test_published_evidence_fields(published, field, new):
    evidence = read_evidence(published, 5)
    check_evidence(evidence, 5, published.documents, "file")
    with pytest.raises(FormatError, match=f"file: {field} is "):
        check_evidence(evidence | {field: new}, 5, published.documents, "file")


def test_evidence_experts(ours):
    evidence = read_evidence(ours, 0)
    for experts in (evidence["experts"][:3], evidence["experts"][::-1]):
        with pytest.raises(FormatError, match="file: experts is "):
            check_evidence(evidence | {"experts": experts}, 0, ours.documents, "file")


@pytest.mark.parametrize(("field", "new"), [("mode13", "R1"), ("mode2", "R1")])
def test_evidence_modes(ours, field, new):
    evidence, layer = read_evidence(ours, 0), read_package_layer(ours, 0)
    manifest = copy.deepcopy(ours.documents.manifest)
    manifest["producer"]["encoder"]["settings"]["modes"] = "all"
    check_evidence_experts(evidence, layer, manifest, "file")
    evidence["experts"][2][field] = new
    with pytest.raises(FormatError, match="file: modes of expert 2 is "):
        check_evidence_experts(evidence, layer, manifest, "file")


def test_evidence_orders(ours):
    evidence, layer = read_evidence(ours, 0), read_package_layer(ours, 0)
    evidence["experts"][2]["low_to_high"] = "AAAA"
    manifest = ours.documents.manifest
    with pytest.raises(FormatError, match="file: expert 2: low_to_high is no order of 64 groups"):
        check_evidence_experts(evidence, layer, manifest, "file")


@pytest.mark.parametrize("intermediate", [256, 3072])
def test_low_to_high_round_trip(intermediate):
    generator = torch.Generator().manual_seed(0)
    groups = torch.randperm(intermediate // 4, generator=generator)
    text = encode_low_to_high(groups)
    assert base64.b64decode(text)[:2] == int(groups[0]).to_bytes(2, "little")
    found = low_to_high(text, intermediate, "file")
    assert found.tolist() == [4 * g + i for g in groups.tolist() for i in range(4)]


def packed(groups):
    return base64.b64encode(b"".join(g.to_bytes(2, "little") for g in groups)).decode()


@pytest.mark.parametrize(
    "text",
    [
        "*",
        "AAA",
        "",
        packed(range(63)),
        packed(range(65)),
        packed([0, *range(63)]),
        packed([64, *range(1, 64)]),
        packed(range(64))[:-4],
        packed(range(64)) + "\n",
        "ü",
    ],
)
def test_low_to_high_refused(text):
    with pytest.raises(FormatError, match="file: low_to_high is no"):
        low_to_high(text, 256, "file")


def test_low_to_high_of_an_odd_length():
    data = base64.b64decode(packed(range(64)))[:-1]
    with pytest.raises(FormatError, match="file: low_to_high is no order"):
        low_to_high(base64.b64encode(data).decode(), 256, "file")
