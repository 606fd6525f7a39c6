"""Fixtures shared by all tests. Everything runs without a GPU and without the network."""

import json
import logging
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it once, as it is imported

import checkpoints
import pytest
import torch
from hypothesis import HealthCheck, settings

from qsrt_pack import job
from qsrt_pack.encode.expert import Settings

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as behind a shell's &
    # For the commands that tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a test first imports triton

_PROFILE = {  # deadline in ms, for one example: nothing hangs
    "deadline": 20_000,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}
settings.register_profile("short", max_examples=60, **_PROFILE)
settings.register_profile("long", max_examples=1000, **_PROFILE)
settings.load_profile("short")

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
SHARED = ROOT.parent / "shared"
FULL_GOLDEN = SHARED / "golden"  # a larger set, used where it is there


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Stamps of verified packages lie in a folder of this run, and not in the user's cache."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _own_log_levels() -> Iterator[None]:
    """The command line sets levels for the whole process."""
    loggers = [logging.getLogger(name) for name in ("qsrt_pack", "qsrt_runtime")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The repository's folder."""
    return ROOT


@pytest.fixture(scope="session")
def golden() -> Path:
    """The golden data that lies in the repository."""
    return GOLDEN


@pytest.fixture(scope="session")
def full_golden() -> Path:
    """The full golden set; tests of it are skipped where only the repository is there."""
    if not FULL_GOLDEN.is_dir():
        pytest.skip("the full golden set is not here")
    return FULL_GOLDEN


@pytest.fixture(scope="session")
def facts() -> dict:
    """Checksums and figures of the golden data."""
    return json.loads((GOLDEN / "index.json").read_text())["facts"]


def _converted(source: Path, out: Path) -> Path:
    job.run(job.prepare(source, out, Settings(search="fast")), show_progress=False)
    return out


@pytest.fixture(scope="session")
def clean_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint that converts. Never written to: tests damage copies."""
    return checkpoints.write_checkpoint(tmp_path_factory.mktemp("clean") / "model")


@pytest.fixture(scope="session")
def clean_package(clean_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of the tiny checkpoint, by the fast search. Never written to."""
    return _converted(clean_checkpoint, tmp_path_factory.mktemp("package") / "model-qsrt")


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Mixtral checkpoint and its package. Never written to."""
    folder = tmp_path_factory.mktemp("mixtral")
    source = checkpoints.write_mixtral(folder / "model")
    return source, _converted(source, folder / "out")


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A copy of the bundled trained model and its package. Never written to."""
    folder = tmp_path_factory.mktemp("example")
    source = shutil.copytree(ROOT / "examples/tiny_moe/model", folder / "model")
    return source, _converted(source, folder / "out")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A larger trained model and its package; tests of it are skipped where it is not there."""
    source = SHARED / "models" / "qwen3moe-tiny"
    if not source.is_dir():
        pytest.skip("the larger trained model is not here")
    return source, _converted(source, tmp_path_factory.mktemp("trained") / "out")


@pytest.fixture
def checkpoint(clean_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint to damage."""
    return shutil.copytree(clean_checkpoint, tmp_path / "model")


@pytest.fixture
def package(clean_package: Path, tmp_path: Path) -> Path:
    """A copy of the tiny package to damage."""
    return shutil.copytree(clean_package, tmp_path / "model-qsrt")
