"""The kernels compile for GPUs that are not here."""

import json
import os
import subprocess
import sys

import pytest

SHARED = {80: 101_376, 90: 232_448}  # bytes; for 80 what sm_86 has, the least of all

ANY_GPU = ["prepare", "activate", "combine", "plain", "group", "expand"]
ANY_GPU += [f"grouped_gemm_{block}" for block in (16, 32, 64, 128)]
ANY_GPU += ["activate_routes", "combine_routes", "group_warps"]
ANY_GPU += ["activate_routes_warps", "combine_routes_warps"]


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


@pytest.mark.parametrize(
    ("kernel", "labels", "own"),
    [
        ("product", 131072, 0),
        ("wide", 131072, 0),
        ("fused", 131072, 1),
        ("expand_warps", 65536, 0),
        ("expand_warps_uniform", 65536, 0),
    ],
)
def test_labels_have_shared_memory_to_themselves(compiled, kernel, labels, own):
    """They are put there behind Triton's back: nothing else may be stored there."""
    found = compiled[kernel, 90]
    assert found["shared"] == labels
    assert found["layouts"] == 0
    assert (
        found["stores"] == labels // 16384 + own
    )  # of the gather that is never run; of the output's routes
