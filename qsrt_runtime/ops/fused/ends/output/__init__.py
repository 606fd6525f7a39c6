"""What both ways to the output have in common."""

MAX_TOPK = 32  # a warp each
