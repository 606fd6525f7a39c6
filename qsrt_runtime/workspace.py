"""Every buffer that the kernels need, sized once."""

from dataclasses import dataclass

import torch

from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.mxfp8 import BLOCK

MAX_TOKENS = 1024  # of one call of moe_decode
FEW_TOKENS = 16  # whose routes are mapped without atomics, and who may go by ops.fused
ALONE_TOKENS = 2  # up to which calls go by ops.fused.alone
PLACES = 8  # routes of a block, which share a decoded weight
MANY_PLACES = 32  # where experts have more rows
COLUMNS = 512  # of a tile of a product
MAX_PREFILL_TOKENS = 4096  # of one call of moe_prefill
MIN_BLOCK, MAX_BLOCK = 16, 128  # routes of a block of its products
SCRATCH_BYTES = 1 << 29  # of experts' labels at a time
_PLAIN_PROGRAMS = 3  # where there is no GPU, whose multiprocessors decide


@dataclass(frozen=True)
class Workspace:
    """Buffers of moe_decode, the caller's; one call at a time uses them.

    rotated: [2 R, H], middle: [R, I], of the rows' type, tiles in fragment order; R = tokens topk.
    W4A8 has bytes there, see quantized.
    partial: [2, n] float32, sums [parts, places, COLUMNS] of what one program made of one tile;
    ops.fused has gate and up in the first half and down in the second, others use it as one.
    counts: [2] int32, blocks of routes, and ids that name no expert and are not -1.
    sent: [2, parts, COLUMNS, 2], sent_rows: [R of ALONE_TOKENS, I / 2, 2], what programs of one
    launch hand each other, see ops.fused.alone.ptx, beside the number of the call that it is of;
    calls: [programs], that of the last one; int32, zeros at first.
    block_experts: [blocks], block_routes: [blocks, places], -1 where empty; route_places: [R],
    block places + place of each route, -1 for none; scratch: of prepare; first_block: [E + 1],
    cursors: [E], of group; int32.
    programs: of the products, one for each multiprocessor.
    """

    tokens: int
    topk: int
    geometry: Geometry
    programs: int
    rotated: torch.Tensor
    middle: torch.Tensor
    partial: torch.Tensor
    counts: torch.Tensor
    sent: torch.Tensor
    sent_rows: torch.Tensor
    calls: torch.Tensor
    block_experts: torch.Tensor
    block_routes: torch.Tensor
    route_places: torch.Tensor
    scratch: torch.Tensor
    first_block: torch.Tensor
    cursors: torch.Tensor

    def invalid_routes(self) -> int:
        """Ids of the last call that named no expert and were not -1. Waits for the device."""
        return int(self.counts[1])


def quantized(rows: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Where W4A8 has its rows, in the memory of W4A16's.

    rows: [n, K], a workspace's rotated or middle.   kind: torch.uint8, E4M3 bytes [n, K] and
    exponents [n, K / 32]; or torch.bfloat16, the numbers that they stand for [n, K], twice: the
    same but for steps below 2^-133.
    """
    if kind != torch.uint8:
        return rows.view(kind), rows.view(kind)
    memory, count = rows.view(torch.uint8).flatten(), rows.numel()
    exponents = memory[count : count + count // BLOCK]
    return memory[:count].view(rows.shape), exponents.view(len(rows), -1)


def make_workspace(
    geometry: Geometry, topk: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> Workspace:
    """Buffers for calls of up to `tokens` tokens, at most MAX_TOKENS, of `topk` routes each.

    dtype: of the rows, float16 or bfloat16.   Any layer of the geometry, and any rank's share of
    it, can use them.
    """
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"a workspace is for 1 to {MAX_TOKENS} tokens, not {tokens}")
    if topk < 1:
        raise ValueError(f"topk is {topk}, expected at least 1")
    routes = tokens * topk
    programs = _programs(device)

    def blocks(places: int) -> int:
        most = (routes + (places - 1) * min(geometry.experts, routes)) // places
        return max(min(routes, most), topk)

    def sums(places: int) -> int:
        tiles = blocks(places) * max(geometry.pairs, -(-geometry.hidden // COLUMNS))
        return (programs + tiles) * places * COLUMNS

    half, places = sums(PLACES), blocks(PLACES) * PLACES
    if tokens > FEW_TOKENS:
        half = max(half, -(-sums(MANY_PLACES) // 2))
        places = max(places, blocks(MANY_PLACES) * MANY_PLACES)

    alone = min(tokens, ALONE_TOKENS) * topk
    parts = programs + alone * max(geometry.pairs, -(-geometry.hidden // COLUMNS))

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return Workspace(
        tokens=tokens,
        topk=topk,
        geometry=geometry,
        programs=programs,
        rotated=torch.empty(2 * routes, geometry.hidden, dtype=dtype, device=device),
        middle=torch.empty(routes, geometry.intermediate, dtype=dtype, device=device),
        partial=torch.empty(2, half, dtype=torch.float32, device=device),
        counts=integers(2).zero_(),
        sent=integers(2, parts, COLUMNS, 2).zero_(),
        sent_rows=integers(alone, geometry.intermediate // 2, 2).zero_(),
        calls=integers(programs).zero_(),
        block_experts=integers(blocks(PLACES)),
        block_routes=integers(places),
        route_places=integers(routes),
        scratch=integers(4 * max(16, min(routes, FEW_TOKENS * topk))),
        first_block=integers(geometry.experts + 1),
        cursors=integers(geometry.experts),
    )


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _PLAIN_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class PrefillWorkspace:
    """Buffers of moe_prefill, the caller's; one call at a time uses them.

    inputs: the traits' that it has room for, see weights.Traits.
    rotated: [T, 2 T or 2 R; H], middle: [R, I], of the rows' type, tiles in fragment order, where
    R = T topk.
    sums: float32, of gate and up, [R, 2 I]; down_sums: the same memory, [R, H], bfloat16 for
    bfloat16 rows, else float32.
    scratch: uint8, E4M3 labels of as many experts' matrices as it has room for, or of none.
    counts: [2], first_block: [E + 1], cursors: [E], block_experts: [blocks], order: [places], the
    routes by expert; int32, see ops.group.
    multiprocessors: of the device.
    """

    tokens: int
    topk: int
    geometry: Geometry
    inputs: int
    multiprocessors: int
    rotated: torch.Tensor
    middle: torch.Tensor
    sums: torch.Tensor
    down_sums: torch.Tensor
    scratch: torch.Tensor
    counts: torch.Tensor
    first_block: torch.Tensor
    cursors: torch.Tensor
    block_experts: torch.Tensor
    order: torch.Tensor

    def invalid_routes(self) -> int:
        """Ids of the last call that named no expert and were not -1. Waits for the device."""
        return int(self.counts[1])


def make_prefill_workspace(
    geometry: Geometry,
    topk: int,
    tokens: int,
    inputs: int,
    dtype: torch.dtype,
    device: torch.device,
    scratch_bytes: int = SCRATCH_BYTES,
) -> PrefillWorkspace:
    """Buffers for calls of up to `tokens` tokens, at most MAX_PREFILL_TOKENS, of `topk` routes.

    inputs: of the layers' traits.   dtype: of the rows, float16 or bfloat16.
    scratch_bytes: for labels; 0 where all layers are expanded, else one expert's gate and up are
    held whatever it says.
    """
    if not 1 <= tokens <= MAX_PREFILL_TOKENS:
        raise ValueError(f"a workspace is for 1 to {MAX_PREFILL_TOKENS} tokens, not {tokens}")
    if topk < 1:
        raise ValueError(f"topk is {topk}, expected at least 1")
    routes, hidden, inner = tokens * topk, geometry.hidden, geometry.intermediate
    experts, one = geometry.experts, 2 * geometry.intermediate * geometry.hidden
    if scratch_bytes:
        scratch_bytes = max(one, min(scratch_bytes // 16 * 16, one * experts))
    if inputs not in (0, 1, 2):
        raise ValueError(f"inputs is {inputs}, expected 0, 1 or 2, as in a layer's traits")
    rows = (2 * routes, tokens, 2 * tokens)[inputs]
    places = min(routes * MAX_BLOCK, routes + experts * (MAX_BLOCK - 1))  # for blocks of any size
    narrow = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    sums = empty(routes * max(2 * inner, hidden * narrow.itemsize // 4), dtype=torch.float32)
    return PrefillWorkspace(
        tokens=tokens,
        topk=topk,
        geometry=geometry,
        inputs=inputs,
        multiprocessors=_programs(device),
        rotated=empty(rows, hidden, dtype=dtype),
        middle=empty(routes, inner, dtype=dtype),
        sums=sums,
        down_sums=sums.view(narrow),
        scratch=empty(scratch_bytes, dtype=torch.uint8),
        counts=empty(2).zero_(),
        first_block=empty(experts + 1),
        cursors=empty(experts),
        block_experts=empty(min(routes, routes // MIN_BLOCK + experts)),
        order=empty(places),
    )
