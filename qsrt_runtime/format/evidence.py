"""The evidence of a layer: what it has to agree with, and the order of channels that it states."""

import base64
from typing import Any

import torch

from qsrt_runtime.format import atom, rates, slab
from qsrt_runtime.format.container import Layer
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.manifest import MANIFEST, Documents, require_equal, true_sizes_of


def check_evidence(evidence: dict[str, Any], key: int, documents: Documents, where: str) -> None:
    """Refuse an evidence file that disagrees with the manifest."""
    manifest = documents.manifest
    entry = manifest["layers"][str(key)]
    experts = entry["expert_count"]
    stated = {
        "layer": key,
        "codebook": manifest["codebook"],
        "profile_id": manifest["profile_id"],
        "schema": manifest["storage_schema"],
        "encoder_fingerprint": manifest["producer"]["encoder"]["fingerprint"],
        "source_sha256": manifest["source"]["source_sha256"],
        "expert_count": experts,
        "expert_ids": list(range(experts)),
        "safetensors_file": entry["qsrt_atoms"],
        "safetensors_bytes": entry["bytes"],
        "safetensors_sha256": entry["sha256"],
    }
    for field, expected in stated.items():
        require_equal(evidence[field], expected, field, where, MANIFEST)
    if documents.is_ours:
        settings = manifest["producer"]["encoder"]["settings"]
        require_equal(evidence["search"], settings["search"], "search", where, MANIFEST)
        found = [item["expert"] for item in evidence["experts"]]
        require_equal(found, list(range(experts)), "experts", where, MANIFEST)


def check_evidence_experts(
    evidence: dict[str, Any], layer: Layer, manifest: dict[str, Any], where: str
) -> None:
    """Refuse evidence whose modes or channel orders disagree with layer file and manifest.

    Where the layer has all of its slots, the scales of padded channels are looked at too.
    """
    settings = manifest["producer"]["encoder"]["settings"]
    if settings["modes"] == "R0" and layer.format_codes.any():
        expert = int(layer.format_codes.nonzero()[0])
        raise FormatError(
            f"{where}: expert {expert} is not R0, the encoder's settings say modes R0"
        )
    has_all = len(layer.slots) == layer.geometry.slots
    intermediate = true_sizes_of(manifest).intermediate
    stored = rates.stored_channels(layer.geometry.records)
    for item in evidence["experts"]:
        expert = item["expert"]
        found = (item["mode13"], item["mode2"])
        expected = tuple(f"R{mode}" for mode in slab.expert_modes(layer, expert))
        require_equal(found, expected, f"modes of expert {expert}", where, "the layer file")
        at = f"{where}: expert {expert}"
        order = low_to_high(item["low_to_high"], layer.geometry.intermediate, at)
        padded = order[stored] >= intermediate
        if has_all and padded.any():
            scales = atom.local_scales(slab.expert_bundles(layer, expert))
            if scales[:, padded].any():
                raise FormatError(
                    f"{at}: scales of padded intermediate channels are not all 0 in the layer file"
                )


def encode_low_to_high(groups: torch.Tensor) -> str:
    """[I/4] group numbers, least important first -> base64 of little-endian uint16."""
    return base64.b64encode(b"".join(g.to_bytes(2, "little") for g in groups.tolist())).decode()


def low_to_high(text: str, intermediate: int, where: str) -> torch.Tensor:
    """The source channel at each low-to-high place: [I] int64, from an evidence entry."""
    try:
        data = bytearray(base64.b64decode(text, validate=True))
    except ValueError:
        raise FormatError(f"{where}: low_to_high is not base64") from None
    groups = [int.from_bytes(data[i : i + 2], "little") for i in range(0, len(data), 2)]
    if len(data) % 2 or sorted(groups) != list(range(intermediate // 4)):
        raise FormatError(f"{where}: low_to_high is no order of {intermediate // 4} groups")
    return (torch.tensor(groups)[:, None] * 4 + torch.arange(4)).flatten()
