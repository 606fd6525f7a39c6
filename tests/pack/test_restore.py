"""Decoding a package back into a dense checkpoint in the source's names and order."""

import json
import shutil
from pathlib import Path

import checkpoints
import pytest
import torch
from checkpoints import config, expert_key
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qsrt_pack.restore import DensePackage, decode_package, source_order
from qsrt_pack.source.checkpoint import open_checkpoint
from qsrt_pack.source.models import find_experts
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.manifest import INDEX
from qsrt_runtime.format.package import seal

Weights = dict[str, torch.Tensor]


def nmse(source: torch.Tensor, decoded: torch.Tensor) -> float:
    source = source.float()
    return float((source - decoded.float()).square().sum() / source.square().sum())


def tensors_of(folder: Path) -> Weights:
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    shards = {name: load_file(folder / name) for name in set(index.values())}
    return {name: shards[shard][name] for name, shard in index.items()}


def loaded(folder: Path) -> tuple[torch.nn.Module, dict]:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )


@pytest.fixture(scope="module")
def decoded(clean_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The clean package decoded. Not to be written to."""
    out = tmp_path_factory.mktemp("decoded") / "dense"
    decode_package(clean_package, out, show_progress=False)
    return out


def test_names_shapes_and_order_are_the_sources(decoded: Path) -> None:
    source, dense = checkpoints.tensors(), tensors_of(decoded)
    assert dense.keys() == source.keys()
    for name, tensor in source.items():
        assert dense[name].shape == tensor.shape
        assert dense[name].dtype == torch.bfloat16  # which config.json states
        if ".experts." in name:
            assert 0.01 < nmse(tensor, dense[name]) < 0.03
        else:
            assert torch.equal(dense[name].view(torch.int16), tensor.view(torch.int16))


def test_the_decoded_checkpoint_is_one_to_convert(decoded: Path) -> None:
    opened = open_checkpoint(decoded)
    assert find_experts(opened).layers == (0, 1)
    assert opened.config == config()
    assert opened.carried == ("generation_config.json",)
    assert opened.left_out == ()


def test_transformers_loads_it_whole(decoded: Path, clean_checkpoint: Path) -> None:
    model, info = loaded(decoded)
    assert {key: names for key, names in info.items() if names} == {}
    source, _ = loaded(clean_checkpoint)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        logits, expected = model(ids).logits, source(ids).logits
    assert 0 < nmse(expected, logits) < 0.1


def test_mixtral_is_decoded_in_its_own_names(mixtral: tuple[Path, Path], tmp_path: Path) -> None:
    source, package = mixtral
    decode_package(package, tmp_path / "dense", show_progress=False)
    dense, expected = tensors_of(tmp_path / "dense"), tensors_of(source)
    assert dense.keys() == expected.keys()
    for name, tensor in expected.items():
        assert nmse(tensor, dense[name]) < (0.03 if ".experts." in name else 1e-30)
    _, info = loaded(tmp_path / "dense")
    assert {key: names for key, names in info.items() if names} == {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_dtype_is_that_of_the_experts_only(
    clean_package: Path, tmp_path: Path, dtype: str
) -> None:
    decode_package(clean_package, tmp_path / "dense", dtype=dtype, show_progress=False)
    exact = DensePackage(clean_package)
    for name, tensor in tensors_of(tmp_path / "dense").items():
        if ".experts." in name:
            assert torch.equal(tensor, exact.expert_weight(name).to(getattr(torch, dtype)))
        else:
            assert tensor.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"torch_dtype": "float16"}, torch.float16),
        ({"text_config": {"dtype": "float16"}}, torch.float16),
        ({}, torch.float32),
    ],
)
def test_the_default_dtype_is_the_configs(
    package: Path, tmp_path: Path, stated: dict, expected: torch.dtype
) -> None:
    def edit(value: dict) -> None:
        del value["dtype"]
        value.update(stated)

    checkpoints.edit_json(package / "config.json", edit)
    seal(package)
    decode_package(package, tmp_path / "dense", show_progress=False)
    assert tensors_of(tmp_path / "dense")[expert_key(0, 0, "up_proj")].dtype == expected


def test_a_dtype_is_stated_of_the_text_model_too(package: Path, tmp_path: Path) -> None:
    inner = {"torch_dtype": "bfloat16", "num_experts": checkpoints.EXPERTS}
    checkpoints.edit_json(package / "config.json", lambda value: value.update(text_config=inner))
    seal(package)
    decode_package(package, tmp_path / "dense", dtype="float32", show_progress=False)
    value = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert value["dtype"] == value["text_config"]["dtype"] == "float32"
    assert "torch_dtype" not in value["text_config"]


def test_a_dtype_that_is_not_written(package: Path, tmp_path: Path) -> None:
    checkpoints.edit_json(package / "config.json", lambda value: value.update(dtype="float8"))
    seal(package)
    with pytest.raises(FormatError, match=r"dtype 'float8' is not one of .*give --dtype"):
        decode_package(package, tmp_path / "dense", show_progress=False)
    assert not (tmp_path / "dense").exists()


def test_side_files_are_there_and_nothing_of_the_package(package: Path, tmp_path: Path) -> None:
    (package / "assets").mkdir()
    for name in ("tokenizer.json", "assets/logo.png", "README.md"):
        (package / name).write_text(name)
    seal(package)
    decode_package(package, tmp_path / "dense", show_progress=False)
    found = {p.relative_to(tmp_path / "dense").as_posix() for p in (tmp_path / "dense").rglob("*")}
    assert found == {
        *("config.json", "generation_config.json", INDEX, "model-00001-of-00001.safetensors"),
        *("tokenizer.json", "assets", "assets/logo.png"),  # the card is the package's
    }
    assert (tmp_path / "dense" / "assets" / "logo.png").read_text() == "assets/logo.png"


@pytest.mark.parametrize(
    "name",
    ["qsrt-layer-001.safetensors", "model-00001-of-00001.safetensors", "generation_config.json"],
)
def test_a_damaged_package_leaves_nothing(package: Path, tmp_path: Path, name: str) -> None:
    data = bytearray((package / name).read_bytes())
    data[len(data) // 2] ^= 1
    (package / name).write_bytes(data)
    with pytest.raises(FormatError, match=f"{name} is damaged"):
        decode_package(package, tmp_path / "dense", show_progress=False)
    assert [path.name for path in tmp_path.iterdir()] == [package.name]


def test_the_output_is_kept_without_a_wish(clean_package: Path, tmp_path: Path) -> None:
    out = tmp_path / "dense"
    out.mkdir()
    (out / "old").write_text("")
    with pytest.raises(FormatError, match="is not empty"):
        decode_package(clean_package, out, show_progress=False)
    decode_package(clean_package, out, overwrite=True, show_progress=False)
    assert not (out / "old").exists()
    assert (out / "config.json").exists()


def test_package_and_output_lie_apart(package: Path) -> None:
    for out in (package, package / "dense", package.parent):
        with pytest.raises(FormatError, match="lie inside each other"):
            decode_package(package, out, overwrite=True, show_progress=False)


def test_a_package_made_elsewhere_is_refused(golden: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(golden / "publication", tmp_path / "publication")
    with pytest.raises(FormatError, match="was made elsewhere; its evidence does not keep"):
        DensePackage(folder)


def test_an_architecture_that_is_not_known(package: Path) -> None:
    checkpoints.edit_json(package / "config.json", lambda value: value.update(model_type="x"))
    seal(package)
    with pytest.raises(FormatError, match="model_type 'x' is not one of"):
        DensePackage(package)


def test_experts_can_be_read_in_any_order(clean_package: Path) -> None:
    in_order, backwards = DensePackage(clean_package), DensePackage(clean_package)
    first = {name: in_order.expert_weight(name) for name in in_order.experts}
    for name in reversed(backwards.experts):
        assert torch.equal(backwards.expert_weight(name), first[name])


def test_source_order_undoes_order_and_interleaving() -> None:
    # With four records the stored order of records is 0, 3, 1, 2.
    low_to_high = torch.randperm(512, generator=torch.Generator().manual_seed(0))
    records = low_to_high.view(4, 128)[[0, 3, 1, 2]].flatten().float()
    stored = {"w1": records[:, None], "w3": 2 * records[:, None], "w2": 3 * records[None]}
    restored = source_order(stored, low_to_high)
    channels = torch.arange(512.0)
    assert torch.equal(restored["w1"][:, 0], channels)
    assert torch.equal(restored["w3"][:, 0], 2 * channels)
    assert torch.equal(restored["w2"][0], 3 * channels)
