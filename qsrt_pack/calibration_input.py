"""What statistics are made from: a checkpoint, windows of a text, settings. Nothing is run yet."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from qsrt_pack.assemble.package import library_versions
from qsrt_pack.output import check_output, has_content
from qsrt_pack.source.architectures import CALIBRATED
from qsrt_pack.source.checkpoint import (
    Checkpoint,
    digest_small_files,
    open_checkpoint,
    source_stamp,
)
from qsrt_pack.source.models import RoutedExperts, find_experts
from qsrt_pack.state import differences, listed
from qsrt_pack.statistics import DOCUMENT, Statistics, open_statistics
from qsrt_pack.text import count_windows, read_text, tokenize
from qsrt_runtime.format import schema
from qsrt_runtime.format.errors import FormatError

ROWS = 1 << 16  # kept of an expert
_EMBEDDINGS = ("model.embed_tokens.weight", "model.word_embeddings.weight")
_TITLES = {"source": "source file", "settings": "setting", "versions": "version of"}


@dataclass(frozen=True)
class CalibrationInput:
    """A checkpoint and a text that go together.

    tokens: [windows, window] int64.   document: calibration.json as it begins, its source {} until
    the files are hashed.   stamp: source_stamp of the checkpoint.
    """

    checkpoint: Checkpoint
    experts: RoutedExperts
    tokens: torch.Tensor
    document: dict[str, Any]
    stamp: dict[str, tuple[int, ...]]

    def changes(self, document: dict[str, Any]) -> list[str]:
        """How this differs from what another calibration.json states.

        Shards that have not been hashed are compared by name.
        """
        stated = document["source"]
        source = self.document["source"] or digest_small_files(self.checkpoint, stated)
        now = self.document | {"source": source}
        return [
            change
            for key, title in _TITLES.items()
            for change in differences(title, document[key], now[key])
        ]

    def finished(self, out: Path, *, overwrite: bool) -> Statistics | None:
        """The statistics at out if they are of this input, None if they can be made there.

        FormatError if something else stands there, unless it is to be overwritten.
        """
        filled = has_content(out)  # first, as another process may finish it meanwhile
        if (out / DOCUMENT).exists():
            found = open_statistics(out)
            changes = self.changes(found.document)
            if not changes:
                return found
            if not overwrite:
                raise FormatError(
                    f"{out} holds the statistics of another calibration: {listed(changes)}. "
                    "Delete that folder to calibrate anew, or give it as convert's --calibration "
                    "to use it as it is"
                )
        elif filled and not overwrite:
            raise FormatError(
                f"{out} is not empty and holds no {DOCUMENT}; the statistics go there, move it away"
            )
        check_output(out, self.checkpoint.path, overwrite, resumable=True)
        return None

    def stopped(self, state: Path) -> dict[str, Any] | None:
        """What a stopped run of this input has noted, None where none was; else FormatError."""
        if not state.exists():
            return None
        found = schema.read(state, "calibration")
        changes = self.changes(found)
        if changes:
            raise FormatError(
                f"{state.parent} holds the work of another calibration: {listed(changes)}; delete "
                "that folder to start over"
            )
        return found


def read_input(
    source: Path,
    text: Path,
    *,
    device: torch.device,
    window: int | None = None,
    windows: int | None = None,
    rows: int = ROWS,
    seed: int = 0,
    backward: bool = True,
) -> CalibrationInput:
    """Open a checkpoint and cut a text into windows of its tokens; FormatError on any doubt.

    The settings are those of `calibrate`. Reads no shard but for its header.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # a layer alone lacks what is not run
    checkpoint = open_checkpoint(source)
    stamp = source_stamp(checkpoint)
    experts = find_experts(checkpoint)
    _check_runs(checkpoint, experts)
    vocabulary = _checked_vocabulary(checkpoint)
    data = read_text(text)
    tokens = tokenize(source, data, vocabulary, text)
    longest = checkpoint.config.get("max_position_embeddings")
    size, count = count_windows(len(tokens), longest, window, windows, text)
    settings = {
        "text_sha256": hashlib.sha256(data).hexdigest(),
        "window": size,
        "windows": count,
        "rows": rows,
        "seed": seed,
        "backward": backward,
        "device": device.type,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
    }
    document = {
        "schema": "qsrt_calibration_v1",
        "source": {},
        "settings": settings,
        "versions": {**library_versions(), "transformers": transformers.__version__},
        "layers": {},
        "files": {},
    }
    tokens = tokens[: size * count].unflatten(0, (count, size))
    return CalibrationInput(checkpoint, experts, tokens, document, stamp)


def embedding_name(checkpoint: Checkpoint) -> str:
    """The tensor of the tokens' rows, [V, H]."""
    for name in _EMBEDDINGS:
        if name in checkpoint.weights:
            return name
    raise FormatError(f"{checkpoint.path} has no {_EMBEDDINGS[0]}, which calibration runs")


def _check_runs(checkpoint: Checkpoint, experts: RoutedExperts) -> None:
    """Refuse a model whose layers are not run alone."""
    kind = experts.model_type
    if checkpoint.config.get("text_config") is not None:
        kind = f"models with a text_config ({checkpoint.config.get('model_type')})"
    elif kind in CALIBRATED:
        return
    raise FormatError(
        f"{checkpoint.path}: calibration runs {', '.join(sorted(CALIBRATED))}, not {kind}; "
        "convert without it"
    )


def _checked_vocabulary(checkpoint: Checkpoint) -> int:
    """vocab_size, once the tokens' rows are known to be there."""
    embedding_name(checkpoint)
    size = checkpoint.config.get("vocab_size")
    if type(size) is not int:
        raise FormatError(f"{checkpoint.path}/config.json: vocab_size is {size!r}")
    return size
