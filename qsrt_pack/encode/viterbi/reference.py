"""The exact tail-biting search in plain torch: what the other searches are held to."""

import torch

from qsrt_runtime.format import codebook

# Below this magnitude every sum of squares is far from overflowing float32.
LIMIT = 1e15
STEPS = 256
HALF = 128  # the position where the first pass starts
_CHUNK = 32  # tiles at once: 2 bits take 128 MiB of back pointers


def check(targets: torch.Tensor, bits: int) -> None:
    """Refuse what no search accepts: a wrong rate, shape or dtype, and values without a cost."""
    if bits not in codebook.BITS:
        raise ValueError(f"bits is {bits!r}, expected one of {codebook.BITS}")
    if targets.ndim != 2 or targets.shape[1] != STEPS:
        raise ValueError(f"targets have shape {tuple(targets.shape)}, expected [n, {STEPS}]")
    if targets.dtype != torch.float32:
        raise ValueError(f"targets are {targets.dtype}, expected torch.float32")
    if not bool((targets.abs() < LIMIT).all()):
        raise ValueError(
            f"targets hold a NaN, an infinity or a magnitude of {LIMIT:g} or more; "
            "look for a bad source weight or scale"
        )


def search_reference(targets: torch.Tensor, bits: int) -> torch.Tensor:
    """Find the closed path of least squared error for every tile, over all 2**(16-bits) nodes.

    A node is the newest 16-bits bits of the stream. An unconstrained pass over the whole circle,
    from position 128, settles the node before position 0; a pass over positions 0..255 then
    starts and ends in it. A cost is c + (x - v) * (x - v) in float32, each operation rounded by
    itself; no cost is ever subtracted, since 256 steps lose at most 2**-15 of it to rounding.
    Ties go to the smallest predecessor, and at the end of the first pass to the smallest node.

    targets: [n, 256] float32, trellis order, in codebook units, any device.   bits: 2, 3 or 4.
    Returns edges: [n, 256] uint8 on the same device, trellis order, each < 2**bits.
    """
    check(targets, bits)
    edges = torch.empty(targets.shape, dtype=torch.uint8, device=targets.device)
    for start in range(0, len(targets), _CHUNK):
        part = targets[start : start + _CHUNK]
        edges[start : start + _CHUNK] = _search(part, bits)
    return edges


def _search(targets: torch.Tensor, bits: int) -> torch.Tensor:
    """As search_reference, for few tiles at once and without checks."""
    free = targets.new_zeros(len(targets), 1 << (16 - bits))
    costs, origins = _forward(free, targets.roll(HALF, 1), bits)
    _, boundary = _trace(origins[HALF:], costs.argmin(1), bits)
    forced = torch.full_like(free, torch.inf).scatter_(1, boundary[:, None], 0)
    _, origins = _forward(forced, targets, bits)
    edges, _ = _trace(origins, boundary, bits)
    return edges


def _forward(
    costs: torch.Tensor, targets: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take every step: the cost of each node at the end, and its best oldest edge at each step.

    costs: [n, nodes] float32 before the first step.   targets: [n, steps] float32.
    Returns costs: [n, nodes] float32, and origins: [steps, n, nodes] uint8.
    """
    symbols = 1 << bits
    # A state is (oldest edge, middle, newest edge): its predecessor node is the first two,
    # its successor node the last two.
    values = codebook.values(bits, targets.device).view(symbols, -1, symbols)
    origins = torch.empty(targets.shape[1], *costs.shape, dtype=torch.uint8, device=costs.device)
    for step, target in enumerate(targets.unbind(1)):
        distance = target[:, None, None, None] - values
        candidates = costs.view(len(costs), symbols, -1, 1) + distance * distance
        costs, origin = candidates.flatten(2).min(1)  # the first of equal ones
        origins[step] = origin
    return costs, origins


def _trace(
    origins: torch.Tensor, node: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk back from a node: the newest edge of each step, and the node before the first.

    origins: [steps, n, nodes] uint8.   node: [n] int64, after the last step.
    Returns edges: [n, steps] uint8, and node: [n] int64.
    """
    edges = torch.empty(len(node), len(origins), dtype=torch.uint8, device=node.device)
    for step in range(len(origins) - 1, -1, -1):
        edges[:, step] = node & ((1 << bits) - 1)
        oldest = origins[step].gather(1, node[:, None])[:, 0].to(torch.int64)
        node = (oldest << (16 - 2 * bits)) | (node >> bits)
    return edges, node
