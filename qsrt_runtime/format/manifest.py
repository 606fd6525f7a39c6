"""The documents of a package and the cross-field rules that a schema cannot say.

Every rule about two fields, or two files, that must agree stands here, or in evidence.py where one
of them is a layer's evidence; what one field may hold stands in schemas/.
"""

from dataclasses import dataclass
from typing import Any

from qsrt_runtime.format import codebook, container, rates, schema, slab
from qsrt_runtime.format.container import Layer
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry, TrueSizes
from qsrt_runtime.format.paths import relative_name

MANIFEST = "qsrt-manifest.json"
CHECKSUMS = "MANIFEST.sha256"
MARKER = "QSRT_COMPLETE.json"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
CARD = "README.md"
REPORT = "qsrt-eval.json"
BENCH = "qsrt-bench.json"
ATTRIBUTES = ".gitattributes"
OF_PUSH = frozenset((CARD, REPORT, BENCH, ATTRIBUTES))  # what push adds to a package
REQUIRED_FILES = (CONFIG, INDEX, MANIFEST)
PRODUCER = "qsrt"
SOURCE_KIND = "safetensors_manifest"
STORAGE_FORMAT = "qsrt_atoms_v1"
# The file that config.json tells transformers to load. It is none, so that transformers stops and
# shows this, where it would start the experts at random.
TRANSFORMERS_WEIGHTS = "transformers_weights"
IMPORT_FIRST = "first import qsrt_runtime.integrations.transformers, then load this package"
# The key of our quantization_config under which the source's own stands, where the tensors that
# are no routed expert's are in the source's format.
DENSE_QUANTIZATION = "dense_quantization_config"
ACTIVATIONS = ("silu", "situ")
SITU_BETA = 4.0
SITU_LINEAR_BETA = 25.0
METHODS = ("qsrt", "modelopt")  # how convert's two loaders spell quant_method


@dataclass(frozen=True)
class Documents:
    """The parsed JSON files of a package, each checked against its schema."""

    config: dict[str, Any]
    manifest: dict[str, Any]
    marker: dict[str, Any]
    index: dict[str, Any]

    @property
    def is_ours(self) -> bool:
        return is_ours(self.manifest)

    @property
    def quantization(self) -> dict[str, Any]:
        return self.config["quantization_config"]


def is_ours(manifest: Any) -> bool:
    """Whether the strict schemas apply: producer.name is `qsrt`."""
    producer = manifest.get("producer") if isinstance(manifest, dict) else None
    return isinstance(producer, dict) and producer.get("name") == PRODUCER


def layer_file_name(layer: int) -> str:
    return f"qsrt-layer-{layer:03d}.safetensors"


def evidence_file_name(layer: int) -> str:
    return f"qsrt-layer-{layer:03d}.json"


def geometry_of(manifest: dict[str, Any]) -> Geometry:
    """The stored geometry that a checked manifest states."""
    fields = manifest["geometry"]
    return Geometry(fields["hidden_size"], fields["intermediate_size"], fields["experts_per_layer"])


def true_sizes_of(manifest: dict[str, Any]) -> TrueSizes:
    """The model's own sizes, which a checked manifest states where the stored ones are padded."""
    fields = manifest["geometry"]
    return TrueSizes(
        *(fields.get(f"true_{name}", fields[name]) for name in ("hidden_size", "intermediate_size"))
    )


def layers_of(manifest: dict[str, Any]) -> list[int]:
    return sorted(int(key) for key in manifest["layers"])


def same_by_layer(value: Any) -> Any:
    """A value of config.json, which some families state as a list by layer, all alike."""
    is_same = isinstance(value, list) and value and all(each == value[0] for each in value)
    return value[0] if is_same else value


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says of the text model: its `text_config`, if it has one, over the rest."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def descriptor(manifest: dict[str, Any]) -> dict[str, Any]:
    """The `qsrt` block of config.json that agrees with a manifest."""
    return {
        "artifact_manifest": MANIFEST,
        "codebook": manifest["codebook"],
        "encoding": manifest["encoding"],
        "encoder_fingerprint": manifest["producer"]["encoder"]["fingerprint"],
        "producer_fingerprint": manifest["producer"]["fingerprint"],
        "profile_id": manifest["profile_id"],
        "schema": manifest["storage_schema"],
        "storage_format": STORAGE_FORMAT,
        **manifest["source"],
    }


def activations(manifest: dict[str, Any], hidden_act: str | None, layer: int) -> list[str]:
    """The activation of every expert of a layer, `silu` or `situ`.

    hidden_act: the model's own, which a package made elsewhere falls back on.
    """
    entry = manifest["layers"][str(layer)]
    experts = entry["expert_count"]
    if "activation" in entry:
        stated = entry["activation"]["experts"]
        return [stated.get(str(e), entry["activation"]["default"]) for e in range(experts)]
    if hidden_act not in ACTIVATIONS:
        raise FormatError(
            f"{CONFIG}: hidden_act is {hidden_act!r}; an expert's activation is one of "
            f"{ACTIVATIONS}"
        )
    return [hidden_act] * experts


def encoder_fingerprint(settings: dict[str, Any]) -> str:
    """SHA-256 over every setting that can change a byte of a layer file."""
    return schema.digest(settings)


def producer_fingerprint(encoder: str, versions: dict[str, Any]) -> str:
    """SHA-256 over schema identifiers, encoder fingerprint and library versions."""
    identifiers = [container.FRUIT, STORAGE_FORMAT, container.ENCODING, codebook.NAME]
    return schema.digest({"schemas": identifiers, "encoder": encoder, "versions": versions})


def check_documents(documents: Documents, where: str) -> None:
    """Refuse documents that disagree with themselves or each other, naming the field."""
    _check_manifest(documents, f"{where}/{MANIFEST}")
    if documents.manifest["storage_schema"] == container.FRUIT:
        fields = documents.manifest["geometry"]
        counts = (fields["experts_per_layer"], fields["topk"])
        sizes = true_sizes_of(documents.manifest)
        said, at = f"{MANIFEST}'s geometry", f"{where}/{CONFIG}"
        check_config(text_config(documents.config), sizes, *counts, at, said)
    _check_descriptor(documents, f"{where}/{CONFIG}")
    _check_marker(documents, f"{where}/{MARKER}")
    _check_activations(documents, where)
    for tensor, name in documents.index["weight_map"].items():
        relative_name(name, f"{where}/{INDEX}: weight_map of {tensor}")
        if ".experts." in tensor:
            raise FormatError(f"{where}/{INDEX}: {tensor} is a routed expert's, which is packed")


def check_layer(layer: Layer, key: int, documents: Documents, where: str) -> None:
    """Refuse a layer file whose header disagrees with the manifest."""
    manifest = documents.manifest
    stated = {
        "schema": (layer.schema, manifest["storage_schema"]),
        "layer": (layer.layer, key),
        "experts": (layer.geometry.experts, manifest["geometry"]["experts_per_layer"]),
        "latent_channels": (layer.geometry.hidden, manifest["geometry"]["hidden_size"]),
        "intermediate_channels": (
            layer.geometry.intermediate,
            manifest["geometry"]["intermediate_size"],
        ),
    }
    if layer.schema == container.FRUIT:
        stated["source_sha256"] = (layer.source_sha256, manifest["source"]["source_sha256"])
        stated["encoder_fingerprint"] = (
            layer.encoder_fingerprint,
            manifest["producer"]["encoder"]["fingerprint"],
        )
    for field, (found, expected) in stated.items():
        require_equal(found, expected, field, where, MANIFEST)
    if (layer.format_codes == rates.X4T).any():
        expert = int((layer.format_codes == rates.X4T).nonzero()[0])
        slab.expert_modes(layer, expert)  # refuses X4T by name
    if layer.shared_scales[:, :, true_sizes_of(manifest).hidden :].any():
        raise FormatError(f"{where}: scales of padded hidden channels are not all 0")


def _check_manifest(documents: Documents, where: str) -> None:
    manifest = documents.manifest
    fields, entries = manifest["geometry"], manifest["layers"]
    geometry = geometry_of(manifest)
    require_equal(fields["layers"], layers_of(manifest), "geometry.layers", where, "layers")
    if fields["topk"] > fields["experts_per_layer"]:
        raise FormatError(
            f"{where}: geometry.topk is {fields['topk']}, more than experts_per_layer "
            f"{fields['experts_per_layer']}"
        )
    names: set[str] = set()
    for key, entry in entries.items():
        at = f"layers.{key}"
        require_equal(
            entry["expert_count"], geometry.experts, f"{at}.expert_count", where, "geometry"
        )
        for field in ("qsrt_atoms", "evidence"):
            name = relative_name(entry[field], f"{where}: {at}.{field}")
            if name in names:
                raise FormatError(f"{where}: {at}.{field}: {name} is named twice")
            names.add(name)
        if "x4t" in entry:
            raise FormatError(f"{where}: {at}.x4t: X4T experts are not read by this version")
    if documents.is_ours:
        _check_own_manifest(manifest, geometry, where)


def _check_own_manifest(manifest: dict[str, Any], geometry: Geometry, where: str) -> None:
    fields, producer = manifest["geometry"], manifest["producer"]
    _check_true_sizes(fields, geometry, where)
    encoder = producer["encoder"]
    fingerprint = encoder_fingerprint(encoder["settings"])
    derived = {
        "geometry.profile": (fields["profile"], geometry.profile),
        "geometry.atom_slots": (fields["atom_slots"], geometry.slots),
        "geometry.atoms_per_expert": (fields["atoms_per_expert"], geometry.atoms_per_expert),
        "producer.encoder.settings.package": (
            encoder["settings"]["package"],
            producer["versions"]["qsrt"],
        ),
        "source.source_kind": (manifest["source"]["source_kind"], SOURCE_KIND),
        "producer.encoder.fingerprint": (encoder["fingerprint"], fingerprint),
        "producer.fingerprint": (
            producer["fingerprint"],
            producer_fingerprint(fingerprint, producer["versions"]),
        ),
    }
    for key, entry in manifest["layers"].items():
        size = container.layer_file_bytes(geometry, int(key))
        derived[f"layers.{key}.bytes"] = (entry["bytes"], size)
        derived[f"layers.{key}.qsrt_atoms"] = (entry["qsrt_atoms"], layer_file_name(int(key)))
        derived[f"layers.{key}.evidence"] = (entry["evidence"], evidence_file_name(int(key)))
        for expert in entry["activation"]["experts"]:
            if int(expert) >= geometry.experts:
                raise FormatError(
                    f"{where}: layers.{key}.activation names expert {expert} of {geometry.experts}"
                )
    for field, (found, expected) in derived.items():
        require_equal(found, expected, field, where, "what it follows from")


def _check_true_sizes(fields: dict[str, Any], geometry: Geometry, where: str) -> None:
    """True sizes are stated where the stored ones are padded, and these follow from them."""
    true = true_sizes_of({"geometry": fields})
    expected = true.padded(geometry.experts)
    for name, found, stored, size in (
        ("hidden_size", true.hidden, expected.hidden, geometry.hidden),
        ("intermediate_size", true.intermediate, expected.intermediate, geometry.intermediate),
    ):
        if stored != size:
            raise FormatError(
                f"{where}: geometry.true_{name} is {found}, which is stored as {stored}; "
                f"geometry.{name} is {size}"
            )
    if "true_hidden_size" in fields and not true.is_padded:
        raise FormatError(
            f"{where}: geometry.true_hidden_size and true_intermediate_size are stated though "
            "nothing is padded"
        )


def check_config(
    config: dict[str, Any],
    sizes: TrueSizes,
    experts: int,
    topk: int,
    where: str,
    said: str = "the weights",
) -> None:
    """Refuse a config.json whose sizes, under their usual names, are not those packed.

    said: names in the error what says the sizes.
    """
    stated = {
        "hidden_size": sizes.hidden,
        "moe_intermediate_size": sizes.intermediate,
        "num_experts": experts,
        "num_local_experts": experts,
        "n_routed_experts": experts,
        "num_experts_per_tok": topk,
    }
    for key, expected in stated.items():
        found = config.get(key)
        if isinstance(found, list) and len(found) == config.get("num_hidden_layers"):
            found = same_by_layer(found)
        if found is not None and type(found) is not int:  # 128.0 and True are equal to integers
            raise FormatError(f"{where}: {key} is {found!r}, expected an integer")
        if found is not None:
            require_equal(found, expected, key, where, said)


def _check_descriptor(documents: Documents, where: str) -> None:
    quantization, manifest = documents.quantization, documents.manifest
    block = quantization["qsrt"]
    for field, expected in descriptor(manifest).items():
        require_equal(block[field], expected, f"quantization_config.qsrt.{field}", where, MANIFEST)
    carried_as = manifest.get("source_format", {}).get("carried_as", "bf16")
    if (DENSE_QUANTIZATION in quantization) != (carried_as == "stored"):
        raise FormatError(
            f"{where}: quantization_config.{DENSE_QUANTIZATION} stands there if and only if the "
            f"manifest's source_format.carried_as is stored, which is {carried_as}"
        )
    bit_map = quantization["hybrid_bit_map"]
    at = "quantization_config.hybrid_bit_map"
    require_equal(sorted(map(int, bit_map)), layers_of(manifest), at, where, MANIFEST)
    for key, bits in bit_map.items():
        experts = manifest["layers"][key]["expert_count"]
        require_equal(len(bits), experts, f"{at}.{key}", where, MANIFEST)
        if 4 in bits:
            raise FormatError(
                f"{where}: {at}.{key} keeps expert {bits.index(4)} exact (X4T), "
                "which this version does not read"
            )


def _check_activations(documents: Documents, where: str) -> None:
    """The default activation is the model's own; SiTU has the parameters that the format fixes."""
    config, used = text_config(documents.config), set()
    for layer in layers_of(documents.manifest):
        used |= set(activations(documents.manifest, config.get("hidden_act"), layer))
        entry = documents.manifest["layers"][str(layer)]
        if "activation" in entry and config.get("hidden_act") is not None:
            at = f"layers.{layer}.activation.default"
            default = entry["activation"]["default"]
            require_equal(default, config.get("hidden_act"), at, f"{where}/{MANIFEST}", CONFIG)
    if "situ" in used:
        for key, expected in (
            ("activation_situ_beta", SITU_BETA),
            ("activation_situ_linear_beta", SITU_LINEAR_BETA),
        ):
            require_equal(config.get(key, expected), expected, key, f"{where}/{CONFIG}", "SiTU")


def _check_marker(documents: Documents, where: str) -> None:
    marker, manifest = documents.marker, documents.manifest
    stated = {
        "source.kind": (marker["source"]["kind"], manifest["source"]["source_kind"]),
        "source.sha256": (marker["source"]["sha256"], manifest["source"]["source_sha256"]),
        "base_manifest_sha256": (
            marker["base_manifest_sha256"],
            manifest["base_model"]["manifest_sha256"],
        ),
        "producer_fingerprint": (
            marker["producer_fingerprint"],
            manifest["producer"]["fingerprint"],
        ),
        "encoder_fingerprint": (
            marker["encoder_fingerprint"],
            manifest["producer"]["encoder"]["fingerprint"],
        ),
    }
    for field, (found, expected) in stated.items():
        require_equal(found, expected, field, where, MANIFEST)


def require_equal(found: Any, expected: Any, field: str, where: str, source: str) -> None:
    """FormatError where a field of `where` is not what `source` says it is."""
    if found != expected:
        raise FormatError(f"{where}: {field} is {found!r}, {source} says {expected!r}")
