"""Every architecture of the table as transformers writes it: packed, decoded, loaded, run."""

import json
import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import pytest
import torch
import transformers
from architectures import IDS, KINDS, NAMES_ONLY, tensors_of, write_model
from safetensors.torch import load_file, save_file

from qsrt_pack import job
from qsrt_pack.calibration_input import read_input
from qsrt_pack.encode.expert import Settings
from qsrt_pack.restore import decode_package
from qsrt_pack.source.architectures import ARCHITECTURES, CALIBRATED
from qsrt_pack.source.checkpoint import open_checkpoint
from qsrt_pack.source.models import find_experts
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.integrations.transformers import PackedExperts


@pytest.fixture(autouse=True)
def quiet():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def stated(start, repository):
    """The last cell of the row of README.md that begins so."""
    found = re.search(rf"^{re.escape(start)} \| (.*) \|$", readme(repository), re.M)
    assert found is not None, f"README.md has no row {start}"
    return found[1]


def common(names):
    """The start of all of them."""
    columns = zip(*names, strict=False)
    return "".join(c[0] for c in takewhile(lambda column: len(set(column)) == 1, columns))


def row(name, experts):
    """README.md's row of an architecture but for the last cell."""
    layout = experts.naming.layout
    names = [*dict.fromkeys((layout.gate, layout.up, layout.down))]
    start, end = common(names), common([each[::-1] for each in names])[::-1]
    middle = ",".join(each.removeprefix(start).removesuffix(end) for each in names)
    path = f"{experts.naming.prefix}layers.L.{start}{{{middle}}}{end}".replace("{expert}", "E")
    layouts = ", ".join(layout.name for layout in experts.architecture.layouts)
    return f"| `{name}` | `{path}` | {layouts}"


def readme(repository):
    return (repository / "README.md").read_text()


def relative(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def logits(model):
    if isinstance(model, transformers.Llama4ForConditionalGeneration):
        model = model.language_model  # the whole does not run without images
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def load(model_class, path):
    """The model of a folder in float32, every tensor of it taken and none made up."""
    model, info = model_class.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


def pack(source, package):
    prepared = job.prepare(source, package, Settings(search="fast"))
    return job.run(prepared, show_progress=False)


def stacked(path, out, layout):
    """A copy of a checkpoint with its experts in another layout."""
    experts = find_experts(open_checkpoint(path))
    tensors = tensors_of(path)
    naming = type(experts.naming)(
        next(each for each in experts.architecture.layouts if each.name == layout),
        experts.naming.prefix,
        experts.naming.count,
    )
    weights = {}
    for layer, expert, matrix, place in experts.weights():
        block = tensors[place.tensor] if place.index is None else tensors[place.tensor][place.index]
        weights[layer, expert, matrix] = place.of(block)
    for name in experts.stored():
        del tensors[name]
    numbers = range(experts.geometry.experts)
    for layer in experts.layers:
        gate, up, down = (
            torch.stack([weights[layer, expert, matrix] for expert in numbers])
            for matrix in ("w1", "w3", "w2")
        )
        parts = {"w1": torch.cat([gate, up], 1), "w2": down}
        for matrix, stack in parts.items():
            name = naming.weight(layer, 0, matrix, 1).tensor
            tensors[name] = (stack.mT if layout == "transposed" else stack).contiguous()
    out.mkdir()
    (out / "config.json").write_bytes((path / "config.json").read_bytes())
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


@dataclass(frozen=True)
class Packed:
    name: str
    folder: Path
    original: torch.nn.Module
    evidence: dict


def experts_of(packed):
    return find_experts(open_checkpoint(packed.folder / "model"))


@pytest.fixture(scope="module", params=KINDS)
def packed(request, tmp_path_factory):
    """A tiny model and its package."""
    folder = tmp_path_factory.mktemp("kind")
    original = write_model(folder / "model", request.param)
    evidence = pack(folder / "model", folder / "package")
    return Packed(request.param, folder, original, evidence)


def test_every_architecture_is_here_and_in_the_readme(repository):
    assert {kind.text or name for name, kind in KINDS.items()} | {*NAMES_ONLY} == {*ARCHITECTURES}
    named = set(re.findall(r"^\| `(\w+)` \| `", readme(repository), re.M))
    assert named == {*KINDS, *NAMES_ONLY}


def test_packed_decoded_and_run(packed, repository):
    folder, original, kind = packed.folder, packed.original, KINDS[packed.name]
    experts = experts_of(packed)
    assert experts.layers == kind.layers
    assert experts.naming.layout.name == kind.layout
    decode_package(folder / "package", folder / "dense", dtype="float32", show_progress=False)
    found = logits(load(type(original), folder / "dense"))
    error = relative(found, logits(original))
    expected = float(stated(row(packed.name, experts), repository))
    assert error == pytest.approx(expected, rel=0.5)
    before, after = (tensors_of(folder / name) for name in ("model", "dense"))
    routed = experts.stored()
    assert before.keys() == after.keys() > routed.keys()
    for name, tensor in before.items():
        if name in routed:
            assert 0.05 < relative(after[name], tensor.float()) < 0.2
        else:
            assert torch.equal(after[name], tensor)
    model = load(type(original), folder / "package")
    count = sum(isinstance(module, PackedExperts) for module in model.modules())
    assert count == len(kind.layers)
    assert relative(logits(model), found) < 1e-5


def test_other_layouts_give_the_same_package(packed):
    """CV-1a. And what such a package decodes to is in the source's layout, and loads."""
    layouts = {layout.name for layout in experts_of(packed).architecture.layouts}
    if len(layouts) == 1:
        pytest.skip("read in one layout alone")
    for layout in layouts - {KINDS[packed.name].layout}:
        source, package, dense = (
            packed.folder / f"{layout}-{n}" for n in ("model", "package", "dense")
        )
        stacked(packed.folder / "model", source, layout)
        evidence = pack(source, package)
        for layer in KINDS[packed.name].layers:
            assert evidence[layer]["experts"] == packed.evidence[layer]["experts"]
            name = f"qsrt-layer-{layer:03d}.safetensors"
            expected = load_file(packed.folder / "package" / name)
            for key, tensor in load_file(package / name).items():
                assert torch.equal(tensor, expected[key])
        decode_package(package, dense, dtype="float32", show_progress=False)
        before, after = tensors_of(source), tensors_of(dense)
        assert {k: v.shape for k, v in before.items()} == {k: v.shape for k, v in after.items()}
        model = load(type(packed.original), dense)
        loaded = load(type(packed.original), package)
        assert relative(logits(loaded), logits(model)) < 1e-5


@pytest.mark.parametrize("name", NAMES_ONLY)
def test_names_alone(tmp_path, name, repository):
    """A config and a tensor list, where transformers has no class."""
    write_model(tmp_path / "model", NAMES_ONLY[name])
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"model_type": name, "auto_map": {}}))
    experts = find_experts(open_checkpoint(tmp_path / "model"))
    assert experts.layers == KINDS[NAMES_ONLY[name]].layers
    assert stated(row(name, experts), repository) == "names only"
    pack(tmp_path / "model", tmp_path / "package")
    decode_package(tmp_path / "package", tmp_path / "dense", show_progress=False)
    before, after = (tensors_of(tmp_path / folder) for folder in ("model", "dense"))
    assert {k: v.shape for k, v in before.items()} == {k: v.shape for k, v in after.items()}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("hunyuan_v1_moe", {"moe_topk": [1], "moe_intermediate_size": [256]}),
        ("ernie4_5_moe", {"moe_layer_end_index": -1}),
        ("bailing_hybrid", {"num_experts_per_token": None, "num_experts_per_tok": 1}),
    ],
)
def test_what_else_a_config_may_say(tmp_path, name, changes):
    """A list by layer of one number, as Hunyuan-A13B has them; -1 for the last layer; top-k by its
    usual name, which transformers changes on saving."""
    model = write_model(tmp_path / "model", name)
    path = tmp_path / "model" / "config.json"
    value = json.loads(path.read_text()) | changes
    gone = {key for key, item in changes.items() if item is None}
    path.write_text(json.dumps({key: item for key, item in value.items() if key not in gone}))
    assert [*pack(tmp_path / "model", tmp_path / "package")] == [*KINDS[name].layers]
    decode_package(tmp_path / "package", tmp_path / "dense", dtype="float32", show_progress=False)
    dense, packed = (load(type(model), tmp_path / folder) for folder in ("dense", "package"))
    assert relative(logits(packed), logits(dense)) < 1e-5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt_oss", r"experts\.\w+_proj_bias is a bias of experts"),
        ("nemotron_h", r"mlp_hidden_act is 'relu2'; packed experts compute down\(silu"),
    ],
)
def test_refused_by_what_is_not_supported(tmp_path, name, message):
    """CF-5a, CF-5c."""
    write_model(tmp_path / "model", name)
    with pytest.raises(FormatError, match=message):
        find_experts(open_checkpoint(tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "prefix"), [("deepseek_v3", "model.layers.2."), ("qwen3_next", "mtp.layers.0.")]
)
def test_layers_of_next_token_prediction(tmp_path, name, prefix):
    """CF-3a. transformers leaves out of a package what it leaves out of the source."""
    model = write_model(tmp_path / "model", name)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    inner = {k.replace("model.layers.1.", prefix): t for k, t in tensors.items() if ".1." in k}
    save_file(tensors | {k: t.clone() for k, t in inner.items()}, path, {"format": "pt"})
    evidence = pack(tmp_path / "model", tmp_path / "package")
    assert [*evidence] == [1, 2]
    decode_package(tmp_path / "package", tmp_path / "dense", dtype="float32", show_progress=False)
    assert tensors_of(tmp_path / "dense").keys() == tensors.keys() | inner.keys()
    unexpected, results = {}, {}
    for folder in ("model", "dense", "package"):
        loaded, info = type(model).from_pretrained(
            tmp_path / folder, dtype=torch.float32, output_loading_info=True
        )
        assert not info["missing_keys"]
        unexpected[folder] = {key for key in info["unexpected_keys"] if ".experts." not in key}
        results[folder] = logits(loaded.eval())
    assert unexpected["model"] == unexpected["dense"] == unexpected["package"]
    assert bool(unexpected["model"]) == (name == "deepseek_v3")  # which names the layer 61 alone
    assert relative(results["package"], results["dense"]) < 1e-5
    assert relative(results["dense"], results["model"]) < 0.3


def test_a_packed_llama4_made_dense(tmp_path):
    """Stacks [E, in, out] and rows by expert, in the model's own memory again."""
    model = write_model(tmp_path / "model", "llama4_text")
    pack(tmp_path / "model", tmp_path / "package")
    packed = load(type(model), tmp_path / "package")
    expected = logits(packed)
    assert relative(logits(packed.dequantize(torch.float32)), expected) < 1e-5


def test_calibration_says_which_it_runs(tmp_path, repository):
    left = {name for name, kind in KINDS.items() if kind.text is None} - CALIBRATED
    exceptions = re.search(r"all of the table but (.*?) the names only", readme(repository), re.S)
    assert set(re.findall(r"`(\w+)`", exceptions[1])) == left
    for name, refused in (("jamba", "jamba"), ("kimi_k25", r"models with a text_config \(kimi")):
        write_model(tmp_path / name, name)
        with pytest.raises(FormatError, match=f"calibration runs .*qwen3_moe.*, not {refused}"):
            read_input(tmp_path / name, tmp_path / "text", device=torch.device("cpu"))
