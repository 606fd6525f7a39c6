"""Decode a package back into dense weights in the source's names and channel order."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from qsrt_pack.assemble.shards import Spec, file_pieces, write_shards
from qsrt_pack.encode.padding import unpad_matrices
from qsrt_pack.output import check_output, replacing
from qsrt_pack.progress import bar
from qsrt_pack.source import quantization
from qsrt_pack.source.dtypes import to_bfloat16
from qsrt_pack.source.formats import read_weight
from qsrt_pack.source.models import RoutedExperts, packed_experts
from qsrt_pack.source.naming import ExpertWeight
from qsrt_pack.source.quantization import Quantization
from qsrt_pack.source.weights import find_weights
from qsrt_runtime.format import decode, paths, schema
from qsrt_runtime.format import manifest as manifests
from qsrt_runtime.format.container import Layer
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.evidence import low_to_high
from qsrt_runtime.format.geometry import RECORD
from qsrt_runtime.format.package import (
    Package,
    check_base,
    open_package,
    read_evidence,
    read_package_layer,
    verify_file,
)
from qsrt_runtime.format.rates import stored_channels
from qsrt_runtime.format.slab import unpack_expert
from qsrt_runtime.format.tensorfile import TensorEntry, read_header, read_tensor, tensor_data

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class DensePackage:
    """The dense tensors that an opened package decodes to.

    tensors: what the carried shards hold.   base: what that decodes to, by name.
    experts: shape of every tensor of experts by name, in the source's own layout.
    Keeps the layer and the expert read last, so that reading in order decodes each once, and
    twice where experts are stacked: gate and up of all come before down of all.
    """

    def __init__(self, path: Path) -> None:
        """Open a package and verify its carried shards; FormatError on any doubt."""
        self.package = open_package(path)
        check_base(self.package)
        if not self.package.documents.is_ours:
            raise FormatError(
                f"{path} was made elsewhere; its evidence does not keep the source's channel order"
            )
        self.tensors: dict[str, tuple[str, TensorEntry]] = {}
        for shard in sorted(set(self.package.documents.index["weight_map"].values())):
            verify_file(self.package, shard)
            for name, entry in read_header(path / shard).tensors.items():
                self.tensors[name] = (shard, entry)
        self.base = find_weights(path, self.tensors, _kept_quantization(self.package))
        routed = packed_experts(self.package.documents, str(path / manifests.CONFIG))
        _check_one_activation(self.package)
        self.naming = routed.naming
        self.experts = routed.stored()
        self._blocks = _blocks(routed)
        self._layer: tuple[int, Layer, dict[str, Any]] | None = None
        self._expert: tuple[int, int, dict[str, torch.Tensor]] | None = None

    def base_weight(self, name: str) -> torch.Tensor:
        """One carried tensor, as stored or decoded to float32."""
        weight = self.base[name]
        if weight.is_plain:
            shard, entry = self.tensors[name]
            return read_tensor(self.package.path / shard, entry)
        return read_weight(self.package.path, self.tensors, weight)

    @property
    def block_count(self) -> int:
        """How many experts' parts there are in all tensors."""
        return sum(map(len, self._blocks.values()))

    def expert_weight(self, name: str) -> torch.Tensor:
        """A decoded tensor of experts, float32, of the source's shape and channel order."""
        return torch.stack([*self.expert_blocks(name)]).view(self.experts[name])

    def expert_blocks(self, name: str) -> Iterator[torch.Tensor]:
        """The same by the leading axis of a stack, or the tensor whole where it is none."""
        for (number, expert), parts in self._blocks[name].items():
            shape = self.experts[name][-2:]
            block = torch.full(shape, torch.nan)
            for matrix, place in parts.items():
                place.of(block).copy_(self._weight(number, expert, matrix))
            yield block

    def _weight(self, number: int, expert: int, matrix: str) -> torch.Tensor:
        """One expert's decoded matrix [out, in] float32 in the source's channel order."""
        if self._expert is None or self._expert[:2] != (number, expert):
            layer, evidence = self._read_layer(number)
            order = low_to_high(
                evidence["experts"][expert]["low_to_high"],
                layer.geometry.intermediate,
                f"{self.package.evidence_name(number)}: expert {expert}",
            )
            weights = decode.dense_expert(unpack_expert(layer, expert))
            found = unpad_matrices(source_order(weights, order), self.package.true_sizes)
            self._expert = (number, expert, found)
        return self._expert[2][matrix]

    def _read_layer(self, number: int) -> tuple[Layer, dict[str, Any]]:
        if self._layer is None or self._layer[0] != number:
            layer = read_package_layer(self.package, number)
            self._layer = (number, layer, read_evidence(self.package, number))
        return self._layer[1:]


def decode_package(
    path: Path,
    out: Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    show_progress: bool = True,
) -> None:
    """Write a dense checkpoint that transformers loads.

    dtype: of the expert weights, a key of DTYPES, and then also config.json's, by default the one
    that config.json states; other tensors and files are copied as they are, but for quantized
    ones of a package that keeps their format, which become bfloat16.
    """
    dense = DensePackage(path)
    check_output(out, path, overwrite)
    config = dense_config(dense.package)
    stated = manifests.text_config(config)
    kind = dtype or stated.get("dtype") or stated.get("torch_dtype") or "float32"
    if not isinstance(kind, str) or kind not in DTYPES:
        raise FormatError(f"{path}: dtype {kind!r} is not one of {sorted(DTYPES)}; give --dtype")
    if dtype is not None:  # else transformers would load the experts in the old one
        config = _with_dtype(config, dtype)
    with (
        replacing(out, overwrite=overwrite) as folder,
        bar("decode", dense.block_count, "tensors", show_progress) as advance,
    ):

        def payload(name: str) -> Iterable[bytes]:
            if name in dense.base:
                if not dense.base[name].is_plain:
                    weight = to_bfloat16(dense.base_weight(name), f"{path}: weight {name}")
                    return [tensor_data(weight)]
                shard, entry = dense.tensors[name]
                return file_pieces(path / shard, entry.start, entry.end)
            return decoded(name)

        def decoded(name: str) -> Iterator[bytes]:
            for block in dense.expert_blocks(name):
                weight = block.to(getattr(torch, kind))
                if not torch.isfinite(weight).all():
                    raise FormatError(
                        f"{path}: {name} does not fit into {kind}; give another --dtype"
                    )
                yield tensor_data(weight)
                advance(1)

        index = write_shards(folder, _specs(dense, DTYPES[kind]), payload)
        paths.write_file(folder / manifests.INDEX, schema.dump(index))
        paths.write_file(folder / manifests.CONFIG, schema.dump(config))
        _copy_side_files(dense.package, folder)


def dense_config(package: Package) -> dict[str, Any]:
    """config.json without what packing added to it."""
    added = ("quantization_config", manifests.TRANSFORMERS_WEIGHTS)
    return {key: value for key, value in package.documents.config.items() if key not in added}


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A config.json that states a dtype, of the text model in it too."""
    changed = {key: value for key, value in config.items() if key != "torch_dtype"}
    if isinstance(config.get("text_config"), dict):
        changed["text_config"] = _with_dtype(config["text_config"], dtype)
    return changed | {"dtype": dtype}


def _kept_quantization(package: Package) -> Quantization:
    """What the source said of the carried tensors, where they are as they were."""
    kept = package.documents.quantization.get(manifests.DENSE_QUANTIZATION)
    config = {} if kept is None else {quantization.KEY: kept}
    return quantization.read_quantization(config, str(package.path / manifests.CONFIG))


def source_order(weights: dict[str, torch.Tensor], order: torch.Tensor) -> dict[str, torch.Tensor]:
    """Dense matrices from stored order to the source's order of intermediate channels.

    weights: w1, w3 [I, H], w2 [H, I].   order: [I], see evidence.low_to_high.
    """
    channel = order[stored_channels(len(order) // RECORD)]
    place = torch.argsort(channel)
    return {m: w[:, place] if m == "w2" else w[place] for m, w in weights.items()}


def _check_one_activation(package: Package) -> None:
    """A dense checkpoint has one activation for all experts; refuse what it cannot say."""
    hidden_act = manifests.text_config(package.documents.config).get("hidden_act", "silu")
    for layer in package.layers:
        found = manifests.activations(package.documents.manifest, hidden_act, layer)
        for expert, activation in enumerate(found):
            if activation != hidden_act:
                raise FormatError(
                    f"{package.path}: layer {layer} expert {expert} has activation {activation}, "
                    f"the model {hidden_act}; a dense checkpoint cannot say that"
                )


def _blocks(experts: RoutedExperts) -> dict[str, dict[tuple[int, int], dict[str, ExpertWeight]]]:
    """Of every tensor of experts: layer and expert of each of its blocks, and what matrices."""
    tensors: dict[str, dict[tuple[int, int], dict[str, ExpertWeight]]] = {}
    for layer, expert, matrix, weight in experts.weights():
        blocks = tensors.setdefault(weight.tensor, {})
        blocks.setdefault((layer, expert), {})[matrix] = weight
    return tensors


def _specs(dense: DensePackage, kind: str) -> dict[str, Spec]:
    """dtype and shape of every tensor of the dense checkpoint."""
    base = {name: weight.written for name, weight in dense.base.items()}
    return base | {name: (kind, shape) for name, shape in dense.experts.items()}


def _copy_side_files(package: Package, folder: Path) -> None:
    """Copy what is neither weights nor a document of the package."""
    for name in package.side_files:
        verify_file(package, name)
        source, target = package.path / name, folder / name
        paths.make_folder(target.parent)
        paths.write_pieces(target, file_pieces(source, 0, source.stat().st_size))
