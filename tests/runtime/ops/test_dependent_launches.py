"""Dependent launches: what one reads before it waits for the one before, and when it writes.

A launch begins with memory as it was before the launch before it; waiting brings what that wrote.
"""

from types import SimpleNamespace

import pytest
import torch
import warps
from layers import BOUND, HALF, check_guards, error, inputs, poisoned, random_layer

from qsrt_runtime import moe_decode
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.moe_reference import moe_forward_reference
from qsrt_runtime.ops import activate, combine, fused, prepare
from qsrt_runtime.ops import kernel as shared_kernel
from qsrt_runtime.ops.fused import alone, product

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU here")

HOSTS = {
    "alone_kernel": alone,
    "fused_kernel": fused,
    "product_kernel": product,
    "prepare_kernel": prepare,
    "activate_kernel": activate,
    "combine_kernel": combine,
}
MANY = 1 << 40
# ALONE_TOKENS and THREE_LAUNCH_WEIGHTS.
ONE, THREE, FIVE = (2, MANY), (0, MANY), (0, 0)


class Memory:
    """Tensors that launches share, as they were before the launch before and as they are."""

    def __init__(self):
        self.tensors, self.before, self.now, self.launches = [], [], None, 0

    def share(self, *tensors):
        """More of them, which nothing under way writes to."""
        self.tensors += tensors
        self.before += [tensor.clone() for tensor in tensors]

    def launch(self, kernel, grid, arguments, options):
        now = [tensor.clone() for tensor in self.tensors]
        self._set(self.before)
        self.now = now
        kernel[grid](*arguments, **options)
        assert self.now is None  # it has waited
        self.before, self.launches = now, self.launches + 1

    def wait(self):
        if self.now is None:
            return  # another program of this launch has
        for tensor, before in zip(self.tensors, self.before, strict=True):
            assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8))
        self._set(self.now)
        self.now = None

    def _set(self, values):
        for tensor, value in zip(self.tensors, values, strict=True):
            tensor.copy_(value)


class Dependent(warps.Launched):
    def __init__(self, kernel, memory):
        super().__init__(kernel, product.SHARED_BYTES)
        self.memory = memory

    def __getitem__(self, grid):
        def launch(*arguments, launch_pdl, launch_cooperative_grid=False, **options):
            # Programs that wait for each other have to be there all at once.
            assert launch_cooperative_grid == ("SPREAD" in options)
            self.memory.launch(self.kernel, grid, arguments, options)
            return self.found

        return launch


@pytest.fixture
def memory(monkeypatch):
    found = Memory()
    warps.interpret(monkeypatch, product.kernel)
    monkeypatch.setattr(moe_decode, "ways", lambda _device: (True, True))
    for name, host in HOSTS.items():
        monkeypatch.setattr(host, name, Dependent(getattr(host, name), found))
    waiting = SimpleNamespace(gdc_wait=found.wait, gdc_launch_dependents=lambda: None)
    monkeypatch.setattr(shared_kernel, "cuda", waiting)
    return found


@pytest.mark.parametrize("sides", ["one", "expert"])
def test_calls_of_all_launches_by_one_workspace(monkeypatch, memory, sides):
    layer = random_layer(Geometry(256, 256, 3), torch.device("cpu"), sides=sides)
    workspace = poisoned(layer, 3, HALF, programs=1)
    buffers = [each for each in vars(workspace).values() if isinstance(each, torch.Tensor)]
    memory.share(*buffers)
    calls = [(1, ONE), (1, THREE), (1, FIVE), (3, THREE), (2, ONE), (3, FIVE)]
    calls += [(2, THREE), (3, ONE), (1, THREE), (1, ONE)]
    for number, (tokens, limits) in enumerate(calls):
        monkeypatch.setattr(alone, "ALONE_TOKENS", limits[0])
        monkeypatch.setattr(fused, "THREE_LAUNCH_WEIGHTS", limits[1])
        x, ids, weights = inputs(layer, tokens, 3, HALF, seed=number)
        ids[-1, 1], named = 7, ids.clone()
        named[-1, 1] = -1
        out = torch.full_like(x, float("nan"))
        memory.share(out)
        memory.launches = 0
        moe_decode.moe_decode(x, layer, ids, weights, workspace, out)
        expected = moe_forward_reference(x.float(), layer, named, weights)
        assert error(out, expected) < 1.2 * BOUND[HALF]
        assert workspace.invalid_routes() == 1
        is_alone = sides == "one" and tokens <= limits[0]
        assert memory.launches == (1 if is_alone else 4 if limits[1] else 5)
        check_guards(workspace)
