"""What inspect says of packages and layer files."""

import json
import os
from pathlib import Path

import pytest

from qsrt_pack.encode.expert import Settings
from qsrt_pack.inspect import describe, inspect
from qsrt_pack.validate import bits_per_expert_weight
from qsrt_runtime.format import paths, schema
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.package import open_package

LAYER_0, LAYER_1 = "qsrt-layer-000.safetensors", "qsrt-layer-001.safetensors"
GOLDEN_LAYER, KIMI_LAYER = "publication/qsrt-layer-005.safetensors", "kimi_layer.safetensors"


def run(path: Path) -> dict:
    return inspect(path, show_progress=False)


def all_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(os.stat(file).st_size for file in files)


def file_bytes(folder: Path, *names: str) -> int:
    return sum(os.stat(folder / name).st_size for name in names)


def test_a_package_of_ours(clean_package: Path) -> None:
    report = run(clean_package)
    schema.check(report, "report", "report")
    manifest = json.loads((clean_package / "qsrt-manifest.json").read_text())
    shard = "model-00001-of-00001.safetensors"
    documents = ("config.json", "qsrt-manifest.json", "MANIFEST.sha256", "QSRT_COMPLETE.json")
    layer_bytes = file_bytes(clean_package, LAYER_0, LAYER_1)
    del report["errors"]
    assert report == {
        "schema": "qsrt_report_v1",
        "kind": "inspect",
        "inspected": "package",
        "path": str(clean_package),
        "is_ours": True,
        "files": 12,
        "storage_schema": "kquant_fruit_qsrt_atoms_v1",
        "layers": [0, 1],
        "experts_per_layer": 4,
        "hidden_size": 128,
        "intermediate_size": 256,
        "true_hidden_size": 128,
        "true_intermediate_size": 256,
        "topk": 2,
        "profile": "generic",
        "atom_slots": 8,
        "atoms_per_expert": 48,
        "experts": 8,
        "expert_weights": 786_432,
        "modes": {"R0/R0": 8},
        "pairs": {matrix: {"P33": 8, "P24": 0} for matrix in ("w1", "w3", "w2")},
        "x4t_experts": [],
        "bytes": {
            "trellis_words": 294_912,  # 8 experts, 8 slots, 3 matrices, 12 * 128
            "local_scales": 12_288,  # 8 experts, 8 slots, 192
            "shared_scales": 6_144,  # 8 experts, 3 vectors, 128 float16
            "format_codes": 8,
            "padding": 2 * (4092 + 1024 + 8 * (20_480 - 19_200)),
            "headers": layer_bytes - 2 * (4096 + 4096 + 8 * 20_480),
            "evidence": file_bytes(clean_package, "qsrt-layer-000.json", "qsrt-layer-001.json"),
            "base": file_bytes(clean_package, shard, "model.safetensors.index.json"),
            "other": file_bytes(
                clean_package, *documents, ".gitattributes", "generation_config.json"
            ),
            "total": all_bytes(clean_package),
        },
        "bits_per_expert_weight": bits_per_expert_weight(open_package(clean_package)),
        "trellis_bits_per_expert_weight": 3.0,
        "activations": {"silu": 8, "situ": 0},
        "encoder_settings": Settings(search="fast").fingerprinted(),
        "versions": manifest["producer"]["versions"],
        "source_format": None,
        "source_sha256": manifest["source"]["source_sha256"],
        "encoder_fingerprint": manifest["producer"]["encoder"]["fingerprint"],
        "producer_fingerprint": manifest["producer"]["fingerprint"],
        "seal_sha256": paths.sha256_file(clean_package / "QSRT_COMPLETE.json"),
    }


def test_errors_of_a_package_of_ours(clean_package: Path) -> None:
    entries = [
        (layer, item)
        for layer in (0, 1)
        for item in json.loads((clean_package / f"qsrt-layer-00{layer}.json").read_text())[
            "experts"
        ]
    ]
    errors = run(clean_package)["errors"]
    for matrix in ("w1", "w3", "w2"):
        values = [item["nmse"][matrix] for _, item in entries]
        assert 0 < min(values) < max(values) < 0.1
        assert errors["nmse"][matrix]["max"] == max(values)
        assert errors["nmse"][matrix]["mean"] == pytest.approx(sum(values) / 8, rel=1e-12)
    ranked = sorted(((max(item["nmse"].values()), n, item) for n, item in entries), reverse=True)
    assert errors["worst"] == [
        {"layer": n, "expert": item["expert"], "nmse": item["nmse"]} for _, n, item in ranked[:5]
    ]
    assert (errors["functional_nmse"], errors["tokens"]) == (None, None)


def test_a_published_package(golden: Path) -> None:
    folder = golden / "publication"
    report = run(folder)
    assert report == {
        "schema": "qsrt_report_v1",
        "kind": "inspect",
        "inspected": "package",
        "path": str(folder),
        "is_ours": False,
        "files": 7,
        "storage_schema": "kquant_fruit_qsrt_atoms_v1",
        "layers": [5],
        "experts_per_layer": 4,
        "hidden_size": 1024,
        "intermediate_size": 512,
        "true_hidden_size": 1024,
        "true_intermediate_size": 512,
        "topk": 2,
        "profile": "fruit",
        "atom_slots": 16,
        "atoms_per_expert": 96,
        "experts": 4,
        "expert_weights": 6_291_456,
        "modes": {"R0/R0": 1, "R0/R2": 1, "R1/R0": 1, "R2/R1": 1},
        "pairs": {matrix: {"P33": 5, "P24": 3} for matrix in ("w1", "w3", "w2")},
        "x4t_experts": [],
        "bytes": {
            "trellis_words": 2_359_296,
            "local_scales": 12_288,
            "shared_scales": 24_576,
            "format_codes": 4,
            "padding": 57_340,
            "headers": 1_032,
            "evidence": 555,
            "base": 64,
            "other": 3_392,
            "total": 2_458_547,
        },
        "bits_per_expert_weight": 8 * 2_454_536 / 6_291_456,
        "trellis_bits_per_expert_weight": 3.0,
        "activations": {"silu": 4, "situ": 0},
        "errors": None,
        "encoder_settings": None,
        "versions": None,
        "source_format": None,
        "source_sha256": "ff22c87301d02ea8ebd1850318d9885c6d606293ce29b7719668c05370afbe47",
        "encoder_fingerprint": "3055662eb121fb40fc413d2b26770b17aba4d66f8dc676349226b3f9d1a02052",
        "producer_fingerprint": "b7a0416b8bbde02f88d1f4b95bc2198cbda32bc05a7ddd2dd1e4ad680eb305c3",
        "seal_sha256": paths.sha256_file(folder / "QSRT_COMPLETE.json"),
    }


def test_a_kimi_layer_file(golden: Path) -> None:
    path = golden / KIMI_LAYER
    assert run(path) == {
        "schema": "qsrt_report_v1",
        "kind": "inspect",
        "inspected": "layer_file",
        "path": str(path),
        "is_ours": False,
        "files": 1,
        "storage_schema": "kquant_kimi_k3_qsrt_atoms_v1",
        "layers": [7],
        "experts_per_layer": 3,
        "hidden_size": 128,
        "intermediate_size": 3072,
        "true_hidden_size": None,
        "true_intermediate_size": None,
        "topk": None,
        "profile": "generic",
        "atom_slots": 96,
        "atoms_per_expert": 576,
        "experts": 3,
        "expert_weights": 2 * 3 * 128 * 3072,
        "modes": {"R1/R2": 1, "R2/R0": 1, "X4T": 1},
        "pairs": {
            "w1": {"P33": 21, "P24": 3},
            "w3": {"P33": 21, "P24": 3},
            "w2": {"P33": 22, "P24": 2},
        },
        "x4t_experts": [1],
        "bytes": {
            "trellis_words": 884_736,
            "local_scales": 36_864,
            "shared_scales": 768,  # one row for all experts
            "format_codes": 3,
            "padding": 4093 + 3328 + 96 * (12_288 - 9_600),
            "headers": 4_096,
            "evidence": 0,
            "base": 0,
            "other": 0,
            "total": 1_191_936,
        },
        "bits_per_expert_weight": 8 * 1_191_936 / (2 * 3 * 128 * 3072),
        "trellis_bits_per_expert_weight": 3.0,
        **dict.fromkeys(("activations", "errors", "encoder_settings", "versions", "source_format")),
        **dict.fromkeys(("source_sha256", "encoder_fingerprint", "producer_fingerprint")),
        "seal_sha256": None,
    }


def test_a_layer_file_alone_says_what_its_package_says(golden: Path) -> None:
    alone, package = run(golden / GOLDEN_LAYER), run(golden / "publication")
    for key in ("files", "bytes"):
        del package[key]
    changed = {key for key, value in package.items() if alone[key] != value}
    assert changed == {
        *("inspected", "path", "is_ours", "topk", "activations"),
        *("producer_fingerprint", "seal_sha256", "true_hidden_size", "true_intermediate_size"),
    }
    assert [alone[key] for key in ("inspected", "is_ours", "topk")] == ["layer_file", None, None]
    assert alone["bytes"]["total"] == 2_454_536


@pytest.mark.parametrize("name", ["publication", GOLDEN_LAYER, KIMI_LAYER])
def test_bytes_add_up(golden: Path, name: str) -> None:
    sizes = run(golden / name)["bytes"]
    assert sizes.pop("total") == sum(sizes.values()) == all_bytes(golden / name)


def test_modes_pairs_and_activations_are_counted(mixed: Path) -> None:
    report = run(mixed)
    assert report["modes"] == {"R0/R0": 3, "R0/R2": 2, "R1/R0": 1, "R2/R1": 1, "R2/R2": 1}
    assert report["pairs"] == {
        "w1": {"P33": 11, "P24": 5},
        "w3": {"P33": 11, "P24": 5},
        "w2": {"P33": 9, "P24": 7},
    }
    assert report["activations"] == {"silu": 7, "situ": 1}
    assert report["encoder_settings"]["modes"] == "all"
    sizes = report["bytes"]
    assert sizes["trellis_words"] == 8 * 3 * 128 * 512 * 3 // 8
    assert sizes.pop("total") == sum(sizes.values()) == all_bytes(mixed)
    assert report["bits_per_expert_weight"] == bits_per_expert_weight(open_package(mixed))


def test_errors_are_summed_up(mixed: Path) -> None:
    errors = run(mixed)["errors"]
    assert errors["nmse"] == {
        "w1": {"mean": 2.625 / 8, "max": 1.0},
        "w3": {"mean": 2.875 / 8, "max": 0.625},
        "w2": {"mean": 1.96875 / 8, "max": 0.75},
    }
    # Expert 0 and 3 of layer 0 both have 0.5: the earlier one first.
    worst = [(item["layer"], item["expert"]) for item in errors["worst"]]
    assert worst == [(1, 2), (0, 2), (1, 3), (0, 0), (0, 3)]
    assert errors["worst"][1]["nmse"] == {"w1": 0.25, "w3": 0.25, "w2": 0.75}
    assert errors["functional_nmse"] == {"experts": 2, "mean": 0.375, "max": 0.5}
    assert errors["tokens"] == {"experts": 3, "min": 0, "max": 1000, "total": 1070}


def test_a_layer_file_of_x4t_experts_alone(golden: Path, tmp_path: Path) -> None:
    header = json.loads((golden / KIMI_LAYER).read_bytes()[8:4096])
    header["__metadata__"] |= {
        "compressed_experts": "0",
        "x4t_experts": "3",
        "atom_slot_payload_bytes": "0",
        "atom_slot_stride_bytes": "4096",
    }
    end = 8192 + 96 * 4096
    header["qsrt_atoms"] |= {"shape": [96, 4096], "data_offsets": [8192, end]}
    text = json.dumps(header).encode()
    path = tmp_path / "layer.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\xff" * 3 + bytes(end - 3))
    report = run(path)
    assert (report["modes"], report["x4t_experts"]) == ({"X4T": 3}, [0, 1, 2])
    assert report["pairs"]["w1"] == {"P33": 0, "P24": 0}
    assert (report["experts"], report["expert_weights"]) == (3, 0)
    assert report["bits_per_expert_weight"] is report["trellis_bits_per_expert_weight"] is None
    assert report["bytes"]["total"] == all_bytes(path)
    assert "X4T 3" in describe(report)


def test_a_link_to_a_layer_file_is_followed(golden: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(golden / KIMI_LAYER)
    assert run(tmp_path / "link")["layers"] == [7]


def test_the_report_has_a_closed_schema(clean_package: Path) -> None:
    for edit in (
        lambda r: r.update(more=1),
        lambda r: r.pop("seal_sha256"),
        lambda r: r["bytes"].update(more=1),
        lambda r: r["modes"].update({"R3/R0": 1}),
        lambda r: r["encoder_settings"].update(more=1),
        lambda r: r["errors"]["worst"][0].pop("layer"),
    ):
        report = run(clean_package)
        schema.check(report, "report", "report")
        edit(report)
        with pytest.raises(FormatError, match="report"):
            schema.check(report, "report", "report")


def test_text_of_a_published_package(golden: Path) -> None:
    report = run(golden / "publication") | {"path": "/p"}
    assert describe(report).splitlines() == [
        "package     /p (made elsewhere)",
        "experts     layer 5 x 4, 1024 x 512, top-2, silu: 6,291,456 weights",
        "format      kquant_fruit_qsrt_atoms_v1, profile fruit, 16 slots, 96 atoms an expert",
        "modes       R0/R0 1, R0/R2 1, R1/R0 1, R2/R1 1 (experts by w1 and w3/w2)",
        "pairs       w1 P33 5 P24 3, w3 P33 5 P24 3, w2 P33 5 P24 3",
        "bits        3.1211 stored an expert weight, 3.0000 of them trellis words",
        "bytes       2,458,547 in 7 files",
        "            2,359,296 trellis words",
        "               12,288 local scales, in the bundles",
        "               24,576 shared scales, of the hidden side",
        "                    4 format codes",
        "               57,340 padding of the layer files",
        "                1,032 headers of the layer files",
        "                  555 evidence",
        "                   64 base shards and their index",
        "                3,392 other files",
        "source      ff22c87301d02ea8ebd1850318d9885c6d606293ce29b7719668c05370afbe47",
        "encoder id  3055662eb121fb40fc413d2b26770b17aba4d66f8dc676349226b3f9d1a02052",
        "producer id b7a0416b8bbde02f88d1f4b95bc2198cbda32bc05a7ddd2dd1e4ad680eb305c3",
        f"seal        {report['seal_sha256']}",
        "not hashed  layer files, base shards and side files; qsrt-pack validate PACKAGE does that",
    ]


def test_text_of_a_package_of_ours(mixed: Path) -> None:
    report = run(mixed)
    report["versions"] = {"qsrt": "1.2", "torch": "\x1b[2J", "triton": None}
    lines = describe(report).splitlines()
    assert lines[:4] == [
        f"package     {mixed} (made by qsrt-pack)",
        "experts     2 layers (0 to 1) x 4, 128 x 512, top-2, silu 7, situ 1: 1,572,864 weights",
        "format      kquant_fruit_qsrt_atoms_v1, profile generic, 16 slots, 96 atoms an expert",
        "modes       R0/R0 3, R0/R2 2, R1/R0 1, R2/R1 1, R2/R2 1 (experts by w1 and w3/w2)",
    ]
    start = next(i for i, line in enumerate(lines) if line.startswith("NMSE"))
    assert lines[start : start + 10] == [
        "NMSE        w1 0.32812 (max 1.00000), w3 0.35938 (max 0.62500), w2 0.24609 (max 0.75000)",
        "worst       layer 1 expert 2: w1 1.00000 w3 0.25000 w2 0.25000",
        "            layer 0 expert 2: w1 0.25000 w3 0.25000 w2 0.75000",
        "            layer 1 expert 3: w1 0.25000 w3 0.62500 w2 0.25000",
        "            layer 0 expert 0: w1 0.25000 w3 0.50000 w2 0.12500",
        "            layer 0 expert 3: w1 0.12500 w3 0.50000 w2 0.25000",
        "functional  NMSE 0.37500 (max 0.50000) over 2 experts",
        "tokens      1,070, 0 to 1,000 an expert, over 3 experts",
        "encoder     exact search, modes all, hidden side of each layer, seed 3, damping 0.025, "
        "calibration none, cpu",
        "versions    qsrt 1.2, torch ?[2J, triton none",
    ]


def test_text_of_a_layer_file(golden: Path) -> None:
    lines = describe(run(golden / KIMI_LAYER)).splitlines()
    assert lines[0] == f"layer file  {golden / KIMI_LAYER} (made elsewhere)"
    assert lines[6] == "bytes       1,191,936 in 1 file"
    assert lines[-1].startswith("not hashed  any byte of it")
    assert not any(line.startswith(("seal", "source", "            ")) for line in lines[13:])
