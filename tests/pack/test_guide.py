"""The choice of rate modes by the confirmation documents."""

import pytest
import torch

from qsrt_pack.calibrate.statistics import ExpertRows, part_of
from qsrt_pack.guide import ACTIVATIONS, _choose

DOCUMENTS, EACH, HIDDEN, INTERMEDIATE = 64, 8, 16, 32


@pytest.fixture
def source():
    generator = torch.Generator().manual_seed(0)
    shapes = ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    return tuple(torch.randn(*shape, generator=generator) for shape in shapes)


def rows(documents):
    generator = torch.Generator().manual_seed(1)
    count = EACH * len(documents)
    return ExpertRows(
        torch.randn(count, HIDDEN, generator=generator),
        torch.rand(count, generator=generator) + 0.1,
        torch.tensor(documents).repeat_interleave(EACH),
        torch.empty(0, HIDDEN),
    )


def noisy(matrices, size, seed):
    generator = torch.Generator().manual_seed(seed)
    return tuple(m + size * torch.randn(m.shape, generator=generator) for m in matrices)


def choice(given, source, errors):
    decoded = {modes: noisy(source, size, i) for i, (modes, size) in enumerate(errors.items())}
    return _choose((0, 0), given, source, ACTIVATIONS["silu"], decoded)


def test_the_surely_better_modes_are_taken(source):
    errors = {(0, 0): 0.2, (0, 1): 0.02, (1, 0): 0.2, (1, 1): 0.1}
    assert choice(rows(list(range(DOCUMENTS))), source, errors) == (0, 1)


def test_r0_stays_where_it_is_best(source):
    errors = {(0, 0): 0.02, (0, 1): 0.2, (1, 0): 0.2, (1, 1): 0.1}
    assert choice(rows(list(range(DOCUMENTS))), source, errors) == (0, 0)


def test_fit_documents_do_not_choose(source):
    fit = [number for number in range(DOCUMENTS) if part_of(number) == "fit"]
    assert choice(rows(fit), source, {(0, 0): 0.2, (1, 1): 0.02}) == (0, 0)


def test_no_rows_choose_nothing(source):
    nothing = rows([0])
    empty = ExpertRows(*(value[:0] for value in vars(nothing).values()))
    assert choice(empty, source, {(0, 0): 0.2, (1, 1): 0.02}) == (0, 0)
