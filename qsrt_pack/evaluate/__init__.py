"""How far models are from their reference: forward KL and agreement on a text."""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

import qsrt_runtime
from qsrt_pack.evaluate import models
from qsrt_pack.evaluate.reference import ReferenceLogits, identity, write_logits
from qsrt_pack.evaluate.scores import Totals, check_finite, compare
from qsrt_pack.evaluate.table import describe
from qsrt_pack.evaluate.tokens import Windows, read_windows
from qsrt_pack.evaluation import content_sha256, shown_name
from qsrt_pack.output import check_file
from qsrt_pack.progress import bar
from qsrt_pack.source.checkpoint import digest_files
from qsrt_pack.text import blaming
from qsrt_runtime.format import schema
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.manifest import text_config
from qsrt_runtime.format.package import Package

__all__ = ["describe", "evaluate"]

_ROWS = 256  # positions whose logits of both models are compared at once
_CPU = torch.device("cpu")


def evaluate(
    path: Path,
    reference: Path,
    text: Path,
    *,
    window: int | None = None,
    windows: int | None = None,
    device: torch.device = _CPU,
    cache: Path | None = None,
    against: Sequence[Path] = (),
    noise_floor: bool = False,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Compare a package with its unquantized model on a text, in float32; returns the report.

    text: a UTF-8 text or a .safetensors file of tokens, see `read_windows`. It is cut into windows
    of `window` tokens (by default 1,024, or the model's longest context if that is shorter), each
    read on its own. windows: how many to use, by default all. Every position's next-token
    distribution is compared over the full vocabulary.

    The models run one after another, the reference first: its logits go to the file `cache`, or
    one that is removed, 4 bytes a position and word of the vocabulary. A cache that is there is
    used in its stead, and refused if it is of something else. Memory holds one model and a
    window's logits.
    against: further packages or checkpoints, on the same positions.   noise_floor: also the
    reference in bfloat16.
    """
    start = time.perf_counter()
    if cache is not None and not cache.exists():
        check_file(cache, overwrite=True)
    transformers.utils.logging.disable_progress_bar()
    package, original = models.open_packed(path), models.open_dense(reference)
    others = [models.open_model(other) for other in against]
    with blaming(reference):
        config = AutoConfig.from_pretrained(reference).get_text_config()
    for model in (package, *others):
        _check_vocabulary(model, reference, config.vocab_size)
    longest = getattr(config, "max_position_embeddings", None)
    given = read_windows(text, reference, config.vocab_size, longest, window, windows)
    source_sha256 = schema.digest(digest_files(original.opened))
    known = identity(source_sha256, given, device)
    shape = (*given.tokens.shape, config.vocab_size)
    runs = 1 + len(others) + noise_floor
    with tempfile.TemporaryDirectory(prefix="qsrt-eval-") as folder:
        file = cache or Path(folder) / "logits.safetensors"
        is_new = not file.exists()
        with bar("eval", (runs + is_new) * len(given.tokens), "windows", show_progress) as advance:
            if is_new:
                write_logits(file, known, original, given, config.vocab_size, device, advance)
            logits = ReferenceLogits(file, known, shape)

            def measure(model: models.Model, dtype: torch.dtype = torch.float32) -> Totals:
                return _measure(model, logits, given, dtype, device, advance)

            totals = measure(package)
            compared = [_facts(other) | measure(other).figures(given.documents) for other in others]
            floor = measure(original, torch.bfloat16) if noise_floor else None
    figures = totals.figures(given.documents)
    report = {
        **_package_facts(package),
        "package_score": figures.pop("score"),
        **figures,
        "reference_score": totals.reference_score(),
        "reference": str(reference),
        "reference_is_source": source_sha256 == _source_sha256(package.opened),
        "text": str(text),
        "text_sha256": given.sha256,
        "device": device.type,
        "window": shape[1],
        "windows": shape[0],
        "positions": given.tokens.numel(),
        "documents": int(given.documents.max()) + 1,
        "noise_floor": floor and floor.figures(given.documents),
        "against": compared,
        "seconds": time.perf_counter() - start,
    }
    schema.check(report, "report", "report")
    return report


def _measure(
    model: models.Model,
    reference: ReferenceLogits,
    windows: Windows,
    dtype: torch.dtype,
    device: torch.device,
    advance: Callable[[int], None],
) -> Totals:
    """Run a model over all windows and compare it with the reference's logits."""
    totals, loaded = Totals(), models.load(model, dtype, device)
    width = reference.shape[-1]
    for number, row in enumerate(windows.tokens):
        logits = models.run(model, loaded, row, width)
        check_finite(logits, str(model.path))
        parts = []
        for first in range(0, len(row), _ROWS):
            rows = slice(first, first + _ROWS)
            expected = reference.rows(number, rows).to(device)
            parts.append(compare(expected, logits[rows], row[1:][rows]))
        totals.add(parts)
        advance(1)
    return totals


def _check_vocabulary(model: models.Model, reference: Path, vocabulary: int) -> None:
    found = text_config(model.config).get("vocab_size", vocabulary)
    if found != vocabulary:
        raise FormatError(f"{reference} has a vocabulary of {vocabulary}, {model.path} of {found}")


def _source_sha256(package: Package) -> str:
    return package.documents.manifest["source"]["source_sha256"]


def _facts(model: models.Model) -> dict[str, Any]:
    return {
        "name": shown_name(str(model.path)),
        "kind": model.kind,
        "stored_bytes": model.stored_bytes,
        "bits_per_expert_weight": model.bits_per_expert_weight,
    }


def _package_facts(model: models.Model) -> dict[str, Any]:
    package = model.opened
    experts = package.geometry.experts * len(package.layers)
    return {
        "schema": "qsrt_report_v2",
        "kind": "eval",
        "package": str(model.path),
        "seal_sha256": package.seal_sha256,
        "content_sha256": content_sha256(package),
        "encoder_fingerprint": package.documents.marker["encoder_fingerprint"],
        "dtype": "float32",
        "stored_bytes": model.stored_bytes,
        "bits_per_expert_weight": model.bits_per_expert_weight,
        "expert_weights": experts * package.true_sizes.weights_per_expert,
        "versions": {
            "qsrt": qsrt_runtime.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
