"""The part in a conversion of a process that is not the one that writes."""

from pathlib import Path
from typing import Any

import torch

from qsrt_pack.assemble.package import library_versions
from qsrt_pack.calibrate.statistics import LayerRows
from qsrt_pack.encode.expert import Settings
from qsrt_pack.produce import produce_layer
from qsrt_pack.ranks import Ranks
from qsrt_pack.source.checkpoint import digest_files, open_checkpoint, source_stamp
from qsrt_pack.source.models import RoutedExperts, find_experts
from qsrt_pack.statistics import Statistics
from qsrt_runtime.format import schema
from qsrt_runtime.format.errors import FormatError


def assist(
    source: Path,
    settings: Settings,
    devices: tuple[torch.device, ...],
    ranks: Ranks,
    statistics: Statistics | None = None,
) -> None:
    """Encode this rank's share for rank 0's `run`, of the same source by the same settings."""
    checkpoint = open_checkpoint(source)
    stamp = source_stamp(checkpoint)
    experts = find_experts(checkpoint)
    remaining = ranks.told(None)
    if remaining:
        ranks.agree(facts(settings, digest_files(checkpoint) if ranks.leads_machine else None))
    for layer in remaining:
        rows = layer_rows(statistics, experts, layer)
        for _ in produce_layer(checkpoint, experts, settings, devices, layer, ranks, rows):
            pass
        if source_stamp(checkpoint) != stamp:
            raise FormatError(f"{source} changed since it was opened; convert it again")
    ranks.told(None)  # rank 0 has sealed the package


def layer_rows(
    statistics: Statistics | None, experts: RoutedExperts, layer: int
) -> LayerRows | None:
    """What calibration knows of a layer; it runs none of next-token prediction."""
    runs = layer < experts.naming.count
    return statistics.layer(layer) if statistics is not None and runs else None


def facts(settings: Settings, source: dict[str, str] | None) -> dict[str, Any]:
    """What all ranks must have alike; the source None where another process has hashed it."""
    return {
        "settings": settings.fingerprinted(),
        "versions": library_versions(),
        "source": source and schema.digest(source),
    }
