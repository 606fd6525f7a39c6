import dataclasses
import hashlib
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from checkpoints import edit_json
from packages import write_package

import qsrt_runtime
from qsrt_runtime import cache, load, reader, staging
from qsrt_runtime.format import container
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry, TrueSizes, extent
from qsrt_runtime.format.package import open_package
from qsrt_runtime.format.slab import expert_pairs, unpack_expert
from qsrt_runtime.load import load_package
from qsrt_runtime.moe import moe_forward

LAYER = "qsrt-layer-001.safetensors"


def test_golden_publication(golden):
    loaded = load_package(golden / "publication")
    assert loaded.path == golden / "publication"
    assert loaded.geometry == Geometry(1024, 512, 4)
    assert loaded.topk == 2
    assert list(loaded.layers) == [5]
    layer = loaded.layers[5]
    stored = container.read_layer(golden / "publication/qsrt-layer-005.safetensors")
    assert torch.equal(layer.atoms, stored.atoms)
    assert torch.equal(layer.shared_scales, stored.shared_scales)
    assert layer.geometry == loaded.geometry
    assert layer.activations.tolist() == [0, 0, 0, 0]


def test_tiny_package(package):
    loaded = load_package(str(package))
    assert loaded.path == package
    assert loaded.config == json.loads((package / "config.json").read_text())
    assert (loaded.geometry, loaded.topk) == (Geometry(128, 256, 4), 2)
    assert list(loaded.layers) == [0, 1]
    assert [layer.layer for layer in loaded.layers.values()] == [0, 1]
    assert loaded.seal_sha256 == open_package(package).seal_sha256


def test_frozen(golden):
    loaded = load_package(golden / "publication")
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.topk = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.layers[5].layer = 1


def test_loads_from_a_hub_cache(package, hub_snapshot):
    assert list(load_package(hub_snapshot(package)).layers) == [0, 1]


def test_activations_of_each_expert(package, reseal):
    activation = {"default": "silu", "experts": {"0": "situ", "1": "situ", "3": "situ"}}
    edit_json(
        package / "qsrt-manifest.json", lambda m: m["layers"]["1"].update(activation=activation)
    )
    reseal(package)
    layers = load_package(package).layers
    assert layers[0].activations.tolist() == [0, 0, 0, 0]
    assert layers[1].activations.tolist() == [1, 1, 0, 1]


def test_activation_of_the_model(publication, reseal):
    edit_json(publication / "config.json", lambda config: config.update(hidden_act="situ"))
    reseal(publication)
    assert load_package(publication).layers[5].activations.tolist() == [1, 1, 1, 1]


def test_default_activation_is_the_models(package, reseal):
    activation = {"default": "situ", "experts": {}}
    edit_json(
        package / "qsrt-manifest.json", lambda m: m["layers"]["1"].update(activation=activation)
    )
    reseal(package)
    with pytest.raises(FormatError, match=r"layers\.1\.activation\.default is 'situ'"):
        load_package(package)


@pytest.mark.parametrize("key", ["activation_situ_beta", "activation_situ_linear_beta"])
def test_other_parameters_of_situ_are_refused(publication, reseal, key):
    edit_json(
        publication / "config.json", lambda config: config.update({"hidden_act": "situ", key: 8.0})
    )
    reseal(publication)
    with pytest.raises(FormatError, match=f"{key} is 8.0"):
        load_package(publication)


@pytest.mark.parametrize("hidden_act", ["gelu_pytorch_tanh", "swigluoai", None])
def test_activation_that_is_not_run(publication, reseal, hidden_act):
    edit_json(publication / "config.json", lambda config: config.update(hidden_act=hidden_act))
    reseal(publication)
    with pytest.raises(FormatError, match=r"config\.json: hidden_act is"):
        load_package(publication)


@pytest.mark.parametrize(
    "name", [LAYER, "qsrt-layer-001.json", "qsrt-manifest.json", "config.json", "MANIFEST.sha256"]
)
def test_one_bit(package, name):
    data = bytearray((package / name).read_bytes())
    data[len(data) // 2] ^= 1
    (package / name).write_bytes(data)
    with pytest.raises(FormatError, match=name):
        load_package(package)


@pytest.mark.parametrize("name", [LAYER, "qsrt-layer-001.json", "QSRT_COMPLETE.json"])
def test_missing_file(package, name):
    (package / name).unlink()
    with pytest.raises(FormatError, match=name):
        load_package(package)


def test_base_shard_whose_header_disagrees(package, reseal):
    edit_json(
        package / "model.safetensors.index.json",
        lambda index: index["weight_map"].pop("lm_head.weight"),
    )
    reseal(package)
    with pytest.raises(FormatError, match=r"lm_head\.weight"):
        load_package(package)


def test_no_package(tmp_path):
    with pytest.raises(FormatError, match="has no QSRT_COMPLETE"):
        load_package(tmp_path)
    with pytest.raises(FormatError, match="is not a folder"):
        load_package(tmp_path / "missing")


def test_public_names():
    assert qsrt_runtime.load_package is load_package
    assert qsrt_runtime.FormatError is FormatError
    assert all(hasattr(qsrt_runtime, name) for name in qsrt_runtime.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = qsrt_runtime.nothing


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Two layers of experts of 7 pairs."""
    path = tmp_path_factory.mktemp("wide") / "package"
    return write_package(path, Geometry(128, 7 * 256, 3), layers=(0, 2))


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Two layers of 5 experts of 3 pairs."""
    path = tmp_path_factory.mktemp("many") / "package"
    return write_package(path, Geometry(128, 3 * 256, 5), layers=(0, 1))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_ranks_add_up(wide, world_size):  # RT-11a
    whole = load_package(wide)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    ids, weights = torch.tensor([[0, 1], [2, 1], [1, 0], [2, 0], [0, -1]]), torch.rand(5, 2)
    ranks = [load_package(wide, rank=rank, world_size=world_size) for rank in range(world_size)]
    for layer, expected in whole.layers.items():
        shares = [rank.layers[layer] for rank in ranks]
        assert [slot for share in shares for slot in share.slots] == list(range(56))
        assert {len(share.slots) // 8 for share in shares} <= {7 // world_size, 7 // world_size + 1}
        assert torch.equal(torch.cat([share.atoms for share in shares]), expected.atoms)
        found = sum(moe_forward(x, share, ids, weights) for share in shares)
        expected = moe_forward(x, expected, ids, weights)
        assert ((found - expected).norm() / expected.norm()).item() < 1e-5
        assert expected.any()


def test_eight_pairs_on_three_ranks(tmp_path):  # RT-11a
    path = write_package(tmp_path / "package", Geometry(128, 8 * 256, 1), topk=1)
    shares = [load_package(path, rank=rank, world_size=3).layers[0].slots for rank in range(3)]
    assert shares == [range(0, 24), range(24, 48), range(48, 64)]


@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranges_of_experts_add_up(many, parts, ranks):
    whole = load_package(many)
    assert whole.expert_map is None
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(6, 128, generator=generator), torch.rand(6, 2, generator=generator)
    ids = torch.tensor([[0, 1], [2, 3], [4, 0], [1, 4], [3, -1], [2, 2]])
    held = [
        load_package(many, rank=rank, world_size=ranks, experts=extent(5, parts, part))
        for part in range(parts)
        for rank in range(ranks)
    ]
    for layer, expected in whole.layers.items():
        expected = moe_forward(x, expected, ids, weights)
        for options in ({}, {"weight_on_input": True}):  # RT-8b, over ranges
            found = sum(
                moe_forward(x, h.layers[layer], ids, weights, expert_map=h.expert_map, **options)
                for h in held
            )
            if options:
                expected = moe_forward(x, whole.layers[layer], ids, weights, **options)
            assert ((found - expected).norm() / expected.norm()).item() < 1e-5


@pytest.mark.parametrize("kind", ["ours", "published"])
def test_a_range_is_those_experts(many, golden, kind):
    path, layer = (many, 1) if kind == "ours" else (golden / "publication", 5)
    whole = load_package(path).layers[layer]
    loaded = load_package(path, experts=range(1, 3))
    assert loaded.expert_map.tolist() == [-1, 0, 1] + [-1] * (whole.geometry.experts - 3)
    part, size = loaded.layers[layer], whole.geometry.bundle_bytes
    assert part.geometry == dataclasses.replace(whole.geometry, experts=2)
    assert torch.equal(part.atoms, whole.atoms[:, size : 3 * size])
    assert torch.equal(part.format_codes, whole.format_codes[1:3])
    assert torch.equal(part.activations, whole.activations[1:3])
    assert torch.equal(part.shared_scales, whole.shared_scales[:, 1:3])
    for place, expert in enumerate((1, 2)):
        assert expert_pairs(part, place) == expert_pairs(whole, expert)
        found, expected = unpack_expert(part, place), unpack_expert(whole, expert)
        for matrix in ("w1", "w3", "w2"):
            for records in zip(
                getattr(found, matrix).records, getattr(expected, matrix).records, strict=True
            ):
                assert torch.equal(*records)


def test_a_range_of_experts_that_share_their_scales(golden):
    """The other published schema has one row of them, for all experts."""
    stored = container.read_layer(golden / "kimi_layer.safetensors")
    manifest = {"layers": {"7": {"expert_count": stored.geometry.experts}}}
    package = SimpleNamespace(
        geometry=stored.geometry,
        true_sizes=TrueSizes(stored.geometry.hidden, stored.geometry.intermediate),
        path=golden,
        layer_name=lambda _: "kimi_layer.safetensors",
        documents=SimpleNamespace(config={"hidden_act": "situ"}, manifest=manifest),
    )
    with staging.Staging(torch.device("cpu")) as stage:
        part = load.load_layer(package, 7, stage, range(8, 16), range(1))
    assert torch.equal(part.shared_scales, stored.shared_scales)
    assert torch.equal(part.atoms, stored.atoms[8:16, : stored.geometry.bundle_bytes])
    assert part.activations.tolist() == [1]


@pytest.mark.parametrize("experts", [range(0), range(2, 2), range(3, 6), range(-1, 2)])
def test_experts_that_are_not_there(many, experts):
    with pytest.raises(ValueError, match=r"experts is range\(.*\), expected some, of step 1, of"):
        load_package(many, experts=experts)


def test_experts_that_are_no_range(many):
    with pytest.raises(ValueError, match=r"experts is range\(0, 4, 2\), expected some, of step 1"):
        load_package(many, experts=range(0, 4, 2))
    with pytest.raises(TypeError, match=r"experts is \[0, 1\], expected a range"):
        load_package(many, experts=[0, 1])


@pytest.fixture
def read(monkeypatch):
    """The byte ranges of layer files that were read since the list was cleared."""
    ranges, original = [], reader._read

    def counted(path, file, start, memory):
        ranges.append((path.name, range(start, start + memory.nbytes)))
        return original(path, file, start, memory)

    monkeypatch.setattr(reader, "library", lambda: None)
    monkeypatch.setattr(reader, "_read", counted)
    return ranges


def count(ranges):
    return sum(len(places) for _, places in ranges)


def test_a_rank_reads_its_extent_alone(wide, read):
    load_package(wide)  # verifies
    stride, small = load_package(wide).geometry.slot_stride(3), 2 * (3 + 2 * 3 * 3 * 128)
    for arguments, slots in (
        ({}, 56),
        ({"rank": 0, "world_size": 2}, 32),
        ({"rank": 1, "world_size": 2}, 24),
    ):
        read.clear()
        loaded = load_package(wide, **arguments)
        assert loaded.load_bytes == count(read) == small + 2 * slots * stride


def test_a_range_of_experts_reads_its_bundles_alone(many, read):
    geometry = load_package(many).geometry
    size, stride = geometry.bundle_bytes, geometry.slot_stride(5)
    place = container.layer_place(many / "qsrt-layer-000.safetensors")
    read.clear()
    loaded = load_package(many, rank=1, world_size=3, experts=range(2, 4), layers=[0])
    assert loaded.load_bytes == count(read) == 2 + 2 * 3 * 2 * 128 + 8 * 2 * size
    bundles = {places.start for _, places in read if places.start >= place.slab}
    assert bundles == {place.slab + slot * stride + 2 * size for slot in range(8, 16)}


@pytest.mark.parametrize(
    ("rank", "world_size", "message"),
    [
        (0, 8, "world_size is 8; experts of 1792 channels have 7 pairs"),
        (0, 0, "world_size is 0"),
        (3, 8, "have 7 pairs, of which each rank owns at least one"),
        (2, 2, r"rank is 2, expected 0\.\.1"),
        (-1, 2, r"rank is -1, expected 0\.\.1"),
    ],
)
def test_ranks_that_do_not_exist(wide, rank, world_size, message):
    with pytest.raises(ValueError, match=message):
        load_package(wide, rank=rank, world_size=world_size)


@pytest.mark.parametrize("argument", ["rank", "world_size"])
@pytest.mark.parametrize("value", [True, 1.0, "1"])
def test_ranks_that_are_no_integers(wide, argument, value):
    with pytest.raises(TypeError, match=f"{argument} is {value!r}, expected an integer"):
        load_package(wide, **{argument: value})


def test_default_device_does_not_matter(wide):
    with torch.device("meta"):
        found = load_package(wide, verify="always")
    assert {t.device.type for t in vars(found.layers[0]).values() if hasattr(t, "device")} == {
        "cpu"
    }


def test_some_layers(wide):
    loaded = load_package(wide, layers=[2])
    assert list(loaded.layers) == [2]
    assert torch.equal(loaded.layers[2].atoms, load_package(wide).layers[2].atoms)
    assert list(load_package(wide, layers=(2, 0, 2)).layers) == [0, 2]
    assert list(load_package(wide, layers=(n for n in (0, 2))).layers) == [0, 2]
    (layer,) = load_package(wide, layers=[torch.tensor(2)]).layers
    assert type(layer) is int
    assert load_package(wide, layers=[]).layers == {}
    for layer in (True, 2.0, "2", None):
        with pytest.raises(TypeError, match=r"a layer is .*, expected an integer"):
            load_package(wide, layers=[layer])
    with pytest.raises(ValueError, match=r"layer 1 is not one of the packed layers \[0, 2\]"):
        load_package(wide, layers=[2, 1])
    with pytest.raises(TypeError, match=r"layers is 2, expected several numbers, as \[2\]"):
        load_package(wide, layers=2)


@pytest.mark.parametrize("device", ["meta", "mps", "cuda:99", "nothing", ""])
def test_other_devices(wide, device):
    with pytest.raises(ValueError, match=f"device is '?{device}'?, expected cpu"):
        load_package(wide, device=device)


@pytest.mark.gpu
def test_on_a_gpu(wide):
    for rank in (0, 1):
        found = load_package(wide, device="cuda", rank=rank, world_size=2)
        expected = load_package(wide, rank=rank, world_size=2)
        for layer, weights in expected.layers.items():
            for field in dataclasses.fields(weights):
                value, other = (
                    getattr(weights, field.name),
                    getattr(found.layers[layer], field.name),
                )
                if isinstance(value, torch.Tensor):
                    assert other.device.type == "cuda"
                    assert torch.equal(other.cpu(), value)
                else:
                    assert other == value


def test_report(wide, caplog):
    with caplog.at_level(logging.INFO, logger="qsrt_runtime.load"):
        loaded = load_package(wide, verify="always")
    assert loaded.load_s > 0
    assert loaded.verify_s > 0
    assert f"{loaded.load_bytes} bytes in {loaded.load_s:.2f} s" in caplog.text


@pytest.fixture
def hashed(monkeypatch):
    """The files that were hashed whole since the list was cleared."""
    hashed = []

    def verify_files(package, names):
        hashed.extend(names)
        return original(package, names)

    original = load.verify_files
    monkeypatch.setattr(load, "verify_files", verify_files)
    return hashed


def test_verified_once(package, hashed):
    load_package(package)
    everything = sorted(open_package(package).digests)
    assert sorted(hashed) == everything
    hashed.clear()
    load_package(package)
    load_package(package, rank=0, world_size=1, layers=[1])
    assert hashed == []
    load_package(package, verify="always")
    assert sorted(hashed) == everything


def test_structure_remembers_nothing(package, hashed):
    load_package(package, verify="structure")
    assert hashed == []
    load_package(package)
    assert hashed


@pytest.mark.parametrize("change", ["time", "inode", "size"])
def test_a_changed_file_is_verified_again(package, hashed, change):
    load_package(package)
    hashed.clear()
    path = package / LAYER
    data, stat = path.read_bytes(), path.stat()
    if change == "time":
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        load_package(package)
    elif change == "inode":
        (package / "copy").write_bytes(data)
        os.utime(package / "copy", ns=(stat.st_atime_ns, stat.st_mtime_ns))
        os.replace(package / "copy", path)
        load_package(package)
    else:
        path.write_bytes(data + b"0")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        with pytest.raises(FormatError, match=LAYER):
            load_package(package)
        return
    assert LAYER in hashed


def test_damage_after_the_first_load(package):
    load_package(package)
    data = bytearray((package / LAYER).read_bytes())
    data[-1 - len(data) // 3] ^= 1
    (package / LAYER).write_bytes(data)
    for _ in range(2):
        with pytest.raises(FormatError, match=f"{LAYER} is damaged"):
            load_package(package)
    load_package(package, verify="structure")  # which says so


def test_another_seal_is_verified_again(package, reseal, hashed):
    load_package(package)
    hashed.clear()
    edit_json(package / "config.json", lambda config: config.update(rope_theta=5.0))
    reseal(package)
    load_package(package)
    assert hashed


@pytest.mark.parametrize("verify", ["structure", "once"])
def test_structure_is_always_checked(package, verify):
    load_package(package)
    path = package / LAYER
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(FormatError, match=LAYER):
        load_package(package, verify=verify)


def test_scales_that_are_not_finite_are_found_once(package, reseal):
    """Their digest may be right: the first load looks at the slab itself."""
    path = package / LAYER
    data = bytearray(path.read_bytes())
    slab_bytes = open_package(package).geometry.slot_stride(4) * 8
    bundle = open_package(package).geometry.bundle_bytes
    data[len(data) - slab_bytes + bundle - 2 : len(data) - slab_bytes + bundle] = b"\xff\x7f"
    path.write_bytes(data)
    edit_json(
        package / "qsrt-layer-001.json",
        lambda e: e.update(safetensors_sha256=hashlib.sha256(data).hexdigest()),
    )
    reseal(package)
    with pytest.raises(FormatError, match="local scale that is not finite"):
        load_package(package)


def test_package_that_changes_while_it_is_read(package, monkeypatch):
    original = load.load_layer

    def load_layer(*args):
        os.utime(package / LAYER)
        return original(*args)

    monkeypatch.setattr(load, "load_layer", load_layer)
    with pytest.raises(FormatError, match="was changed while it was read"):
        load_package(package)


def test_unknown_way_to_verify(package):
    with pytest.raises(ValueError, match="verify is 'never', expected one of"):
        load_package(package, verify="never")


def test_cache_that_cannot_be_written(package, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        caplog.clear()
        assert load_package(package).layers
        assert "will be verified again next time" in caplog.text


def test_stamps_lie_outside_the_package(package, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = sorted(package.rglob("*"))
    load_package(package)
    assert sorted(package.rglob("*")) == before
    stamps = (tmp_path / "cache/qsrt/verified").iterdir()
    assert sorted(path.suffix for path in stamps) == ["", ".lock"]
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        assert cache.cache_folder("verified") == tmp_path / ".cache/qsrt/verified"
    monkeypatch.setenv("XDG_CACHE_HOME", str(package / "cache"))
    load_package(package)
    assert sorted(package.rglob("*")) == before


def test_user_without_a_home(package, monkeypatch, caplog):
    def no_home(_path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(cache.Path, "expanduser", no_home)
    assert load_package(package).layers
    assert "will be verified again next time" in caplog.text


def test_a_stamp_that_cannot_be_replaced_leaves_nothing(package, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_package(package)
    (stamp,) = (p for p in (tmp_path / "cache/qsrt/verified").iterdir() if not p.suffix)
    stamp.unlink()
    (stamp / "in the way").mkdir(parents=True)
    load_package(package)
    assert "will be verified again" in caplog.text
    assert len(list(stamp.parent.iterdir())) == 2


def test_ranks_verify_once_together(package, hashed):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: load_package(package), range(4)))
    assert len(hashed) == len(open_package(package).digests)
