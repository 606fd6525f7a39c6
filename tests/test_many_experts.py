"""A layer of 1,000 experts, from random words: headers stay small, documents are checked fast."""

import hashlib
import json
import time
from pathlib import Path

import checkpoints
import torch

from qsrt_pack.assemble.layer import expert_evidence, layer_evidence
from qsrt_pack.assemble.package import build_config, build_manifest
from qsrt_pack.encode.expert import Settings
from qsrt_pack.validate import validate
from qsrt_runtime.format import manifest, schema
from qsrt_runtime.format.atom import unpack_expert
from qsrt_runtime.format.container import LayerWriter
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.format.package import open_package, seal

GEOMETRY = Geometry(hidden=128, intermediate=256, experts=1000)


def _random_expert():
    generator = torch.Generator().manual_seed(0)
    shape = (GEOMETRY.slots, GEOMETRY.bundle_bytes)
    bundles = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    bundles[:, -192:].view(torch.float16).fill_(0.5)
    scales = torch.full((3, GEOMETRY.hidden), 0.25, dtype=torch.float16)
    return unpack_expert(bundles, scales, (0, 0), GEOMETRY)


def test_a_thousand_experts(tmp_path: Path) -> None:
    settings = Settings(search="fast")
    fingerprint = manifest.encoder_fingerprint(settings.fingerprinted())
    path = tmp_path / manifest.layer_file_name(0)
    coded, groups = _random_expert(), torch.arange(64)
    with LayerWriter(path, GEOMETRY, 0, "5" * 64, fingerprint) as writer:
        for expert in range(1000):
            writer.write_expert(expert, coded)
    assert int.from_bytes(path.read_bytes()[:8], "little") < 2000

    nmse = {"w1": 0.5, "w3": 0.5, "w2": 0.5}
    entries = [expert_evidence(expert, coded, groups, nmse, nmse) for expert in range(1000)]
    evidence = layer_evidence(writer, settings.search, entries)
    index = schema.dump({"metadata": {"total_size": 0}, "weight_map": {}})
    document = build_manifest(
        GEOMETRY,
        topk=8,
        activation="silu",
        encoder_settings=settings.fingerprinted(),
        source_sha256="5" * 64,
        base_sha256=schema.digest({manifest.INDEX: hashlib.sha256(index).hexdigest()}),
        evidence={0: evidence},
    )
    config = checkpoints.config(num_experts=1000, num_experts_per_tok=8, num_hidden_layers=1)
    files = {
        manifest.evidence_file_name(0): evidence,
        manifest.MANIFEST: document,
        manifest.CONFIG: build_config(config, document, "qsrt"),
    }
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
    (tmp_path / manifest.INDEX).write_bytes(index)
    seal(tmp_path)

    start = time.perf_counter()
    package = open_package(tmp_path)
    assert time.perf_counter() - start < 5
    assert len(schema.dump(package.documents.manifest)) < 10_000
    assert validate(tmp_path, show_progress=False)["experts"] == 1000
