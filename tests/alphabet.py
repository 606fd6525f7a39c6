"""A tokenizer of one token for each character of a 64-character alphabet."""

import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ALPHABET = string.ascii_letters + string.digits + " ."


def write_tokenizer(folder: Path) -> None:
    """One token for each character of the alphabet."""
    vocabulary = {character: number for number, character in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
