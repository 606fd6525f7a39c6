"""What the documents of a package say, with every checksum redone."""

import copy
import json
import re

import pytest
from checkpoints import edit_json

from qsrt_runtime.format import paths
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.package import open_package

CONFIG, INDEX, MANIFEST = "config.json", "model.safetensors.index.json", "qsrt-manifest.json"
CHECKSUMS, MARKER = "MANIFEST.sha256", "QSRT_COMPLETE.json"
LAYERS = ["qsrt-layer-000.safetensors", "qsrt-layer-001.safetensors"]
EVIDENCE = "qsrt-layer-000.json"
OTHER = "0123456789abcdef" * 4


def another(leaf):
    """A value of the same type, and of the same shape where it is a digest."""
    if isinstance(leaf, bool):
        return not leaf
    if isinstance(leaf, int | float):
        return leaf + 1
    if leaf is None:
        return "x"
    return OTHER if re.fullmatch("[0-9a-f]{64}", leaf) else leaf + "x"


def nodes(value, path=()):
    """(path, value) of everything in a document, of the first item alone in an array."""
    yield path, value
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = list(enumerate(value))[:1]
    for key, item in items:
        yield from nodes(item, (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def changed(document):
    """(path, document with this one leaf changed)."""
    for path, leaf in nodes(document):
        if not isinstance(leaf, dict | list):
            value = copy.deepcopy(document)
            at(value, path[:-1])[path[-1]] = another(leaf)
            yield path, value


def lacking(document):
    """(path, document without this key)."""
    for path, _ in nodes(document):
        if path and isinstance(path[-1], str):
            value = copy.deepcopy(document)
            del at(value, path[:-1])[path[-1]]
            yield path, value


def enlarged(document):
    """(path, document with a key `unheard_of` in this object)."""
    for path, node in nodes(document):
        if isinstance(node, dict):
            value = copy.deepcopy(document)
            at(value, path)["unheard_of"] = 1
            yield (*path, "unheard_of"), value


def field_named(path, message):
    """Whether an error names the field, or the fingerprint that covers it."""
    keys = [key for key in path if isinstance(key, str) and not key.isdigit()]
    if "settings" in path or "versions" in path:
        keys.append("fingerprint")
    return any(key in message for key in keys[-2:])


def sweep(read_all, folder, name, edits, resealing, inside=None):
    """{path: what was said} of those edits of a document not refused by the field's name."""
    file = folder / name
    original = json.loads(file.read_text())
    document = original if inside is None else original[inside]
    found = {}
    for path, value in edits(document):
        file.write_text(json.dumps(value if inside is None else original | {inside: value}))
        resealing(folder)
        said = "accepted"
        try:
            read_all(folder)
        except FormatError as error:
            said = str(error).replace(str(file), "")
        if not field_named(path, said):
            found[".".join(map(str, path))] = said
    return found


def test_changed_manifest(package, reseal_listing, read_all):
    found = sweep(read_all, package, MANIFEST, changed, reseal_listing)
    assert list(found) == ["producer.name", "producer.versions.qsrt"]
    assert (
        "('activation_parameters', 'expert_tensors' were unexpected)" in found["producer.name"]
    )  # read as another's
    assert "producer.encoder.settings.package is" in found["producer.versions.qsrt"]


def test_manifest_without_a_key(package, reseal_listing, read_all):
    found = sweep(read_all, package, MANIFEST, lacking, reseal_listing)
    assert list(found) == ["producer.name"]
    assert "('activation_parameters', 'expert_tensors' were unexpected)" in found["producer.name"]


def test_manifest_with_a_key_more(package, reseal_listing, read_all):
    assert sweep(read_all, package, MANIFEST, enlarged, reseal_listing) == {}


@pytest.mark.parametrize("edits", [changed, enlarged])
def test_config_sweep(package, reseal_listing, edits, read_all):
    found = sweep(read_all, package, CONFIG, edits, reseal_listing, inside="quantization_config")
    assert found == {}


def test_config_without_a_key(package, reseal_listing, read_all):
    found = sweep(read_all, package, CONFIG, lacking, reseal_listing, inside="quantization_config")
    assert list(found) == []


def test_config_without_a_method(package, reseal_listing, refused):
    edit_json(package / CONFIG, lambda value: value["quantization_config"].pop("quant_method"))
    reseal_listing(package)
    refused(package, "'quant_method' is a required property")


def test_changed_marker(package, read_all):
    found = sweep(read_all, package, MARKER, changed, lambda folder: None)
    digests = {"checksum": CHECKSUMS, "package": MANIFEST, "model": INDEX}
    assert sorted(found) == sorted(
        ["checksum_manifest_sha256", "package_manifest_sha256", "model_index_sha256"]
    )
    for field, said in found.items():
        assert digests[field.split("_")[0]] in said


@pytest.mark.parametrize("edits", [lacking, enlarged])
def test_marker_keys(package, edits, read_all):
    assert sweep(read_all, package, MARKER, edits, lambda folder: None) == {}


def test_changed_evidence(package, reseal_listing, read_all):
    found = sweep(read_all, package, EVIDENCE, changed, reseal_listing)
    measured = [f"experts.0.{kind}.{n}" for kind in ("nmse", "rms") for n in ("w1", "w2", "w3")]
    assert found == dict.fromkeys(["experts.0.fallback", *measured], "accepted")


@pytest.mark.parametrize("edits", [lacking, enlarged])
def test_evidence_keys(package, reseal_listing, edits, read_all):
    assert sweep(read_all, package, EVIDENCE, edits, reseal_listing) == {}


@pytest.mark.parametrize("literal", ["-1", "1e999", "1.5", '"4"', "true", "NaN", str(1 << 63)])
@pytest.mark.parametrize("field", ["experts_per_layer", "hidden_size", "topk", "atom_slots"])
def test_numbers_of_the_manifest(package, reseal_listing, field, literal, refused):
    path = package / MANIFEST
    edit_json(path, lambda manifest: manifest["geometry"].update({field: "@"}))
    path.write_text(path.read_text().replace('"@"', literal))
    reseal_listing(package)
    refused(package, f"{MANIFEST}: $.geometry.{field}: ")


@pytest.mark.parametrize("name", [MANIFEST, CONFIG, INDEX, MARKER, EVIDENCE])
@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "not valid JSON"),
        ("[]", ""),
        ("null", ""),
        ("{}", ""),
        ('{"a": 1, "a": 1}', "stands twice"),
        ('{"a": ' + "[" * 10_000 + "]" * 10_000 + "}", "nested too deep"),
    ],
)
def test_documents_that_are_none(package, name, text, part, refused, relist):
    """Checksums are redone by hand, since the usual helper reads the documents."""
    (package / name).write_text(text)
    if name != MARKER:
        digest = paths.sha256_file(package / name)
        relist(
            package, lambda listing: re.sub(f"(?m)^.{{64}}  {name}$", f"{digest}  {name}", listing)
        )
        field = {MANIFEST: "package_manifest_sha256", INDEX: "model_index_sha256"}.get(name)
        if field:
            edit_json(package / MARKER, lambda marker: marker.update({field: digest}))
    refused(package, name, part)


def test_layer_twice(package, reseal_listing, refused, relist):
    manifest = package / MANIFEST
    manifest.write_text(manifest.read_text().replace('"1": {', '"0": {'))
    digest = paths.sha256_file(manifest)
    relist(
        package, lambda listing: re.sub(rf"(?m)^.*  {MANIFEST}$", f"{digest}  {MANIFEST}", listing)
    )
    edit_json(package / MARKER, lambda marker: marker.update(package_manifest_sha256=digest))
    refused(package, MANIFEST, "key '0' stands twice")


def test_one_expert_more_everywhere(package, reseal, refused):
    def more(manifest):
        manifest["geometry"]["experts_per_layer"] = 5
        for entry in manifest["layers"].values():
            entry["expert_count"] = 5

    edit_json(package / MANIFEST, more)
    edit_json(
        package / CONFIG,
        lambda config: config["quantization_config"].update(
            hybrid_bit_map={"0": [3] * 5, "1": [3] * 5}
        ),
    )
    reseal(package)
    refused(package, MANIFEST, "layers.0.bytes")


@pytest.mark.parametrize(
    ("field", "value", "stated"),
    [
        ("experts_per_layer", 5, "experts"),
        ("hidden_size", 2048, "latent_channels"),
        ("intermediate_size", 256, "intermediate_channels"),
    ],
)
def test_geometry_that_the_layer_file_denies(publication, reseal, field, value, stated, refused):
    def edit(manifest):
        manifest["geometry"][field] = value
        if field == "experts_per_layer":
            manifest["layers"]["5"]["expert_count"] = value

    edit_json(publication / MANIFEST, edit)
    sizes = ("hidden_size", "moe_intermediate_size", "n_routed_experts")
    edit_json(publication / CONFIG, lambda config: [config.pop(size) for size in sizes])
    if field == "experts_per_layer":
        edit_json(
            publication / CONFIG,
            lambda config: config["quantization_config"].update(hybrid_bit_map={"5": [3] * value}),
        )
        edit_json(
            publication / "qsrt-layer-005.json",
            lambda evidence: evidence.update(expert_count=value, expert_ids=list(range(value))),
        )
    reseal(publication)
    refused(publication, "qsrt-layer-005.safetensors", f"{stated} is ", str(value))


def test_our_additions_in_a_published_package(publication, reseal, refused):
    added = {"true_hidden_size": 1000, "true_intermediate_size": 500}
    for key, value in added.items():
        edit_json(publication / MANIFEST, lambda m, k=key, v=value: m["geometry"].update({k: v}))
        reseal(publication)
        refused(publication, MANIFEST, "$.geometry", key)
        edit_json(publication / MANIFEST, lambda m, k=key: m["geometry"].pop(k))
    activation = {"default": "silu", "experts": {}}
    edit_json(publication / MANIFEST, lambda m: m["layers"]["5"].update(activation=activation))
    reseal(publication)
    refused(publication, MANIFEST, "$.layers['5']", "activation")


def test_scale_that_is_nan_with_checksums_redone(package, reseal, refused):
    path = package / LAYERS[1]
    data = bytearray(path.read_bytes())
    scale = len(data) - 8 * 20480 + 36 * 128  # slot 0, expert 0, the first of w1.svh
    data[scale : scale + 2] = b"\xff\x7f"
    path.write_bytes(data)
    digest = paths.sha256_file(path)
    evidence = package / "qsrt-layer-001.json"
    edit_json(evidence, lambda value: value.update(safetensors_sha256=digest))
    reseal(package)
    refused(package, LAYERS[1], "not finite")


@pytest.mark.parametrize(("field", "value"), [("sha256", OTHER), ("bytes", 173_047)])
def test_layer_entry_is_checked_on_opening(publication, reseal_listing, field, value):
    edit_json(publication / MANIFEST, lambda m: m["layers"]["5"].update({field: value}))
    reseal_listing(publication)
    with pytest.raises(FormatError, match=rf"layers\.5\.{field} is "):
        open_package(publication)


@pytest.mark.parametrize("value", [128.0, "128", True, [128, 256], [128]])
def test_sizes_in_config_are_integers(package, reseal, value):
    edit_json(package / "config.json", lambda config: config.update(hidden_size=value))
    reseal(package)
    with pytest.raises(FormatError, match=r"config\.json: hidden_size is .*, expected an integer"):
        open_package(package)
