"""The evidence file of one layer: what was coded, how well, and in which channel order."""

from typing import Any

import torch

from qsrt_runtime.format import atom, codebook, container, schema
from qsrt_runtime.format import manifest as manifests
from qsrt_runtime.format.container import LayerWriter
from qsrt_runtime.format.evidence import encode_low_to_high


def expert_evidence(
    expert: int,
    coded: atom.Expert,
    low_to_high_groups: torch.Tensor,
    nmse: dict[str, float],
    rms: dict[str, float],
    *,
    functional_nmse: float | None = None,
    tokens: int | None = None,
    fallback: str | None = None,
) -> dict[str, Any]:
    """One expert's entry; the last three are None without calibration.

    low_to_high_groups: [I/4], groups of four source channels, least important first.
    nmse, rms: of w1, w3 and w2.   functional_nmse: of the expert's outputs on rows of the text.
    tokens: rows that calibration routed to it.   fallback: what stood in for rows it lacks.
    """
    matrices = {"w1": coded.w1, "w3": coded.w3, "w2": coded.w2}
    zeros = {name for name, m in matrices.items() if not (m.suh.any() and m.svh.any())}
    return {
        "expert": expert,
        "mode13": f"R{coded.mode13}",
        "mode2": f"R{coded.mode2}",
        "nmse": nmse,
        "rms": rms,
        "functional_nmse": functional_nmse,
        "tokens": tokens,
        "fallback": fallback,
        "zero_matrices": sorted(zeros),
        "low_to_high": encode_low_to_high(low_to_high_groups),
    }


def layer_evidence(
    written: LayerWriter, search: str, experts: list[dict[str, Any]]
) -> dict[str, Any]:
    """The evidence document of a layer file that has just been written."""
    evidence = {
        "codebook": codebook.NAME,
        "encoder_fingerprint": written.encoder_fingerprint,
        "expert_count": written.geometry.experts,
        "expert_ids": list(range(written.geometry.experts)),
        "layer": written.layer,
        "profile_id": container.PROFILE_ID,
        "safetensors_bytes": written.size,
        "safetensors_file": written.path.name,
        "safetensors_sha256": written.sha256,
        "schema": container.FRUIT,
        "source_sha256": written.source_sha256,
        "version": 1,
        "search": search,
        "experts": experts,
    }
    schema.check(evidence, "evidence", manifests.evidence_file_name(written.layer))
    return evidence


def worst_experts(evidence: dict[int, dict[str, Any]], count: int) -> list[tuple[int, Any]]:
    """(layer, entry) of the experts with the largest weight error of any matrix, worst first.

    evidence: the evidence document of each layer.
    """
    experts = [(layer, e) for layer, document in evidence.items() for e in document["experts"]]
    experts.sort(key=lambda item: (-max(item[1]["nmse"].values()), item[0], item[1]["expert"]))
    return experts[:count]
