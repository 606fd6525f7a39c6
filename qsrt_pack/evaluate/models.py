"""Models to compare: packages and dense checkpoints, loaded one at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from qsrt_pack.restore import DensePackage, dense_config
from qsrt_pack.source.checkpoint import Checkpoint, open_checkpoint, read_tensor, read_weight
from qsrt_pack.source.models import find_experts
from qsrt_pack.source.naming import Naming
from qsrt_pack.text import blaming
from qsrt_pack.validate import bits_per_expert_weight
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.manifest import MARKER
from qsrt_runtime.format.package import Package

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Model:
    """A model that can be loaded. opened: what it is read from, whose headers have been read.

    config: config.json without what is said of quantization.   stored_bytes: of its weights' files.
    read: gives all tensors, decoded where they are packed or quantized.
    """

    path: Path
    opened: Package | Checkpoint
    config: dict[str, Any]
    naming: Naming
    stored_bytes: int
    bits_per_expert_weight: float
    read: Callable[[], State]

    @property
    def kind(self) -> str:
        return "package" if isinstance(self.opened, Package) else "checkpoint"


def open_model(path: Path) -> Model:
    """A package or a dense checkpoint, whichever the folder holds; FormatError on any doubt."""
    return open_packed(path) if (path / MARKER).is_file() else open_dense(path)


def open_packed(path: Path) -> Model:
    dense = DensePackage(path)
    package = dense.package
    files = [name for name in package.digests if name.endswith(".safetensors")]

    def read() -> State:
        state = {name: dense.base_weight(name) for name in dense.base}
        return state | {name: dense.expert_weight(name) for name in dense.experts}

    return Model(
        path,
        package,
        dense_config(package),
        dense.naming,
        sum((path / name).stat().st_size for name in files),
        bits_per_expert_weight(package),
        read,
    )


def open_dense(path: Path) -> Model:
    checkpoint = open_checkpoint(path)
    experts = find_experts(checkpoint)
    parts = {part for name in experts.stored() for part in checkpoint.weights[name].parts.values()}
    entries = [checkpoint.tensors[part][1] for part in parts]
    per_layer = experts.geometry.experts * experts.true_sizes.weights_per_expert

    def read() -> State:
        return {
            name: (read_tensor if weight.is_plain else read_weight)(checkpoint, name)
            for name, weight in checkpoint.weights.items()
        }

    return Model(
        path,
        checkpoint,
        checkpoint.model_config,
        experts.naming,
        sum((path / shard).stat().st_size for shard in checkpoint.shards),
        8 * sum(e.end - e.start for e in entries) / (per_layer * len(experts.layers)),
        read,
    )


def load(model: Model, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """transformers' model of its config.json and tensors."""
    with blaming(model.path):
        config = AutoConfig.for_model(**model.config)
        (architecture,) = config.architectures or ["None"]
        model_class = getattr(transformers, architecture)
        if not issubclass(model_class, PreTrainedModel):
            raise ValueError(f"{architecture} is not a model")
        loaded, info = model_class.from_pretrained(
            None, config=config, state_dict=model.read(), dtype=dtype, output_loading_info=True
        )
    _check_complete(info, model)
    with blaming(model.path):
        return loaded.eval().to(device)


def run(model: Model, loaded: PreTrainedModel, tokens: torch.Tensor, width: int) -> torch.Tensor:
    """The logits [n, width] of tokens [n], on the model's device."""
    with blaming(model.path, "run"), torch.inference_mode():
        logits = loaded(tokens[None].to(loaded.device), use_cache=False).logits[0]
    if logits.shape != (len(tokens), width):
        raise FormatError(
            f"{model.path}: the model gives logits of {list(logits.shape)}, expected "
            f"[{len(tokens)}, {width}]"
        )
    return logits


def _check_complete(info: dict[str, Any], model: Model) -> None:
    """Refuse where transformers made up, dropped or could not fit a tensor that counts."""
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = [name for name in map(str, info[what]) if not model.naming.is_nextn(name)]
        if names:
            name = min(names)
            raise FormatError(f"{model.path}: {what.replace('_', ' ')}, {name} for one")
