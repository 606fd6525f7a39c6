"""Stop real conversions by faults in their file operations, and see that no harm is done.

    python tests/faults/run.py --points 240

Each point is one fault at one file operation of one `qsrt-pack convert` process: see
site/sitecustomize.py for the kinds. After it the output must be whole or as it was before; then the
same command runs again without a fault and must leave, with nothing beside it, the package that an
undisturbed run makes, to the byte. Exits 1 if anything else is found.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import checkpoints  # noqa: E402

FAULTS = ("kill", "power", "torn", "eio", "full", "interrupt")
OUTCOMES = {0: "no effect on the run", 1: "clean error", -9: "killed", 130: "interrupted"}
Tree = dict[str, bytes]


@dataclass(frozen=True)
class Scenario:
    """A conversion to disturb. start: what lies in the output's folder before."""

    name: str
    start: Path
    options: tuple[str, ...] = ()

    @property
    def before(self) -> Tree | None:
        out = self.start / "out"
        return tree(out) if out.exists() else None


@dataclass(frozen=True)
class Point:
    """One fault at one file operation, counted from 1."""

    scenario: Scenario
    number: int
    operation: str
    fault: str


def tree(folder: Path) -> Tree:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def convert(
    model: Path, folder: Path, *options: str, point: int = 0, fault: str = ""
) -> tuple[subprocess.CompletedProcess, list[str]]:
    """Run the command into folder/out; returns what became of it and its file operations."""
    trace = folder.with_name(folder.name + ".trace")
    trace.unlink(missing_ok=True)
    value = {"root": str(folder), "trace": str(trace), "point": point, "fault": fault}
    python_path = [str(HERE / "site"), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "QSRT_FAULT": json.dumps(value),
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "qsrt_pack", "-q", "convert", model, folder / "out"]
    done = subprocess.run(
        [*map(str, command), "--search", "fast", *options],
        env=environment,
        cwd=HERE.parents[1],  # whose code `python -m` runs
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=600,
        check=False,
    )
    return done, trace.read_text().splitlines() if trace.exists() else []


def trial(model: Path, wanted: Tree, room: Path, point: Point) -> tuple[str, list[str]]:
    """Strike once, then run the same command again: (outcome, what is wrong)."""
    folder = Path(tempfile.mkdtemp(dir=room)) / "work"
    shutil.copytree(point.scenario.start, folder)
    strike = {"point": point.number, "fault": point.fault}
    done, _ = convert(model, folder, *point.scenario.options, **strike)
    wrong = [] if done.returncode in OUTCOMES else [f"exit code {done.returncode}"]
    lines = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    if "Traceback" in done.stderr or len(lines) != (done.returncode == 1):
        wrong.append(f"standard error: {done.stderr}")
    out = folder / "out"
    found = tree(out) if out.exists() else None
    if found == {} and point.scenario.before is None:
        found = None
    moved = folder / "out.partial" / "old"
    aside = found is None and moved.exists() and tree(moved) == point.scenario.before
    if found not in (wanted, point.scenario.before) and not aside:
        wrong.append("the output is neither whole nor as it was")
    again, _ = convert(model, folder, *point.scenario.options)
    if again.returncode:
        wrong.append(f"again: exit code {again.returncode}: {again.stderr}")
    if out.exists() and tree(out) != wanted:
        wrong.append("again: other bytes than those of an undisturbed run")
    if [path.name for path in folder.iterdir()] != ["out"]:
        wrong.append(f"again: {sorted(path.name for path in folder.iterdir())} are left")
    shutil.rmtree(folder.parent)
    return OUTCOMES.get(done.returncode, "other"), wrong


def prepare(room: Path) -> tuple[Path, Tree, list[Scenario]]:
    """The smallest checkpoint of two layers, its package, and the conversions to disturb."""
    value = checkpoints.config(num_experts=1, num_experts_per_tok=1)
    weights = checkpoints.tensors(layers=2, experts=1)
    model = checkpoints.write_checkpoint(room / "model", config_value=value, weights=weights)
    folders = {name: room / name for name in ("fresh", "over an older one", "continued")}
    for folder in folders.values():
        folder.mkdir()
    done, _ = convert(model, folders["over an older one"], "--seed", "1")
    assert done.returncode == 0, done.stderr
    (room / "undisturbed").mkdir()
    done, operations = convert(model, room / "undisturbed")
    assert done.returncode == 0, done.stderr
    second = operations.index("open out.partial/package/qsrt-layer-001.safetensors.partial")
    convert(model, folders["continued"], point=second + 3, fault="kill")
    assert (folders["continued"] / "out.partial" / "state.json").exists()
    scenarios = [
        Scenario(name, folder, ("--overwrite",) * (name == "over an older one"))
        for name, folder in folders.items()
    ]
    return model, tree(room / "undisturbed" / "out"), scenarios


def all_points(model: Path, room: Path, scenarios: list[Scenario]) -> list[Point]:
    """Every kind of fault at every operation of every scenario.

    A tear only in a write; of equal operations in a row the first and the last.
    """
    points = []
    for scenario in scenarios:
        folder = room / "traced"
        shutil.copytree(scenario.start, folder)
        done, operations = convert(model, folder, *scenario.options)
        assert done.returncode == 0, done.stderr
        shutil.rmtree(folder)
        points += [
            Point(scenario, number, operation, fault)
            for number, operation in enumerate(operations, 1)
            for fault in FAULTS
            if not operations[number - 2 : number - 1]
            == [operation]
            == operations[number : number + 1]
            and (fault != "torn" or operation.startswith("write "))
        ]
    return points


def _spread(points: list[Point], count: int) -> list[Point]:
    """As many points of every scenario and fault; of these, evenly over the operations."""
    groups: dict[tuple, list[Point]] = {}
    for point in points:
        groups.setdefault((point.scenario.name, point.fault), []).append(point)
    generator, chosen = random.Random(0), []
    for place, group in enumerate(groups.values()):
        size = count // len(groups) + (place < count % len(groups))
        bounds = [len(group) * i // max(size, 1) for i in range(size + 1)]
        chosen += [generator.choice(group[a:b]) for a, b in itertools.pairwise(bounds) if a < b]
    return chosen


def run(room: Path, count: int, jobs: int) -> tuple[Counter, list[str], int]:
    """Try `count` points spread evenly over all: (outcomes by fault, what is wrong, all)."""
    model, wanted, scenarios = prepare(room)
    points = all_points(model, room, scenarios)
    source = tree(model)
    chosen = _spread(points, min(count, len(points)))
    outcomes: Counter = Counter()
    wrong = []
    with ThreadPoolExecutor(jobs) as pool:
        for point, (outcome, found) in zip(
            chosen, pool.map(partial(trial, model, wanted, room), chosen), strict=True
        ):
            outcomes[point.fault, outcome] += 1
            where = f"{point.scenario.name}, {point.fault} at {point.number}: {point.operation}"
            wrong += [f"{where}: {text}" for text in found]
    if tree(model) != source:
        wrong.append("the source has changed")
    return outcomes, wrong, len(points)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--points", type=int, default=240)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as room:
        outcomes, wrong, possible = run(Path(room), arguments.points, arguments.jobs)
    lines = [f"{outcomes.total()} points of {possible}"]
    for fault in FAULTS:
        counts = [f"{outcomes[fault, o]} {o}" for o in OUTCOMES.values() if outcomes[fault, o]]
        lines.append(f"{fault:6} {', '.join(counts)}")
    bad = len({text.split(": ")[0] for text in wrong})
    lines.append(f"{outcomes.total() - bad} identical to the byte after the same command again")
    sys.stdout.write("\n".join([*lines, *wrong]) + "\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
