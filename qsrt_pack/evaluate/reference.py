"""The reference's logits in a file: written once, read by rows, checked before they are used.

A safetensors file of one tensor `logits` [windows, window, vocabulary] float32. Its metadata says
of what: digests of the reference and of the tokens, the device and the libraries' versions.
"""

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers

from qsrt_pack.evaluate import models
from qsrt_pack.evaluate.scores import check_finite
from qsrt_pack.evaluate.tokens import Windows
from qsrt_runtime.format import paths
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.tensorfile import (
    TensorEntry,
    header_bytes,
    layout,
    read_header,
    read_tensor,
    tensor_bytes,
    tensor_data,
)

_TENSOR, _SCHEMA = "logits", "qsrt_logits_v1"
_PIECE = 64  # positions written at once
_TITLES = {
    "schema": "format",
    "reference_sha256": "reference",
    "tokens_sha256": "text, tokenizer, window or number of windows",
    "device": "device",
    "torch": "version of torch",
    "transformers": "version of transformers",
}


def identity(reference_sha256: str, windows: Windows, device: torch.device) -> dict[str, str]:
    """The metadata of a file of logits: two files that agree in it hold the same."""
    return {
        "schema": _SCHEMA,
        "reference_sha256": reference_sha256,
        "tokens_sha256": windows.digest,
        "device": device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


class ReferenceLogits:
    """An opened file of logits [windows, window, vocabulary]."""

    def __init__(self, path: Path, known: dict[str, str], shape: tuple[int, ...]) -> None:
        """known: its identity. FormatError where the file holds something else."""
        header = read_header(path)
        for key, value in known.items():
            found = header.metadata.get(key)
            if found != value:
                raise FormatError(
                    f"{path} holds the logits of another {_TITLES[key]}: {key} is {found}, "
                    f"expected {value}; delete it or name another --cache"
                )
        entry = header.tensors.get(_TENSOR)
        if entry is None or (entry.dtype, entry.shape) != ("F32", shape):
            raise FormatError(f"{path} holds no {_TENSOR} F32 {list(shape)}; delete it")
        self.path, self.shape, self._entry = path, shape, entry

    def rows(self, window: int, rows: slice) -> torch.Tensor:
        """Of some positions of a window: [n, vocabulary] float32."""
        whole = self._entry.at(window)
        first, last, _ = rows.indices(whole.shape[0])
        start, end = whole.at(first).start, whole.at(last - 1).end
        part = TensorEntry("F32", (last - first, whole.shape[1]), start, end)
        return read_tensor(self.path, part)


def write_logits(
    path: Path,
    known: dict[str, str],
    reference: models.Model,
    windows: Windows,
    vocabulary: int,
    device: torch.device,
    advance: Callable[[int], None],
) -> None:
    """Run the reference in float32 over all windows into a new file, which appears when whole."""
    shape = (*windows.tokens.shape, vocabulary)
    size, free = tensor_bytes("F32", shape), shutil.disk_usage(path.parent).free
    if size > free:
        raise FormatError(
            f"the reference's logits take {size:,} bytes, {path.parent} has {free:,} free; name "
            "another --cache, or take fewer --windows"
        )

    def pieces() -> Iterator[bytes]:
        loaded = models.load(reference, torch.float32, device)
        for row in windows.tokens:
            logits = models.run(reference, loaded, row, vocabulary)
            check_finite(logits, str(reference.path))
            for some in logits.split(_PIECE):
                yield tensor_data(some.cpu())
            advance(1)

    head = header_bytes(known, layout({_TENSOR: ("F32", shape)}))
    paths.write_pieces(path, itertools.chain([head], pieces()))
