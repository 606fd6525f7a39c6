"""Texts as windows of a model's tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoTokenizer

from qsrt_pack.workers import device_failure
from qsrt_runtime.format.errors import FormatError

_MAX_WINDOW = 1024


def read_text(path: Path) -> bytes:
    """A file's bytes, which are UTF-8."""
    if not path.is_file():
        raise FormatError(f"{path} is not a file; give a UTF-8 text")
    data = path.read_bytes()
    try:
        data.decode()
    except UnicodeDecodeError:
        raise FormatError(f"{path} is not UTF-8 text") from None
    return data


def tokenize(reference: Path, data: bytes, vocabulary: int, text: Path) -> torch.Tensor:
    """Token ids of the whole text: [n] int64, each below the vocabulary's size."""
    with blaming(reference):
        tokenizer = AutoTokenizer.from_pretrained(reference)
        ids = tokenizer(data.decode(), add_special_tokens=False, verbose=False)["input_ids"]
    if data.strip() and not ids:
        raise FormatError(f"{reference}: its tokenizer makes no token of {text}; is it complete?")
    if max(ids, default=0) >= vocabulary:
        raise FormatError(
            f"{reference}: its tokenizer gives token {max(ids)}, the model has {vocabulary}"
        )
    return torch.tensor(ids, dtype=torch.int64)


def count_windows(
    tokens: int, longest: int | None, window: int | None, windows: int | None, text: Path
) -> tuple[int, int]:
    """Tokens in a window and how many windows. longest: the model's context, where it has one."""
    longest = longest or _MAX_WINDOW
    size = window or min(_MAX_WINDOW, longest)
    if size > longest:
        raise FormatError(f"a window of {size} tokens is longer than the model's {longest}")
    count = tokens // size
    if not count:
        raise FormatError(
            f"{text} has {tokens} tokens, a window takes {size}; give a longer text, or to "
            "calibrate or eval a shorter --window"
        )
    return size, min(count, windows or count)


@contextmanager
def blaming(path: Path, what: str = "load") -> Iterator[None]:
    """Errors of transformers, of whatever type, as one line about the folder that caused them.

    what: it was to do with the model.
    """
    try:
        yield
    except Exception as error:
        if device_failure(error) is not None:
            raise
        reason = " ".join(str(error).split())[:300]
        raise FormatError(
            f"transformers cannot {what} {path}: {type(error).__name__}: {reason}"
        ) from error
