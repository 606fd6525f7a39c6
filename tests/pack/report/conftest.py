"""A package whose evidence has everything that a report shows."""

from pathlib import Path

import checkpoints
import pytest
from packages import write_package

from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.format.package import open_package, seal

LAYERS, EXPERTS, HIDDEN = (0, 2), 6, 128
HOSTILE = '<script>alert(1)</script> & "more" $x^2$'


def _calibrate(layer: int, evidence: dict) -> None:
    """Errors that grow with the expert and the layer, but for one; tokens that grow likewise."""
    for item in evidence["experts"]:
        expert = item["expert"]
        error = 0.01 * (1 + layer + expert / 10)
        item["nmse"] = {"w1": error, "w3": error / 2, "w2": 0.9 if (layer, expert) == (0, 3) else 0}
        item["functional_nmse"] = 0.03 + expert / 1000 if expert else None
        item["tokens"] = 400 * expert
        item["fallback"] = None if expert else HOSTILE


@pytest.fixture
def calibrated(tmp_path: Path) -> Path:
    """Twelve experts of two layers; expert 0 of each has no tokens, expert 1 of each few."""
    folder = write_package(
        tmp_path / "<i>model<i> & co", Geometry(HIDDEN, 256, EXPERTS), layers=LAYERS
    )
    for layer in LAYERS:
        checkpoints.edit_json(
            folder / f"qsrt-layer-{layer:03}.json", lambda e, n=layer: _calibrate(n, e)
        )
    seal(folder)
    return folder


@pytest.fixture
def evaluation(calibrated: Path) -> dict:
    """What `eval` says of it, but for the digest of its seal."""
    marker = open_package(calibrated).documents.marker
    return {
        "bits_per_expert_weight": 3.5,
        "dtype": "float32",
        "encoder_fingerprint": marker["encoder_fingerprint"],
        "expert_weights": 1_179_648,
        "kind": "eval",
        "against": [],
        "device": "cpu",
        "documents": 8,
        "kl_histogram": {"edges": [0.01, 0.1, 1], "counts": [3096, 1000]},
        "kl_max": 4.5,
        "kl_mean": 0.125,
        "kl_mean_interval": {"low": 0.12, "high": 0.13},
        "kl_median": 0.02,
        "kl_p90": 0.2,
        "kl_p99": 0.9,
        "noise_floor": None,
        "package": "/home/someone/model-qsrt",
        "package_score": {"cross_entropy": 3.0, "perplexity": 20.5},
        "positions": 4096,
        "reference": "/home/someone/<b>model",
        "reference_is_source": False,
        "reference_score": {"cross_entropy": 2.9, "perplexity": 18.25},
        "schema": "qsrt_report_v2",
        "seal_sha256": "2" * 64,
        "seconds": 1.0,
        "stored_bytes": 516_096,
        "text": "/home/someone/text.txt",
        "text_sha256": "3" * 64,
        "top10_agreement": 0.75,
        "top1_agreement": 0.8125,
        "versions": {"qsrt": "0", "torch": "2.13.0", "transformers": "5.24.0"},
        "window": 512,
        "windows": 8,
    }
