import hashlib
import json
from pathlib import Path

import pytest

from qsrt_runtime.format import schema
from qsrt_runtime.format.errors import FormatError

NAMES = sorted(
    path.name.removesuffix(".schema.json")
    for path in (Path(__file__).parents[3] / "schemas").glob("*.schema.json")
)
INTEGER = [
    "NaN",
    "Infinity",
    "1e999",
    '"4"',
    "true",
    "1.5",
    "4.0",
    "-1",
    str(1 << 63),
    "null",
    "[]",
    "{}",
    "[" * 500 + "]" * 500,
]


@pytest.fixture
def manifest(golden):
    return json.loads((golden / "publication/qsrt-manifest.json").read_text())


def with_literal(value, literal):
    """JSON text of a value in which the string "@" is replaced by a literal."""
    return json.dumps(value).replace('"@"', literal)


def refused(text, name, *parts):
    with pytest.raises(FormatError) as caught:
        schema.check(schema.parse(text, "file.json"), name, "file.json")
    message = str(caught.value)
    assert message.startswith("file.json: ")
    assert len(message) < 400
    for part in parts:
        assert part in message


def test_schemas_are_found():
    assert "manifest" in NAMES
    assert "published-manifest" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_load(name):
    assert schema.load(name)["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_unknown_schema():
    with pytest.raises(FileNotFoundError, match=r"nothing\.schema\.json"):
        schema.load("nothing")


def test_good_manifest(manifest):
    schema.check(manifest, "published-manifest", "file.json")


@pytest.mark.parametrize("literal", INTEGER, ids=lambda text: text[:20])
def test_refused_integers(manifest, literal):
    manifest["geometry"]["experts_per_layer"] = "@"
    text = with_literal(manifest, literal)
    refused(text, "published-manifest", "$.geometry.experts_per_layer: ")


@pytest.mark.parametrize("literal", [x for x in INTEGER if x != "4.0"], ids=lambda x: x[:20])
def test_refused_constants(manifest, literal):
    manifest["version"] = "@"
    refused(with_literal(manifest, literal), "published-manifest", "$.version: 1 was expected")


@pytest.mark.parametrize("key", ["version", "profile_id"])
def test_constants_are_integers(manifest, key):
    manifest[key] = 1.0
    refused(json.dumps(manifest), "published-manifest", f"$.{key}: ")


def test_higher_version_is_named(manifest):
    manifest["version"] = 2
    refused(json.dumps(manifest), "published-manifest", "$.version: 1 was expected, found 2")


@pytest.mark.parametrize(
    "literal", ["NaN", "-Infinity", "1e999", f"1{400 * '0'}", '"4"', "true", "-0.5", "null"]
)
def test_refused_numbers(clean_package, literal):
    value = json.loads((clean_package / "qsrt-manifest.json").read_text())
    value["producer"]["encoder"]["settings"]["damping"] = "@"
    at = "$.producer.encoder.settings.damping: "
    refused(with_literal(value, literal), "manifest", at)


@pytest.mark.parametrize(
    "digest", ['""', '"a"', f'"{"A" * 64}"', f'"{"a" * 65}"', f'"{"g" * 64}"', "1", "null"]
)
def test_refused_digests(manifest, digest):
    manifest["base_model"]["manifest_sha256"] = "@"
    text = with_literal(manifest, digest)
    refused(text, "published-manifest", "$.base_model.manifest_sha256: ")


def test_digest_with_a_newline(manifest):
    manifest["base_model"]["manifest_sha256"] = "a" * 64 + "\n"
    refused(json.dumps(manifest), "published-manifest", "$.base_model.manifest_sha256: ")


@pytest.mark.parametrize(
    ("path", "at"),
    [
        ((), "$"),
        (("geometry",), "$.geometry"),
        (("layers", "5"), "$.layers['5']"),
        (("source",), "$.source"),
    ],
)
def test_unknown_and_missing_keys(manifest, path, at):
    def item(value):
        for key in path:
            value = value[key]
        return value

    for key in item(manifest):
        damaged = json.loads(json.dumps(manifest))
        del item(damaged)[key]
        where = f"{at}: '{key}' is a required property"
        refused(json.dumps(damaged), "published-manifest", where)
    item(manifest)["unheard_of"] = 1
    refused(json.dumps(manifest), "published-manifest", f"{at}: ", "unheard_of")


def test_layer_key(manifest):
    for key in ("-1", "05", "5.0", "x", "", "1000000"):
        damaged = manifest | {"layers": {key: manifest["layers"]["5"]}}
        refused(json.dumps(damaged), "published-manifest", "$.layers: ")


@pytest.mark.parametrize("depth", [10_000, 1_000_000])
@pytest.mark.parametrize("field", ["version", "evaluation"])
def test_nested_too_deep(manifest, field, depth):
    manifest[field] = "@"
    text = with_literal(manifest, "[" * depth + "]" * depth)
    refused(text, "published-manifest", "JSON nested too deep")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("{}x", "Extra data"),
        ("{'a': 1}", "Expecting property name"),
        (b"\xff", "file.json: not valid JSON"),
        (b'{"a": "\xff"}', "file.json: not valid JSON"),
        ('{"a": 1, "b": {"c": 1, "c": 1}}', "key 'c' stands twice"),
        ('{"a": 1, "\\u0061": 2}', "key 'a' stands twice"),
        ('{"a": ' + "1" * 5000 + "}", "file.json: not valid JSON"),
    ],
)
def test_refused_text(text, part):
    with pytest.raises(FormatError, match=part):
        schema.parse(text, "file.json")


def test_read(tmp_path, manifest):
    path = tmp_path / "value.json"
    with pytest.raises(FormatError, match=f"{path} is missing"):
        schema.read(path)
    path.write_text('{"a": 1}')
    assert schema.read(path) == {"a": 1}
    with pytest.raises(FormatError, match=rf"{path}: \$: "):
        schema.read(path, "published-manifest")
    path.write_bytes(schema.dump(manifest))
    assert schema.read(path, "published-manifest") == manifest


def test_dump():
    value = {"b": [1, 2.5], "a": {"z": None, "y": "ü"}}
    expected = (
        '{\n  "a": {\n    "y": "ü",\n    "z": null\n  },\n  "b": [\n    1,\n    2.5\n  ]\n}\n'
    )
    assert schema.dump(value) == expected.encode()


def test_golden_documents_are_dumps(golden):
    for path in sorted((golden / "publication").glob("*.json")):
        assert schema.dump(schema.read(path)) == path.read_bytes()


def test_digest():
    text = '{"a":{"y":"ü","z":null},"b":[1,2.5]}'
    value = {"b": [1, 2.5], "a": {"z": None, "y": "ü"}}
    assert schema.digest(value) == hashlib.sha256(text.encode()).hexdigest()
    assert schema.digest({}) == hashlib.sha256(b"{}").hexdigest()


@pytest.mark.parametrize("write", [schema.dump, schema.digest])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_json_cannot_say_is_not_written(write, value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write({"a": value})
