"""That a way computes what the others do, before it is timed."""

from collections.abc import Sequence

import torch

from qsrt_pack.bench.choice import Choice
from qsrt_pack.bench.inputs import Input
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.moe_reference import moe_forward_reference
from qsrt_runtime.weights import LayerWeights

# Relative L2 errors. Rounding weights and rows to bfloat16 gives 3e-3 to 6e-3, wrong results 1.
LARGEST_ERROR = 1e-2  # of some rows against the reference in float32
LARGEST_DISTANCE = 2e-2  # of all rows of two ways; by the triangle inequality
LARGEST_ROW = 0.1  # of any one row of two ways, by its own size or the average row's
_ROWS = 4  # at either end


class WrongError(FormatError):
    """A way's output is not the reference's."""


class Check:
    """The reference's output of some rows of the first call and the last; then a way's of all."""

    def __init__(self, inputs: Sequence[Input], layers: Sequence[LayerWeights]) -> None:
        self._calls = sorted({0, len(inputs) - 1})
        tokens = len(inputs[0].x)
        self._rows = sorted({*range(min(_ROWS, tokens)), *range(max(0, tokens - _ROWS), tokens)})
        self._expected = {number: self._reference(inputs[number], layers) for number in self._calls}
        self._kept: dict[int, torch.Tensor] = {}

    def _reference(self, given: Input, layers: Sequence[LayerWeights]) -> torch.Tensor:
        rows = self._rows
        x, ids, weights = given.x[rows].float(), given.ids[rows], given.weights[rows]
        return moe_forward_reference(x, layers[given.place], ids, weights)

    def error(self, name: str, choice: Choice) -> float:
        """The larger relative error of two calls.

        Raises WrongError where it is too large; FormatError where what was kept agrees with the
        reference, too, and yet differs in other rows, so that either may be wrong.
        """
        worst = 0.0
        for number in self._calls:
            out = choice.outs[number].fill_(float("nan"))
            choice.calls[number]()
            error = _distance(out[self._rows], self._expected[number])
            what = f"{name} ({choice.name}) with {len(out)} tokens"
            if not error <= LARGEST_ERROR:  # nor NaN
                raise WrongError(_differs(what, "the reference", error, LARGEST_ERROR))
            worst = max(worst, error)
            if number in self._kept:
                self._compare(out, self._kept[number].float(), what)
        return worst

    def keep(self, choice: Choice) -> None:
        """Hold what comes to what this choice's calls have written."""
        self._kept = {number: choice.outs[number].clone() for number in self._calls}

    @staticmethod
    def _compare(out: torch.Tensor, kept: torch.Tensor, what: str) -> None:
        sizes = kept.norm(dim=1)
        sizes = sizes.clamp(min=sizes.square().mean().sqrt())
        rows = ((out - kept).norm(dim=1) / sizes).max().item()
        for error, largest, than in (
            (_distance(out, kept), LARGEST_DISTANCE, "another way"),
            (rows, LARGEST_ROW, "a row of another way"),
        ):
            if not error <= largest:
                raise FormatError(_differs(what, than, error, largest))


def _differs(what: str, than: str, error: float, largest: float) -> str:
    return (
        f"{what} differs from {than} by {error:.1e}, expected at most {largest:g}; it was not timed"
    )


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2, which is NaN for what was not written."""
    return ((found.float() - expected).norm() / expected.norm()).item()
