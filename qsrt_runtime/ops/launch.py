"""How launches follow one another."""


def dependent(pdl: bool) -> dict[str, bool]:
    """Options of a launch that may start before the one before has ended; CUDA alone has them."""
    return {"launch_pdl": True} if pdl else {}
