"""The packed layers, as moe_forward runs them: as stored, with rows in MXFP8, or expanded."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qsrt_pack.bench.choice import Absent, Choice, Measure, Unavailable, Way, tensor_bytes
from qsrt_pack.bench.inputs import Input
from qsrt_pack.bench.machine import Call, Machine
from qsrt_pack.bench.subject import USABLE, gigabytes
from qsrt_pack.bench.table import A8
from qsrt_runtime.arguments import padded_rows
from qsrt_runtime.arithmetic import CAPABILITY
from qsrt_runtime.expansion import expanded
from qsrt_runtime.format.geometry import LOCAL_BYTES
from qsrt_runtime.moe_decode import moe_decode
from qsrt_runtime.moe_kernels import decodes
from qsrt_runtime.moe_prefill import moe_prefill
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import (
    FEW_TOKENS,
    MAX_PREFILL_TOKENS,
    PrefillWorkspace,
    Workspace,
    make_prefill_workspace,
    make_workspace,
)


@dataclass(frozen=True)
class Packed:
    """The packed layers by this project's kernels, as moe_forward chooses them.

    layers: all as stored, or all expanded.   activation: "a16", or "a8" of those as stored.
    """

    layers: Sequence[LayerWeights]
    topk: int
    name: str = "qsrt"
    activation: str = "a16"
    weights: str = "packed"

    @property
    def expert_bytes(self) -> int:
        return _expert_bytes(self.layers[0], is_expanded=self.layers[0].labels is not None)

    def buffer_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        if self.activation == "a8" and tokens > FEW_TOKENS:
            raise Unavailable(f"takes up to {FEW_TOKENS} tokens")
        return tensor_bytes(self._workspace(tokens, dtype, torch.device("meta")))

    def tune(self, inputs: Sequence[Input], measure: Measure) -> Choice:
        tokens = len(inputs[0].x)
        dtype, device = inputs[0].x.dtype, inputs[0].x.device
        workspace = self._workspace(tokens, dtype, device)
        forward, options = moe_prefill, {}
        if isinstance(workspace, Workspace):
            forward, options = moe_decode, {"activation": self.activation}
        layers = [self.layers[i.place] for i in inputs]
        rows = [padded_rows(i.x, layer) for i, layer in zip(inputs, layers, strict=True)]
        outs = [torch.empty_like(x) for x in rows]

        def call(x: torch.Tensor, layer: LayerWeights, given: Input, out: torch.Tensor) -> Call:
            whole = (x, given.ids, given.weights, out)
            parts = list(zip(*(t.split(workspace.tokens) for t in whole), strict=True))
            return lambda: [
                forward(x, layer, ids, weights, workspace, out, **options)
                for x, ids, weights, out in parts
            ]

        calls = [call(*each) for each in zip(rows, layers, inputs, outs, strict=True)]
        width = self.layers[0].width
        outs = [out[:, :width] for out in outs]
        return Choice(forward.__name__, calls, outs, self.activation)

    def _workspace(
        self, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> Workspace | PrefillWorkspace:
        """Of moe_decode or moe_prefill, whichever moe_forward takes for so many tokens."""
        geometry = self.layers[0].geometry
        if decodes(self.layers[0], tokens, self.topk):
            return make_workspace(geometry, self.topk, tokens, dtype, device)
        found = {layer.traits.inputs for layer in self.layers}
        inputs = found.pop() if len(found) == 1 else 0  # which has room for any
        most = min(tokens, MAX_PREFILL_TOKENS)
        sizes = (geometry, self.topk, most, inputs, dtype, device)
        if self.layers[0].labels is not None:
            return make_prefill_workspace(*sizes, scratch_bytes=0)
        return make_prefill_workspace(*sizes)


def with_a8(layers: Sequence[LayerWeights], topk: int, machine: Machine) -> Way:
    """The layers as stored, and rows in MXFP8 (W4A8)."""
    way = Packed(layers, topk, A8, "a8")
    if torch.version.hip is None and machine.capability >= CAPABILITY:
        return way
    needed = "takes an NVIDIA GPU of capability {}.{} or newer".format(*CAPABILITY)
    return Absent(way.name, way.expert_bytes, needed)


def with_expanded(layers: Sequence[LayerWeights], topk: int, machine: Machine) -> Way:
    """The layers expanded to E4M3, which takes memory of their own."""
    name, size = "qsrt expanded", _expert_bytes(layers[0], is_expanded=True)
    needed = len(layers) * layers[0].geometry.experts * size
    free = USABLE * machine.free_bytes()
    if needed > free:
        reason = f"labels take {gigabytes(needed)} of memory, {gigabytes(free)} are free"
        return Absent(name, size, reason)
    try:
        return Packed([expanded(layer) for layer in layers], topk, name)
    except torch.OutOfMemoryError:
        return Absent(name, size, "ran out of memory")


def _expert_bytes(layer: LayerWeights, *, is_expanded: bool) -> int:
    if is_expanded:
        return len(layer.slots) * LOCAL_BYTES + layer.label_bytes // layer.geometry.experts
    return len(layer.slots) * layer.geometry.bundle_bytes
