"""Fixtures of the packer's tests: a package of experts of all rate modes, from random words."""

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import huggingface_hub.constants
import pytest
import torch
from fakehub import FakeHub

from qsrt_pack.assemble.layer import expert_evidence, layer_evidence
from qsrt_pack.assemble.package import build_config, build_manifest
from qsrt_pack.encode.expert import Settings
from qsrt_runtime.format import manifest as manifests
from qsrt_runtime.format import schema
from qsrt_runtime.format.atom import Expert, unpack_expert
from qsrt_runtime.format.container import LayerWriter
from qsrt_runtime.format.geometry import Geometry, TrueSizes
from qsrt_runtime.format.package import seal

MIXED = Geometry(hidden=128, intermediate=512, experts=4)  # 4 records, 2 pairs
MIXED_MODES = {0: [(0, 0), (1, 0), (2, 1), (0, 2)], 1: [(0, 0), (0, 0), (2, 2), (0, 2)]}
# By layer and expert; one largest error of w1, of w3 and of w2, and two that are equal.
MIXED_NMSE = {
    0: [(0.25, 0.5, 0.125), (0.25, 0.25, 0.0625), (0.25, 0.25, 0.75), (0.125, 0.5, 0.25)],
    1: [(0.25, 0.25, 0.03125), (0.25, 0.25, 0.25), (1.0, 0.25, 0.25), (0.25, 0.625, 0.25)],
}


def _random_expert(modes: tuple[int, int], seed: int) -> Expert:
    generator = torch.Generator().manual_seed(seed)
    shape = (MIXED.slots, MIXED.bundle_bytes)
    bundles = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    bundles[:, -192:].view(torch.float16).fill_(0.5)
    return unpack_expert(bundles, torch.full((3, 128), 0.25, dtype=torch.float16), modes, MIXED)


def _write_mixed_layer(folder: Path, layer: int, settings: Settings) -> dict:
    """A layer file of random words and its evidence, which is returned."""
    fingerprint = manifests.encoder_fingerprint(settings.fingerprinted())
    entries = []
    path = folder / manifests.layer_file_name(layer)
    with LayerWriter(path, MIXED, layer, "5" * 64, fingerprint) as writer:
        for expert, modes in enumerate(MIXED_MODES[layer]):
            coded = _random_expert(modes, 10 * layer + expert)
            writer.write_expert(expert, coded)
            nmse = dict(zip(("w1", "w3", "w2"), MIXED_NMSE[layer][expert], strict=True))
            entries.append(expert_evidence(expert, coded, torch.arange(128), nmse, nmse))
    if layer == 1:
        for expert, (functional, tokens) in enumerate([(0.5, 70), (0.25, 1000), (None, 0)]):
            entries[expert].update(functional_nmse=functional, tokens=tokens)
    evidence = layer_evidence(writer, settings.search, entries)
    (folder / manifests.evidence_file_name(layer)).write_bytes(schema.dump(evidence))
    return evidence


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A package of two layers with experts of all kinds, one of them with SiTU."""
    folder, settings = tmp_path / "mixed", Settings(modes="all", seed=3)
    folder.mkdir()
    evidence = {layer: _write_mixed_layer(folder, layer, settings) for layer in MIXED_MODES}
    index = schema.dump({"metadata": {"total_size": 0}, "weight_map": {}})
    document = build_manifest(
        MIXED,
        TrueSizes(MIXED.hidden, MIXED.intermediate),
        topk=2,
        activation="silu",
        encoder_settings=settings.fingerprinted(),
        source_sha256="5" * 64,
        base_sha256=schema.digest({manifests.INDEX: hashlib.sha256(index).hexdigest()}),
        evidence=evidence,
        expert_tensors=checkpoints.NAMED,
    )
    document["layers"]["1"]["activation"]["experts"]["3"] = "situ"
    config = build_config(checkpoints.config(moe_intermediate_size=512), document, "qsrt")
    (folder / manifests.CONFIG).write_bytes(schema.dump(config))
    (folder / manifests.MANIFEST).write_bytes(schema.dump(document))
    (folder / manifests.INDEX).write_bytes(index)
    seal(folder)
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A Hub that the client in this process talks to, and no waiting between tries."""
    with FakeHub() as hub:
        constants = huggingface_hub.constants
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        yield hub
