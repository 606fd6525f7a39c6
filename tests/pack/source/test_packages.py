"""Packages whose documents describe other experts than they hold."""

from pathlib import Path

import checkpoints
import pytest

from qsrt_pack.source.models import packed_experts
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.package import open_package, seal


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("layout", "transposed", r"qwen3_moe has its experts each or stacked; .* 'transposed'"),
        ("layout", "folded", r"expert_tensors\.layout: 'folded' is not one of"),
        ("prefix", "encoder.", r"expert_tensors\.prefix: 'encoder\.' is not one of"),
        ("mtp_layout", "transposed", r"expert_tensors\.mtp_layout of the manifest is 'transposed'"),
    ],
)
def test_a_package_in_a_layout_that_its_model_has_not(
    package: Path, key: str, value: str, message: str
) -> None:
    path = package / "qsrt-manifest.json"
    checkpoints.edit_json(path, lambda manifest: manifest["expert_tensors"].update({key: value}))
    with pytest.raises(FormatError, match=message):
        seal(package)
        packed_experts(open_package(package).documents, "here")


def test_a_package_with_a_layer_that_is_not_counted(clean_package: Path) -> None:
    documents = open_package(clean_package).documents
    documents.config["num_hidden_layers"] = 1
    with pytest.raises(FormatError, match="here counts 1 layers, layer 1 is packed"):
        packed_experts(documents, "here")
    documents.config["num_nextn_predict_layers"] = 1
    assert packed_experts(documents, "here").layers == (0, 1)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", 256, "sizes of the experts are"),
        ("num_experts", 5, "experts of a layer are 5, packed are 4"),
        ("num_experts_per_tok", 1, "experts a token goes to are 1, packed are 2"),
        ("mlp_only_layers", [0], r"layers with experts are \[1\], packed are \[0, 1\]"),
    ],
)
def test_a_package_whose_config_describes_other_experts(
    clean_package: Path, key: str, value: object, message: str
) -> None:
    documents = open_package(clean_package).documents
    documents.config[key] = value
    with pytest.raises(FormatError, match=f"here: {message}"):
        packed_experts(documents, "here")


def test_a_package_with_an_activation_that_its_model_has_not(clean_package: Path) -> None:
    documents = open_package(clean_package).documents
    documents.manifest["layers"]["1"]["activation"]["experts"] = {"2": "situ"}
    with pytest.raises(FormatError, match=r"qwen3_moe has no experts with situ \(layer 1\)"):
        packed_experts(documents, "here")
