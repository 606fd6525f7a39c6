"""Read and write one layer file.

Three U8 tensors: a format byte for every expert, the scale vectors of the hidden side, and the
slab `qsrt_atoms` whose row s holds, in ascending expert order, the bundles that stand in slot s.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from qsrt_runtime.format import atom, codebook, paths, rates, schema, tensorfile
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import (
    ALIGNMENT,
    ATOM,
    RECORD,
    ROTATION_MULTIPLIER,
    Geometry,
    align,
)
from qsrt_runtime.format.slab import Slab, expert_modes

FRUIT = "kquant_fruit_qsrt_atoms_v1"  # the generic schema, the one that we write
KIMI = "kquant_kimi_k3_qsrt_atoms_v1"
ENCODING = "qsrt_sqg_e4m3"
PROFILE_ID = 1
FORMAT_SECTION = "_qsrt_format_section"
SCALE_SECTION = "_qsrt_shared_scale_section"
ATOMS = "qsrt_atoms"
_SIZES = ("latent_channels", "intermediate_channels", "experts")  # metadata of Geometry's fields
_SCHEMA_FILES = {FRUIT: "layer", KIMI: "published-kimi-layer"}


@dataclass(frozen=True)
class Layer(Slab):
    """A layer file's content.

    source_sha256, encoder_fingerprint: 64 hex digits; None in the Kimi schema.
    """

    schema: str
    source_sha256: str | None
    encoder_fingerprint: str | None


def layer_metadata(
    geometry: Geometry, layer: int, compressed: int, source_sha256: str, encoder_fingerprint: str
) -> dict[str, str]:
    """The metadata of a layer file that we write (schema FRUIT)."""
    rows = geometry.experts
    return _common_metadata(geometry, layer, compressed, FRUIT) | {
        "codebook": codebook.NAME,
        "record_channels": str(RECORD),
        "pair_count": str(geometry.pairs),
        "format_section_bytes": str(align(geometry.experts)),
        "shared_scale_rows": str(rows),
        "shared_scale_section_bytes": str(align(6 * rows * geometry.hidden)),
        "rotation_multiplier": str(ROTATION_MULTIPLIER),
        "source_sha256": source_sha256,
        "encoder_fingerprint": encoder_fingerprint,
    }


def layer_header(metadata: dict[str, str], geometry: Geometry) -> bytes:
    """The header bytes of a layer file that we write, every expert compressed."""
    tensors = {
        FORMAT_SECTION: ("U8", (int(metadata["format_section_bytes"]),)),
        SCALE_SECTION: ("U8", (int(metadata["shared_scale_section_bytes"]),)),
        ATOMS: ("U8", (geometry.slots, geometry.slot_stride(geometry.experts))),
    }
    return tensorfile.header_bytes(metadata, tensorfile.layout(tensors))


def layer_file_bytes(geometry: Geometry, layer: int) -> int:
    """Size of the layer file that we write, header included, which states the layer's number."""
    metadata = layer_metadata(geometry, layer, geometry.experts, "0" * 64, "0" * 64)
    return (
        len(layer_header(metadata, geometry))
        + align(geometry.experts)
        + align(6 * geometry.experts * geometry.hidden)
        + geometry.slots * geometry.slot_stride(geometry.experts)
    )


class LayerWriter:
    """Writes one layer file expert by expert, beside its place, and renames it when whole.

    Use as a context manager; an exception leaves nothing behind. After the block, `sha256` and
    `size` describe the file.
    """

    def __init__(
        self,
        path: Path,
        geometry: Geometry,
        layer: int,
        source_sha256: str,
        encoder_fingerprint: str,
    ) -> None:
        self.path, self.geometry, self.layer = path, geometry, layer
        self.source_sha256, self.encoder_fingerprint = source_sha256, encoder_fingerprint
        metadata = layer_metadata(
            geometry, layer, geometry.experts, source_sha256, encoder_fingerprint
        )
        schema.check(_schema_view(metadata), _SCHEMA_FILES[FRUIT], str(path))
        self._header = layer_header(metadata, geometry)
        self._codes = torch.zeros(align(geometry.experts), dtype=torch.uint8)
        self._scales = torch.zeros(3, geometry.experts, geometry.hidden, dtype=torch.float16)
        self._written: set[int] = set()
        self.sha256, self.size = "", 0

    def __enter__(self) -> "LayerWriter":
        self._partial = paths.partial_name(self.path)
        self._file = self._partial.open("wb")
        with paths.naming(self._partial):
            size = layer_file_bytes(self.geometry, self.layer)
            self._file.truncate(size)  # zeros where nothing is written
        return self

    def write_expert(self, expert: int, coded: atom.Expert) -> None:
        """Put one expert's bundles into their slots, once for each of 0..experts-1."""
        modes = (coded.mode13, coded.mode2)
        self.write_bundles(expert, atom.pack_expert(coded).cpu(), coded.shared_scales.cpu(), modes)

    def write_bundles(
        self, expert: int, bundles: torch.Tensor, scales: torch.Tensor, modes: tuple[int, int]
    ) -> None:
        """As write_expert, for one that is packed.

        bundles: atom.pack_expert's.   scales: [3, H] float16, Expert.shared_scales.   Both on the
        CPU.   modes: of w1 and w3, and of w2.
        """
        if expert in self._written or not 0 <= expert < self.geometry.experts:
            raise ValueError(f"expert {expert} is written already or not one of {self.geometry}")
        if not (torch.isfinite(scales).all() and torch.isfinite(_local_scales(bundles)).all()):
            raise FormatError(f"layer {self.layer} expert {expert}: a scale is not finite")
        with paths.naming(self._partial):
            self._write_slots(expert, bundles)
        self._codes[expert] = rates.format_code(*modes)
        self._scales[:, expert] = scales
        self._written.add(expert)

    def _write_slots(self, expert: int, bundles: torch.Tensor) -> None:
        geometry = self.geometry
        start = self._slab_offset + expert * geometry.bundle_bytes
        stride = geometry.slot_stride(geometry.experts)
        for slot, bundle in zip(geometry.physical_slots(self.layer, expert), bundles, strict=True):
            self._file.seek(start + slot * stride)
            self._file.write(tensorfile.tensor_data(bundle))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                with paths.naming(self._partial):
                    self._finish()
        finally:
            try:
                with paths.naming(self._partial):
                    self._file.close()  # which writes what it still holds
            finally:
                self._partial.unlink(missing_ok=True)

    @property
    def _slab_offset(self) -> int:
        return len(self._header) + len(self._codes) + align(2 * self._scales.numel())

    def _finish(self) -> None:
        missing = sorted(set(range(self.geometry.experts)) - self._written)
        if missing:
            raise FormatError(f"layer {self.layer}: expert {missing[0]} was not written")
        self._file.seek(0)
        for part in (self._header, *map(tensorfile.tensor_data, (self._codes, self._scales))):
            self._file.write(part)
        self._file.flush()
        os.fsync(self._file.fileno())
        self.sha256 = paths.sha256_file(self._partial)
        self.size = self._partial.stat().st_size
        self._partial.replace(self.path)
        paths.sync_folder(self.path.parent)


def read_layer(path: Path, slots: range | None = None) -> Layer:
    """Read and check a layer file, whole or a run of slots of its slab.

    Refuses, with FormatError, whatever the format does not allow: header, sections, codes,
    padding, scales that are not finite. An X4T expert is listed, and refused on use.
    slots: range(0) reads header and sections alone; atoms is then [0, slot stride].
    """
    header = tensorfile.read_header(path)
    kind = header.metadata.get("schema")
    if kind not in _SCHEMA_FILES:
        raise FormatError(f"{path}: schema {kind!r} is not one of {sorted(_SCHEMA_FILES)}")
    view = _schema_view(header.metadata, header)
    schema.check(view, _SCHEMA_FILES[kind], str(path))
    geometry = _checked_geometry(header)
    if slots is not None and (slots.step != 1 or not 0 <= slots.start <= slots.stop):
        raise ValueError(f"{slots} is no run of slots")
    if slots is not None and slots.stop > geometry.slots:
        raise ValueError(f"{slots} ends past the layer's {geometry.slots} slots")
    with _opened(path) as file:
        section = file.get_tensor(FORMAT_SECTION)
        scale_section = file.get_tensor(SCALE_SECTION)
        slab = file.get_slice(ATOMS)
        atoms = slab[:] if slots is None else slab[slots.start : slots.stop]
    rows = geometry.experts if kind == FRUIT else 1
    scale_bytes = 6 * rows * geometry.hidden
    _require_zero(section[geometry.experts :], path, FORMAT_SECTION)
    _require_zero(scale_section[scale_bytes:], path, SCALE_SECTION)
    scales = scale_section[:scale_bytes].view(torch.float16)
    layer = Layer(
        layer=int(header.metadata["layer"]),
        schema=kind,
        geometry=geometry,
        slots=range(geometry.slots) if slots is None else slots,
        format_codes=section[: geometry.experts].clone(),
        shared_scales=scales.view(3, rows, geometry.hidden).clone(),
        atoms=atoms,
        source_sha256=header.metadata.get("source_sha256"),
        encoder_fingerprint=header.metadata.get("encoder_fingerprint"),
    )
    _check_content(layer, int(header.metadata["x4t_experts"]), path)
    return layer


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer file has what: byte offsets of its sections and of its slab.

    stride: bytes of a slot.   scale_rows: rows of each shared scale vector.
    """

    path: Path
    sections: int
    slab: int
    stride: int
    scale_rows: int


def layer_place(path: Path) -> LayerPlace:
    """Read the places out of a layer file that `read_layer` has accepted before."""
    header = tensorfile.read_header(path)
    tensors, metadata = header.tensors, header.metadata
    return LayerPlace(
        path=path,
        sections=tensors[FORMAT_SECTION].start,
        slab=tensors[ATOMS].start,
        stride=tensors[ATOMS].shape[1],
        scale_rows=int(metadata["experts"]) if metadata["schema"] == FRUIT else 1,
    )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise FormatError(f"{path}: {error}") from None


def _common_metadata(geometry: Geometry, layer: int, compressed: int, kind: str) -> dict[str, str]:
    return {
        "format": "pt",
        "schema": kind,
        "version": "1",
        "encoding": ENCODING,
        "layer": str(layer),
        "experts": str(geometry.experts),
        "compressed_experts": str(compressed),
        "x4t_experts": str(geometry.experts - compressed),
        "intermediate_channels": str(geometry.intermediate),
        "latent_channels": str(geometry.hidden),
        "atom_channels": str(ATOM),
        "atom_slots": str(geometry.slots),
        "atom_bundle_bytes": str(geometry.bundle_bytes),
        "atom_slot_payload_bytes": str(compressed * geometry.bundle_bytes),
        "atom_slot_stride_bytes": str(geometry.slot_stride(compressed)),
        "alignment_bytes": str(ALIGNMENT),
        "profile_id": str(PROFILE_ID),
    }


def _schema_view(
    metadata: dict[str, str], header: tensorfile.Header | None = None
) -> dict[str, Any]:
    """What layer.schema.json describes: the metadata, and dtype and shape of each tensor."""
    view: dict[str, Any] = {"metadata": metadata}
    if header is not None:
        view["tensors"] = {
            name: {"dtype": entry.dtype, "shape": list(entry.shape)}
            for name, entry in header.tensors.items()
        }
    return view


def _checked_geometry(header: tensorfile.Header) -> Geometry:
    """The geometry, once every derived field of the header equals what follows from it."""
    metadata, path = header.metadata, header.path
    sizes = [int(metadata[name]) for name in _SIZES]
    try:
        geometry = Geometry(*sizes)
    except FormatError as error:
        raise FormatError(f"{path}: {', '.join(_SIZES)}: {error}") from None
    compressed, layer = int(metadata["compressed_experts"]), int(metadata["layer"])
    if metadata["schema"] == FRUIT:
        expected = layer_metadata(
            geometry,
            layer,
            compressed,
            metadata["source_sha256"],
            metadata["encoder_fingerprint"],
        )
        rows = geometry.experts
    else:
        expected = _common_metadata(geometry, layer, compressed, KIMI)
        rows = 1
    stride = int(metadata["atom_slot_stride_bytes"])
    if stride >= geometry.slot_stride(compressed) and stride == align(stride):
        expected["atom_slot_stride_bytes"] = str(stride)  # a larger one is allowed
    for key, value in expected.items():
        if metadata[key] != value:
            raise FormatError(
                f"{path}: {key} is {metadata[key]}, expected {value} for "
                f"{geometry.experts} experts of {geometry.hidden} x {geometry.intermediate}"
            )
    _check_shapes(
        header,
        {
            FORMAT_SECTION: (align(geometry.experts),),
            SCALE_SECTION: (align(6 * rows * geometry.hidden),),
            ATOMS: (geometry.slots, stride),
        },
    )
    return geometry


def _check_shapes(header: tensorfile.Header, shapes: dict[str, tuple[int, ...]]) -> None:
    path = header.path
    if list(header.tensors) != list(shapes):
        raise FormatError(
            f"{path}: tensors lie in order {list(header.tensors)}, expected {list(shapes)}"
        )
    for name, shape in shapes.items():
        if header.tensors[name].shape != shape:
            raise FormatError(
                f"{path}: {name} has shape {list(header.tensors[name].shape)}, "
                f"its metadata says {list(shape)}"
            )


def _check_content(layer: Layer, x4t_experts: int, path: Path) -> None:
    found = int((layer.format_codes == rates.X4T).sum())
    if found != x4t_experts:
        raise FormatError(f"{path}: {found} X4T format codes, its metadata says {x4t_experts}")
    compressed = layer.geometry.experts - found
    for code in layer.format_codes.unique().tolist():
        if code != rates.X4T:
            _require_modes(layer, int((layer.format_codes == code).nonzero()[0]), path)
    if not torch.isfinite(layer.shared_scales).all():
        raise FormatError(f"{path}: {SCALE_SECTION} holds a scale that is not finite")
    payload = compressed * layer.geometry.bundle_bytes
    _require_zero(layer.atoms[:, payload:], path, ATOMS)
    bundles = layer.atoms[:, :payload].unflatten(1, (compressed, layer.geometry.bundle_bytes))
    if not torch.isfinite(_local_scales(bundles)).all():
        raise FormatError(f"{path}: {ATOMS} holds a local scale that is not finite")


def _require_modes(layer: Layer, expert: int, path: Path) -> None:
    try:
        expert_modes(layer, expert)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


def _local_scales(bundles: torch.Tensor) -> torch.Tensor:
    """The scale parts of bundles [..., bundle bytes] uint8: [..., 96] float16."""
    return bundles[..., -6 * ATOM :].contiguous().view(torch.float16)


def _require_zero(padding: torch.Tensor, path: Path, name: str) -> None:
    if padding.any():
        raise FormatError(f"{path}: {name} has padding that is not zero")
