"""What a package or a single layer file holds, without reading its weights."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qsrt_pack.progress import bar
from qsrt_runtime.format import manifest as manifests
from qsrt_runtime.format import rates, schema
from qsrt_runtime.format.atom import MATRICES
from qsrt_runtime.format.container import ATOMS, FORMAT_SECTION, KIMI, Layer, read_layer
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry, TrueSizes
from qsrt_runtime.format.package import (
    Package,
    check_base,
    open_package,
    read_checked_layer,
)
from qsrt_runtime.format.tensorfile import read_header

_NO_SLOTS = range(0)
_WORST = 5  # experts listed for their error
BYTE_KINDS = {  # what each kind of byte is called; those of a layer file first
    "trellis_words": "trellis words",
    "local_scales": "local scales, in the bundles",
    "shared_scales": "shared scales, of the hidden side",
    "format_codes": "format codes",
    "padding": "padding of the layer files",
    "headers": "headers of the layer files",
    "evidence": "evidence",
    "base": "base shards and their index",
    "other": "other files",
}
_PACKAGE_BYTES = ("evidence", "base", "other")
MAKERS = {True: "made by qsrt-pack", False: "made elsewhere", None: "its maker is not recorded"}


def inspect(path: Path, *, show_progress: bool = True) -> dict[str, Any]:
    """The report on a package's folder or a layer file; FormatError names what is wrong.

    Of a layer file the header and the sections are read, the slab is not, and nothing is hashed.
    A package's documents and evidence are verified by digest.
    """
    if path.is_dir():
        report = _package_report(open_package(path), show_progress)
    elif path.is_file():
        report = _file_report(path)
    else:
        raise FormatError(f"{path} is not a folder or regular file; give a package or layer file")
    schema.check(report, "report", "report")
    return report


def _package_report(package: Package, show_progress: bool) -> dict[str, Any]:
    check_base(package)
    manifest = package.documents.manifest
    hidden_act = manifests.text_config(package.documents.config).get("hidden_act")
    codes, acts, experts = Counter(), Counter(silu=0, situ=0), []
    sizes = _file_sizes(package)
    with bar("layers", len(package.layers), "layers", show_progress) as advance:
        for number in package.layers:
            layer, evidence = read_checked_layer(package, number, _NO_SLOTS)
            codes.update(layer.format_codes.tolist())
            sizes.update(_layer_sizes(package.path / package.layer_name(number), layer))
            acts.update(manifests.activations(manifest, hidden_act, number))
            if package.documents.is_ours:
                experts += [_expert_errors(number, item) for item in evidence["experts"]]
            advance(1)
    return {
        **_contents(package.geometry, package.true_sizes, package.layers, codes, sizes),
        **_origin(package),
        "inspected": "package",
        "path": str(package.path),
        "files": len(package.digests) + 2,  # MANIFEST.sha256 lists neither itself nor the seal
        "topk": manifest["geometry"]["topk"],
        "activations": dict(acts),
        "x4t_experts": [],
        "errors": _summary(experts, package.path) if package.documents.is_ours else None,
    }


def _origin(package: Package) -> dict[str, Any]:
    manifest, is_ours = package.documents.manifest, package.documents.is_ours
    producer = manifest["producer"]
    return {
        "is_ours": is_ours,
        "storage_schema": manifest["storage_schema"],
        "encoder_settings": package.encoder_settings if is_ours else None,
        "versions": producer["versions"] if is_ours else None,
        "source_format": manifest.get("source_format"),
        "source_sha256": manifest["source"]["source_sha256"],
        "encoder_fingerprint": producer["encoder"]["fingerprint"],
        "producer_fingerprint": producer["fingerprint"],
        "seal_sha256": package.seal_sha256,
    }


def _file_report(path: Path) -> dict[str, Any]:
    layer = read_layer(path, _NO_SLOTS)
    codes = Counter(layer.format_codes.tolist())
    sizes = Counter(dict.fromkeys(_PACKAGE_BYTES, 0))
    sizes.update(_layer_sizes(path, layer))
    absent = ("topk", "activations", "errors", "encoder_settings", "versions", "source_format")
    return {
        **_contents(layer.geometry, None, [layer.layer], codes, sizes),
        **dict.fromkeys((*absent, "producer_fingerprint", "seal_sha256")),
        "inspected": "layer_file",
        "path": str(path),
        "is_ours": False if layer.schema == KIMI else None,
        "files": 1,
        "storage_schema": layer.schema,
        "x4t_experts": (layer.format_codes == rates.X4T).nonzero().flatten().tolist(),
        "source_sha256": layer.source_sha256,
        "encoder_fingerprint": layer.encoder_fingerprint,
    }


def _contents(
    geometry: Geometry,
    true_sizes: TrueSizes | None,
    layers: list[int],
    codes: Counter[int],
    sizes: Counter[str],
) -> dict[str, Any]:
    """What is said alike of a package and of a layer file.

    true_sizes: None where they are not stated; weights are then those stored.
    codes: experts by format code.   sizes: bytes by kind.
    """
    each = (true_sizes or geometry).weights_per_expert
    weights = (codes.total() - codes[rates.X4T]) * each
    stored = sizes.total() - sum(sizes[kind] for kind in _PACKAGE_BYTES)
    modes, pairs = _modes_and_pairs(codes, geometry.records)
    return {
        "schema": "qsrt_report_v1",
        "kind": "inspect",
        "layers": layers,
        "experts_per_layer": geometry.experts,
        "hidden_size": geometry.hidden,
        "intermediate_size": geometry.intermediate,
        "true_hidden_size": true_sizes and true_sizes.hidden,
        "true_intermediate_size": true_sizes and true_sizes.intermediate,
        "profile": geometry.profile,
        "atom_slots": geometry.slots,
        "atoms_per_expert": geometry.atoms_per_expert,
        "experts": codes.total(),
        "expert_weights": weights,
        "modes": modes,
        "pairs": pairs,
        "bytes": {**sizes, "total": sizes.total()},
        "bits_per_expert_weight": 8 * stored / weights if weights else None,
        "trellis_bits_per_expert_weight": (
            8 * sizes["trellis_words"] / weights if weights else None
        ),
    }


def _modes_and_pairs(
    codes: Counter[int], records: int
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Experts by modes of w1 and w3 / of w2, and pairs by matrix and kind over all experts."""
    modes: dict[str, int] = {}
    pairs = {matrix: Counter(P33=0, P24=0) for matrix in MATRICES}
    for code, experts in sorted(codes.items()):
        if code == rates.X4T:
            modes["X4T"] = experts
            continue
        mode13, mode2 = rates.modes_of_code(code, records, f"format code 0x{code:02X}")
        modes[f"R{mode13}/R{mode2}"] = experts
        for matrix, mode in zip(MATRICES, (mode13, mode13, mode2), strict=True):
            for kind in rates.pair_kinds(mode, records):
                pairs[matrix][kind] += experts
    return modes, {matrix: dict(kinds) for matrix, kinds in pairs.items()}


def _layer_sizes(path: Path, layer: Layer) -> Counter[str]:
    """Bytes of a layer file by kind; they add up to its size."""
    tensors, geometry = read_header(path).tensors, layer.geometry
    start = tensors[FORMAT_SECTION].start
    bundles = geometry.slots * int((layer.format_codes != rates.X4T).sum())
    trellis = len(MATRICES) * geometry.trellis_bytes
    sizes = Counter(
        trellis_words=bundles * trellis,
        local_scales=bundles * (geometry.bundle_bytes - trellis),
        shared_scales=layer.shared_scales.nbytes,
        format_codes=geometry.experts,
    )
    padding = tensors[ATOMS].end - start - sizes.total()
    sizes.update(headers=start, padding=padding)
    return sizes


def _file_sizes(package: Package) -> Counter[str]:
    """Bytes of a package's files by kind, less the layer files."""
    entries = package.documents.manifest["layers"].values()
    layers = {entry["qsrt_atoms"] for entry in entries}
    evidence = {entry["evidence"] for entry in entries}
    base = {manifests.INDEX, *package.documents.index["weight_map"].values()}
    sizes = Counter(dict.fromkeys(_PACKAGE_BYTES, 0))
    for name in {*package.digests, manifests.CHECKSUMS, manifests.MARKER} - layers:
        kind = "evidence" if name in evidence else "base" if name in base else "other"
        sizes[kind] += (package.path / name).stat().st_size
    return sizes


def _expert_errors(layer: int, item: dict[str, Any]) -> dict[str, Any]:
    """Of an expert's evidence what the report sums up."""
    return {"layer": layer} | {
        key: item[key] for key in ("expert", "nmse", "functional_nmse", "tokens")
    }


def _summary(experts: list[dict[str, Any]], path: Path) -> dict[str, Any]:
    """Means, maxima and the worst experts of what `_expert_errors` gives of each."""
    errors = {matrix: [item["nmse"][matrix] for item in experts] for matrix in MATRICES}
    functional = [e["functional_nmse"] for e in experts if e["functional_nmse"] is not None]
    tokens = [item["tokens"] for item in experts if item["tokens"] is not None]
    worst = sorted(experts, key=lambda e: (-max(e["nmse"].values()), e["layer"], e["expert"]))
    return {
        "nmse": {matrix: _mean_and_max(values, path) for matrix, values in errors.items()},
        "functional_nmse": (
            {"experts": len(functional), **_mean_and_max(functional, path)} if functional else None
        ),
        "tokens": (
            {
                "experts": len(tokens),
                "min": min(tokens),
                "max": max(tokens),
                "total": sum(tokens),
            }
            if tokens
            else None
        ),
        "worst": [
            {key: item[key] for key in ("layer", "expert", "nmse")} for item in worst[:_WORST]
        ],
    }


def _mean_and_max(values: Sequence[float], path: Path) -> dict[str, float]:
    try:
        mean = math.fsum(values) / len(values)
    except OverflowError:
        raise FormatError(f"{path}: its evidence states errors too large to average") from None
    return {"mean": mean, "max": max(values)}


def not_hashed(is_package: bool) -> tuple[str, str]:
    """What has been taken on trust."""
    what = "layer files, base shards and side files" if is_package else "any byte of it"
    return "not hashed", f"{what}; qsrt-pack validate PACKAGE does that"


def describe(report: dict[str, Any]) -> str:
    """A report on one screen."""
    is_package = report["inspected"] == "package"
    lines = [
        (
            "package" if is_package else "layer file",
            f"{report['path']} ({MAKERS[report['is_ours']]})",
        ),
        *content_lines(report),
        *_byte_lines(report),
        *_error_lines(report["errors"]),
        *origin_lines(report),
        not_hashed(is_package),
    ]
    return "\n".join(f"{name:<12}{_printable(value)}" for name, value in lines)


def _printable(text: str) -> str:
    """Without what a file could make a terminal do."""
    return "".join(c if c.isprintable() else "?" for c in text)


def content_lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    """What is packed, and how, in lines of a name and a value."""
    modes = ", ".join(f"{mode} {count:,}" for mode, count in report["modes"].items())
    pairs = [
        f"{matrix} " + " ".join(f"{kind} {count:,}" for kind, count in kinds.items())
        for matrix, kinds in report["pairs"].items()
    ]
    lines = [
        ("experts", _experts(report)),
        (
            "format",
            f"{report['storage_schema']}, profile {report['profile']}, "
            f"{report['atom_slots']} slots, {report['atoms_per_expert']} atoms an expert",
        ),
        ("modes", f"{modes} (experts by w1 and w3/w2)"),
        ("pairs", ", ".join(pairs)),
    ]
    if report["expert_weights"]:
        bits, words = report["bits_per_expert_weight"], report["trellis_bits_per_expert_weight"]
        lines.append(
            ("bits", f"{bits:.4f} stored an expert weight, {words:.4f} of them trellis words")
        )
    return lines


def _experts(report: dict[str, Any]) -> str:
    layers = report["layers"]
    span = f"layer {layers[0]}"
    if len(layers) > 1:
        span = f"{len(layers)} layers ({layers[0]} to {layers[-1]})"
    sizes = stored = f"{report['hidden_size']} x {report['intermediate_size']}"
    if report["true_hidden_size"] is not None:
        sizes = f"{report['true_hidden_size']} x {report['true_intermediate_size']}"
    sizes += f" (padded to {stored})" if sizes != stored else ""
    parts = [f"{span} x {report['experts_per_layer']}", sizes]
    if report["topk"] is not None:
        parts.append(f"top-{report['topk']}")
    used = {act: count for act, count in (report["activations"] or {}).items() if count}
    parts += [act if len(used) == 1 else f"{act} {count:,}" for act, count in used.items()]
    return f"{', '.join(parts)}: {report['expert_weights']:,} weights"


def _byte_lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    total = report["bytes"]["total"]
    width = len(f"{total:,}")
    return [
        ("bytes", f"{total:,} in {report['files']:,} file{'s' * (report['files'] > 1)}"),
        *(
            ("", f"{report['bytes'][kind]:>{width},} {label}")
            for kind, label in BYTE_KINDS.items()
            if report["bytes"][kind]
        ),
    ]


def _error_lines(errors: dict[str, Any] | None) -> list[tuple[str, str]]:
    if errors is None:
        return []
    stated = [
        f"{matrix} {error['mean']:.5f} (max {error['max']:.5f})"
        for matrix, error in errors["nmse"].items()
    ]
    lines = [("NMSE", ", ".join(stated))]
    for number, item in enumerate(errors["worst"]):
        each = " ".join(f"{matrix} {item['nmse'][matrix]:.5f}" for matrix in MATRICES)
        where = f"layer {item['layer']} expert {item['expert']}"
        lines.append(("" if number else "worst", f"{where}: {each}"))
    if (functional := errors["functional_nmse"]) is not None:
        value = f"NMSE {functional['mean']:.5f} (max {functional['max']:.5f})"
        lines.append(("functional", f"{value} over {functional['experts']:,} experts"))
    if (tokens := errors["tokens"]) is not None:
        value = f"{tokens['total']:,}, {tokens['min']:,} to {tokens['max']:,} an expert"
        lines.append(("tokens", f"{value}, over {tokens['experts']:,} experts"))
    return lines


def origin_lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Whence it comes, in lines of a name and a value."""
    lines = []
    if (settings := report["encoder_settings"]) is not None:
        calibration = settings["calibration_sha256"] or "none"
        stated = [f"{settings['search']} search", f"modes {settings['modes']}"]
        stated += [f"hidden side of each {settings['hidden_side']}"]
        stated += [f"seed {settings['seed']}", f"damping {settings['damping']}"]
        stated += [f"calibration {calibration}", settings["device"]]
        versions = report["versions"].items()
        lines.append(("encoder", ", ".join(stated)))
        lines.append(("versions", ", ".join(f"{k} {v or 'none':.60}" for k, v in versions)))
    if (formats := report["source_format"]) is not None:
        text = f"experts {', '.join(formats['experts'])}"
        if formats["carried"]:
            how = {"bf16": "decoded to bf16", "stored": "kept so"}[formats["carried_as"]]
            text += f"; other tensors {', '.join(formats['carried'])}, {how}"
        lines.append(("made from", text))
    for name, key in (
        ("source", "source_sha256"),
        ("encoder id", "encoder_fingerprint"),
        ("producer id", "producer_fingerprint"),
        ("seal", "seal_sha256"),
    ):
        if report[key] is not None:
            lines.append((name, report[key]))
    return lines
