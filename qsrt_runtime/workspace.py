"""Every buffer that decoding a few tokens needs, sized once."""

from dataclasses import dataclass

import torch

from qsrt_runtime.format.geometry import Geometry

MAX_TOKENS = 16  # of one call of moe_decode
PLACES = 8  # routes of a block, which share a decoded weight
COLUMNS = 512  # of a tile of a product
_PLAIN_PROGRAMS = 3  # where there is no GPU, whose multiprocessors decide


@dataclass(frozen=True)
class Workspace:
    """Buffers of moe_decode, the caller's; one call at a time uses them.

    rotated: [2 R, H], middle: [R, I], of the rows' type, tiles in fragment order; R = tokens topk.
    partial: [2, parts, PLACES, COLUMNS] float32, sums of what one program made of one tile; the
    fused way has gate and up in the first half and down in the second, the plain way uses one.
    counts: [2] int32, blocks of routes, and ids that name no expert and are not -1.
    arrivals: [2] int32, programs that have come to where all meet; the first is 0 between calls.
    block_experts: [blocks], block_routes: [blocks, PLACES], -1 where empty; route_places: [R],
    block PLACES + place of each route, -1 for none; scratch: of prepare; int32.
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
    arrivals: torch.Tensor
    block_experts: torch.Tensor
    block_routes: torch.Tensor
    route_places: torch.Tensor
    scratch: torch.Tensor

    def invalid_routes(self) -> int:
        """Ids of the last call that named no expert and were not -1. Waits for the device."""
        return int(self.counts[1])


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
    most = min(routes, (routes + (PLACES - 1) * min(geometry.experts, routes)) // PLACES)
    most = max(most, topk)  # the routes of a single token are blocks of their own
    tiles = most * max(geometry.pairs, -(-geometry.hidden // COLUMNS))
    programs = _programs(device)

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return Workspace(
        tokens=tokens,
        topk=topk,
        geometry=geometry,
        programs=programs,
        rotated=torch.empty(2 * routes, geometry.hidden, dtype=dtype, device=device),
        middle=torch.empty(routes, geometry.intermediate, dtype=dtype, device=device),
        partial=torch.empty(
            2, programs + tiles, PLACES, COLUMNS, dtype=torch.float32, device=device
        ),
        counts=integers(2),
        arrivals=torch.zeros(2, dtype=torch.int32, device=device),
        block_experts=integers(most),
        block_routes=integers(most, PLACES),
        route_places=integers(routes),
        scratch=integers(4 * max(16, routes)),
    )


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _PLAIN_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count
