"""The reports that push adds to a package, and later pushes keep."""

from pathlib import Path
from typing import Any

from qsrt_runtime.format import schema
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.manifest import REPORT
from qsrt_runtime.format.package import Package

BENCH = "qsrt-bench.json"
_NAMES = {"eval": REPORT, "bench": BENCH}
_PATHS = {"eval": ("package", "reference", "text"), "bench": ("package",)}
_VERBS = {"eval": "evaluate", "bench": "measure"}


def read_report(package: Package, kind: str, given: Path | None) -> dict[str, Any] | None:
    """The report to publish, without the paths of the machine that made it, or the one there.

    kind: eval or bench.   given: a file of this package's, checked by its seal.
    """
    kept = None
    if _NAMES[kind] in package.digests:
        kept = _read(package.path / _NAMES[kind], kind)
    if given is None:
        return kept
    value = _read(given, kind)
    names = {key: Path(value[key]).name for key in _PATHS[kind] if value[key] is not None}
    stripped = value | names
    if stripped != kept and value["seal_sha256"] != package.seal_sha256:
        raise FormatError(
            f"{given}: seal_sha256 is {value['seal_sha256']}, the package's is "
            f"{package.seal_sha256}; {_VERBS[kind]} this package"
        )
    return stripped


def report_files(reports: dict[str, dict[str, Any] | None]) -> dict[str, bytes]:
    """The files of a package that hold its reports, which are given by kind."""
    return {_NAMES[kind]: schema.dump(value) for kind, value in reports.items() if value}


def side_files(package: Package) -> list[str]:
    """A package's side files, less the report of bench, which is not the source's."""
    return [name for name in package.side_files if name != BENCH]


def _read(path: Path, kind: str) -> dict[str, Any]:
    value = schema.read(path, "report")
    if value["kind"] != kind:
        raise FormatError(f"{path} is a report of {value['kind']}, expected one of {kind} --json")
    if kind == "bench":
        _check_ways(value, path)
    return value


def _check_ways(report: dict[str, Any], path: Path) -> None:
    """Refuse rows that have not the ways of the report, which no schema can say."""
    names = [way["way"] for way in report["ways"]]
    if len(set(names)) < len(names):
        raise FormatError(f"{path}: a way stands twice in {names}")
    for row in report["rows"]:
        found = [result["way"] for result in row["results"]]
        if found != names:
            raise FormatError(
                f"{path}: {row['tokens']} tokens have results of {found}, not {names}"
            )
