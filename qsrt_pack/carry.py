"""What a package carries beside the experts: every other tensor and the side files."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qsrt_pack.assemble.package import GIT_ATTRIBUTES, build_config
from qsrt_pack.assemble.shards import file_pieces, write_shards
from qsrt_pack.source.census import quantized_carried, source_formats
from qsrt_pack.source.checkpoint import Checkpoint, read_weight
from qsrt_pack.source.dtypes import PLAIN, to_bfloat16
from qsrt_pack.source.models import RoutedExperts, carried_tensors
from qsrt_runtime.format import manifest as manifests
from qsrt_runtime.format import paths, schema
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.tensorfile import tensor_data


def how_carried(checkpoint: Checkpoint, experts: RoutedExperts, loader: str) -> str:
    """How --keep-dense-format has the quantized weights carried; bf16 where there are none."""
    if not quantized_carried(checkpoint, experts):
        return "bf16"
    if loader != "qsrt":
        raise FormatError(f"the {loader} loader reads no other quantization beside the experts'")
    if checkpoint.quantization_config is None:
        raise FormatError(
            f"{checkpoint.path} has quantized tensors and no quantization_config, without which no "
            "loader reads them; convert without keeping their format"
        )
    return "stored"


def source_format(
    checkpoint: Checkpoint, experts: RoutedExperts, carried_as: str
) -> dict[str, Any] | None:
    """The manifest's source_format; None for a source that is not quantized."""
    formats = source_formats(checkpoint, experts)
    if not formats.carried and all(name in PLAIN for name in formats.experts):
        return None
    return {
        "experts": sorted(formats.experts),
        "carried": sorted(formats.carried),
        "carried_as": carried_as,
    }


def package_config(
    checkpoint: Checkpoint, manifest: dict[str, Any], loader: str, carried_as: str
) -> dict[str, Any]:
    """The config.json of a checkpoint's package."""
    kept = checkpoint.quantization_config if carried_as == "stored" else None
    return build_config(checkpoint.model_config, manifest, loader, kept)


def write_base(
    folder: Path, checkpoint: Checkpoint, experts: RoutedExperts, carried_as: str
) -> str:
    """Carry every other tensor and the side files; returns the digest over shards and index."""
    decoded = set(quantized_carried(checkpoint, experts)) if carried_as == "bf16" else ()

    def payload(name: str) -> Iterable[bytes]:
        if name in decoded:
            where = f"{checkpoint.path_of(checkpoint.weights[name])}: weight {name}"
            return [tensor_data(to_bfloat16(read_weight(checkpoint, name), where))]
        shard, entry = checkpoint.tensors[name]
        return file_pieces(checkpoint.shards_at / shard, entry.start, entry.end)

    index = write_shards(folder, carried_tensors(checkpoint, experts, carried_as), payload)
    schema.check(index, "index", manifests.INDEX)
    paths.write_file(folder / manifests.INDEX, schema.dump(index))
    for name in checkpoint.carried:
        source, target = checkpoint.path / name, folder / name
        paths.make_folder(target.parent)
        paths.write_pieces(target, file_pieces(source, 0, source.stat().st_size))
    paths.write_file(folder / ".gitattributes", GIT_ATTRIBUTES)
    names = sorted({manifests.INDEX, *index["weight_map"].values()})
    return schema.digest({name: paths.sha256_file(folder / name) for name in names})
