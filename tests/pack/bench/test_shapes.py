"""Sizes that are given instead of a package."""

import re

import pytest

from qsrt_pack.bench.shapes import SHAPES, parse_shape
from qsrt_runtime.format.geometry import Geometry, TrueSizes


@pytest.mark.parametrize("text", ["H=2048,I=768,E=128,k=8", "k=8,E=128,I=768,H=2048", "qwen30b"])
def test_sizes(text: str) -> None:
    shape = parse_shape(text)
    assert shape is not None
    assert (shape.geometry, shape.topk) == (Geometry(2048, 768, 128), 8)
    assert shape.sizes == TrueSizes(2048, 768)
    assert shape.dense_bytes == 128 * 3 * 2048 * 768 * 2
    assert shape.packed_bytes == 24 * 128 * 3 * (12 * 2048 + 64)


@pytest.mark.parametrize("name", SHAPES)
def test_names(name: str) -> None:
    shape = parse_shape(name)
    assert shape is not None
    sizes = (shape.geometry.hidden, shape.geometry.intermediate, shape.geometry.experts)
    assert (*sizes, shape.topk) == SHAPES[name]


@pytest.mark.parametrize("text", ["./glm", "models/H=128", "model-qsrt", "owner/name", ".", ""])
def test_anything_else_is_a_package(text: str) -> None:
    assert parse_shape(text) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("H=2048", "does not state H, I, E and k once each"),
        ("H=2048,I=768,E=128,k=8,k=8", "does not state H, I, E and k once each"),
        ("H=2048,I=768,E=128,K=8", "does not state H, I, E and k once each"),
        ("H=2048,I=768,E=128,k=8,", "does not state H, I, E and k once each"),
        ("H=2048,I=768,E=128,k=0", "whole numbers from 1 on"),
        ("H=2048,I=768,E=128,k=-1", "whole numbers from 1 on"),
        ("H=2048,I=768,E=1e2,k=8", "whole numbers from 1 on"),
        ("H=²,I=768,E=128,k=8", "whole numbers from 1 on"),
        ("H=9999999999,I=768,E=128,k=8", "whole numbers from 1 on"),
        ("H=2048,I=768,E=4,k=8", "k is 8, and there are 4 experts"),
        ("H=2880,I=2880,E=32,k=4", "hidden size 2880 is not a positive multiple of 128"),
        ("H=2944,I=2880,E=32,k=4", "size 2880 is not a positive multiple of 256"),
    ],
)
def test_sizes_that_no_layer_has(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_shape(text)
