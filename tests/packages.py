"""Sealed packages of any size, from random words: nothing is encoded."""

from pathlib import Path

import checkpoints
import torch
from safetensors.torch import save_file

from qsrt_pack.assemble.layer import expert_evidence, layer_evidence
from qsrt_pack.assemble.package import build_config, build_manifest
from qsrt_pack.encode.expert import Settings
from qsrt_pack.encode.permutation import channels_of_groups
from qsrt_runtime.format import manifest, paths, schema
from qsrt_runtime.format.atom import unpack_expert
from qsrt_runtime.format.container import LayerWriter
from qsrt_runtime.format.geometry import Geometry, TrueSizes
from qsrt_runtime.format.package import seal
from qsrt_runtime.format.rates import stored_channels

SHARD = "model.safetensors"
SETTINGS = Settings(search="fast")
SOURCE = "5" * 64
_DIFFERENT = 8  # experts; the ones after have the same words again


def random_bundles(geometry: Geometry, seed: int, scale: float) -> torch.Tensor:
    """Bundles [I/32, bundle bytes] of random words, all local scales alike."""
    generator = torch.Generator().manual_seed(seed)
    shape = (geometry.slots, geometry.bundle_bytes)
    bundles = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    bundles[:, -192:].view(torch.float16).fill_(scale)
    return bundles


def write_layer(
    path: Path,
    geometry: Geometry,
    layer: int,
    scale: float = 0.1,
    true_sizes: TrueSizes | None = None,
) -> LayerWriter:
    """A layer file of R0 experts whose weights are normal, with a deviation of scale^2.

    true_sizes: less than all of the geometry's channels; the others' scales are 0.
    """
    true_sizes = true_sizes or TrueSizes(geometry.hidden, geometry.intermediate)
    bundles = [random_bundles(geometry, seed, scale) for seed in range(_DIFFERENT)]
    scales = torch.full((3, geometry.hidden), scale, dtype=torch.float16)
    scales[:, true_sizes.hidden :] = 0
    channels = channels_of_groups(_groups(geometry, true_sizes))
    padding = channels[stored_channels(geometry.records)] >= true_sizes.intermediate
    atoms = padding.view(-1, 2, 8, 16).transpose(1, 2).reshape(-1, 32).repeat(1, 3)
    for each in bundles:
        each[:, -192:].view(torch.float16)[atoms] = 0
    fingerprint = manifest.encoder_fingerprint(SETTINGS.fingerprinted())
    with LayerWriter(path, geometry, layer, SOURCE, fingerprint) as writer:
        for expert in range(geometry.experts):
            writer.write_bundles(expert, bundles[expert % _DIFFERENT], scales, (0, 0))
    return writer


def write_package(
    path: Path,
    geometry: Geometry,
    *,
    layers: tuple[int, ...] = (0,),
    topk: int = 2,
    config: dict | None = None,
    base: dict[str, torch.Tensor] | None = None,
    true_sizes: TrueSizes | None = None,
) -> Path:
    """A sealed package. config: changes to checkpoints.config.   base: the carried tensors.

    true_sizes: the model's own, where they are not those of the geometry.
    """
    path.mkdir(parents=True)
    true_sizes = true_sizes or TrueSizes(geometry.hidden, geometry.intermediate)
    evidence = {layer: _write_evidence(path, geometry, true_sizes, layer) for layer in layers}
    base = base or {}
    save_file(base, path / SHARD, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in base.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(base, SHARD)}
    if not base:
        (path / SHARD).unlink()
    (path / manifest.INDEX).write_bytes(schema.dump(index))
    names = [manifest.INDEX, *([SHARD] if base else [])]
    document = build_manifest(
        geometry,
        true_sizes,
        topk=topk,
        activation="silu",
        encoder_settings=SETTINGS.fingerprinted(),
        source_sha256=SOURCE,
        base_sha256=schema.digest({name: paths.sha256_file(path / name) for name in names}),
        evidence=evidence,
        expert_tensors=checkpoints.NAMED,
    )
    sizes = {
        "hidden_size": true_sizes.hidden,
        "moe_intermediate_size": true_sizes.intermediate,
        "num_experts": geometry.experts,
        "num_experts_per_tok": topk,
        "num_hidden_layers": max(layers) + 1,
        "mlp_only_layers": sorted(set(range(max(layers))) - set(layers)),
    }
    source_config = checkpoints.config(**(sizes | (config or {})))
    (path / manifest.MANIFEST).write_bytes(schema.dump(document))
    built = build_config(source_config, document, "qsrt")
    (path / manifest.CONFIG).write_bytes(schema.dump(built))
    seal(path)
    return path


def _groups(geometry: Geometry, true_sizes: TrueSizes) -> torch.Tensor:
    """The channels in the source's order, but for groups of padding, which come first."""
    added = geometry.intermediate - true_sizes.intermediate
    return torch.arange(geometry.intermediate // 4).roll(added // 4)


def _write_evidence(path: Path, geometry: Geometry, true_sizes: TrueSizes, layer: int) -> dict:
    name = manifest.layer_file_name(layer)
    writer = write_layer(path / name, geometry, layer, true_sizes=true_sizes)
    scales = torch.ones(3, geometry.hidden, dtype=torch.float16)
    coded = unpack_expert(random_bundles(geometry, 0, 0.1), scales, (0, 0), geometry)
    groups, error = _groups(geometry, true_sizes), dict.fromkeys(("w1", "w3", "w2"), 0.5)
    entries = [
        expert_evidence(expert, coded, groups, error, error) for expert in range(geometry.experts)
    ]
    evidence = layer_evidence(writer, SETTINGS.search, entries)
    (path / manifest.evidence_file_name(layer)).write_bytes(schema.dump(evidence))
    return evidence
