"""How far a package's model is from its reference: forward KL and agreement on a text."""

import hashlib
import math
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import log_softmax
from transformers import AutoConfig, PreTrainedModel

import qsrt_runtime
from qsrt_pack.progress import bar
from qsrt_pack.restore import DensePackage, dense_config
from qsrt_pack.source.checkpoint import (
    Checkpoint,
    digest_files,
    open_checkpoint,
    read_tensor,
    read_weight,
)
from qsrt_pack.source.models import find_experts
from qsrt_pack.source.naming import Naming
from qsrt_pack.text import blaming, count_windows, read_text, tokenize
from qsrt_pack.validate import bits_per_expert_weight
from qsrt_runtime.format import schema
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.manifest import text_config
from qsrt_runtime.format.package import Package

_ROWS = 256  # positions whose full-vocabulary distributions are held at once


def evaluate(
    path: Path,
    reference: Path,
    text: Path,
    *,
    window: int | None = None,
    windows: int | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Compare a package with its unquantized model on a text, in float32; returns the report.

    The text is cut into windows of `window` tokens (by default 1,024, or the model's longest
    context if that is shorter), each read on its own; an incomplete last one is left out.
    windows: how many to use, by default all. Every position's next-token distribution is
    compared over the full vocabulary. Both models are in memory at once.
    """
    start = time.perf_counter()
    transformers.utils.logging.disable_progress_bar()
    dense = DensePackage(path)
    checkpoint = open_checkpoint(reference)
    naming = find_experts(checkpoint).naming
    data = read_text(text)
    with blaming(reference):
        config = AutoConfig.from_pretrained(reference).get_text_config()
    packed_config = text_config(dense.package.documents.config)
    vocabulary = packed_config.get("vocab_size", config.vocab_size)
    if config.vocab_size != vocabulary:
        raise FormatError(
            f"{reference} has a vocabulary of {config.vocab_size}, {path} of {vocabulary}"
        )
    tokens = tokenize(reference, data, vocabulary, text)
    longest = getattr(config, "max_position_embeddings", None)
    size, count = count_windows(len(tokens), longest, window, windows, text)
    models = (_reference_model(checkpoint, naming), _packed_model(dense))
    totals = _Totals()
    with bar("eval", count, "windows", show_progress) as advance, torch.inference_mode():
        for row in tokens[: count * size].unflatten(0, (count, size)):
            with blaming(reference, "run"):
                logits = [model(row[None], use_cache=False).logits[0] for model in models]
            totals.add(*logits, row)
            advance(1)
    source_sha256 = dense.package.documents.manifest["source"]["source_sha256"]
    report = {
        **_package_facts(dense.package),
        **totals.result(),
        "reference": str(reference),
        "reference_is_source": schema.digest(digest_files(checkpoint)) == source_sha256,
        "text": str(text),
        "text_sha256": hashlib.sha256(data).hexdigest(),
        "window": size,
        "windows": count,
        "seconds": time.perf_counter() - start,
    }
    schema.check(report, "report", "report")
    return report


def _package_facts(package: Package) -> dict[str, Any]:
    experts = package.geometry.experts * len(package.layers)
    return {
        "schema": "qsrt_report_v1",
        "kind": "eval",
        "package": str(package.path),
        "seal_sha256": package.seal_sha256,
        "encoder_fingerprint": package.documents.marker["encoder_fingerprint"],
        "dtype": "float32",
        "bits_per_expert_weight": bits_per_expert_weight(package),
        "expert_weights": experts * package.true_sizes.weights_per_expert,
        "versions": {
            "qsrt": qsrt_runtime.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


class _Totals:
    """Sums over positions, kept in float64."""

    def __init__(self) -> None:
        self.positions = self.targets = 0
        self.kl_sum = self.kl_max = self.top1 = self.top10 = 0.0
        self.nll = [0.0, 0.0]

    def add(self, reference: torch.Tensor, packed: torch.Tensor, tokens: torch.Tensor) -> None:
        """reference, packed: logits [n, vocabulary] of one window's tokens [n]."""
        for name, logits in (("reference", reference), ("package", packed)):
            if not torch.isfinite(logits).all():
                raise FormatError(f"the {name}'s model gives logits that are not finite")
        for first in range(0, len(tokens), _ROWS):
            rows = slice(first, first + _ROWS)
            targets = tokens[1:][rows]
            p, q = (log_softmax(x[rows].float(), dim=-1) for x in (reference, packed))
            kl = (p.exp() * (p - q)).sum(-1).double()
            self.positions += len(kl)
            self.kl_sum += float(kl.sum())
            self.kl_max = max(self.kl_max, float(kl.max()))
            top_p, top_q = (x.topk(min(10, x.shape[-1]), dim=-1).indices for x in (p, q))
            self.top1 += float((top_p[:, 0] == top_q[:, 0]).sum())
            shared = (top_p[:, :, None] == top_q[:, None, :]).any(-1)
            self.top10 += float(shared.double().mean(-1).sum())
            self.targets += len(targets)
            for side, x in enumerate((p, q)):
                self.nll[side] -= float(x[: len(targets)].gather(1, targets[:, None]).sum())

    def result(self) -> dict[str, Any]:
        scores = [nll / self.targets for nll in self.nll]
        reference, packed = (
            {"cross_entropy": score, "perplexity": math.exp(min(score, 700))} for score in scores
        )
        return {
            "positions": self.positions,
            "kl_mean": self.kl_sum / self.positions,
            "kl_max": self.kl_max,
            "top1_agreement": self.top1 / self.positions,
            "top10_agreement": self.top10 / self.positions,
            "reference_score": reference,
            "package_score": packed,
        }


def _reference_model(checkpoint: Checkpoint, naming: Naming) -> PreTrainedModel:
    """The reference, decoded where it is quantized, in float32."""
    state = {
        name: read_tensor(checkpoint, name) if weight.is_plain else read_weight(checkpoint, name)
        for name, weight in checkpoint.weights.items()
    }
    return _model(checkpoint.model_config, state, naming, checkpoint.path)


def _packed_model(dense: DensePackage) -> PreTrainedModel:
    """The package's model with its experts decoded, in float32."""
    state = {name: dense.base_weight(name) for name in dense.base}
    state |= {name: dense.expert_weight(name) for name in dense.experts}
    return _model(dense_config(dense.package), state, dense.naming, dense.package.path)


def _model(
    values: dict[str, Any], state: dict[str, torch.Tensor], naming: Naming, path: Path
) -> PreTrainedModel:
    """transformers' model of a config.json with these tensors, in float32."""
    with blaming(path):
        config = AutoConfig.for_model(**values)
        (architecture,) = config.architectures or ["None"]
        model_class = getattr(transformers, architecture)
        if not issubclass(model_class, PreTrainedModel):
            raise ValueError(f"{architecture} is not a model")
        model, info = model_class.from_pretrained(
            None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True
        )
    return _complete(model, info, naming, path)


def _complete(
    model: PreTrainedModel, info: dict[str, Any], naming: Naming, path: Path
) -> PreTrainedModel:
    """The model, unless transformers made up, dropped or could not fit a tensor that counts."""
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = [name for name in map(str, info[what]) if not naming.is_nextn(name)]
        if names:
            name = min(names)
            raise FormatError(f"{path}: {what.replace('_', ' ')}, {name} for one")
    return model.eval()


def describe(report: dict[str, Any]) -> str:
    """A report as a table for people."""
    reference, packed = report["reference_score"], report["package_score"]
    lines = [
        ("KL(reference || package), mean", f"{report['kl_mean']:.5f} nats"),
        ("KL, largest at one position", f"{report['kl_max']:.3f} nats"),
        ("top-1 agreement", f"{100 * report['top1_agreement']:.2f} %"),
        ("top-10 agreement", f"{100 * report['top10_agreement']:.2f} %"),
        ("perplexity, reference", f"{reference['perplexity']:.4f}"),
        ("perplexity, package", f"{packed['perplexity']:.4f}"),
        ("stored bits an expert weight", f"{report['bits_per_expert_weight']:.4f}"),
        ("positions", f"{report['positions']:,} in windows of {report['window']:,}"),
    ]
    if not report["reference_is_source"]:
        lines.append(("note", "the reference is not the checkpoint that was packed"))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)
