"""A folder of calibration statistics, as `calibrate` leaves it and convert reads it."""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from qsrt_pack.calibrate.statistics import PARTS, LayerRows, part_of
from qsrt_pack.state import differences, listed
from qsrt_runtime.format import paths, schema
from qsrt_runtime.format.errors import FormatError

DOCUMENT = "calibration.json"


@dataclass(frozen=True)
class Statistics:
    """An opened folder of statistics.

    document: its calibration.json.   digest: SHA-256 of that, which binds every other file.
    """

    path: Path
    document: dict[str, Any]
    digest: str

    def check_source(self, source: dict[str, str]) -> None:
        """Refuse statistics of another checkpoint. source: SHA-256 of its files by name."""
        found = differences("source file", self.document["source"], source)
        if found:
            raise FormatError(
                f"{self.path} was made from another checkpoint: {listed(found)}; calibrate again"
            )

    def verify(self, advance: Callable[[int], None]) -> None:
        """Refuse damaged files. advance: called with the bytes read since last time."""
        for name in self.document["files"]:
            self._verify_file(name, advance)

    def total_bytes(self) -> int:
        """Of all files but calibration.json."""
        return sum((self.path / name).stat().st_size for name in self.document["files"])

    def layer_bytes(self) -> int:
        """Of the files of the largest layer, as one in memory takes."""
        numbers = self.document["layers"]
        names = [(rows_name(int(n)), gradients_name(int(n))) for n in numbers]
        present = [[n for n in both if n in self.document["files"]] for both in names]
        sizes = [sum((self.path / n).stat().st_size for n in both) for both in present]
        return max(sizes, default=0)

    def expert_rows(self) -> int:
        """The most rows that an expert has."""
        counts = [max(layer["tokens"]) for layer in self.document["layers"].values()]
        return min(self.document["settings"]["rows"], max(counts, default=0))

    def missing_parts(self) -> list[str]:
        """Those of PARTS without a document."""
        found = {part_of(number) for number in range(self.document["settings"]["windows"])}
        return [part for part in PARTS if part not in found]

    def layer(self, number: int) -> LayerRows:
        """The rows of one layer.

        Its files are verified as they are read, here once more: that takes little of the time of
        encoding, hours may have passed since `verify`, and other ranks read for themselves.
        """
        tensors = self._load(rows_name(number))
        if gradients_name(number) in self.document["files"]:
            tensors |= self._load(gradients_name(number))
        where = self.path / rows_name(number)
        for field in fields(LayerRows):
            if field.name not in tensors:
                raise FormatError(f"{where} has no tensor {field.name}")
        layer = LayerRows(**{field.name: tensors[field.name] for field in fields(LayerRows)})
        _check_shapes(layer, str(where))
        return layer

    def _load(self, name: str) -> dict[str, torch.Tensor]:
        path = self.path / name
        if name not in self.document["files"]:
            raise FormatError(f"{self.path} has no statistics of this layer: no {name}")
        self._verify_file(name)
        try:
            return load_file(path)
        except SafetensorError as error:
            raise FormatError(f"{path}: {error}") from None

    def _verify_file(self, name: str, advance: Callable[[int], None] | None = None) -> None:
        path = self.path / name
        paths.regular_file(path, self.path)
        if paths.sha256_file(path, advance) != self.document["files"][name]:
            raise FormatError(
                f"{path} is damaged: its SHA-256 is not the one in {DOCUMENT}; copy it again, or "
                f"delete {self.path} and calibrate again"
            )


def open_statistics(path: Path) -> Statistics:
    """Open a folder that `calibrate` made, every file there; FormatError for anything else."""
    document = schema.read(path / DOCUMENT, "calibration")
    for name in document["files"]:
        if not os.path.lexists(path / name):
            raise FormatError(
                f"{path / name} is missing, {DOCUMENT} lists it; copy it again, or delete {path} "
                "and calibrate again"
            )
        paths.regular_file(path / name, path)
    return Statistics(path, document, paths.sha256_file(path / DOCUMENT))


def _check_shapes(layer: LayerRows, where: str) -> None:
    if layer.rows.ndim != 2 or layer.ids.ndim != 2 or layer.tokens.ndim != 1:
        raise FormatError(f"{where}: rows, ids or tokens have another number of dimensions")
    count, hidden = layer.rows.shape
    expected = {
        "ids": (count, layer.ids.shape[1]),
        "gates": tuple(layer.ids.shape),
        "documents": (count,),
        "places": (count,),
        "gradients": (count if len(layer.gradients) else 0, hidden),
        "moments": (len(PARTS), hidden, hidden),
        "weights": (len(PARTS), 2),
    }
    for name, shape in expected.items():
        found = tuple(getattr(layer, name).shape)
        if found != shape:
            raise FormatError(f"{where}: {name} has shape {list(found)}, expected {list(shape)}")


def rows_name(layer: int) -> str:
    """The file of a layer's rows."""
    return f"layer-{layer:03d}.safetensors"


def gradients_name(layer: int) -> str:
    """The file of the gradients of those rows."""
    return f"gradients-{layer:03d}.safetensors"
