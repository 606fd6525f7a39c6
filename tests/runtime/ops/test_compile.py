"""The kernels compile for GPUs that are not here."""

import json
import os
import subprocess
import sys

import pytest

from qsrt_runtime.ops.fused.alone import ptx as alone_ptx
from qsrt_runtime.ops.fused.product.quantized import ptx as quantized_ptx

SHARED = {80: 101_376, 89: 101_376, 90: 232_448}  # bytes; for 80 what sm_86 has, the least of all

ANY_GPU = ["prepare", "activate", "combine", "plain", "group", "expand"]
ANY_GPU += [f"grouped_gemm_{block}" for block in (16, 32, 64, 128)]
ANY_GPU += ["activate_routes", "combine_routes", "group_warps"]
ANY_GPU += ["activate_routes_warps", "combine_routes_warps", "label_gemm"]
ALONE = ["alone_1", "alone_2", "alone_spread"]
STAGES = [f"fused_{n}_{i}" for n in ("grouped", "several", "one_token") for i in range(3)]


@pytest.fixture(scope="module")
def compiled(repository, tmp_path_factory):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, repository / "tests" / "compiling.py"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {(each["kernel"], each["capability"]): each for each in found}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kernel", ANY_GPU)
def test_fits_the_gpu(compiled, kernel, capability):
    assert compiled[kernel, capability]["shared"] <= SHARED[capability]


@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize("kernel", ["prepare_a8", "activate_a8", "plain_a8"])
def test_quantized_rows_fit_the_gpu(compiled, kernel, capability):
    found = compiled[kernel, capability]
    assert found["shared"] <= SHARED[capability]
    assert (found["stack"] or 0) <= 16  # Triton 3.9 takes as much of plain_a8, 3.6 none
    assert (found["e4m3"] > 0) == (kernel == "plain_a8" and capability == 89)


@pytest.mark.parametrize("kernel", ["prepare_a8", "activate_a8"])
def test_quantizing_keeps_numbers_below_the_normal_ones(compiled, kernel):
    found = [compiled[name, 90] for name in (kernel, f"{kernel}_numbers")]
    assert [each["flushes"] for each in [*found, compiled[kernel, 89]]] == [0, 0, 0]


@pytest.mark.parametrize("kernel", ["quantized", "quantized_down"])
def test_labels_go_to_tensor_cores_as_they_are(compiled, kernel):
    """Two products a step, each once for either block of channels."""
    for capability in (89, 90):
        assert compiled[kernel, capability]["e4m3"] == 4
    assert compiled[kernel, 89]["stack"] in (0, None)


@pytest.mark.parametrize("kernel", ALONE + STAGES)
def test_fused_has_registers_enough(compiled, kernel):
    """But for a few that lie in memory meanwhile."""
    assert (compiled[kernel, 90]["stack"] or 0) <= 32


@pytest.mark.parametrize("kernel", ALONE + STAGES)
def test_fused_has_no_barriers_of_tritons(compiled, kernel):
    """Where some warps alone do something, they would wait there for ever."""
    found = compiled[kernel, 90]
    # One is the gather's that is never run; LLVM makes one of two that follow a loop and end it.
    assert found["barriers"] - found["written_barriers"] in ((0, 1) if "alone" in kernel else (1,))


@pytest.mark.parametrize(
    ("kernel", "labels", "own", "capability"),
    [
        ("product", 131072, 0, 90),
        ("product_several", 131072, 0, 90),
        ("wide", 131072, 0, 90),
        # Rows of gate, up and down, sums, the output's routes, and what sets memory aside.
        *((kernel, 131072, 9, 90) for kernel in ALONE),
        *((kernel, 131072, int(kernel[-1] == "2"), 90) for kernel in STAGES),
        ("expand_warps", 65536, 0, 90),
        ("expand_warps_uniform", 65536, 0, 90),
        *((name, 65536, 0, c) for name in ("quantized", "quantized_down") for c in (89, 90)),
    ],
)
def test_labels_have_shared_memory_to_themselves(compiled, kernel, labels, own, capability):
    """They are put there behind Triton's back, from where memory that a kernel sets aside by itself
    ends: nothing else may be stored there.
    """
    found = compiled[kernel, capability]
    assert found["shared"] == labels
    begin = alone_ptx.LABELS if kernel in ALONE else quantized_ptx.LABELS[divmod(capability, 10)]
    assert found["static"] in (None, begin)
    assert found["layouts"] == 0
    assert (
        found["stores"] == labels // 16384 + own
    )  # of the gather that is never run; of the output's routes
