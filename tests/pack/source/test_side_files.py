"""Which files beside the weights a package carries."""

from pathlib import Path

import pytest

from qsrt_pack.source.checkpoint import open_checkpoint
from qsrt_runtime.format.errors import FormatError

CARRIED = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE", "merges.txt"),
    *("NOTICE.md", "spiece.model", "assets/logo.png", "docs/README.md"),
)
LEFT_OUT = (
    *("modeling_x.py", "pytorch_model.bin", "model.pt", "model.gguf", "model.onnx", "x.PY"),
    *("README.md", "pytorch_model.bin.index.json", "config.json.partial"),
)
HIDDEN = (
    ".gitattributes",
    ".git/" + "z" * 250 + "/obj",
    "sub/.hidden",
    ".cache/huggingface/x.lock",
)


def test_side_files_are_carried_by_pattern(checkpoint: Path) -> None:
    for name in (*CARRIED, *LEFT_OUT, *HIDDEN):
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_text(name)
    opened = open_checkpoint(checkpoint)
    assert opened.carried == tuple(sorted(["generation_config.json", *CARRIED]))
    assert opened.left_out == tuple(sorted(LEFT_OUT))


@pytest.mark.parametrize(
    "name", ["a\\b.txt", "C:x.txt", "a\nb.txt", b"\xff.txt".decode(errors="surrogateescape")]
)
def test_side_file_whose_name_no_package_can_list(checkpoint: Path, name: str) -> None:
    (checkpoint / name).write_text("x")
    with pytest.raises(FormatError, match="file name"):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize("value", ["[0.0, Infinity]", "NaN", '"\\ud800"'])
def test_config_that_is_not_json_again(checkpoint: Path, value: str) -> None:
    text = (checkpoint / "config.json").read_text()
    (checkpoint / "config.json").write_text(text[:-1] + f', "x": {value}}}')
    with pytest.raises(FormatError, match=r"config\.json.* JSON"):
        open_checkpoint(checkpoint)
