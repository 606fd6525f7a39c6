"""What a way has to give before it is timed."""

from dataclasses import replace

import pytest
import torch

from qsrt_pack.bench.check import Check, WrongError
from qsrt_pack.bench.choice import Choice
from qsrt_pack.bench.inputs import make_inputs
from qsrt_pack.bench.layers import random_layer
from qsrt_pack.bench.shapes import Shape
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry, TrueSizes
from qsrt_runtime.moe_reference import moe_forward_reference

SHAPE = Shape(Geometry(128, 256, 3), TrueSizes(128, 256), 2)
TOKENS, CALLS = 20, 3


@pytest.fixture(scope="module")
def layer():
    return random_layer(SHAPE.geometry, torch.device("cpu"))


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(SHAPE, TOKENS, CALLS, 1, torch.float32, torch.device("cpu"))


def choice_of(layer, inputs, change=lambda number, out: None, activation="a16"):
    outs = [torch.empty_like(i.x) for i in inputs]

    def call(number):
        i = inputs[number]
        out = moe_forward_reference(i.x, layer, i.ids, i.weights, activation=activation)
        outs[number].copy_(out)
        change(number, outs[number])

    return Choice("some", [lambda n=n: call(n) for n in range(len(inputs))], outs, activation)


def test_the_same_is_let_pass(layer, inputs):
    check = Check(inputs, [layer])
    assert check.error("a", choice_of(layer, inputs)) < 1e-6
    assert 0.004 < check.error("a", choice_of(layer, inputs, scaled(1.005))) < 0.006


def scaled(factor, rows=slice(None), calls=(0, CALLS - 1)):
    def change(number, out):
        if number in calls:
            out[rows] *= factor

    return change


@pytest.mark.parametrize(
    "change",
    [
        scaled(1.02),
        scaled(1.02, calls=(0,)),
        scaled(1.02, calls=(CALLS - 1,)),
        scaled(1.05, 0),
        scaled(1.05, TOKENS - 1),
        scaled(float("nan"), 0),
        scaled(0, slice(0, 4)),
    ],
)
def test_what_differs_from_the_reference_is_refused(layer, inputs, change):
    with pytest.raises(WrongError, match=r"a \(some\) with 20 tokens differs from the reference"):
        Check(inputs, [layer]).error("a", choice_of(layer, inputs, change))


def test_what_is_not_written_is_refused(layer, inputs):
    choice = choice_of(layer, inputs)
    silent = Choice("some", [lambda: None] * CALLS, choice.outs)
    for call in choice.calls:
        call()
    with pytest.raises(WrongError, match="differs from the reference by nan"):
        Check(inputs, [layer]).error("a", silent)


def test_rows_that_the_reference_does_not_have_are_held_to_another_way(layer, inputs):
    check, good = Check(inputs, [layer]), choice_of(layer, inputs)
    middle = slice(8, 12)
    wrong = choice_of(layer, inputs, scaled(0, middle))
    assert check.error("a", wrong) < 1e-6  # nothing to compare with yet
    check.error("a", good)
    check.keep(good)
    with pytest.raises(FormatError, match="differs from another way by") as raised:
        check.error("b", wrong)
    assert raised.type is FormatError
    with pytest.raises(FormatError, match="differs from another way by nan"):
        check.error("b", choice_of(layer, inputs, scaled(float("nan"), 9)))
    assert check.error("b", choice_of(layer, inputs, scaled(0.95, 10))) < 1e-6


def test_one_wrong_row_of_many_is_found(layer):
    inputs = make_inputs(SHAPE, 500, 1, 1, torch.float32, torch.device("cpu"))
    check, good = Check(inputs, [layer]), choice_of(layer, inputs)
    check.error("a", good)
    check.keep(good)
    message = r"a row of another way by \d\.\de-01, expected at most 0\.1"
    with pytest.raises(FormatError, match=message):
        check.error("b", choice_of(layer, inputs, scaled(0.7, 250)))


def test_quantized_rows_have_bounds_of_their_own(layer, inputs):
    check, a8 = Check(inputs, [layer]), choice_of(layer, inputs, activation="a8")
    assert 4e-2 < check.error("a", a8) < 6e-2
    with pytest.raises(WrongError, match=r"the reference by 4\.\de-02, expected at most 0\.01;"):
        check.error("a", replace(a8, activation="a16"))
    exact = replace(choice_of(layer, inputs), activation="a8")
    with pytest.raises(WrongError, match=r"a8 reference by 4\.\de-02, expected at most 0\.03;"):
        check.error("a", exact)
    for factor, message in (
        (1.1, r"differs from the reference by 1\.\de-01, expected at most 0\.09;"),
        (1.04, r"differs from the a8 reference by 4\.0e-02, expected at most 0\.03;"),
    ):
        with pytest.raises(WrongError, match=message):
            check.error("a", choice_of(layer, inputs, scaled(factor), "a8"))


def test_quantized_rows_are_held_to_another_way_and_none_to_them(layer, inputs):
    check, good = Check(inputs, [layer]), choice_of(layer, inputs)
    a8 = choice_of(layer, inputs, activation="a8")
    check.error("a", a8)
    check.keep(a8)
    wrong = choice_of(layer, inputs, scaled(0, slice(8, 12)), "a8")
    check.error("a", wrong)  # nothing to compare with yet
    check.error("b", good)
    check.keep(good)
    check.keep(a8)
    check.error("b", good)
    check.error("a", a8)
    with pytest.raises(FormatError, match=r"another way by \d\.\de-01, expected at most 0\.1;"):
        check.error("a", wrong)
