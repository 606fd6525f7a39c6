"""What kernels share that decode by warps, with the labels of 3 bits in shared memory."""


def check_shared(found: int, expected: int) -> None:
    """Refuse a Triton that puts anything beside the labels, behind which kernels write them."""
    if found != expected:
        raise RuntimeError(
            f"this Triton sets {found} bytes of shared memory aside, expected {expected}; "
            "use another version"
        )
