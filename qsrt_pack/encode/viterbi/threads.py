"""Tiles shared out among threads: each compiled search releases the interpreter lock."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch


def over_tiles(
    search_tiles: Callable[[np.ndarray, np.ndarray], None], targets: torch.Tensor, chunk: int
) -> torch.Tensor:
    """Call search_tiles on at most `chunk` tiles, torch.get_num_threads() times at once.

    search_tiles: fills its second argument, edges [m, 256] uint8, from its first, targets
    [m, 256] float32, m <= chunk; a tile's edges depend on nothing but its targets.
    targets: [n, 256] float32 on the CPU.
    Returns edges: [n, 256] uint8.
    """
    source = targets.detach().contiguous().numpy()
    edges = np.empty(source.shape, np.uint8)
    threads = torch.get_num_threads()
    chunk = max(1, min(chunk, -(-len(source) // threads)))
    starts = range(0, len(source), chunk)

    def search_chunk(start: int) -> None:
        search_tiles(source[start : start + chunk], edges[start : start + chunk])

    if threads == 1 or len(starts) < 2:
        for start in starts:
            search_chunk(start)
    else:
        with ThreadPoolExecutor(min(threads, len(starts))) as pool:
            list(pool.map(search_chunk, starts))  # the list raises what a thread raised
    return torch.from_numpy(edges)
