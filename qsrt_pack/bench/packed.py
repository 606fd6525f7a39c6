"""The packed layers, as moe_forward runs them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qsrt_pack.bench.choice import Choice, Measure, tensor_bytes
from qsrt_pack.bench.inputs import Input
from qsrt_pack.bench.machine import Call
from qsrt_runtime.arguments import padded_rows
from qsrt_runtime.moe_decode import moe_decode
from qsrt_runtime.moe_kernels import decodes
from qsrt_runtime.moe_prefill import moe_prefill
from qsrt_runtime.weights import LayerWeights
from qsrt_runtime.workspace import (
    MAX_PREFILL_TOKENS,
    PrefillWorkspace,
    Workspace,
    make_prefill_workspace,
    make_workspace,
)


@dataclass(frozen=True)
class Packed:
    """The packed layers by this project's kernels, as moe_forward chooses them."""

    layers: Sequence[LayerWeights]
    topk: int
    name: str = "qsrt"
    weights: str = "packed"

    @property
    def expert_bytes(self) -> int:
        geometry = self.layers[0].geometry
        return geometry.slots * geometry.bundle_bytes

    def buffer_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        return tensor_bytes(self._workspace(tokens, dtype, torch.device("meta")))

    def tune(self, inputs: Sequence[Input], measure: Measure) -> Choice:
        tokens = len(inputs[0].x)
        dtype, device = inputs[0].x.dtype, inputs[0].x.device
        workspace = self._workspace(tokens, dtype, device)
        forward = moe_decode if isinstance(workspace, Workspace) else moe_prefill
        layers = [self.layers[i.place] for i in inputs]
        rows = [padded_rows(i.x, layer) for i, layer in zip(inputs, layers, strict=True)]
        outs = [torch.empty_like(x) for x in rows]

        def call(x: torch.Tensor, layer: LayerWeights, given: Input, out: torch.Tensor) -> Call:
            whole = (x, given.ids, given.weights, out)
            parts = list(zip(*(t.split(workspace.tokens) for t in whole), strict=True))
            return lambda: [
                forward(x, layer, ids, weights, workspace, out) for x, ids, weights, out in parts
            ]

        calls = [call(*each) for each in zip(rows, layers, inputs, outs, strict=True)]
        width = self.layers[0].width
        return Choice(forward.__name__, calls, [out[:, :width] for out in outs])

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
        return make_prefill_workspace(geometry, self.topk, most, inputs, dtype, device)
