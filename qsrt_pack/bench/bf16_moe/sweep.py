"""Which configuration of a layer's kernels is fastest, by shape and batch."""

import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from qsrt_pack.bench.bf16_moe.choices import BEST, TARGETS, Sizes, candidates
from qsrt_pack.bench.bf16_moe.kernel import OutOfResources, compiling
from qsrt_pack.bench.bf16_moe.layer import Config, Launch, Layer, Routing
from qsrt_pack.bench.shapes import SHAPES
from qsrt_pack.bench.timing import graph_time

LARGEST_ERROR = 1e-2  # relative L2, against plain torch


def reference(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The layer in plain torch float32: out [M, H] float32."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ w13[expert].float().T).chunk(2, dim=1)
        value = (torch.nn.functional.silu(gate) * up) @ w2[expert].float().T
        out.index_add_(0, token, value * weights[token, slot, None])
    return out


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative L2 distance of `got` from `wanted`."""
    return float((got.float() - wanted).norm() / wanted.norm())


def make_weights(shape: str, device: torch.device | str = "cuda") -> list[torch.Tensor]:
    """Random w13 [E, 2I, H] and w2 [E, H, I], bf16, of which outputs have about unit size."""
    hidden, inter, experts, _ = SHAPES[shape]
    made = []
    for size in ((experts, 2 * inter, hidden), (experts, hidden, inter)):
        weight = torch.empty(size, dtype=torch.bfloat16, device=device)
        made.append(weight.normal_(0.0, size[-1] ** -0.5))
    return made


def random_routes(
    tokens: int, experts: int, top_k: int, sets: int, seed: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`sets` of ids [tokens, top_k] int32 and weights float32 on the CPU.

    While tokens * top_k <= experts, the sets walk over disjoint experts, so that no cache helps.
    """
    generator = torch.Generator().manual_seed(seed)
    made, pool = [], []
    for _ in range(sets):
        rows = []
        for _ in range(tokens):
            if tokens * top_k > experts:
                rows.append(torch.randperm(experts, generator=generator)[:top_k].tolist())
                continue
            if len(pool) < top_k:
                pool = torch.randperm(experts, generator=generator).tolist()
            rows.append(pool[:top_k])
            pool = pool[top_k:]
        weights = torch.rand(tokens, top_k, generator=generator) + 0.1
        ids = torch.tensor(rows, dtype=torch.int32)
        made.append((ids, weights / weights.sum(1, keepdim=True)))
    return made


def layer_bytes(shape: str, ids: torch.Tensor) -> int:
    """Bytes of the weights that a batch's routes read at least: each of its experts once."""
    hidden, inter, _, _ = SHAPES[shape]
    return int(ids.unique().numel()) * 3 * hidden * inter * 2


class Bench:
    """Layers of one shape and batch over several input sets, with buffers shared between sets."""

    def __init__(
        self, shape: str, tokens: int, tensors: list[torch.Tensor], pdl: bool = True
    ) -> None:
        hidden, _, experts, top_k = SHAPES[shape]
        self.shape, self.tokens, self.pdl = shape, tokens, pdl
        device = tensors[0].device
        self.layer = Layer(*tensors, tokens, top_k)
        one = random_routes(tokens, experts, top_k, 1)[0][0]
        sets = min(32, max(6, 600_000_000 // layer_bytes(shape, one)))
        routes = random_routes(tokens, experts, top_k, sets)
        self.bytes = statistics.mean(layer_bytes(shape, ids) for ids, _ in routes)
        self.inputs = []
        for ids, weights in routes:
            x = torch.randn(tokens, hidden, device=device).to(tensors[0].dtype)
            ids, weights = ids.to(device), weights.to(device)
            routing = Routing(tokens, top_k, experts, device).run(ids)
            self.inputs.append((x, ids, weights, routing))

    def launches(self, path: str, config: Config) -> list[list[Launch]]:
        """The launches of each input set."""
        return [self.layer.launches(*inputs, path, config, pdl=self.pdl) for inputs in self.inputs]

    def time(self, path: str, config: Config, repeats: int = 10) -> float:
        """Median microseconds of a layer, routing outside."""
        sets = self.launches(path, config)
        return graph_time([lambda s=s: [launch.run() for launch in s] for s in sets], repeats)

    def time_first(self, path: str, config: Config, repeats: int = 5) -> float:
        """Median microseconds of a layer's first kernel alone."""
        sets = self.launches(path, config)
        return graph_time([launches[0].run for launches in sets], repeats)

    def error(self, path: str, config: Config) -> float:
        """Largest relative L2 error over the first two input sets, against `reference`."""
        worst = 0.0
        for x, ids, weights, routing in self.inputs[:2]:
            got = self.layer(x, ids, weights, routing, path, config, pdl=self.pdl)
            wanted = reference(x, self.layer.w13, self.layer.w2, ids, weights)
            worst = max(worst, relative_error(got, wanted))
        return worst


def precompile(benches: list[Bench], threads: int = 16) -> None:
    """Compile every candidate of the benches, in threads; those that fail are left to the sweep."""
    with (
        ThreadPoolExecutor(threads) as pool,
        compiling(pool),
    ):
        for bench in benches:
            for path, kernels in candidates(*SHAPES[bench.shape][:2], bench.tokens).items():
                for config in _pairs(kernels):
                    for launch in bench.launches(path, config)[0]:
                        launch.compile()


def _pairs(kernels: dict[str, Sizes]) -> list[Config]:
    """Configurations in which each candidate of either kernel occurs."""
    first, second = kernels["fc1"], kernels["fc2"]
    return [
        {"fc1": first[i % len(first)], "fc2": second[i % len(second)]}
        for i in range(max(len(first), len(second)))
    ]


def _fastest(options: Sizes, measure: Callable[[tuple[int, ...]], float]) -> tuple[int, ...]:
    """The option of least time; one that does not fit the device is passed over."""
    times: dict[tuple[int, ...], float] = {}
    for option in options:
        try:
            times[option] = measure(option)
        except OutOfResources:
            continue
    return min(times, key=times.__getitem__)


def tune_path(bench: Bench, path: str) -> tuple[Config, float]:
    """The fastest configuration of a path and its microseconds: first fc1 alone, then fc2."""
    kernels = candidates(*SHAPES[bench.shape][:2], bench.tokens)[path]
    second = kernels["fc2"][0]
    first = _fastest(
        kernels["fc1"], lambda option: bench.time_first(path, {"fc1": option, "fc2": second})
    )
    second = _fastest(
        kernels["fc2"], lambda option: bench.time(path, {"fc1": first, "fc2": option}, repeats=5)
    )
    config = {"fc1": first, "fc2": second}
    return config, bench.time(path, config)


@dataclass(frozen=True)
class Result:
    """The best configuration of each path of one shape and batch, with its microseconds."""

    shape: str
    tokens: int
    paths: dict[str, tuple[Config, float]]
    errors: dict[str, float]
    bytes: float

    @property
    def path(self) -> str:
        return min(self.paths, key=lambda path: self.paths[path][1])

    @property
    def best(self) -> tuple[str, Config]:
        return self.path, self.paths[self.path][0]

    @property
    def us(self) -> float:
        return self.paths[self.path][1]

    def line(self) -> str:
        each = ", ".join(
            f"{path} {us:.1f} us {config} error {self.errors[path]:.1e}"
            for path, (config, us) in self.paths.items()
        )
        target = TARGETS.get((self.shape, self.tokens))
        goal = f" (target {target:.1f})" if target else ""
        rate = self.bytes / self.us / 1e6
        return f"{self.shape} M={self.tokens}: {self.us:.1f} us{goal}, {rate:.2f} TB/s; {each}"


def measure(bench: Bench, paths: dict[str, Config]) -> Result:
    """Times and errors of the given configurations, by path."""
    timed = {path: (config, bench.time(path, config)) for path, config in paths.items()}
    errors = {path: bench.error(path, config) for path, config in paths.items()}
    return Result(bench.shape, bench.tokens, timed, errors, bench.bytes)


def tune(
    shape: str,
    tokens: int,
    tensors: list[torch.Tensor] | None = None,
    bench: Bench | None = None,
) -> Result:
    """Sweep both paths for one shape and batch and check them against `reference`.

    `tensors` are w13 and w2 (made here if left out); a given `bench` has compiled its kernels.
    """
    if bench is None:
        bench = Bench(shape, tokens, tensors or make_weights(shape))
        precompile([bench])
    paths = {path: tune_path(bench, path) for path in candidates(*SHAPES[shape][:2], tokens)}
    errors = {path: bench.error(path, config) for path, (config, _) in paths.items()}
    return Result(shape, tokens, paths, errors, bench.bytes)


def best(
    shape: str,
    tokens: int,
    tensors: list[torch.Tensor] | None = None,
    bench: Bench | None = None,
) -> Result:
    """The configuration in `BEST`, measured again; without one, `tune` with the same arguments."""
    known = BEST.get((shape, tokens))
    if known is None:
        return tune(shape, tokens, tensors, bench)
    path, config = known
    return measure(bench or Bench(shape, tokens, tensors or make_weights(shape)), {path: config})


def sweep(
    shapes: list[str], tokens: list[int], budget: float, known: bool = False, pdl: bool = True
) -> list[Result]:
    """`tune` (with `known`, `best`) each shape and batch, printed as it goes, within `budget` s.

    Raises if a path's relative L2 error is 1e-2 or more.
    """
    started, results = time.monotonic(), []
    for shape in shapes:
        tensors = make_weights(shape)
        benches = [Bench(shape, count, tensors, pdl) for count in tokens]
        precompile([b for b in benches if not (known and (shape, b.tokens) in BEST)])
        sys.stdout.write(f"{shape} ready after {time.monotonic() - started:.1f} s\n")
        for bench in benches:
            if time.monotonic() - started > budget:
                sys.stdout.write("out of time\n")
                return results
            result = (best if known else tune)(shape, bench.tokens, bench=bench)
            sys.stdout.write(result.line() + "\n")
            sys.stdout.flush()
            if not max(result.errors.values()) < LARGEST_ERROR:
                raise ArithmeticError(f"{shape}, {bench.tokens} tokens: {result.errors}")
            results.append(result)
        del tensors, benches, bench
        torch.cuda.empty_cache()
    sys.stdout.write(f"{time.monotonic() - started:.1f} s\n")
    return results
