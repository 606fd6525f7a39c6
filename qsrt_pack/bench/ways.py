"""The ways of computing a layer that are measured side by side.

Another one is a class as theirs, added here: tables, plots and reports take what there is.
"""

from collections.abc import Collection, Sequence

import torch

from qsrt_pack.bench.choice import Way
from qsrt_pack.bench.dense import TorchGrouped, TritonFused
from qsrt_pack.bench.layers import DenseLayer
from qsrt_pack.bench.machine import Machine
from qsrt_pack.bench.packed import Packed, with_a8, with_expanded
from qsrt_runtime.weights import LayerWeights

ASKED_FOR = {"a8": with_a8, "expanded": with_expanded}


def make_ways(
    packed: Sequence[LayerWeights],
    dense: Sequence[DenseLayer],
    topk: int,
    machine: Machine,
    also: Collection[str] = (),
) -> list[Way]:
    """Those of packed layers, and those of dense ones where there are any.

    also: keys of ASKED_FOR.
    """
    found: list[Way] = [Packed(packed, topk)]
    found += [way(packed, topk, machine) for name, way in ASKED_FOR.items() if name in also]
    if dense:
        found += [
            TorchGrouped(dense, topk),
            TritonFused(
                dense, topk, pdl=machine.capability >= (9, 0) and torch.version.hip is None
            ),
        ]
    return found
