"""What is read by all models: windows of tokens, from a text or from a file of tokens."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from qsrt_pack.text import count_windows, read_text, tokenize
from qsrt_runtime.format import paths
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.tensorfile import read_header, read_tensor, tensor_data

_TENSOR = "tokens"
_DTYPES = ("I64", "I32", "U16")


@dataclass(frozen=True)
class Windows:
    """tokens: [windows, window] int64.   documents: [windows] int64, to which each belongs.

    sha256: of the file that they come from.
    """

    tokens: torch.Tensor
    documents: torch.Tensor
    sha256: str

    @property
    def digest(self) -> str:
        """Of the tokens alone."""
        shape = "x".join(map(str, self.tokens.shape))
        return hashlib.sha256(shape.encode() + tensor_data(self.tokens)).hexdigest()


def read_windows(
    path: Path,
    reference: Path,
    vocabulary: int,
    longest: int | None,
    window: int | None,
    windows: int | None,
) -> Windows:
    """Windows of a UTF-8 text, or of a .safetensors file with an integer tensor `tokens`.

    tokens: [n], of which as of a text each window counts as a document, or [documents, n].
    Each document is cut from its start; an incomplete last window is left out. windows: how many
    to use, by default all. FormatError for ids that the vocabulary does not have.
    """
    if path.suffix == ".safetensors":
        documents, digest = _read_tokens(path, vocabulary), paths.sha256_file(path)
    else:
        data = read_text(path)
        documents = tokenize(reference, data, vocabulary, path)
        digest = hashlib.sha256(data).hexdigest()
    size, count = count_windows(documents.shape[-1], longest, window, None, path)
    rows = documents[..., : count * size].reshape(-1, size)
    of_each = 1 if documents.dim() == 1 else count
    numbers = torch.arange(len(rows)) // of_each
    return Windows(rows[:windows].clone(), numbers[:windows], digest)


def _read_tokens(path: Path, vocabulary: int) -> torch.Tensor:
    entry = read_header(path).tensors.get(_TENSOR)
    if entry is None:
        raise FormatError(f"{path} has no tensor {_TENSOR!r}, which a file of tokens holds")
    if entry.dtype not in _DTYPES or len(entry.shape) not in (1, 2) or 0 in entry.shape:
        raise FormatError(
            f"{path}: {_TENSOR} is {entry.dtype} {list(entry.shape)}, expected one of "
            f"{', '.join(_DTYPES)} and [n] or [documents, n]"
        )
    tokens = read_tensor(path, entry).to(torch.int64)
    wrong = ((tokens < 0) | (tokens >= vocabulary)).nonzero()
    if len(wrong):
        place = wrong[0].tolist()
        raise FormatError(
            f"{path}: {_TENSOR}{place} is {int(tokens[tuple(place)])}, the vocabulary has "
            f"{vocabulary} tokens"
        )
    return tokens
