"""Hadamard rotations, sign draws, and what suh and svh mean.

The dense weight of a matrix, stored [K inputs, N outputs], is
diag(suh) B_K T B_N diag(svh), with T the decoded tiles and B the block-diagonal matrix of
128x128 Sylvester Hadamard blocks divided by sqrt(128), which is symmetric and its own inverse.
"""

import hashlib

import torch

from qsrt_runtime.format.geometry import RECORD


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x B: rotate the last axis in blocks of 128. x: [..., n] float32 or float64, n % 128 == 0."""
    columns = x.reshape(-1, RECORD).T.contiguous()
    return _transform(columns[None])[0].T.reshape(x.shape)


def rotate_rows(x: torch.Tensor) -> torch.Tensor:
    """B x: rotate the first axis of a matrix [n, m] in blocks of 128."""
    return _transform(x.contiguous().unflatten(0, (-1, RECORD))).flatten(0, 1)


def _transform(x: torch.Tensor) -> torch.Tensor:
    """The Hadamard matrix times the middle axis of [a, 128, b].

    A fast Walsh-Hadamard transform: seven rounds of sums and differences, so that the result is
    the same to the bit on every platform and with any number of threads.
    """
    x, spare = x.clone(), torch.empty_like(x)
    half = 1
    while half < RECORD:
        even, odd = x.unflatten(1, (-1, 2, half)).unbind(2)
        sums, differences = spare.unflatten(1, (-1, 2, half)).unbind(2)
        torch.add(even, odd, out=sums)
        torch.sub(even, odd, out=differences)
        x, spare = spare, x
        half *= 2
    return x.mul_(RECORD**-0.5)


def signs(
    count: int, *, seed: int, layer: int, expert: int | None, matrix: str | None, side: str
) -> torch.Tensor:
    """Draw +1 and -1, the same on every platform and device: [count] float32.

    Sign i is bit i (lowest bit first) of SHAKE-128 over the key's text, so a draw depends on its
    key alone. expert None: one draw for the whole layer. matrix None: one draw for all matrices.
    side: "hidden" or "intermediate".   count: a multiple of 8.
    """
    key = (
        f"qsrt signs 1 seed={seed} layer={layer} expert={'all' if expert is None else expert} "
        f"matrix={matrix or 'all'} side={side}"
    )
    data = bytearray(hashlib.shake_128(key.encode()).digest(count // 8))
    bits = (torch.frombuffer(data, dtype=torch.uint8)[:, None] >> torch.arange(8)) & 1
    return 1 - 2 * bits.flatten().to(torch.float32)
