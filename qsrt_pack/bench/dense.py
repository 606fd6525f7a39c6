"""Layers decoded to a dense type, by torch and by Triton kernels."""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from qsrt_pack.bench.bf16_moe import choices as few
from qsrt_pack.bench.bf16_moe.kernel import OutOfResources, compiling
from qsrt_pack.bench.bf16_moe.layer import MAX_ROUTES, Config, Launch, Layer, Routing
from qsrt_pack.bench.bf16_prefill import TILES, Dense
from qsrt_pack.bench.choice import Choice, Measure, Unavailable, tensor_bytes
from qsrt_pack.bench.inputs import Input
from qsrt_pack.bench.layers import DenseLayer
from qsrt_pack.bench.machine import Call

_MANY_TOKENS = 16  # from which on the kernels for many tokens are tried
_SPLITS = 4  # of fc2 at most, each with sums of its own
_COMPILERS = 16  # threads
_META = torch.device("meta")


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
        except RuntimeError as error:  # of a GPU or sizes that this torch has no such product for
            if inputs[0].x.is_cuda:
                torch.cuda.synchronize()  # which raises where the GPU itself is at fault
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
            found += tensor_bytes(Dense(w13, w2, tokens, self.topk)) - w13.nbytes - w2.nbytes
        return len(self.layers) * found

    def tune(self, inputs: Sequence[Input], measure: Measure) -> Choice:
        tokens = len(inputs[0].x)
        outs, measure = [torch.empty_like(i.x) for i in inputs], _fitting(measure)
        found: list[tuple[float, Choice]] = []
        if self._is_few(tokens):
            found += _FewTokens(self, inputs, outs).best_of_paths(measure)
        if tokens >= _MANY_TOKENS:
            found += [(measure(choice), choice) for choice in self._many(inputs, outs)]
        us, choice = min(found, key=lambda each: each[0], default=(math.inf, None))
        if choice is None or us == math.inf:
            _, hidden, inner = self.layers[0].w2.shape
            raise Unavailable(f"no blocks divide {hidden} x {inner} and fit this GPU")
        return choice

    def _is_few(self, tokens: int) -> bool:
        return tokens * self.topk <= MAX_ROUTES

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


class _FewTokens:
    """The launches of TritonFused for few tokens, over all inputs."""

    def __init__(self, way: TritonFused, inputs: Sequence[Input], outs: list[torch.Tensor]) -> None:
        self._inputs, self._outs, self._pdl = inputs, outs, way.pdl
        self._tokens = len(inputs[0].x)
        experts, self._hidden, self._inner = way.layers[0].w2.shape
        sizes = (self._tokens, way.topk)
        self._layers = [Layer(layer.w13, layer.w2, *sizes) for layer in way.layers]
        self._routings = [Routing(*sizes, experts, i.x.device) for i in inputs]

    def best_of_paths(self, measure: Measure) -> Iterator[tuple[float, Choice]]:
        """Of each path: the best sizes of its first kernel, then of its second."""
        paths = few.candidates(self._hidden, self._inner, self._tokens)
        for path, sizes in paths.items():
            first, second = sizes["fc1"], sizes["fc2"]
            if self._inputs[0].x.is_cuda:
                self._compile(path, first, second)
            tried = [self._choice(path, {"fc1": fc1, "fc2": second[0]}) for fc1 in first]
            times = [measure(choice) for choice in tried]
            fc1 = first[times.index(min(times))]
            more = [self._choice(path, {"fc1": fc1, "fc2": fc2}) for fc2 in second[1:]]
            times += [measure(choice) for choice in more]
            yield min(zip(times, tried + more, strict=True), key=lambda each: each[0])

    def _compile(self, path: str, first: few.Sizes, second: few.Sizes) -> None:
        """Compile what is tried later, in threads."""
        with ThreadPoolExecutor(_COMPILERS) as pool, compiling(pool):
            for number in range(max(len(first), len(second))):
                fc1, fc2 = first[number % len(first)], second[number % len(second)]
                for launch in self._launches(path, {"fc1": fc1, "fc2": fc2}, 0):
                    launch.compile()

    def _launches(self, path: str, config: Config, number: int) -> list[Launch]:
        given = self._inputs[number]
        arguments = (given.x, given.ids, given.weights, self._routings[number], path, config)
        layer, out = self._layers[given.place], self._outs[number]
        return layer.launches(*arguments, pdl=self._pdl, out=out)

    def _choice(self, path: str, config: Config) -> Choice:
        def call(number: int) -> Call:
            routing, ids = self._routings[number], self._inputs[number].ids
            launches = self._launches(path, config, number)
            if path == "gemv":  # which needs no blocks of routes
                return lambda: [launch.run() for launch in launches]
            return lambda: [routing.run(ids), *(launch.run() for launch in launches)]

        name = f"{path} {config['fc1']} {config['fc2']}"
        return Choice(name, [call(number) for number in range(len(self._inputs))], self._outs)


def _dense_expert_bytes(layer: DenseLayer) -> int:
    return layer.w13[0].nbytes + layer.w2[0].nbytes


def _fitting(measure: Measure) -> Measure:
    """The same, and infinity for what takes more of a multiprocessor than there is."""

    def found(choice: Choice) -> float:
        try:
            return measure(choice)
        except OutOfResources:
            return math.inf

    return found
