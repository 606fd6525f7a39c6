import copy
import re

import checkpoints
import pytest

from qsrt_pack.assemble import package as module
from qsrt_pack.assemble.package import (
    GIT_ATTRIBUTES,
    build_config,
    build_manifest,
    library_versions,
)
from qsrt_pack.encode.expert import Settings
from qsrt_runtime.format import manifest as manifests
from qsrt_runtime.format import schema
from qsrt_runtime.format.container import layer_file_bytes
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry, TrueSizes

SOURCE, BASE = "a" * 64, "c" * 64
SETTINGS, GEOMETRY = Settings(), Geometry(128, 256, 4)


def manifest(
    settings: Settings = SETTINGS, geometry: Geometry = GEOMETRY, source_sha256: str = SOURCE
) -> dict:
    """The manifest of layers 1 and 3."""
    evidence = {
        layer: {
            "safetensors_file": manifests.layer_file_name(layer),
            "safetensors_bytes": layer_file_bytes(geometry, layer),
            "safetensors_sha256": str(layer) * 64,
        }
        for layer in (3, 1)
    }
    return build_manifest(
        geometry,
        TrueSizes(geometry.hidden, geometry.intermediate),
        topk=2,
        activation="silu",
        encoder_settings=settings.fingerprinted(),
        source_sha256=source_sha256,
        base_sha256=BASE,
        evidence=evidence,
        expert_tensors=checkpoints.NAMED,
    )


def fingerprints(value: dict) -> tuple[str, str]:
    return value["producer"]["encoder"]["fingerprint"], value["producer"]["fingerprint"]


def test_the_manifest_states_what_was_packed() -> None:
    value = manifest()
    assert value["geometry"] == {
        "layers": [1, 3],
        "experts_per_layer": 4,
        "hidden_size": 128,
        "intermediate_size": 256,
        "topk": 2,
        "profile": "generic",
        "atom_slots": 8,
        "atoms_per_expert": 48,
    }
    assert value["source"] == {"source_kind": "safetensors_manifest", "source_sha256": SOURCE}
    assert value["base_model"] == {"manifest_sha256": BASE}
    assert value["layers"]["3"] == {
        "qsrt_atoms": "qsrt-layer-003.safetensors",
        "bytes": layer_file_bytes(GEOMETRY, 3),
        "sha256": "3" * 64,
        "expert_count": 4,
        "evidence": "qsrt-layer-003.json",
        "activation": {"default": "silu", "experts": {}},
    }
    assert sorted(value["layers"]) == ["1", "3"]


def test_the_fruit_geometry_has_16_slots_and_96_atoms() -> None:
    geometry = manifest(geometry=Geometry(1024, 512, 256))["geometry"]
    assert geometry["profile"] == "fruit"
    assert (geometry["atom_slots"], geometry["atoms_per_expert"]) == (16, 96)


def test_a_manifest_beyond_the_schema_is_refused() -> None:
    with pytest.raises(FormatError, match=r"qsrt-manifest\.json: \$\.source\.source_sha256"):
        manifest(source_sha256="no digest")


def test_manifest_and_config_agree() -> None:
    value = manifest()
    for loader in ("qsrt", "kquant"):
        config = build_config(checkpoints.config(), value, loader)
        marker = {
            "source": {"kind": "safetensors_manifest", "sha256": SOURCE},
            "base_manifest_sha256": BASE,
            "encoder_fingerprint": fingerprints(value)[0],
            "producer_fingerprint": fingerprints(value)[1],
        }
        documents = manifests.Documents(config, value, marker, {"weight_map": {}})
        manifests.check_documents(documents, "test")


def test_config_as_this_projects_loader_reads_it() -> None:
    source = checkpoints.config()
    before = copy.deepcopy(source)
    value = manifest()
    config = build_config(source, value, "qsrt")
    assert source == before
    quantization = config.pop("quantization_config")
    assert "import qsrt_runtime.integrations.transformers" in config.pop("transformers_weights")
    assert config == source
    assert quantization == {
        "quant_method": "qsrt",
        "demoted_format": "qsrt_sqg_e4m3",
        "hybrid_bit_map": {"1": [3, 3, 3, 3], "3": [3, 3, 3, 3]},
        "qsrt": {
            "artifact_manifest": "qsrt-manifest.json",
            "codebook": "sqg_xor_cheb_t12",
            "encoding": "qsrt_sqg_e4m3",
            "encoder_fingerprint": fingerprints(value)[0],
            "producer_fingerprint": fingerprints(value)[1],
            "profile_id": 1,
            "schema": "kquant_fruit_qsrt_atoms_v1",
            "storage_format": "qsrt_atoms_v1",
            "source_kind": "safetensors_manifest",
            "source_sha256": SOURCE,
        },
    }


def test_config_as_the_published_loader_reads_it() -> None:
    value = manifest()
    ours, published = (
        build_config(checkpoints.config(), value, loader)["quantization_config"]
        for loader in ("qsrt", "kquant")
    )
    assert published == ours | {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kept_format": "mxfp4_e8m0k32",
    }


def test_fingerprints_are_the_digests_that_the_format_defines() -> None:
    value = manifest(Settings(seed=5, search="fast", modes="all"))
    settings = value["producer"]["encoder"]["settings"]
    assert (settings["seed"], settings["search"], settings["modes"]) == (5, "fast", "all")
    encoder, producer = fingerprints(value)
    assert encoder == schema.digest(settings)
    assert producer == manifests.producer_fingerprint(encoder, value["producer"]["versions"])
    assert re.fullmatch("[0-9a-f]{64}", producer)


@pytest.mark.parametrize("change", [{"seed": 1}, {"search": "fast"}, {"modes": "all"}])
def test_every_setting_changes_the_fingerprint(change: dict) -> None:
    settings = Settings(**change)
    assert settings.fingerprinted() != SETTINGS.fingerprinted()
    assert not set(fingerprints(manifest(settings))) & set(fingerprints(manifest()))


def test_versions_change_the_producers_fingerprint_only(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprints(manifest())
    assert fingerprints(manifest()) == before
    versions = library_versions() | {"torch": "0.0.1"}
    monkeypatch.setattr(module, "library_versions", lambda: versions)
    after = fingerprints(manifest())
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_the_hub_keeps_layer_files_in_lfs() -> None:
    assert GIT_ATTRIBUTES == b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
