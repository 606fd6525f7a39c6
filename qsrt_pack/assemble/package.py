"""The documents of a package: manifest, config, and what a Hub needs beside them."""

import importlib.metadata
from typing import Any

import torch

import qsrt_runtime
from qsrt_runtime.format import codebook, container, schema
from qsrt_runtime.format import manifest as manifests
from qsrt_runtime.format.geometry import Geometry, TrueSizes

GIT_ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


def library_versions() -> dict[str, str | None]:
    """The versions that the producer fingerprint covers; triton None where it is not installed."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {"qsrt": qsrt_runtime.__version__, "torch": torch.__version__, "triton": triton}


def build_manifest(
    geometry: Geometry,
    true_sizes: TrueSizes,
    *,
    topk: int,
    activation: str,
    encoder_settings: dict[str, Any],
    source_sha256: str,
    base_sha256: str,
    evidence: dict[int, dict[str, Any]],
    expert_tensors: dict[str, str | None],
    source_format: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """qsrt-manifest.json. evidence: the evidence document of each layer.

    encoder_settings: every setting that can change a byte of a layer file.
    base_sha256: the digest over the base shards and the index that were written.
    source_format: of a quantized source, the manifest's field of that name.
    expert_tensors: how the source names its experts.
    """
    value = {
        "schema": "kquant_qsrt_model_manifest_v1",
        "version": 1,
        "complete": True,
        "codec": "QSRT",
        "storage_schema": container.FRUIT,
        "encoding": container.ENCODING,
        "codebook": codebook.NAME,
        "profile_id": container.PROFILE_ID,
        "producer": build_producer(encoder_settings),
        "source": {"source_kind": manifests.SOURCE_KIND, "source_sha256": source_sha256},
        "base_model": {"manifest_sha256": base_sha256},
        "geometry": {"layers": sorted(evidence), "topk": topk, **_sizes(geometry, true_sizes)},
        "expert_tensors": expert_tensors,
        "activation_parameters": {
            "situ_beta": manifests.SITU_BETA,
            "situ_linear_beta": manifests.SITU_LINEAR_BETA,
        },
        "layers": {
            str(layer): {
                "qsrt_atoms": document["safetensors_file"],
                "bytes": document["safetensors_bytes"],
                "sha256": document["safetensors_sha256"],
                "expert_count": geometry.experts,
                "evidence": manifests.evidence_file_name(layer),
                "activation": {"default": activation, "experts": {}},
            }
            for layer, document in evidence.items()
        },
    }
    if source_format is not None:
        value["source_format"] = source_format
    schema.check(value, "manifest", manifests.MANIFEST)
    return value


def build_producer(encoder_settings: dict[str, Any]) -> dict[str, Any]:
    """The manifest's `producer`: settings, versions and the fingerprints of both."""
    fingerprint = manifests.encoder_fingerprint(encoder_settings)
    versions = library_versions()
    return {
        "name": manifests.PRODUCER,
        "versions": versions,
        "fingerprint": manifests.producer_fingerprint(fingerprint, versions),
        "encoder": {"fingerprint": fingerprint, "settings": encoder_settings},
    }


def _sizes(geometry: Geometry, true_sizes: TrueSizes) -> dict[str, Any]:
    sizes = {
        "experts_per_layer": geometry.experts,
        "hidden_size": geometry.hidden,
        "intermediate_size": geometry.intermediate,
        "profile": geometry.profile,
        "atom_slots": geometry.slots,
        "atoms_per_expert": geometry.atoms_per_expert,
    }
    if true_sizes.is_padded:
        sizes["true_hidden_size"] = true_sizes.hidden
        sizes["true_intermediate_size"] = true_sizes.intermediate
    return sizes


def build_config(
    model_config: dict[str, Any],
    manifest: dict[str, Any],
    loader: str,
    kept_quantization: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """config.json: the source's, with the quantization_config of loader qsrt or kquant.

    And with an entry that keeps transformers from loading it without qsrt_runtime.
    model_config: the source's without its quantization_config.   kept_quantization: that, where
    carried tensors are stored as it says.
    """
    quantization: dict[str, Any] = {
        "quant_method": "qsrt",
        "demoted_format": container.ENCODING,
        "hybrid_bit_map": {
            key: [3] * entry["expert_count"] for key, entry in manifest["layers"].items()
        },
        "qsrt": manifests.descriptor(manifest),
    }
    if kept_quantization is not None:
        quantization[manifests.DENSE_QUANTIZATION] = kept_quantization
    if loader == "kquant":
        quantization |= {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "kept_format": "mxfp4_e8m0k32",
        }
    schema.check(quantization, "descriptor", f"{manifests.CONFIG}: quantization_config")
    return {
        **model_config,
        "quantization_config": quantization,
        manifests.TRANSFORMERS_WEIGHTS: manifests.IMPORT_FIRST,
    }
