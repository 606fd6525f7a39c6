"""The ways of computing a layer that are measured side by side.

Another one is a class as these, added to `make_ways`: tables, plots and reports take what there is.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from qsrt_pack.bench.bf16_moe import choices as few
from qsrt_pack.bench.bf16_moe.kernel import OutOfResources, compiling
from qsrt_pack.bench.bf16_moe.layer import MAX_ROUTES, Config, Launch, Layer, Routing
from qsrt_pack.bench.bf16_prefill import TILES, Dense
from qsrt_pack.bench.inputs import Input
from qsrt_pack.bench.layers import DenseLayer
from qsrt_pack.bench.machine import Call, Machine
from qsrt_runtime.arguments import padded_rows
from qsrt_runtime.moe_decode import moe_decode
from qsrt_runtime.moe_kernels import FEW_ROWS
from qsrt_runtime.moe_prefill import moe_prefill
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import (
    FEW_TOKENS,
    MAX_PREFILL_TOKENS,
    MAX_TOKENS,
    PrefillWorkspace,
    Workspace,
    make_prefill_workspace,
    make_workspace,
)

_MANY_TOKENS = 16  # from which on the kernels for many tokens are tried
_SPLITS = 4  # of fc2 at most, each with sums of its own
_COMPILERS = 16  # threads
_META = torch.device("meta")


class Unavailable(Exception):
    """Why a way cannot run here, or not so many tokens."""


@dataclass(frozen=True)
class Choice:
    """One way's calls, one for each input. name: of its kernels and how they are launched.

    outs: [T, H], what each call writes.
    """

    name: str
    calls: list[Call]
    outs: list[torch.Tensor]


# Checks a choice against the reference; microseconds of a few replays.
Measure = Callable[[Choice], float]


class Way(Protocol):
    """name: its column's.   weights: "packed" or "dense", what it computes with.

    expert_bytes: of an expert's weights, all of which it reads.
    """

    name: str
    weights: str
    expert_bytes: int

    def buffer_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Of memory, beside weights and the calls' rows, in and out."""

    def tune(self, inputs: Sequence[Input], measure: Measure) -> Choice:
        """The fastest choice. Raises Unavailable where there is none."""


@dataclass(frozen=True)
class Packed:
    """The packed layers by this project's kernels, as moe_forward chooses them."""

    layers: Sequence[LayerWeights]
    topk: int
    name: str = "qsrt"
    weights: str = "packed"

    @property
    def expert_bytes(self) -> int:
        geometry = self.layers[0].geometry
        return geometry.slots * geometry.bundle_bytes

    def buffer_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        return _tensor_bytes(self._workspace(tokens, dtype, _META))

    def tune(self, inputs: Sequence[Input], measure: Measure) -> Choice:
        tokens = len(inputs[0].x)
        dtype, device = inputs[0].x.dtype, inputs[0].x.device
        workspace = self._workspace(tokens, dtype, device)
        forward = moe_decode if isinstance(workspace, Workspace) else moe_prefill
        layers = [self.layers[i.place] for i in inputs]
        rows = [padded_rows(i.x, layer) for i, layer in zip(inputs, layers, strict=True)]
        outs = [torch.empty_like(x) for x in rows]

        def call(x: torch.Tensor, layer: LayerWeights, given: Input, out: torch.Tensor) -> Call:
            whole = (x, given.ids, given.weights, out)
            parts = list(zip(*(t.split(workspace.tokens) for t in whole), strict=True))
            return lambda: [
                forward(x, layer, ids, weights, workspace, out) for x, ids, weights, out in parts
            ]

        calls = [call(*each) for each in zip(rows, layers, inputs, outs, strict=True)]
        width = self.layers[0].width
        return Choice(forward.__name__, calls, [out[:, :width] for out in outs])

    def _workspace(
        self, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> Workspace | PrefillWorkspace:
        """Of moe_decode or moe_prefill, whichever moe_forward takes for so many tokens."""
        geometry = self.layers[0].geometry
        if tokens <= FEW_TOKENS or tokens * self.topk <= FEW_ROWS * geometry.experts:
            return make_workspace(geometry, self.topk, min(tokens, MAX_TOKENS), dtype, device)
        found = {layer.traits.inputs for layer in self.layers}
        inputs = found.pop() if len(found) == 1 else 0  # which has room for any
        most = min(tokens, MAX_PREFILL_TOKENS)
        return make_prefill_workspace(geometry, self.topk, most, inputs, dtype, device)


@dataclass(frozen=True)
class TorchGrouped:
    """Dense layers by torch's grouped product."""

    layers: Sequence[DenseLayer]
    topk: int
    name: str = "torch"
    weights: str = "dense"

    @property
    def expert_bytes(self) -> int:
        return _dense_expert_bytes(self.layers[0])

    def buffer_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        _, hidden, inner = self.layers[0].w2.shape
        return tokens * self.topk * 5 * (hidden + inner) * dtype.itemsize

    def tune(self, inputs: Sequence[Input], measure: Measure) -> Choice:
        layers = [Dense(layer.w13, layer.w2, 1, self.topk) for layer in self.layers]
        outs = [torch.empty_like(i.x) for i in inputs]
        calls = [
            lambda i=i, out=out: layers[i.place].torch(i.x, i.ids, i.weights, out)
            for i, out in zip(inputs, outs, strict=True)
        ]
        choice = Choice("torch._grouped_mm", calls, outs)
        try:
            measure(choice)
        except torch.AcceleratorError:
            raise
        except RuntimeError as error:  # of a GPU or sizes that this torch has no such product for
            raise Unavailable(str(error).partition("\n")[0][:200]) from error
        return choice


@dataclass(frozen=True)
class TritonFused:
    """Dense layers by this project's Triton kernels for them, tuned for each number of tokens."""

    layers: Sequence[DenseLayer]
    topk: int
    pdl: bool  # launches may start before the ones before them have ended
    name: str = "triton"
    weights: str = "dense"

    @property
    def expert_bytes(self) -> int:
        return _dense_expert_bytes(self.layers[0])

    def buffer_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        shape = self.layers[0].w2.shape
        experts, hidden, inner = shape
        found = 0
        if self._is_few(tokens):
            found += tokens * self.topk * (inner * dtype.itemsize + 4 * _SPLITS * hidden)
        if tokens >= _MANY_TOKENS:
            w13 = torch.empty(experts, 2 * inner, hidden, dtype=dtype, device=_META)
            w2 = torch.empty(shape, dtype=dtype, device=_META)
            found += _tensor_bytes(Dense(w13, w2, tokens, self.topk)) - w13.nbytes - w2.nbytes
        return len(self.layers) * found

    def tune(self, inputs: Sequence[Input], measure: Measure) -> Choice:
        tokens = len(inputs[0].x)
        outs, measure = [torch.empty_like(i.x) for i in inputs], _fitting(measure)
        found: list[tuple[float, Choice]] = []
        if self._is_few(tokens):
            found += self._few(inputs, outs, measure)
        if tokens >= _MANY_TOKENS:
            found += [(measure(choice), choice) for choice in self._many(inputs, outs)]
        us, choice = min(found, key=lambda each: each[0], default=(math.inf, None))
        if choice is None or us == math.inf:
            _, hidden, inner = self.layers[0].w2.shape
            raise Unavailable(f"no blocks divide {hidden} x {inner} and fit this GPU")
        return choice

    def _is_few(self, tokens: int) -> bool:
        return tokens * self.topk <= MAX_ROUTES

    def _few(
        self, inputs: Sequence[Input], outs: list[torch.Tensor], measure: Measure
    ) -> Iterator[tuple[float, Choice]]:
        """The best of each path for few tokens: of the first kernel's sizes, then the second's."""
        tokens, (experts, hidden, inner) = len(inputs[0].x), self.layers[0].w2.shape
        layers = [Layer(layer.w13, layer.w2, tokens, self.topk) for layer in self.layers]
        routings = [Routing(tokens, self.topk, experts, i.x.device) for i in inputs]

        def launches(path: str, config: Config, number: int) -> list[Launch]:
            given, routing = inputs[number], routings[number]
            return layers[given.place].launches(
                given.x, given.ids, given.weights, routing, path, config,
                pdl=self.pdl, out=outs[number],
            )  # fmt: skip

        def choice(path: str, config: Config) -> Choice:
            def call(number: int) -> Call:
                routing, ids = routings[number], inputs[number].ids
                each = launches(path, config, number)
                if path == "gemv":  # which needs no blocks of routes
                    return lambda: [launch.run() for launch in each]
                return lambda: [routing.run(ids), *(launch.run() for launch in each)]

            name = f"{path} {config['fc1']} {config['fc2']}"
            return Choice(name, [call(number) for number in range(len(inputs))], outs)

        for path, sizes in few.candidates(hidden, inner, tokens).items():
            first, second = sizes["fc1"], sizes["fc2"]
            if inputs[0].x.is_cuda:
                with ThreadPoolExecutor(_COMPILERS) as pool, compiling(pool):
                    for number in range(max(len(first), len(second))):
                        fc1, fc2 = first[number % len(first)], second[number % len(second)]
                        for launch in launches(path, {"fc1": fc1, "fc2": fc2}, 0):
                            launch.compile()
            tried = [choice(path, {"fc1": fc1, "fc2": second[0]}) for fc1 in first]
            times = [measure(each) for each in tried]
            fc1 = first[times.index(min(times))]
            tried += [choice(path, {"fc1": fc1, "fc2": fc2}) for fc2 in second[1:]]
            times += [measure(each) for each in tried[len(times) :]]
            yield min(zip(times, tried, strict=True), key=lambda each: each[0])

    def _many(self, inputs: Sequence[Input], outs: list[torch.Tensor]) -> Iterator[Choice]:
        """The kernels for many tokens with all pairs of tiles that divide the sizes."""
        tokens, (_, hidden, inner) = len(inputs[0].x), self.layers[0].w2.shape
        layers = [Dense(layer.w13, layer.w2, tokens, self.topk) for layer in self.layers]
        for first in TILES:
            for second in TILES:
                if first[0] != second[0]:
                    continue
                (_, width1, step1, *_), (_, width2, step2, *_) = first, second
                if inner % min(width1, 128) or hidden % step1 or hidden % width2 or inner % step2:
                    continue
                calls = [
                    lambda i=i, out=out, tiles=(first, second): layers[i.place].triton(
                        i.x, i.ids, i.weights, out, *tiles
                    )
                    for i, out in zip(inputs, outs, strict=True)
                ]
                yield Choice(f"grouped {first} {second}", calls, outs)


def make_ways(
    packed: Sequence[LayerWeights], dense: Sequence[DenseLayer], topk: int, machine: Machine
) -> list[Way]:
    """Those of packed layers, and those of dense ones where there are any."""
    found: list[Way] = [Packed(packed, topk)]
    if dense:
        found += [
            TorchGrouped(dense, topk),
            TritonFused(
                dense, topk, pdl=machine.capability >= (9, 0) and torch.version.hip is None
            ),
        ]
    return found


def _dense_expert_bytes(layer: DenseLayer) -> int:
    return layer.w13[0].nbytes + layer.w2[0].nbytes


def _tensor_bytes(held: object) -> int:
    return sum(value.nbytes for value in vars(held).values() if isinstance(value, torch.Tensor))


def _fitting(measure: Measure) -> Measure:
    """The same, and infinity for what takes more of a multiprocessor than there is."""

    def found(choice: Choice) -> float:
        try:
            return measure(choice)
        except OutOfResources:
            return math.inf

    return found
