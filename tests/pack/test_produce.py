"""Packed experts from a checkpoint: batches, devices, and what a layer shares."""

from collections.abc import Callable
from pathlib import Path

import checkpoints
import pytest
import torch
from checkpoints import PARTS, config, expert_key, write_checkpoint

from qsrt_pack import produce
from qsrt_pack.encode.expert import MatrixError, Settings
from qsrt_pack.produce import PackedExpert, produce_layer
from qsrt_pack.ranks import Ranks
from qsrt_pack.source.checkpoint import open_checkpoint
from qsrt_pack.source.models import find_experts
from qsrt_runtime.format.errors import FormatError

EXPERTS = 5
FAST = Settings(search="fast")
CPU = (torch.device("cpu"),)
Scale = Callable[[dict[str, torch.Tensor]], object]


def write(folder: Path, change: Scale = lambda _weights: None) -> Path:
    """A checkpoint of one layer of five experts; change(its tensors) in place."""
    weights = checkpoints.tensors(layers=1, experts=EXPERTS)
    change(weights)
    counts = {"num_hidden_layers": 1, "num_experts": EXPERTS, "num_experts_per_tok": 1}
    return write_checkpoint(folder, config_value=config(**counts), weights=weights)


def produced(
    source: Path, settings: Settings = FAST, devices: tuple[torch.device, ...] = CPU
) -> list[PackedExpert]:
    checkpoint = open_checkpoint(source)
    experts = find_experts(checkpoint)
    return list(produce_layer(checkpoint, experts, settings, devices, 0, Ranks()))


def assert_same(found: list[PackedExpert], expected: list[PackedExpert]) -> None:
    assert [packed.entry for packed in found] == [packed.entry for packed in expected]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.bundles, other.bundles)
        assert torch.equal(
            one.shared_scales.view(torch.int16), other.shared_scales.view(torch.int16)
        )
        assert one.modes == other.modes


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("produce") / "model")


@pytest.fixture(scope="module")
def alone(source: Path) -> list[PackedExpert]:
    """The experts, each encoded by itself."""
    return produced(source)


def test_experts_come_in_order(alone: list[PackedExpert]) -> None:
    assert [packed.entry["expert"] for packed in alone] == list(range(EXPERTS))


@pytest.mark.parametrize("size", [2, EXPERTS])
def test_batches_change_nothing(
    source: Path, alone: list[PackedExpert], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    batches = [range(first, min(first + size, EXPERTS)) for first in range(0, EXPERTS, size)]
    monkeypatch.setattr(produce, "_batches", lambda *_arguments: batches)
    assert_same(produced(source), alone)


def test_a_gpu_gets_batches_and_as_many_threads_as_fit(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = find_experts(open_checkpoint(source))
    weights = experts.geometry.weights_per_expert
    monkeypatch.setattr(produce, "_BATCH_WEIGHTS", 2 * weights - 1)
    settings = Settings(device="cuda")
    batches = [range(0, 2), range(2, 4), range(4, 5)]
    assert produce._batches(experts, settings, 0) == batches
    assert produce._batches(experts, settings, 1 << 31) == batches
    assert produce._batches(experts, settings, 1 << 33) == [range(e, e + 1) for e in range(5)]
    device = torch.device("cuda", 0)
    # A batch takes 15.7 MB, its kept costs a sixteenth of the memory.
    for threads, memory in ((3, 160_000_000), (2, 60_000_000), (1, 10_000_000)):
        properties = type("Properties", (), {"total_memory": memory})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _d, p=properties: p)
        assert produce._threads(experts, device, 2, 0) == threads
        assert produce._threads(experts, device, 2, memory // 16) == max(1, threads - 1)


def shared(packed: PackedExpert) -> bytes:
    return packed.shared_scales.numpy().tobytes()


@pytest.mark.parametrize("power", [-7, 5])
def test_an_expert_far_from_the_others_keeps_its_own_hidden_side(
    tmp_path: Path, power: int
) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        for part in PARTS:
            weights[expert_key(0, 3, part)] *= 10.0**power

    found = produced(write(tmp_path / "model", change))
    sides = [shared(packed) for packed in found]
    assert len({*sides[:3], sides[4]}) == 1
    assert sides[3] != sides[0]
    for packed in found:
        assert max(packed.entry["nmse"].values()) < 0.03


@pytest.mark.parametrize("power", [-6, 7])
def test_down_of_another_size_than_gate_and_up(tmp_path: Path, power: int) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        for expert in range(EXPERTS):
            weights[expert_key(0, expert, "down_proj")] *= 10.0**power

    found = produced(write(tmp_path / "model", change))
    assert len({shared(packed) for packed in found}) == 1
    for packed in found:
        assert max(packed.entry["nmse"].values()) < 0.03


def test_a_layer_of_zeros(tmp_path: Path) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        for expert in range(EXPERTS):
            for part in PARTS:
                weights[expert_key(0, expert, part)].zero_()

    for packed in produced(write(tmp_path / "model", change)):
        assert packed.entry["zero_matrices"] == ["w1", "w2", "w3"]
        assert torch.isfinite(packed.shared_scales).all()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("targets hold a NaN"), "layer 0 experts 0 to 0: targets hold a NaN"),
        (
            MatrixError(0, 0, "w2", "too large"),
            r"model-0000\d-of-00002\.safetensors: tensor .*\.experts\.0\.down_proj\.weight: too",
        ),
        (torch.OutOfMemoryError("full"), "^layer 0 experts 0 to 0: cpu has too little memory"),
        (
            RuntimeError("Triton Error [CUDA]: out of memory"),
            "^layer 0 experts 0 to 0: cpu has too little memory",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            "^layer 0 experts 0 to 0: cpu has too little memory",
        ),
        (
            RuntimeError("cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED, when calling `x`"),
            "^layer 0 experts 0 to 0: cusolver error: .*, reported on cpu; if it comes again",
        ),
        (
            RuntimeError("CUDA error: device-side assert triggered\nand what to compile with"),
            r"^layer 0 experts 0 to 0: CUDA error: device-side .*, reported on cpu; if",
        ),
        (
            RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
            r"^layer 0 experts 0 to 0: Triton Error \[CUDA\]: an illegal .*, reported on cpu; if",
        ),
    ],
)
def test_errors_say_where(
    source: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def search(*_arguments: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(produce, "search", search)
    with pytest.raises(FormatError, match=message):
        produced(source)


def test_a_device_that_fails_while_measuring(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(produce, "ordered_mean_square", fail)
    with pytest.raises(FormatError, match=r"^layer 0 experts 0 to 0: CUDA error: unsp"):
        produced(source)


def test_errors_of_programs_stay_what_they_are(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> torch.Tensor:
        raise RuntimeError("sizes differ")

    monkeypatch.setattr(produce, "search", fail)
    with pytest.raises(RuntimeError, match=r"^sizes differ$"):
        produced(source)


@pytest.mark.gpu
@pytest.mark.parametrize("modes", ["R0", "all"])
def test_devices_and_batches_change_nothing_on_a_gpu(
    source: Path, monkeypatch: pytest.MonkeyPatch, modes: str
) -> None:
    settings = Settings(modes=modes, device="cuda")
    device = torch.device("cuda", 0)
    found = produced(source, settings, (device,))
    assert {packed.bundles.device.type for packed in found} == {"cpu"}
    monkeypatch.setattr(produce, "_BATCH_WEIGHTS", 1)
    assert_same(produced(source, settings, (device, device)), found)
    assert max(max(packed.entry["nmse"].values()) for packed in found) < 0.02
