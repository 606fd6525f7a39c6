"""The exact tail-biting search in Triton, over all states and in the reference's two passes.

Two ways to take a step. Packed, for NVIDIA GPUs from sm_80 on: costs are halves, the inner loop
is PTX (ptx.py), the costs of every second or fourth step are kept and the trace repeats the
choices between them in float32. Plain: float32 costs and back pointers, the reference's edges to
the bit; it runs wherever Triton does, under the interpreter too.
"""

import functools
import threading

import torch
import triton
import triton.language as tl

from qsrt_pack.encode.viterbi import ptx
from qsrt_pack.encode.viterbi.reference import HALF, STEPS, check
from qsrt_runtime.format import codebook

# Of the packed way. Beyond this magnitude halves lose too much; such tiles take the plain way.
_FAR = 16.0
_KEPT = {2: 4, 3: 2, 4: 1}  # steps from one kept row of costs to the next: 2 MiB a tile
_TILE_BYTES = 1 << 21
_MOST_TILES = {2: 2, 3: 4, 4: 2}  # tiles of a program; best of 1, 2, 4 and 8 on an H200
_RENORMALIZE = 8  # steps between subtractions of the least cost
_TRACED = 8  # tiles of a trace program
_launching = threading.Lock()  # Triton 3.6 gives a kernel to a second thread before it is loaded
# Plain.
_PLAIN_TILES = 64  # tiles at once of the plain way: 2 bits take 256 MiB of back pointers


def search_kernel(targets: torch.Tensor, bits: int) -> torch.Tensor:
    """Find the closed path of least squared error for every tile, in Triton.

    On an NVIDIA GPU from sm_80 on the packed way, whose paths cost on average at most 0.1% more
    than the reference's for a normal source; elsewhere the plain one, which finds the reference's.

    targets: [n, 256] float32, trellis order, in codebook units.   bits: 2, 3 or 4.
    Returns edges: [n, 256] uint8 on the same device, trellis order, each < 2**bits.
    """
    device = targets.device
    if not is_packed(device):
        return search_plain(targets, bits)
    check(targets, bits)
    edges = torch.empty(targets.shape, dtype=torch.uint8, device=device)
    size = _batch(device)
    with torch.cuda.device(device):
        for start in range(0, len(targets), size):
            _search_packed(targets[start : start + size], bits, edges[start : start + size])
    far = (targets.abs() > _FAR).any(1)
    if far.any():
        edges[far] = search_plain(targets[far], bits)
    return edges


def is_packed(device: torch.device) -> bool:
    """Whether searches on a device go the packed way."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (8, 0)


def search_plain(targets: torch.Tensor, bits: int) -> torch.Tensor:
    """As search_reference, to the bit: costs in float32, no fused multiply-add."""
    check(targets, bits)
    edges = torch.empty(targets.shape, dtype=torch.uint8, device=targets.device)
    with torch.cuda.device_of(targets):
        for start in range(0, len(targets), _PLAIN_TILES):
            part = targets[start : start + _PLAIN_TILES].contiguous()
            _search_plain(part, bits, edges[start : start + _PLAIN_TILES])
    return edges


@functools.cache
def _batch(device: torch.device) -> int:
    """Tiles at once: their kept costs take a sixteenth of the device's memory."""
    properties = torch.cuda.get_device_properties(device)
    fit = properties.total_memory // 16 // _TILE_BYTES
    wave = properties.multi_processor_count * max(_MOST_TILES.values())
    return max(fit // wave * wave, min(fit, wave), 1)


@functools.cache
def _tables(bits: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Each thread's values, and all values by state, float16."""
    return ptx.table(bits).to(device), codebook.values(bits, device).to(torch.float16)


@functools.cache
def _texts(bits: int) -> dict[str, tuple[str, str]]:
    """The routines that forward calls, by its arguments."""
    routines = {
        "BASE": ptx.BASE,
        "ADVANCE": ptx.advance(bits),
        "PUT": ptx.put(bits),
        "GET": ptx.get(bits),
        "KEEP": ptx.keep(bits),
        "LEAST": ptx.least(bits),
        "BEST": ptx.best(bits),
    }
    return {name: (r.text, r.constraints) for name, r in routines.items()}


def _tiles(count: int, bits: int, device: torch.device) -> int:
    """Tiles of a program: many hide each other's latency, but every multiprocessor gets some.

    Shared memory must have room for their costs, twice.
    """
    properties = torch.cuda.get_device_properties(device)
    room = properties.shared_memory_per_block_optin - 1024
    tiles = _MOST_TILES[bits]
    while tiles > 1 and (
        tiles * (4 << (16 - bits)) > room
        or triton.cdiv(count, tiles) < properties.multi_processor_count
    ):
        tiles //= 2
    return tiles


def _search_packed(targets: torch.Tensor, bits: int, edges: torch.Tensor) -> None:
    """Both passes over tiles whose kept costs fit into memory. edges: written."""
    count, device, every = len(targets), targets.device, _KEPT[bits]
    table, values = _tables(bits, device)
    halves = targets.to(torch.float16).contiguous()
    doubled = torch.stack([halves, halves], -1).view(torch.int32)
    history = torch.empty(count * _TILE_BYTES // 2, dtype=torch.float16, device=device)
    boundary, last, node = torch.empty(3, count, dtype=torch.int32, device=device).unbind()
    tiles = _tiles(count, bits, device)
    grid, trace_grid = (triton.cdiv(count, tiles),), (triton.cdiv(count, _TRACED),)
    texts = _texts(bits)
    for start, kept_from, end in ((HALF, HALF, last), (0, 0, boundary)):
        shared = {"START": start, "KEPT_FROM": kept_from, "EVERY": every, "BITS": bits}
        shared["FORCED"] = end is boundary
        with _launching:
            forward[grid](
                doubled,
                table,
                history,
                boundary,
                last,
                count,
                **shared,
                **texts,
                TILES=tiles,
                WORDS=ptx.words(bits),
                RENORMALIZE=_RENORMALIZE,
                num_warps=ptx.THREADS // 32,
            )
            found = node if end is boundary else boundary
            trace[trace_grid](
                halves, values, history, end, found, edges, count, **shared, TILES=_TRACED
            )


@triton.jit
def _call(ROUTINE: tl.constexpr, inputs, OUTPUTS: tl.constexpr):
    """Run a routine of ptx.py on each thread; returns a tuple of [512] int32."""
    return tl.inline_asm_elementwise(
        ROUTINE[0], ROUTINE[1], inputs, dtype=(tl.int32,) * OUTPUTS, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["count"])  # else a count of 1 is constant and `never` left out
def forward(
    targets,  # [n, 256] int32, each target twice as a half
    table,  # [64, 512] int32
    history,  # [n, rows, nodes] float16, written: costs, in the order in which threads own them
    boundary,  # [n] int32, the node to start in where FORCED
    last,  # [n] int32, the best node at the end, written where not FORCED
    count,
    START: tl.constexpr,  # the first position
    KEPT_FROM: tl.constexpr,  # the first step after which costs are kept
    EVERY: tl.constexpr,
    BITS: tl.constexpr,
    FORCED: tl.constexpr,
    ADVANCE: tl.constexpr,
    BASE: tl.constexpr,
    PUT: tl.constexpr,
    GET: tl.constexpr,
    KEEP: tl.constexpr,
    LEAST: tl.constexpr,
    BEST: tl.constexpr,
    TILES: tl.constexpr,
    WORDS: tl.constexpr,  # of a thread's costs
    RENORMALIZE: tl.constexpr,
):
    """A pass of 256 steps over TILES tiles. Every tensor is [512]: one element a thread."""
    NODES: tl.constexpr = 1 << (16 - BITS)
    ROWS: tl.constexpr = (256 - KEPT_FROM) // EVERY
    BUFFER: tl.constexpr = 2 * NODES  # bytes of a tile's costs, of which there are two copies
    thread = tl.arange(0, 512)
    if count < 0:  # never: a gather makes the compiler set shared memory aside
        source = tl.load(table + tl.arange(0, TILES * NODES))
        tl.store(last + thread, tl.gather(source, tl.load(boundary + thread), 0))
    base = _call(BASE, (thread * 0,), 1)[0]
    # 16-byte chunks are permuted within each row of eight, by the bits that neighbouring
    # threads' chunks differ in, so that eight threads write to eight different places. (The
    # base is a multiple of 64, since what stands before it, the slots of ptx.py, is.)
    if BITS == 2:
        read = base + ((thread ^ ((thread >> 3) & 3)) << 4)
        write = base + (thread << 6) + (((thread >> 1) & 3) << 4)
    elif BITS == 3:
        chunk = thread >> 2
        read = base + ((chunk ^ ((chunk >> 3) & 1)) << 4) + ((thread & 3) << 2)
        write = base + (thread << 5) + (((thread >> 2) & 1) << 4)
    else:
        read = base + ((thread >> 1) << 1)
        write = base + (thread << 4)
    values = ()
    for word in tl.static_range(64):
        values = values + (tl.load(table + word * 512 + thread),)
    rows = ()
    inputs = ()
    less = ()
    for k in tl.static_range(TILES):
        tile = tl.minimum(tl.program_id(0) * TILES + k, count - 1).to(tl.int64)
        first = ()
        for word in tl.static_range(WORDS):
            cost = thread * 0
            if FORCED:  # 0 in the boundary node, infinity in all others
                start = tl.load(boundary + tile)
                node = thread * (2 * WORDS) + 2 * word
                cost = tl.where(node == start, 0, 0x7C00)
                cost = cost | tl.where(node + 1 == start, 0, 0x7C000000)
            first = first + (cost,)
        _call(PUT, (write + 2 * BUFFER * k,) + first, 1)
        words = history.to(tl.pointer_type(tl.int32))
        rows = rows + (words + tile * (ROWS * (NODES // 2)) + thread * 4,)
        inputs = inputs + (targets + tile * 256,)
        less = less + (thread * 0,)
    tl.debug_barrier()
    old = thread * 0
    for i in range(256):
        new = BUFFER - old
        step = i + 1
        is_kept = (step >= KEPT_FROM) & (step % EVERY == 0) & (step < 256)
        row = (step - KEPT_FROM) // EVERY
        next_less = ()
        for k in tl.static_range(TILES):
            x = tl.load(inputs[k] + ((START + i) & 255)) + thread * 0
            places = (read + 2 * BUFFER * k + old, write + 2 * BUFFER * k + new)
            costs = _call(ADVANCE, (x, less[k]) + places + values, WORDS)
            if is_kept:
                _call(KEEP, (rows[k] + row * (NODES // 2),) + costs, 1)
            least = thread * 0
            if i % RENORMALIZE == RENORMALIZE - 2:
                least = _call(LEAST, (thread,) + costs, 1)[0]
            next_less = next_less + (least,)
        less = next_less
        old = new
        tl.debug_barrier()
    if not FORCED:
        for k in tl.static_range(TILES):
            tile = tl.minimum(tl.program_id(0) * TILES + k, count - 1).to(tl.int64)
            costs = _call(GET, (write + 2 * BUFFER * k + old,), WORDS)
            node = _call(BEST, (thread,) + costs, 1)[0]
            tl.store(last + tile + thread * 0, node, mask=thread == 0)


@triton.jit
def trace(
    targets,  # [n, 256] float16
    values,  # [65536] float16
    history,  # as forward wrote it
    end,  # [n] int32, the node after the last step
    found,  # [n] int32, written: the node before the first step walked
    edges,  # [n, 256] uint8, written where FORCED
    count,
    START: tl.constexpr,
    KEPT_FROM: tl.constexpr,
    EVERY: tl.constexpr,
    BITS: tl.constexpr,
    FORCED: tl.constexpr,
    TILES: tl.constexpr,
):
    """Walk back from the end, EVERY steps at once: [TILES, 2**(BITS * EVERY)] ways."""
    NODES: tl.constexpr = 1 << (16 - BITS)
    SYMBOLS: tl.constexpr = 1 << BITS
    WAYS: tl.constexpr = 1 << (BITS * EVERY)
    ROWS: tl.constexpr = (256 - KEPT_FROM) // EVERY
    OWNED: tl.constexpr = NODES // 512
    tile = (tl.program_id(0) * TILES + tl.arange(0, TILES)).to(tl.int64)
    inside = tile < count
    last = tl.load(end + tile, mask=inside, other=0)
    node = last
    # A way's highest digit is the oldest edge dropped in the last of the steps.
    way = tl.arange(0, WAYS)[None, :]
    for k in range(ROWS):
        row = ROWS - 1 - k
        step = KEPT_FROM + row * EVERY  # the row holds the costs after so many steps
        place = node[:, None] + way * 0
        distances = tl.zeros((TILES, WAYS), tl.float32)
        for m in tl.static_range(EVERY):
            oldest = (way >> (BITS * (EVERY - 1 - m))) & (SYMBOLS - 1)
            state = (oldest << (16 - BITS)) | place
            position = (START + step + EVERY - 1 - m) & 255
            x = tl.load(targets + tile * 256 + position, mask=inside, other=0.0).to(tl.float32)
            distance = x[:, None] - tl.load(values + state).to(tl.float32)
            distances += distance * distance
            place = state >> BITS
        if FORCED and row == 0:
            cost = tl.where(place == last[:, None], 0.0, float("inf"))
        else:
            # A thread's nodes lie in chunks of eight, each 512 chunks after the one before.
            chunk = (place % OWNED) // 8 * 512 + place // OWNED
            at = (tile * ROWS + row)[:, None] * NODES + chunk * 8 + place % 8
            cost = tl.load(history + at, mask=inside[:, None], other=0.0).to(tl.float32)
        best = tl.argmin(distances + cost, 1)
        for m in tl.static_range(EVERY):
            if FORCED:
                at = tile * 256 + step + EVERY - 1 - m
                tl.store(edges + at, (node & (SYMBOLS - 1)).to(tl.uint8), mask=inside)
            oldest = (best >> (BITS * (EVERY - 1 - m))) & (SYMBOLS - 1)
            node = (oldest << (16 - 2 * BITS)) | (node >> BITS)
    tl.store(found + tile, node, mask=inside)


def _search_plain(targets: torch.Tensor, bits: int, edges: torch.Tensor) -> None:
    count, device, nodes = len(targets), targets.device, 1 << (16 - bits)
    values = codebook.values(bits, device)
    costs = torch.empty(count, 2, nodes, device=device)
    origins = torch.empty(count, STEPS, nodes, dtype=torch.uint8, device=device)
    costs[:, 0] = 0
    for start, forced in ((HALF, False), (0, True)):
        with _launching:
            forward_plain[(count,)](
                targets,
                values,
                costs,
                origins,
                START=start,
                BITS=bits,
                num_warps=8,
                enable_fp_fusion=False,
            )
        if not forced:
            node = costs[:, 0].argmin(1)
            boundary = torch.empty(count, dtype=torch.int64, device=device)
        first = HALF if not forced else 0
        with _launching:
            walk = (origins, node, boundary, edges)
            trace_plain[(count,)](*walk, FIRST=first, START=start, BITS=bits)
        if not forced:
            costs[:, 0] = torch.inf
            costs[torch.arange(count, device=device), 0, boundary] = 0
            node = boundary


@triton.jit
def forward_plain(
    targets,  # [n, 256] float32
    values,  # [65536] float32
    costs,  # [n, 2, nodes] float32; the first row is the start and in the end the result
    origins,  # [n, 256, nodes] uint8, written: each node's best oldest edge at each step
    START: tl.constexpr,
    BITS: tl.constexpr,
):
    """A pass of 256 steps over one tile: [middles, newest edges] nodes at once."""
    SYMBOLS: tl.constexpr = 1 << BITS
    MIDDLES: tl.constexpr = 1 << (16 - 2 * BITS)
    NODES: tl.constexpr = 1 << (16 - BITS)
    tile = tl.program_id(0).to(tl.int64)
    middle = tl.arange(0, MIDDLES)
    node = middle[:, None] * SYMBOLS + tl.arange(0, SYMBOLS)[None, :]
    for i in range(256):
        x = tl.load(targets + tile * 256 + ((START + i) & 255))
        before = costs + (tile * 2 + (i & 1)) * NODES
        least = tl.full((MIDDLES, SYMBOLS), float("inf"), tl.float32)
        origin = tl.zeros((MIDDLES, SYMBOLS), tl.int32)
        for oldest in tl.static_range(SYMBOLS):
            cost = tl.load(before + oldest * MIDDLES + middle)[:, None]
            distance = x - tl.load(values + oldest * NODES + node)
            cost = cost + distance * distance
            less = cost < least
            least = tl.where(less, cost, least)
            origin = tl.where(less, oldest, origin)
        tl.store(costs + (tile * 2 + 1 - (i & 1)) * NODES + node, least)
        tl.store(origins + (tile * 256 + i) * NODES + node, origin.to(tl.uint8))
        tl.debug_barrier()


@triton.jit
def trace_plain(
    origins,
    end,  # [n] int64, the node after the last step
    found,  # [n] int64, written: the node before step FIRST
    edges,  # [n, 256] uint8, written
    FIRST: tl.constexpr,
    START: tl.constexpr,
    BITS: tl.constexpr,
):
    """Walk one tile back from its end to step FIRST."""
    NODES: tl.constexpr = 1 << (16 - BITS)
    tile = tl.program_id(0).to(tl.int64)
    node = tl.load(end + tile)
    for k in range(256 - FIRST):
        step = 255 - k
        position = (START + step) & 255
        tl.store(edges + tile * 256 + position, (node & ((1 << BITS) - 1)).to(tl.uint8))
        oldest = tl.load(origins + (tile * 256 + step) * NODES + node).to(tl.int64)
        node = (oldest << (16 - 2 * BITS)) | (node >> BITS)
    tl.store(found + tile, node)
