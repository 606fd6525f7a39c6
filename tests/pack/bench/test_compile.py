"""The dense layers' kernels compile for GPUs that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qsrt_pack.bench.bf16_prefill import TILES

SHARED = {80: 101_376, 90: 232_448}  # bytes; for 80 what sm_86 has, the least of all
SMALL = ["route", "fc1_gemm", "fc2_gemm", "combine", "fc1_gemv", "fc2_gemv", "sort", "sum"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], int]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("compiling_dense.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {(each["kernel"], each["capability"]): each["shared"] for each in found}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kernel", SMALL)
def test_a_kernel_without_large_tiles_fits(shared: dict, kernel: str, capability: int) -> None:
    assert shared[kernel, capability] <= SHARED[capability]


@pytest.mark.parametrize("capability", [80, 90])
def test_some_tiles_for_many_tokens_fit(shared: dict, capability: int) -> None:
    fitting = [
        tile
        for tile in TILES
        if all(
            shared[f"product {tile} {kind}", capability] <= SHARED[capability]
            for kind in ("gated", "plain")
        )
    ]
    assert len(fitting) == {80: 3, 90: len(TILES)}[capability]
