"""The PTX routines as texts and tables; test_kernel.py compiles them, and runs them on a GPU."""

import re

import pytest
import torch

from qsrt_pack.encode.viterbi import ptx
from qsrt_runtime.format import codebook

MAKERS = (ptx.advance, ptx.put, ptx.get, ptx.keep, ptx.least, ptx.best)
ROUTINES = {
    "base": ptx.BASE,
    **{f"{make.__name__}-{bits}": make(bits) for make in MAKERS for bits in codebook.BITS},
}


@pytest.mark.parametrize("bits", codebook.BITS)
def test_every_value_is_at_its_place_in_the_table(bits: int) -> None:
    count = ptx.words(bits)
    table = ptx.table(bits)
    assert table.shape == (64, 512)
    assert table.dtype == torch.int32
    assert table.is_contiguous()
    assert count << bits == 64
    oldest, word, thread, half = torch.meshgrid(
        *map(torch.arange, (1 << bits, count, 512, 2)), indexing="ij"
    )
    node = (thread * count + word) * 2 + half
    state = (oldest << (16 - bits)) | node
    assert torch.equal(state.flatten().sort().values, torch.arange(1 << 16))
    found = table[oldest * count + word, thread] >> (16 * half) & 0xFFFF
    expected = codebook.values(bits).to(torch.float16).view(torch.int16).int() & 0xFFFF
    assert torch.equal(found, expected[state])


@pytest.mark.parametrize("bits", codebook.BITS)
def test_the_codebook_fits_into_halves(bits: int) -> None:
    values = codebook.values(bits)
    assert torch.equal(values.to(torch.float16).float(), values)


@pytest.mark.parametrize("bits", codebook.BITS)
def test_the_threads_own_each_node_once(bits: int) -> None:
    assert 2 * ptx.words(bits) * ptx.THREADS == 1 << (16 - bits)


@pytest.mark.parametrize("name", ROUTINES)
def test_operands_are_those_of_the_constraints(name: str) -> None:
    routine = ROUTINES[name]
    kinds = routine.constraints.split(",")
    assert {int(number) for number in re.findall(r"\$(\d+)", routine.text)} == {*range(len(kinds))}
    assert [kind.startswith("=") for kind in kinds] == [
        i < routine.outputs for i in range(len(kinds))
    ]


@pytest.mark.parametrize("name", ROUTINES)
def test_no_input_is_read_after_an_output_that_may_share_its_register(name: str) -> None:
    routine = ROUTINES[name]
    kinds = routine.constraints.split(",")
    shared = {i for i, kind in enumerate(kinds) if kind.startswith("=") and "&" not in kind}
    uses = [(int(use[1]), use.start()) for use in re.finditer(r"\$(\d+)", routine.text)]
    writes = [at for i, at in uses if i in shared]
    reads = [at for i, at in uses if i >= routine.outputs]
    assert not writes or max(reads) < min(writes)


@pytest.mark.parametrize(
    ("make", "inputs", "outputs"),
    [
        (ptx.advance, lambda words: 4 + 64, lambda words: words),
        (ptx.put, lambda words: 1 + words, lambda words: 1),
        (ptx.get, lambda words: 1, lambda words: words),
        (ptx.keep, lambda words: 1 + words, lambda words: 1),
        (ptx.least, lambda words: 1 + words, lambda words: 1),
        (ptx.best, lambda words: 1 + words, lambda words: 1),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.parametrize("bits", codebook.BITS)
def test_operands_are_those_of_the_docstrings(make, inputs, outputs, bits: int) -> None:
    routine, words = make(bits), ptx.words(bits)
    assert routine.outputs == outputs(words)
    assert len(routine.constraints.split(",")) == inputs(words) + outputs(words)


@pytest.mark.parametrize("bits", codebook.BITS)
def test_a_step_weighs_every_edge_once(bits: int) -> None:
    text, words = ptx.advance(bits).text, ptx.words(bits)
    assert text.count("fma.rn.f16x2") == words << bits  # two edges each
    assert text.count("min.f16x2") == words * ((1 << bits) - 1)
    values = [int(number) for number in re.findall(r"sub\.f16x2 d, \$\d+, \$(\d+);", text)]
    assert sorted(values) == list(range(words + 4, words + 4 + 64))
