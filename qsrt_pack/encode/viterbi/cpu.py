"""The exact search compiled for the CPU: the reference's edges to the bit, much sooner.

The costs of every step are kept, so no back pointers are: the trace repeats the few comparisons
that it needs. A step is written in vector instructions, because all the time goes there and
LLVM's own vectoriser gives up at 3 bits (7 times slower).
"""

import functools
from collections.abc import Callable

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from qsrt_pack.encode.viterbi.lanes import INDEX, Arguments, integers, spread
from qsrt_pack.encode.viterbi.reference import HALF, STEPS, check
from qsrt_pack.encode.viterbi.threads import over_tiles
from qsrt_runtime.format import codebook

_LANES = {2: 16, 3: 8, 4: 16}  # floats in a vector; best of 8 and 16 on Zen 3 (AVX2)
# The costs under one oldest edge are a power of two long, which would put all that a step reads
# at once into one set of the cache; so many unused floats follow each of them.
_PAD = 16
_CHUNK = 4  # tiles: about 10 ms of work, so that threads finish together


def search_cpu(targets: torch.Tensor, bits: int) -> torch.Tensor:
    """Find the closed path of least squared error for every tile, as search_reference does.

    Runs on torch.get_num_threads() threads, each with 5 MiB (K4) to 17 MiB (K2) of costs.

    targets: [n, 256] float32 on the CPU, trellis order, in codebook units.   bits: 2, 3 or 4.
    Returns edges: [n, 256] uint8, trellis order, each < 2**bits.
    """
    if targets.device.type != "cpu":
        raise ValueError(f"targets are on {targets.device}, expected the CPU; use search()")
    check(targets, bits)
    forward, values = _forward(bits), _values(bits)
    shape = (STEPS + 1, 1 << bits, (1 << (16 - 2 * bits)) + _PAD)

    def search_tiles(targets: np.ndarray, edges: np.ndarray) -> None:
        _search(forward, bits, targets, values, np.empty(shape, np.float32), edges)

    return over_tiles(search_tiles, targets, _CHUNK)


@functools.cache
def _values(bits: int) -> np.ndarray:
    """The codebook in the order in which a step reads it: [groups, A, lanes / A, A] float32.

    Axes: middles of a state in groups of lanes / A, oldest edge (A = 2**bits), middle in its
    group, newest edge.
    """
    symbols = 1 << bits
    values = codebook.values(bits).view(symbols, -1, _LANES[bits] // symbols, symbols)
    return values.transpose(0, 1).contiguous().numpy()


@functools.cache
def _forward(bits: int) -> Callable:
    """Compile the pass over all steps at one rate.

    forward(targets, start, values, costs) fills costs[1:] from costs[0], taking the targets
    from position start on and around the circle.
    """
    relax = _relax(bits)
    nodes, lanes = 1 << (16 - bits), _LANES[bits]
    length = 1 << (16 - 2 * bits)  # nodes under one oldest edge
    stride = length + _PAD

    @numba.njit(nogil=True)
    def forward(targets, start, values, costs):
        for step in range(STEPS):
            target = targets[(start + step) % STEPS]
            for oldest in range(nodes // length):
                for offset in range(0, length, lanes):
                    group, place = (oldest * length + offset) // lanes, oldest * stride + offset
                    relax(costs[step], values, costs[step + 1], target, group, place)

    return forward


def _relax(bits: int) -> Callable:
    """The least costs of one group of `lanes` neighbouring nodes, as vector instructions.

    relax(costs, values, out, target, group, place) writes out[place : place + lanes], flat.
    Compiled code only; the caller answers for every bound.
    """
    symbols, lanes = 1 << bits, _LANES[bits]
    middles = lanes // symbols  # so many costs under each oldest edge serve the group
    stride = (1 << (16 - 2 * bits)) + _PAD
    newest = integers(32, [lane // symbols for lane in range(lanes)])

    def generate(context, builder, signature, arguments):
        arrays = Arguments(context, builder, signature, arguments)
        *_, target, group, place = arguments
        targets, best = spread(builder, target, lanes), None
        middle = builder.mul(group, INDEX(middles))
        entry = builder.mul(group, INDEX(symbols * lanes))
        for oldest in range(symbols):
            costs = arrays.load(0, builder.add(middle, INDEX(oldest * stride)), middles)
            costs = builder.shuffle_vector(costs, costs, newest)
            values = arrays.load(1, builder.add(entry, INDEX(oldest * lanes)), lanes)
            distance = builder.fsub(targets, values)
            costs = builder.fadd(costs, builder.fmul(distance, distance))
            less = best and builder.fcmp_ordered("<", costs, best)
            best = builder.select(less, costs, best) if best else costs
        arrays.store(best, 2, place)
        return context.get_dummy_value()

    @intrinsic
    def relax(_context, costs, values, out, target, group, place):
        integer = types.int64
        return types.void(costs, values, out, types.float32, integer, integer), generate

    return relax


@numba.njit(nogil=True)
def _trace(bits, targets, start, values, costs, node, steps, edges):
    """Walk the last steps of a pass back from a node; returns the node before them.

    Arguments as forward's; edges: [256] uint8, written at the positions walked.
    """
    _, symbols, middles, _ = values.shape
    for step in range(STEPS - 1, STEPS - 1 - steps, -1):
        position = (start + step) % STEPS
        newest, middle = node & (symbols - 1), node >> bits
        least, best = np.float32(np.inf), 0
        for oldest in range(symbols):
            value = values[middle // middles, oldest, middle % middles, newest]
            distance = targets[position] - value
            cost = costs[step, oldest, middle] + distance * distance
            if cost < least:
                least, best = cost, oldest
        edges[position] = newest
        node = (best << (16 - 2 * bits)) | middle
    return node


@numba.njit(nogil=True)
def _search(forward, bits, targets, values, costs, edges):
    """Both passes over each tile.

    targets: [n, 256] float32.   values: as _values.   edges: [n, 256] uint8, written.
    costs: [257, A, 2**16 / A**2 + _PAD] float32 workspace, [step, oldest edge of a node, the rest].
    """
    middles = costs.shape[2] - _PAD
    for tile in range(len(targets)):
        costs[0] = 0
        forward(targets[tile], HALF, values, costs)
        node, least = 0, np.float32(np.inf)
        for oldest in range(costs.shape[1]):
            for middle in range(middles):
                if costs[STEPS, oldest, middle] < least:
                    least, node = costs[STEPS, oldest, middle], oldest * middles + middle
        node = _trace(bits, targets[tile], HALF, values, costs, node, STEPS - HALF, edges[tile])
        costs[0] = np.inf
        costs[0, node // middles, node % middles] = 0
        forward(targets[tile], 0, values, costs)
        _trace(bits, targets[tile], 0, values, costs, node, STEPS, edges[tile])
