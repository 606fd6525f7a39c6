"""That a way computes what the others do, before it is timed."""

from collections.abc import Sequence

import torch

from qsrt_pack.bench.choice import Choice
from qsrt_pack.bench.inputs import Input
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.moe_reference import moe_forward_reference
from qsrt_runtime.weights import LayerWeights

# Relative L2 errors of some rows, by a choice's activation and that of a reference in float32.
# Rounding weights and rows to bfloat16 gives 3e-3 to 6e-3, wrong results 1; rounding rows to MXFP8
# 4.6e-2, and of a single row of 128 x 256 up to 7.7e-2, the largest of 4,000, where sums in another
# order, whose numbers round another way, are up to 2.4e-2 apart.
LARGEST_ERROR = {"a16": {"a16": 1e-2}, "a8": {"a16": 9e-2, "a8": 3e-2}}
LARGEST_ROW = 5  # times what all rows of two ways may be apart, by its own size or the average's
_ROWS = 4  # at either end


class WrongError(FormatError):
    """A way's output is not the reference's."""


class Check:
    """The reference's output of some rows of the first call and the last; then a way's of all."""

    def __init__(self, inputs: Sequence[Input], layers: Sequence[LayerWeights]) -> None:
        self._calls = sorted({0, len(inputs) - 1})
        tokens = len(inputs[0].x)
        self._rows = sorted({*range(min(_ROWS, tokens)), *range(max(0, tokens - _ROWS), tokens)})
        self._inputs, self._layers = inputs, layers
        self._expected: dict[tuple[int, str], torch.Tensor] = {}
        self._kept: dict[int, torch.Tensor] = {}

    def _reference(self, number: int, activation: str) -> torch.Tensor:
        if (number, activation) not in self._expected:
            given, rows = self._inputs[number], self._rows
            routed = (self._layers[given.place], given.ids[rows], given.weights[rows])
            found = moe_forward_reference(given.x[rows].float(), *routed, activation=activation)
            self._expected[number, activation] = found
        return self._expected[number, activation]

    def error(self, name: str, choice: Choice) -> float:
        """The larger relative error of two calls against the reference that rounds nothing.

        Raises WrongError where it is too large; FormatError where what was kept agrees with the
        reference, too, and yet differs in other rows, so that either may be wrong.
        """
        worst = 0.0
        for number in self._calls:
            out = choice.outs[number].fill_(float("nan"))
            choice.calls[number]()
            what = f"{name} ({choice.name}) with {len(out)} tokens"
            bounds = LARGEST_ERROR[choice.activation]
            for activation, largest in bounds.items():
                error = _distance(out[self._rows], self._reference(number, activation))
                if not error <= largest:  # nor NaN
                    than = "the reference" if activation == "a16" else f"the {activation} reference"
                    raise WrongError(_differs(what, than, error, largest))
                if activation == "a16":
                    worst = max(worst, error)
            if number in self._kept:
                largest = bounds["a16"] + LARGEST_ERROR["a16"]["a16"]  # the triangle inequality
                self._compare(out, self._kept[number].float(), what, largest)
        return worst

    def keep(self, choice: Choice) -> None:
        """Hold what comes to what this choice's calls have written, unless its rows are mxfp8."""
        if choice.activation == "a16":
            self._kept = {number: choice.outs[number].clone() for number in self._calls}

    @staticmethod
    def _compare(out: torch.Tensor, kept: torch.Tensor, what: str, largest: float) -> None:
        sizes = kept.norm(dim=1)
        sizes = sizes.clamp(min=sizes.square().mean().sqrt())
        rows = ((out - kept).norm(dim=1) / sizes).max().item()
        for error, most, than in (
            (_distance(out, kept), largest, "another way"),
            (rows, LARGEST_ROW * largest, "a row of another way"),
        ):
            if not error <= most:
                raise FormatError(_differs(what, than, error, most))


def _differs(what: str, than: str, error: float, largest: float) -> str:
    return (
        f"{what} differs from {than} by {error:.1e}, expected at most {largest:g}; it was not timed"
    )


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2, which is NaN for what was not written."""
    return ((found.float() - expected).norm() / expected.norm()).item()
