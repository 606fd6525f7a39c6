"""The look at a source's weights before they are encoded."""

from qsrt_pack.progress import bar
from qsrt_pack.source.checkpoint import Checkpoint, check_finite

Block = tuple[str, int | None]  # what is read at once: a tensor, or an index of a stack


def scan(checkpoint: Checkpoint, blocks: list[Block], show_progress: bool) -> None:
    """Refuse weights that are not finite."""
    with bar("scan weights", len(blocks), "tensors", show_progress) as advance:
        for block in blocks:
            check_finite(checkpoint, *block)
            advance(1)
