"""The search in Triton: interpreted without a GPU, compiled for two, and run where there is one."""

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qsrt_pack.encode.viterbi import kernel, ptx
from qsrt_pack.encode.viterbi.cpu import search_cpu
from qsrt_pack.encode.viterbi.kernel import search_kernel, search_plain
from qsrt_pack.encode.viterbi.reference import HALF, search_reference
from qsrt_runtime.format import codebook, tile

ROOT = Path(__file__).parents[4]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALES = {2: 1.5, 3: 1.46, 4: 1.4}
BINARIES = Path(importlib.util.find_spec("triton").origin).parent / "backends" / "nvidia" / "bin"
both = pytest.mark.parametrize("search", [search_kernel, search_plain])
each_rate = pytest.mark.parametrize("bits", codebook.BITS)


def normal(n: int, bits: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, 256, generator=torch.Generator().manual_seed(seed)) * SCALES[bits]


def squared_errors(targets: torch.Tensor, edges: torch.Tensor, bits: int) -> torch.Tensor:
    """Of each tile, in float64."""
    values = codebook.values(bits).to(targets.device)[tile.states_of_edges(edges, bits)]
    return (targets.double() - values.double()).square().sum(1)


# Few tiles: the interpreter takes 3 s for one at 2 bits and 6 s at 4 bits. The first one's
# constant makes ties, at 3 and 4 bits also for the best node at the end of the first pass: to
# take the last of equals there, or of a node's predecessors, changes at least 60 of its edges.
@pytest.mark.parametrize(
    ("bits", "count", "constant", "positions"),
    [(2, 1, -5.5, 160), (3, 2, 2, 256), (4, 2, 5.5, 256)],
)
def test_plain_equals_the_cpu(bits: int, count: int, constant: float, positions: int) -> None:
    targets = normal(count, bits, seed=bits)
    targets[0, :positions] = constant
    found = search_plain(targets.to(DEVICE), bits)
    assert found.dtype == torch.uint8
    assert torch.equal(found.cpu(), search_cpu(targets, bits))


@both
@each_rate
def test_no_tiles(search, bits: int) -> None:
    found = search(torch.empty(0, 256, device=DEVICE), bits)
    assert found.shape == (0, 256)
    assert found.dtype == torch.uint8


def test_the_cpu_and_older_gpus_take_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "search_plain", lambda targets, bits: (targets, bits))
    capability = {"cpu": (9, 0), "cuda": (7, 5)}  # a CPU has none
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[device.type])
    older = SimpleNamespace(device=torch.device("cuda", 0))  # all that is asked of it
    for targets in (torch.zeros(2, 256), older):
        found, bits = search_kernel(targets, 3)
        assert found is targets
        assert bits == 3


@both
@pytest.mark.parametrize("bits", [1, 5, 3.5, None])
def test_refuses_other_rates(search, bits) -> None:
    with pytest.raises(ValueError, match=r"expected one of \(2, 3, 4\)"):
        search(torch.zeros(1, 256, device=DEVICE), bits)


@both
@pytest.mark.parametrize("shape", [(256,), (1, 255), (1, 16, 16), (256, 1)])
def test_refuses_other_shapes(search, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected \[n, 256\]"):
        search(torch.zeros(shape, device=DEVICE), 3)


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_refuses_other_dtypes(search, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"expected torch\.float32"):
        search(torch.zeros(1, 256, dtype=dtype, device=DEVICE), 3)


@both
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e15])
def test_refuses_values_without_a_cost(search, value: float) -> None:
    targets = torch.zeros(3, 256, device=DEVICE)
    targets[2, 255] = value
    with pytest.raises(ValueError, match="source weight or scale"):
        search(targets, 3)


@pytest.mark.parametrize(
    ("kib", "count", "tiles"),
    [
        (227, 4201, [2, 4, 2]),
        (163, 4201, [2, 4, 2]),
        (99, 4201, [1, 2, 2]),
        (65, 4201, [1, 2, 2]),
        (64, 4201, [1, 1, 2]),
        (227, 3 * 132 + 129, [2, 4, 2]),
        (227, 3 * 132 + 128, [2, 2, 2]),
        (227, 132 + 131, [2, 2, 2]),
        (227, 132 + 130, [1, 1, 1]),
        (227, 1, [1, 1, 1]),
    ],
)
def test_tiles_of_a_program_fit_into_shared_memory_and_leave_no_processor_idle(
    kib: int, count: int, tiles: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(shared_memory_per_block_optin=kib << 10, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device = torch.device("cuda", 0)
    assert [kernel._tiles(count, bits, device) for bits in codebook.BITS] == tiles


@pytest.mark.parametrize(
    ("gib", "processors", "tiles"),
    [(140, 132, 8 * 528), (80, 108, 5 * 432), (8, 20, 240), (0, 9, 1)],
)
def test_tiles_at_once_are_whole_waves_where_memory_allows(
    gib: int, processors: int, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(total_memory=gib << 30, multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert kernel._batch.__wrapped__(torch.device("cuda", 0)) == tiles
    assert tiles == 1 or tiles * kernel._TILE_BYTES <= gib << 26


def kept_costs(count: int, bits: int, end: torch.Tensor, forced: bool) -> torch.Tensor:
    """Random costs [n, rows, nodes], infinite where the second pass cannot yet be."""
    every, width = kernel._KEPT[bits], 16 - bits
    generator = torch.Generator().manual_seed(bits)
    rows = (256 if forced else HALF) // every
    costs = 4 * torch.rand(count, rows, 1 << width, generator=generator)
    for row in range(-(-width // (bits * every)) if forced else 0):
        left = width - bits * every * row  # of the end's bits
        reached = torch.arange(1 << width) >> (width - left) == (end & ((1 << left) - 1))[:, None]
        costs[:, row].masked_fill_(~reached, torch.inf)
    if forced:
        costs[:, 0] = torch.nan  # never written, since only the end is reached
    return costs.to(torch.float16)


def walk_back(
    target: torch.Tensor, costs: torch.Tensor, node: int, bits: int
) -> tuple[int, list[int]]:
    """One tile, from the node at its end to that before position 0, and the edges between."""
    every, symbols, width = kernel._KEPT[bits], 1 << bits, 16 - bits
    values = codebook.values(bits)
    # Ways: the edges dropped, in the last of the steps first.
    ways = torch.cartesian_prod(*[torch.arange(symbols)] * every).view(-1, every)
    edges = []
    for row in range(len(costs) - 1, -1, -1):
        place, error = torch.full((len(ways),), node), torch.zeros(len(ways))
        for m in range(every):
            position = row * every + every - 1 - m
            state = ways[:, m] << width | place
            error += (target[position] - values[state]).square()
            place = state >> bits
        way = ways[(error + costs[row, place]).argmin()]
        for oldest in way.tolist():
            edges.append(node % symbols)
            node = oldest << (width - bits) | node >> bits
    return node, edges[::-1]


@pytest.mark.parametrize("forced", [False, True])
@each_rate
def test_trace_takes_the_best_way_from_row_to_row(bits: int, forced: bool) -> None:
    count, every, start = 3, kernel._KEPT[bits], 0 if forced else HALF
    end = torch.tensor([0, 1234, (1 << (16 - bits)) - 1])
    targets = normal(count, bits).to(torch.float16)
    costs = kept_costs(count, bits, end, forced)
    # In forward's order: a thread's nodes in chunks of eight, each over all threads.
    history = costs.unflatten(2, (ptx.THREADS, -1, 8)).transpose(2, 3).contiguous()
    found = torch.full((count,), -1, dtype=torch.int32, device=DEVICE)
    edges = torch.full((count, 256), 255, dtype=torch.uint8, device=DEVICE)
    values = codebook.values(bits).to(torch.float16)
    given = [x.to(DEVICE) for x in (targets, values, history, end.to(torch.int32))]
    kernel.trace[(2,)](
        *given,
        found,
        edges,
        count,
        START=start,
        KEPT_FROM=start,
        EVERY=every,
        BITS=bits,
        FORCED=forced,
        TILES=2,
    )
    for n in range(count):
        own = costs[n].float()
        if forced:
            own[0] = torch.inf
            own[0, end[n]] = 0
        node, path = walk_back(targets[n].float(), own, int(end[n]), bits)
        assert found[n] == node
        assert edges[n].tolist() == (path if forced else [255] * 256)
        assert not forced or node == end[n]


COMPILE = """
import json
import subprocess
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qsrt_pack.encode.viterbi import kernel, ptx
from qsrt_runtime.format import codebook

cuobjdump, cubin = sys.argv[1], Path(sys.argv[2])
signature = {"targets": "*i32", "table": "*i32", "history": "*fp16", "boundary": "*i32"}
signature |= {"last": "*i32", "count": "i32"}
for capability in (80, 90):
    for bits in codebook.BITS:
        for forced in (False, True):
            tiles = kernel._MOST_TILES[bits]
            start = 0 if forced else 128
            constants = dict(
                START=start, KEPT_FROM=start, EVERY=kernel._KEPT[bits], BITS=bits, FORCED=forced,
                TILES=tiles, WORDS=ptx.words(bits), RENORMALIZE=kernel._RENORMALIZE,
                **kernel._texts(bits),
            )
            types = signature | dict.fromkeys(constants, "constexpr")
            source = ASTSource(fn=kernel.forward, signature=types, constexprs=constants)
            target = GPUTarget("cuda", capability, 32)
            compiled = triton.compile(
                source, target=target, options={"num_warps": ptx.THREADS // 32}
            )
            cubin.write_bytes(compiled.asm["cubin"])
            command = [cuobjdump, "-res-usage", cubin]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            fused = compiled.asm["ptx"].count("fma.rn.f16x2")
            facts = [capability, bits, tiles, compiled.metadata.shared, fused, usage]
            print(json.dumps(facts), flush=True)
"""


@pytest.mark.skipif(not (BINARIES / "ptxas").is_file(), reason="triton has no ptxas here")
def test_forward_compiles_without_spills(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", COMPILE, BINARIES / "cuobjdump", tmp_path / "cubin"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * 3 * 2
    for line in lines:
        capability, bits, tiles, shared, fused, usage = json.loads(line)
        used = dict(part.split(":") for part in usage.split() if part.count(":") == 1)
        assert used["STACK"] == used["LOCAL"] == "0", (capability, bits, usage)
        assert 64 < int(used["REG"]) <= 65536 // ptx.THREADS
        # Both copies of the costs; less would mean that the unused gather was left out.
        assert shared >= tiles * 4 * 2 ** (16 - bits)
        assert fused == tiles * ptx.words(bits) << bits


@pytest.fixture
def cuda() -> torch.device:
    """A GPU that takes the packed way."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the packed way needs sm_80")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
@each_rate
def test_packed_paths_cost_what_the_reference_s_cost(bits: int, cuda: torch.device) -> None:
    targets = normal(128, bits).to(cuda)
    found, best = (
        squared_errors(targets, search(targets, bits), bits)
        for search in (search_kernel, search_reference)
    )
    assert 0.999 <= float((found / best).mean()) <= 1.001


@pytest.mark.gpu
@each_rate
def test_plain_equals_the_reference_on_a_gpu(bits: int) -> None:
    targets = normal(kernel._PLAIN_TILES + 3, bits).cuda()
    targets[0] = 0
    targets[1] = -1.2345
    targets[2] = 1e9
    targets[3] *= 1e-30
    targets[4] *= 1e14
    found = search_plain(targets, bits)
    assert found.device == targets.device
    assert torch.equal(found, search_reference(targets, bits))


@pytest.mark.gpu
@each_rate
def test_a_tile_s_edges_do_not_depend_on_its_company(
    bits: int, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 4201  # past 2**31 words of kept costs, and halves; a prime
    if torch.cuda.mem_get_info(cuda)[0] < 5 * count * kernel._TILE_BYTES // 4:
        pytest.skip("the costs of all tiles at once do not fit into memory")
    targets = normal(count, bits).to(cuda)
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "_batch", lambda device: count)
        edges = search_kernel(targets, bits)
    assert edges.shape == (count, 256)
    assert edges.device == targets.device
    assert int(edges.max()) == (1 << bits) - 1
    for size in (1, 3, 7):
        for start in (0, 1, 2048, 4095, count - size):
            part = slice(start, start + size)
            assert torch.equal(search_kernel(targets[part], bits), edges[part])
    assert torch.equal(search_kernel(targets, bits), edges)  # in batches of its own
    monkeypatch.setattr(kernel, "_batch", lambda device: 5)
    assert torch.equal(search_kernel(targets[:13], bits), edges[:13])
    apart = targets[:13].T.contiguous().T[::2]
    assert torch.equal(search_kernel(apart, bits), edges[:13:2])


@pytest.mark.gpu
@each_rate
def test_a_gpu_with_little_shared_memory_finds_the_same_edges(
    bits: int, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    processors = torch.cuda.get_device_properties(cuda).multi_processor_count
    count = kernel._MOST_TILES[bits] * processors + 1
    assert kernel._tiles(count, bits, cuda) > 1 or bits == 2  # 2 bits take the most
    targets = normal(count, bits).to(cuda)
    edges = search_kernel(targets, bits)
    monkeypatch.setattr(kernel, "_tiles", lambda *_: 1)
    assert torch.equal(search_kernel(targets, bits), edges)


@pytest.mark.gpu
@pytest.mark.parametrize(("value", "is_far"), [(16.0, False), (-20.0, True), (9e14, True)])
@each_rate
def test_a_tile_with_a_far_outlier_takes_the_plain_way(
    bits: int, value: float, is_far: bool, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = normal(5, bits).to(cuda)
    before = search_kernel(targets, bits)
    targets[2, 77] = value
    plain = []

    def noted(targets: torch.Tensor, bits: int) -> torch.Tensor:
        plain.append(targets)
        return search_plain(targets, bits)

    monkeypatch.setattr(kernel, "search_plain", noted)
    found = search_kernel(targets, bits)
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], before[others])
    assert len(plain) == is_far
    if is_far:
        assert torch.equal(plain[0], targets[2:3])
        assert torch.equal(found[2:3], search_plain(targets[2:3], bits))
    else:
        errors = [squared_errors(targets, edges, bits)[2] for edges in (found, before)]
        assert errors[0] < errors[1]


@pytest.mark.gpu
@each_rate
def test_the_same_edges_every_time(bits: int, cuda: torch.device) -> None:
    targets = normal(1057, bits).to(cuda)
    edges = search_kernel(targets, bits)
    for _ in range(3):
        assert torch.equal(search_kernel(targets, bits), edges)
    with ThreadPoolExecutor(3) as pool:  # as workers.in_order calls it
        for found in pool.map(lambda _: search_kernel(targets, bits), range(6)):
            assert torch.equal(found, edges)
