"""A folder of calibration statistics, as `calibrate` leaves it and convert reads it."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from qsrt_pack.calibrate.statistics import PARTS, LayerRows, part_of
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
        """The rows of one layer, their files verified."""
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
        paths.regular_file(path, self.path)
        if paths.sha256_file(path) != self.document["files"][name]:
            raise FormatError(f"{path} is damaged: its SHA-256 is not the one in {DOCUMENT}")
        try:
            return load_file(path)
        except SafetensorError as error:
            raise FormatError(f"{path}: {error}") from None


def open_statistics(path: Path) -> Statistics:
    """Open a folder that `calibrate` made; FormatError for anything else."""
    document = schema.read(path / DOCUMENT, "calibration")
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
