"""Several processes on one conversion, over gloo on the CPU."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoints import edit_json

from qsrt_pack.ranks import Ranks, joined_ranks, rank_devices
from qsrt_runtime.format.errors import FormatError

ROOT = Path(__file__).parents[2]
TIMEOUT = 300


def start(
    sources: list[Path], out: Path, *options: str, machines: int = 1
) -> list[subprocess.Popen]:
    """A rank for each source, as torchrun starts them on one machine, or each on its own."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    running = []
    for rank, source in enumerate(sources):
        values = {"RANK": rank, "WORLD_SIZE": len(sources), "LOCAL_RANK": rank // machines}
        values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": ROOT}
        process = subprocess.Popen(
            [sys.executable, "-m", "qsrt_pack", "-q", "convert", source, out, *options],
            env=os.environ | {key: str(value) for key, value in values.items()},
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
    return running


def finish(running: list[subprocess.Popen]) -> list[tuple[int, str]]:
    """Exit codes and messages."""
    messages = [process.communicate(timeout=TIMEOUT)[1] for process in running]
    return [(process.returncode, text) for process, text in zip(running, messages, strict=True)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_ranks_make_the_same_bytes_as_one(
    clean_checkpoint: Path, clean_package: Path, tmp_path: Path
) -> None:
    results = finish(start([clean_checkpoint] * 2, tmp_path / "out", "--search", "fast"))
    assert [code for code, _ in results] == [0, 0], results
    assert contents(tmp_path / "out") == contents(clean_package)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_ranks_with_different_sources_are_refused(
    clean_checkpoint: Path, checkpoint: Path, tmp_path: Path
) -> None:
    edit_json(checkpoint / "config.json", lambda value: value.update(rope_theta=5.0))
    sources, out = [clean_checkpoint, checkpoint], tmp_path / "out"
    for code, message in finish(start(sources, out, "--search", "fast", machines=2)):
        assert code == 1
        assert "rank 1 has source" in message
        assert "Traceback" not in message
    assert not out.exists()


def test_a_lost_rank_ends_the_run_and_one_rank_continues_it(
    clean_checkpoint: Path, tmp_path: Path
) -> None:
    out, state = tmp_path / "out", tmp_path / "out.partial" / "state.json"
    running = start([clean_checkpoint] * 2, out)  # the exact search takes its time
    deadline = time.monotonic() + TIMEOUT
    while not state.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    running[1].kill()
    (code, message), _ = finish(running)
    assert code == 1
    assert "another rank has stopped or cannot be reached" in message
    assert "1 of 2 layers are finished and kept" in message
    assert "Traceback" not in message
    command = [sys.executable, "-m", "qsrt_pack", "-q", "convert", clean_checkpoint]
    alone = os.environ | {"PYTHONPATH": str(ROOT)}
    for folder in (out, tmp_path / "alone"):
        subprocess.run([*command, folder], env=alone, check=True, timeout=TIMEOUT)
    assert contents(out) == contents(tmp_path / "alone")


def test_a_process_alone_has_no_one_to_talk_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined_ranks() as ranks:
        assert ranks == Ranks(0, 1)
        assert ranks.is_first
        ranks.agree({"seed": 1})
        assert ranks.told([3]) == [3]
        assert list(ranks.deal([1, 2, 3], lambda own: (2 * item for item in own))) == [2, 4, 6]


def test_facts_that_differ_name_rank_and_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = [{"seed": 0, "source": "a"}, {"seed": 0, "source": None}, {"seed": 1, "source": "a"}]

    def gather(found: list, _own: dict, *, group: None) -> None:
        found[:] = theirs

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    with pytest.raises(FormatError, match=r"rank 2 has seed 1, rank 0 has 0"):
        Ranks(0, 3).agree(theirs[0])
    theirs.pop()
    Ranks(1, 2).agree(theirs[1])  # one that has not hashed agrees


def test_a_broken_connection_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_arguments: object, **_options: object) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1\nand a trace")

    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lost)
    with pytest.raises(FormatError, match=r"cannot be reached: Connection closed by peer .*:1$"):
        Ranks(0, 2).told(1)


@pytest.mark.parametrize(
    ("place", "processes", "count", "expected"),
    [(0, 1, 3, [0, 1, 2]), (0, 2, 4, [0, 2]), (1, 2, 4, [1, 3]), (1, 2, 1, [0]), (4, 5, 3, [1])],
)
def test_processes_share_a_machines_devices(
    monkeypatch: pytest.MonkeyPatch, place: int, processes: int, count: int, expected: list[int]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(place))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    devices = tuple(torch.device("cuda", number) for number in range(count))
    assert [device.index for device in rank_devices(devices)] == expected
