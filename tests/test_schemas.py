"""The schemas: valid drafts, closed for what we write, and at one with the constants in code."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from qsrt_pack.source import models
from qsrt_pack.source.architectures import ARCHITECTURES
from qsrt_runtime.format import codebook, container, geometry, manifest

SCHEMAS = Path(__file__).parents[1] / "schemas"
NAMES = sorted(path.name for path in SCHEMAS.glob("*.schema.json"))


def _load(name: str) -> dict:
    return json.loads((SCHEMAS / name).read_text())


def _objects(schema: object) -> list[dict]:
    found = []
    if isinstance(schema, dict):
        if schema.get("type") == "object" and "properties" in schema:
            found.append(schema)
        schema = list(schema.values())
    if isinstance(schema, list):
        for item in schema:
            found += _objects(item)
    return found


def test_there_are_schemas() -> None:
    assert len(NAMES) >= 12


@pytest.mark.parametrize("name", NAMES)
def test_schema_is_a_valid_draft_2020_12(name: str) -> None:
    schema = _load(name)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith("published-")])
def test_own_schema_allows_no_unknown_key(name: str) -> None:
    objects = _objects(_load(name))
    assert objects or name == "report.schema.json"
    for item in objects:
        if "additionalProperties" not in item:
            assert name == "report.schema.json"
        else:
            assert item["additionalProperties"] is not True


def test_layer_schema_states_the_constants_of_the_code() -> None:
    fields = _load("layer.schema.json")["properties"]["metadata"]["properties"]
    for key, value in {
        "schema": container.FRUIT,
        "encoding": container.ENCODING,
        "codebook": codebook.NAME,
        "profile_id": str(container.PROFILE_ID),
        "atom_channels": str(geometry.ATOM),
        "record_channels": str(geometry.RECORD),
        "alignment_bytes": str(geometry.ALIGNMENT),
        "rotation_multiplier": str(geometry.ROTATION_MULTIPLIER),
    }.items():
        assert fields[key] == {"const": value}
    tensors = _load("layer.schema.json")["properties"]["tensors"]
    sections = [container.FORMAT_SECTION, container.SCALE_SECTION, container.ATOMS]
    assert tensors["required"] == sections


def test_manifest_schema_states_the_constants_of_the_code() -> None:
    fields = _load("manifest.schema.json")["properties"]
    assert fields["storage_schema"] == {"const": container.FRUIT}
    assert fields["producer"]["properties"]["name"] == {"const": manifest.PRODUCER}
    named = fields["expert_tensors"]["properties"]
    assert named["prefix"]["enum"] == [*models.PREFIXES]
    layouts = {layout.name for each in ARCHITECTURES.values() for layout in each.layouts}
    assert set(named["layout"]["enum"]) == layouts
    assert set(named["mtp_layout"]["enum"]) == {None, *layouts}
    parameters = fields["activation_parameters"]["properties"]
    assert parameters["situ_beta"] == {"const": manifest.SITU_BETA}
    assert parameters["situ_linear_beta"] == {"const": manifest.SITU_LINEAR_BETA}


def test_profile_fruit_is_16_slots_and_96_atoms_and_kimi_96_slots() -> None:
    fruit = _load("manifest.schema.json")["properties"]["geometry"]["then"]["properties"]
    assert fruit["atom_slots"]["const"] == 16
    assert fruit["atoms_per_expert"]["const"] == 96
    kimi = _load("published-kimi-layer.schema.json")["properties"]["metadata"]["properties"]
    assert kimi["atom_slots"] == {"const": "96"}


def test_reports_state_the_settings_of_the_manifest() -> None:
    settings = _load("manifest.schema.json")["$defs"]["settings"]
    assert _load("report.schema.json")["$defs"]["settings"] == settings


def test_the_formats_of_a_source_are_those_that_are_read() -> None:
    fields = _load("manifest.schema.json")["properties"]["source_format"]["properties"]
    for key in ("experts", "carried"):
        assert set(fields[key]["items"]["enum"]) == set(models.READABLE)
    fields = _load("plan.schema.json")["properties"]
    for key in ("expert_formats", "carried_formats"):
        assert set(fields[key]["propertyNames"]["enum"]) == set(models.READABLE)
