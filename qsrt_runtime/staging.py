"""Bytes of files to a device, by threads that read while the caller plans what else to read.

What was tried is in tests/bench/results/load_h200.txt.
"""

from pathlib import Path
from types import TracebackType

import torch

from qsrt_runtime.reader import reader_for


class Staging:
    """Reads extents of files onto one CPU or CUDA device; a context manager.

    What `read` returns is filled when the block ends.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> "Staging":
        self._reader = reader_for(self.device)
        return self

    def read(self, path: Path, start: int, size: int) -> torch.Tensor:
        """Bytes [start, start + size) of a file as a [size] uint8 tensor, filled later.

        The block ends with FormatError when the file ends before that.
        """
        return self.read_rows(path, start, 1, size, size)[0]

    def read_rows(self, path: Path, start: int, rows: int, size: int, stride: int) -> torch.Tensor:
        """`rows` runs of `size` bytes that begin at start, start + stride, ...: [rows, size].

        As `read`, of nothing in between.
        """
        out = torch.empty(rows, size, dtype=torch.uint8, device=self.device)
        if self.device.type == "cuda":  # what had the memory before may still be running
            torch.cuda.current_stream(self.device).synchronize()
        if size == stride:  # they lie side by side
            size = stride = rows * size
        self._reader.add(path, start, size, stride, out)
        return out

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        waited = False
        try:
            if kind is None:
                self._reader.wait()
                waited = True
        finally:
            self._reader.end(waited)
