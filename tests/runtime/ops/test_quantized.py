"""The product of quantized rows by warps: the whole kernel, its PTX interpreted."""

import pytest
import torch
import warps
from layers import HALF, check_guards, error, inputs, poisoned, random_layer

from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.ops.expert_gemm import expert_gemm
from qsrt_runtime.ops.fused.product import quantized as module
from qsrt_runtime.ops.fused.product.quantized import kernel as kernel_module
from qsrt_runtime.ops.prepare import prepare
from qsrt_runtime.workspace import COLUMNS, PLACES, quantized

GEOMETRY = Geometry(640, 256, 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU here")
@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("down", [False, True])
def test_is_the_plain_product(monkeypatch, capability, tokens, down):
    machine = warps.interpret(monkeypatch, kernel_module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    kernel = warps.Launched(module.quantized_kernel, module.SHARED_BYTES)
    monkeypatch.setattr(module, "quantized_kernel", kernel)
    layer = random_layer(GEOMETRY, torch.device("cpu"), sides="two")
    x, ids, _ = inputs(layer, tokens, 2, HALF)
    ids[:, 0] = 2
    ids[-1, 1] = -1
    found = []
    for gemm in (expert_gemm, module.quantized_product):
        workspace = poisoned(layer, 2, HALF)
        prepare(x, layer, ids, None, workspace, False, torch.uint8)
        rows, exponents = quantized(workspace.middle if down else workspace.rotated, torch.uint8)
        if down:
            generator = torch.Generator().manual_seed(0)
            draw = torch.randint(0, 254, rows.shape, generator=generator, dtype=torch.uint8)
            rows.copy_(draw + (draw > 126).byte())  # no NaN
            powers = torch.randint(110, 140, exponents.shape, generator=generator)
            exponents.copy_(powers)
        options = {"down": down, "pdl": False, "exponents": exponents}
        divisor, up = (1, 0) if down else (2, tokens)
        workspace.partial.fill_(-7.0)
        gemm(rows, layer, ids, None, workspace, divisor, up, PLACES, **options)
        check_guards(workspace)
        found.append(workspace.partial)
    assert machine.loads
    whole = found[0].numel() // (PLACES * COLUMNS) * PLACES * COLUMNS
    plain, by_warps = (each.flatten()[:whole].view(-1, COLUMNS) for each in found)
    written = by_warps != -7
    assert error(by_warps[written], plain[written]) < 1e-6
    missing = ~written & (plain != -7)
    assert not missing[:, : GEOMETRY.hidden % COLUMNS].any()
    assert missing.any() == down  # channels beyond the hidden ones
