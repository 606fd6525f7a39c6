"""The plan against the truth: what convert then writes."""

from dataclasses import replace
from pathlib import Path

import checkpoints
import pytest
import torch

from qsrt_pack import plan as module
from qsrt_pack.encode.expert import Settings
from qsrt_pack.plan import layer_seconds, make_plan, memory_bytes, probe
from qsrt_pack.source.checkpoint import open_checkpoint
from qsrt_pack.source.models import find_experts
from qsrt_runtime.format import schema
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry

FAST = Settings(search="fast")
RATES = {"exact": 1e5, "fast": 1e6}


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring the speed takes seconds; one test does."""
    monkeypatch.setattr(module, "probe", lambda method, _device: RATES[method])


def plan_of(source: Path, out: Path, settings: Settings = FAST, loader: str = "qsrt") -> dict:
    checkpoint = open_checkpoint(source)
    return make_plan(checkpoint, find_experts(checkpoint), out, settings, loader)


@pytest.fixture
def plan(clean_checkpoint: Path, tmp_path: Path) -> dict:
    return plan_of(clean_checkpoint, tmp_path / "out")


def test_the_plan_is_by_its_schema(plan: dict) -> None:
    schema.check(plan, "plan", "plan")
    with pytest.raises(FormatError, match=r"\$\.search"):
        schema.check(plan | {"search": "slow"}, "plan", "plan")


def test_the_plan_says_what_will_be_done(clean_checkpoint: Path, plan: dict) -> None:
    expected = {
        "source": str(clean_checkpoint),
        "model_type": "qwen3_moe",
        "layers": [0, 1],
        "experts_per_layer": 4,
        "topk": 2,
        "hidden_size": 128,
        "intermediate_size": 256,
        "atom_slots": 8,
        "atoms_per_expert": 48,
        "activation": "silu",
        "expert_weights": 2 * 4 * 3 * 128 * 256,
        "modes": "R0",
        "search": "fast",
        "seed": 0,
        "loader": "qsrt",
        "carried_files": ["generation_config.json"],
        "left_out_files": [],
    }
    assert {key: plan[key] for key in expected} == expected
    shards = clean_checkpoint.glob("*.safetensors")
    assert plan["bytes_in"] == sum(shard.stat().st_size for shard in shards)


def test_bytes_out_are_those_of_the_package(plan: dict, clean_package: Path) -> None:
    written = sum(path.stat().st_size for path in clean_package.iterdir())
    assert 0.95 * written < plan["bytes_out"] <= written  # less the JSON documents
    layer = clean_package / "qsrt-layer-001.safetensors"
    assert plan["layer_file_bytes"] == layer.stat().st_size
    base = sum(t.nbytes for name, t in checkpoints.tensors().items() if ".experts." not in name)
    assert plan["base_bytes"] == base


def test_strays_are_mentioned(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "modeling_x.py").write_text("")
    (checkpoint / "tokenizer.json").write_text("{}" * 500)
    plan = plan_of(checkpoint, tmp_path / "out")
    assert plan["left_out_files"] == ["modeling_x.py"]
    assert plan["carried_files"] == ["generation_config.json", "tokenizer.json"]
    before = plan_of(checkpoint, tmp_path / "out")["bytes_out"]
    (checkpoint / "tokenizer.json").unlink()
    assert plan_of(checkpoint, tmp_path / "out")["bytes_out"] == before - 1000


def test_nothing_is_written(clean_checkpoint: Path, tmp_path: Path) -> None:
    plan = plan_of(clean_checkpoint, tmp_path / "deep" / "below" / "out")
    assert plan["free_disk_bytes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_time_follows_from_speed_and_modes(clean_checkpoint: Path) -> None:
    experts = find_experts(open_checkpoint(clean_checkpoint))
    weights = 4 * 3 * 128 * 256
    r0, both = (
        layer_seconds(experts, replace(FAST, modes=modes), RATES) for modes in ("R0", "all")
    )
    assert both - r0 == pytest.approx(weights / RATES["fast"])  # one mode more
    exact = layer_seconds(experts, Settings(), RATES)
    assert exact > weights / RATES["exact"]
    rest = 2e-6 * weights  # rotating and packing do not depend on the search
    twice = layer_seconds(experts, FAST, {"fast": 2 * RATES["fast"]})
    assert twice - rest == pytest.approx((r0 - rest) / 2)


def test_memory_grows_with_the_matrix_and_the_modes() -> None:
    small, large = Geometry(128, 256, 4), Geometry(2048, 1536, 4)
    more = memory_bytes(large, FAST) - memory_bytes(small, FAST)
    assert more > 3 * 4 * (2048 * 1536 - 128 * 256)  # the three sources at least
    assert memory_bytes(large, replace(FAST, modes="all")) > memory_bytes(large, FAST)
    assert memory_bytes(replace(large, experts=256), FAST) == memory_bytes(large, FAST)
    calibrated = replace(FAST, calibration_sha256="0" * 64)
    assert memory_bytes(large, calibrated) > memory_bytes(large, FAST)


def test_the_probe_measures() -> None:
    rates = [probe(method, torch.device("cpu")) for method in ("exact", "fast")]
    assert 0 < rates[0] < rates[1]


def test_finished_layers_are_neither_written_nor_encoded(
    clean_checkpoint: Path, tmp_path: Path, plan: dict
) -> None:
    checkpoint = open_checkpoint(clean_checkpoint)
    experts = find_experts(checkpoint)
    resumed = make_plan(checkpoint, experts, tmp_path / "out", FAST, "qsrt", finished=[1])
    assert (plan["finished_layers"], resumed["finished_layers"]) == ([], [1])
    assert resumed["seconds"] == pytest.approx(plan["seconds"] / 2)
    assert plan["bytes_to_write"] == plan["bytes_out"] == resumed["bytes_out"]
    assert plan["bytes_to_write"] - resumed["bytes_to_write"] == plan["layer_file_bytes"]
    assert "finished    layers 1, by a run before" in module.describe(resumed)
    assert "by a run before" not in module.describe(plan)
