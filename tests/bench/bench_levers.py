"""What each part of the calibrated encoder gains, judged on held-out calibration text.

    python tests/bench/bench_levers.py MODEL TEXT WORK [--windows N] [--rows NAME ...]

Calibrates on the first 92% of the text and converts a checkpoint on the first CUDA device, or the
CPU, with one part left out at a time; prints KL(original || package) and top-1 agreement on the
last 8%, and the time. What there is to switch exists only here, by replacing functions. The
statistics stay in WORK, so that several runs of different rows can follow or share it.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from qsrt_pack import evaluate, guide, job
from qsrt_pack.calibrate import hessian
from qsrt_pack.calibration import calibrate
from qsrt_pack.encode import incoherence, matrix
from qsrt_pack.encode.expert import Settings
from qsrt_pack.statistics import Statistics

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
_down, _rotate = guide.down_moment, matrix.rotate_hessian


def source_target(rows: Any, source: Any, _decoded: Any, w2: Any, activation: Any) -> Any:
    """Down's Hessian from the source's gate and up, and its own weights as target."""
    return _down(rows, source, source, w2, activation)[0], w2


def kept_scales(_inner: Any, _target: Any, _metric: Any, suh: Any, svh: Any, *_rest: Any) -> Any:
    return suh, svh


Patch = tuple[Any, str, Any]
# Each row: what it is called, the settings that differ, what is replaced.
ROWS: dict[str, tuple[dict[str, Any], list[Patch]]] = {
    "uncalibrated": ({}, []),
    "calibrated": ({}, []),
    "gate and up by the layer's Hessian": (
        {},
        [(guide, "gate_up_moment", lambda _rows, prior: prior)],
    ),
    "Hessian without the scales": (
        {},
        [(matrix, "rotate_hessian", lambda moment, scales: _rotate(moment, scales.sign()))],
    ),
    "no column scales": ({}, [(incoherence, "column_scales", lambda _weight: None)]),
    "down's target the source": ({}, [(guide, "down_moment", source_target)]),
    "no refit of scales": ({}, [(matrix, "_refit", kept_scales)]),
    "no Hessian of outputs": ({}, [(guide, "output_moment", lambda *_: None)]),
    "hidden side of each expert": ({"hidden_side": "expert"}, []),
    "all rate modes": ({"modes": "all"}, []),
    "prior 1": ({}, [(hessian, "PRIOR", 1)]),
    "prior 16": ({}, [(hessian, "PRIOR", 16)]),
}


@contextmanager
def changed(name: str) -> Iterator[dict[str, Any]]:
    """The settings of a row, with its replacements in place."""
    settings, patches = ROWS[name]
    with ExitStack() as stack:
        for target, attribute, value in patches:
            stack.enter_context(patch.object(target, attribute, value))
        yield settings


def split(text: Path, work: Path) -> tuple[Path, Path]:
    """The text's first 92% and the rest, cut at an empty line."""
    data = text.read_bytes()
    cut = data.index(b"\n\n", len(data) * 92 // 100)
    head, tail = work / "calibration.txt", work / "held-out.txt"
    head.write_bytes(data[:cut])
    tail.write_bytes(data[cut:])
    return head, tail


def convert(model: Path, out: Path, statistics: Statistics | None, **settings: Any) -> None:
    if statistics is not None:
        settings["calibration_sha256"] = statistics.digest
    ready = job.prepare(
        model,
        out,
        Settings(device=DEVICE.type, **settings),
        devices=(DEVICE,),
        statistics=statistics,
    )
    job.run(ready, show_progress=False)


def measure(name: str, model: Path, text: Path, statistics: Statistics) -> None:
    """Convert as a row says, score on the text and print."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, changed(name) as settings:
        out = Path(folder) / "package"
        convert(model, out, None if name == "uncalibrated" else statistics, **settings)
        seconds = time.perf_counter() - start
        report = evaluate.evaluate(out, model, text, show_progress=False)
    sys.stdout.write(
        f"{name:36} KL {report['kl_mean']:.5f}, top-1 {100 * report['top1_agreement']:.2f}%, "
        f"converted in {seconds:.1f} s\n"
    )
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--windows", type=int)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    arguments = parser.parse_args()
    arguments.work.mkdir(exist_ok=True)
    head, tail = split(arguments.text, arguments.work)
    out = arguments.work / f"statistics-{arguments.windows or 'all'}"
    start = time.perf_counter()
    statistics = calibrate(
        arguments.model,
        head,
        out,
        windows=arguments.windows,
        device=DEVICE,
        show_progress=False,
    )
    windows = statistics.document["settings"]["windows"]
    seconds = time.perf_counter() - start
    sys.stdout.write(f"{windows} windows of calibration text, {seconds:.1f} s, on {DEVICE}\n")
    for name in arguments.rows:
        measure(name, arguments.model, tail, statistics)


if __name__ == "__main__":
    main()
