import copy
import dataclasses
import hashlib
import json

import pytest

from qsrt_runtime.format import container, schema
from qsrt_runtime.format import manifest as manifests
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.format.manifest import Documents
from qsrt_runtime.format.package import open_package, read_package_layer

OTHER = "0123456789abcdef" * 4
BAD_NAMES = [
    "../other/model.safetensors",
    "/abs/x.safetensors",
    "sub/../../x.safetensors",
    "..\\x.safetensors",
    "C:\\x.safetensors",
    "x\0.safetensors",
    "",
    5,
]


@pytest.fixture(scope="module")
def published(golden):
    return open_package(golden / "publication")


@pytest.fixture(scope="module")
def ours(clean_package):
    return open_package(clean_package)


@pytest.fixture
def documents(ours):
    return copy.deepcopy(ours.documents)


@pytest.fixture
def theirs(published):
    return copy.deepcopy(published.documents)


def change(value, path, new):
    """Set the field at a path of keys."""
    *parents, last = path
    for key in parents:
        value = value[key]
    value[last] = new


def refused(documents, *parts):
    with pytest.raises(FormatError) as caught:
        manifests.check_documents(documents, "folder")
    for part in ("folder/", *parts):
        assert part in str(caught.value)


def test_good_documents(documents, theirs):
    manifests.check_documents(documents, "folder")
    manifests.check_documents(theirs, "folder")
    assert documents.is_ours
    assert not theirs.is_ours
    assert documents.quantization["quant_method"] == "qsrt"


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        ({"producer": {"name": "qsrt"}}, True),
        ({"producer": {"name": "other"}}, False),
        ({"producer": {}}, False),
        ({"producer": "qsrt"}, False),
        ({}, False),
        (["producer"], False),
        (None, False),
    ],
)
def test_is_ours(manifest, expected):
    assert manifests.is_ours(manifest) is expected


def test_names_and_sizes(documents, theirs):
    assert manifests.layer_file_name(5) == "qsrt-layer-005.safetensors"
    assert manifests.evidence_file_name(1234) == "qsrt-layer-1234.json"
    assert manifests.geometry_of(documents.manifest) == Geometry(128, 256, 4)
    assert manifests.geometry_of(theirs.manifest) == Geometry(1024, 512, 4)
    assert manifests.layers_of({"layers": {"10": 0, "9": 0, "0": 0}}) == [0, 9, 10]


def test_descriptor_of_golden_config(theirs):
    expected = dict(theirs.quantization["qsrt"])
    del expected["runtime"]  # a choice of the published loader
    assert manifests.descriptor(theirs.manifest) == expected


def test_activations(documents, theirs):
    assert manifests.activations(theirs.manifest, "situ", 5) == ["situ"] * 4
    documents.manifest["layers"]["1"]["activation"] = {"default": "situ", "experts": {"2": "silu"}}
    assert manifests.activations(documents.manifest, "gelu", 0) == ["silu"] * 4
    found = manifests.activations(documents.manifest, "gelu", 1)
    assert found == ["situ", "situ", "silu", "situ"]


@pytest.mark.parametrize("hidden_act", ["gelu", "SiLU", "", None, 1])
def test_unknown_activation(theirs, hidden_act):
    with pytest.raises(FormatError, match=r"config\.json: hidden_act is"):
        manifests.activations(theirs.manifest, hidden_act, 5)


def test_fingerprints(documents):
    settings = {"seed": 0, "search": "fast"}
    text = b'{"search":"fast","seed":0}'
    encoder = manifests.encoder_fingerprint(settings)
    assert encoder == hashlib.sha256(text).hexdigest()
    versions = documents.manifest["producer"]["versions"]
    found = manifests.producer_fingerprint(encoder, versions)
    assert found != manifests.producer_fingerprint(encoder, versions | {"torch": "0"})
    assert found != manifests.producer_fingerprint(OTHER, versions)


@pytest.mark.parametrize(
    ("path", "new", "field"),
    [
        (("geometry", "layers"), [0], "geometry.layers"),
        (("geometry", "layers"), [0, 2], "geometry.layers"),
        (("geometry", "layers"), [1, 0], "geometry.layers"),
        (("geometry", "experts_per_layer"), 5, "expert_count"),
        (("geometry", "topk"), 5, "geometry.topk"),
        (("geometry", "atom_slots"), 16, "geometry.atom_slots"),
        (("geometry", "atoms_per_expert"), 96, "geometry.atoms_per_expert"),
        (("geometry", "profile"), "fruit", "geometry.profile"),
        (("geometry", "hidden_size"), 256, "layers.0.bytes"),
        (("geometry", "intermediate_size"), 512, "geometry.atom_slots"),
        (("source", "source_kind"), "other", "source.source_kind"),
        (("source", "source_sha256"), OTHER, "qsrt.source_sha256"),
        (("base_model", "manifest_sha256"), OTHER, "base_manifest_sha256"),
        (("producer", "fingerprint"), OTHER, "producer.fingerprint"),
        (("producer", "versions", "torch"), "1.0", "producer.fingerprint"),
        (("producer", "encoder", "fingerprint"), OTHER, "producer.encoder.fingerprint"),
        (("producer", "encoder", "settings", "seed"), 1, "producer.encoder.fingerprint"),
        (("producer", "encoder", "settings", "search"), "exact", "producer.encoder.fingerprint"),
        (("layers", "1", "bytes"), 173049, "layers.1.bytes"),
        (("layers", "1", "expert_count"), 3, "layers.1.expert_count"),
        (("layers", "1", "qsrt_atoms"), "x.safetensors", "layers.1.qsrt_atoms"),
        (("layers", "1", "qsrt_atoms"), "qsrt-layer-000.safetensors", "layers.1.qsrt_atoms"),
        (("layers", "1", "evidence"), "x.json", "layers.1.evidence"),
        (("layers", "1", "activation", "experts"), {"4": "silu"}, "layers.1.activation"),
    ],
)
def test_manifest_fields(documents, path, new, field):
    change(documents.manifest, path, new)
    refused(documents, field)


@pytest.mark.parametrize(
    ("path", "new", "field"),
    [
        (("geometry", "layers"), [6], "geometry.layers"),
        (("geometry", "experts_per_layer"), 5, "layers.5.expert_count"),
        (("geometry", "topk"), 5, "geometry.topk"),
        (("layers", "5", "expert_count"), 5, "layers.5.expert_count"),
        (("layers", "5", "evidence"), "qsrt-layer-005.safetensors", "layers.5.evidence"),
        (("layers", "5", "x4t"), "x.safetensors", "layers.5.x4t: X4T"),
        (("source", "source_kind"), "other", "source_kind"),
        (("producer", "fingerprint"), OTHER, "producer_fingerprint"),
        (("producer", "encoder", "fingerprint"), OTHER, "encoder_fingerprint"),
        (("storage_schema",), "kquant_kimi_k3_qsrt_atoms_v1", "schema"),
    ],
)
def test_published_manifest_fields(theirs, path, new, field):
    change(theirs.manifest, path, new)
    refused(theirs, field)


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("field", ["qsrt_atoms", "evidence"])
def test_names_in_the_manifest(theirs, name, field):
    theirs.manifest["layers"]["5"][field] = name
    refused(theirs, f"layers.5.{field}", repr(name))


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_in_the_index(documents, name):
    documents.index["weight_map"]["lm_head.weight"] = name
    refused(documents, "weight_map of lm_head.weight", repr(name))


def test_routed_experts_in_the_index(documents, theirs):
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    theirs.index["weight_map"][name] = "x.safetensors"
    documents.index["weight_map"][name] = "x.safetensors"
    for either in (documents, theirs):
        refused(either, name, "routed expert")


@pytest.mark.parametrize(
    "field",
    [
        *("artifact_manifest", "codebook", "encoding", "encoder_fingerprint"),
        *("producer_fingerprint", "profile_id", "schema", "storage_format"),
        *("source_kind", "source_sha256"),
    ],
)
def test_descriptor_fields(documents, theirs, field):
    for value in (documents, theirs):
        value.quantization["qsrt"][field] = "other"
        refused(value, "config.json", f"quantization_config.qsrt.{field}")


@pytest.mark.parametrize(
    ("bit_map", "part"),
    [
        ({"0": [3] * 4}, "hybrid_bit_map"),
        ({"0": [3] * 4, "2": [3] * 4}, "hybrid_bit_map"),
        ({"0": [3] * 4, "1": [3] * 4, "2": [3] * 4}, "hybrid_bit_map"),
        ({"0": [3] * 4, "1": [3] * 5}, "hybrid_bit_map.1"),
        ({"0": [3] * 4, "1": [3, 3, 4, 3]}, "hybrid_bit_map.1 keeps expert 2 exact (X4T)"),
    ],
)
def test_bit_map(documents, bit_map, part):
    documents.quantization["hybrid_bit_map"] = bit_map
    refused(documents, "config.json", part)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (("source", "kind"), "source.kind"),
        (("source", "sha256"), "source.sha256"),
        (("base_manifest_sha256",), "base_manifest_sha256"),
        (("producer_fingerprint",), "producer_fingerprint"),
        (("encoder_fingerprint",), "encoder_fingerprint"),
    ],
)
def test_marker_fields(documents, path, field):
    change(documents.marker, path, OTHER)
    refused(documents, "QSRT_COMPLETE.json", field)


@pytest.mark.parametrize(
    ("field", "new"),
    [
        ("layer", 6),
        ("source_sha256", OTHER),
        ("encoder_fingerprint", OTHER),
        ("schema", container.KIMI),
        ("experts", Geometry(1024, 512, 5)),
        ("latent_channels", Geometry(2048, 512, 4)),
        ("intermediate_channels", Geometry(1024, 768, 4)),
    ],
)
def test_layer_that_is_another(published, field, new):
    layer = read_package_layer(published, 5)
    manifests.check_layer(layer, 5, published.documents, "file")
    key = "geometry" if isinstance(new, Geometry) else field
    other = dataclasses.replace(layer, **{key: new})
    with pytest.raises(FormatError, match=f"file: {field} is "):
        manifests.check_layer(other, 5, published.documents, "file")


def test_layer_with_an_exact_expert(published):
    layer = read_package_layer(published, 5)
    codes = layer.format_codes.clone()
    codes[2] = 0xFF
    other = dataclasses.replace(layer, format_codes=codes)
    with pytest.raises(FormatError, match="expert 2 is an X4T expert"):
        manifests.check_layer(other, 5, published.documents, "file")


@pytest.mark.parametrize("place", ["layers", "bit map", "activation"])
def test_keys_with_a_newline(documents, place):
    if place == "activation":
        documents.manifest["layers"]["1"]["activation"]["experts"] = {"2\n": "situ"}
    else:
        parent = documents.manifest if place == "layers" else documents.quantization
        entries = parent["layers" if place == "layers" else "hybrid_bit_map"]
        entries["1\n"] = entries.pop("1")
    with pytest.raises(FormatError):
        schema.check(documents.manifest, "manifest", "file")
        schema.check(documents.quantization, "descriptor", "file")
        manifests.check_documents(documents, "folder")


def test_documents_are_frozen(documents):
    with pytest.raises(dataclasses.FrozenInstanceError):
        documents.manifest = {}
    assert json.dumps(dataclasses.asdict(documents))
    assert isinstance(documents, Documents)
