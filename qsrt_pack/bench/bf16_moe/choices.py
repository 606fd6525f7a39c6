"""What a layer's kernels can be launched with, and what was best on one H200."""

TOKENS = (1, 2, 4, 8, 16)
# Microseconds of a layer on one H200 to be reached, by (shape, tokens).
TARGETS = {
    ("fruit", 1): 13.4,
    ("fruit", 4): 38.0,
    ("fruit", 16): 113.0,
    ("qwen30b", 1): 30.3,
    ("qwen30b", 4): 83.4,
    ("qwen30b", 16): 292.0,
    ("glm", 1): 152.0,
    ("glm", 4): 553.0,
    ("glm", 16): 551.0,
    ("mixtral", 1): 174.0,
    ("mixtral", 4): 661.0,
    ("mixtral", 16): 656.0,
}
# (path, configuration) by (shape, tokens), as a sweep printed it.
BEST: dict[tuple[str, int], tuple[str, dict[str, tuple[int, ...]]]] = {
    ("fruit", 1): ("gemv", {"fc1": (2, 4), "fc2": (4, 2)}),
    ("fruit", 2): ("gemv", {"fc1": (8, 2), "fc2": (8, 2)}),
    ("fruit", 4): ("gemm", {"fc1": (16, 128, 2, 3), "fc2": (32, 256, 4, 3, 1)}),
    ("fruit", 8): ("gemm", {"fc1": (32, 256, 4, 3), "fc2": (64, 64, 4, 5, 1)}),
    ("fruit", 16): ("gemm", {"fc1": (32, 256, 4, 3), "fc2": (32, 128, 2, 3, 1)}),
    ("qwen30b", 1): ("gemv", {"fc1": (2, 4), "fc2": (2, 2)}),
    ("qwen30b", 2): ("gemv", {"fc1": (2, 4), "fc2": (2, 1)}),
    ("qwen30b", 4): ("gemm", {"fc1": (32, 256, 4, 3), "fc2": (64, 128, 4, 3, 1)}),
    ("qwen30b", 8): ("gemm", {"fc1": (32, 256, 4, 3), "fc2": (64, 256, 4, 3, 1)}),
    ("qwen30b", 16): ("gemm", {"fc1": (32, 256, 4, 3), "fc2": (64, 256, 4, 3, 1)}),
    ("glm", 1): ("gemv", {"fc1": (4, 2), "fc2": (4, 8)}),
    ("glm", 2): ("gemv", {"fc1": (4, 2), "fc2": (4, 8)}),
    ("glm", 4): ("gemm", {"fc1": (32, 128, 4, 4), "fc2": (32, 256, 4, 3, 1)}),
    ("glm", 8): ("gemm", {"fc1": (32, 128, 4, 3), "fc2": (32, 256, 4, 3, 1)}),
    ("glm", 16): ("gemm", {"fc1": (32, 128, 4, 4), "fc2": (32, 256, 4, 3, 1)}),
    ("mixtral", 1): ("gemv", {"fc1": (2, 8), "fc2": (2, 8)}),
    ("mixtral", 2): ("gemv", {"fc1": (2, 8), "fc2": (2, 8)}),
    ("mixtral", 4): ("gemm", {"fc1": (32, 128, 4, 4), "fc2": (32, 256, 4, 3, 2)}),
    ("mixtral", 8): ("gemm", {"fc1": (32, 128, 4, 4), "fc2": (32, 256, 4, 3, 2)}),
    ("mixtral", 16): ("gemm", {"fc1": (32, 128, 4, 4), "fc2": (32, 256, 4, 3, 1)}),
}

GEMV_TOKENS = 2  # largest batch for which the sweep tries the gemv path

Sizes = list[tuple[int, ...]]


def candidates(hidden: int, inter: int, tokens: int) -> dict[str, dict[str, Sizes]]:
    """The configurations to try, by path and kernel; see `Layer.launches` for their meaning.

    Those whose blocks do not divide the sizes are left out.
    """
    large = inter * hidden >= 1 << 23
    gemm1 = [(16, 128, 4, 4), (16, 256, 4, 3), (32, 64, 4, 5), (32, 128, 4, 3), (32, 128, 4, 4)]
    gemm1 += [(64, 64, 4, 4), (64, 128, 8, 3)] if large else [(16, 128, 2, 3), (32, 256, 4, 3)]
    gemm2 = [(32, 128, 4, 4, 1), (32, 256, 4, 3, 1), (64, 64, 4, 5, 1), (64, 128, 4, 3, 1)]
    gemm2 += [(128, 64, 4, 4, 1)] if large else [(32, 128, 2, 3, 1), (64, 256, 4, 3, 1)]
    if inter >= 8192:
        gemm2 += [(32, 256, 4, 3, 2), (64, 128, 4, 3, 2), (64, 128, 4, 3, 4), (64, 64, 4, 5, 4)]
    gemm1 = [c for c in gemm1 if not (inter % c[0] or hidden % c[1])]
    gemm2 = [c for c in gemm2 if not (hidden % c[0] or inter % (c[1] * c[4]))]
    found = {"gemm": {"fc1": gemm1, "fc2": gemm2}} if gemm1 and gemm2 else {}
    if tokens <= GEMV_TOKENS:
        # 256 columns to a warp: more warps than that would share columns through shared memory.
        gemv1 = [(2, 4), (4, 4), (4, 2)]
        gemv1 += [(2, 8), (4, 8)] if hidden >= 2048 else [(8, 4), (4, 1), (8, 2)]
        gemv2 = [(2, 4), (4, 4), (2, 8), (4, 8), (4, 2)]
        if inter < 512 * 4:
            gemv2 = [(2, 2), (4, 2), (2, 1), (4, 1)]
            gemv2 += [(2, 4), (4, 4)] if inter > 512 else [(8, 2)]
        gemv1 = [c for c in gemv1 if not inter % c[0]]
        gemv2 = [c for c in gemv2 if not hidden % c[0]]
        if gemv1 and gemv2:
            found["gemv"] = {"fc1": gemv1, "fc2": gemv2}
    return found
