"""The report of bench that push adds to a package, and later pushes keep."""

from pathlib import Path
from typing import Any

from qsrt_pack.evaluation import content_sha256, shown_name
from qsrt_runtime.format import schema
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.manifest import BENCH
from qsrt_runtime.format.package import Package


def read_bench(package: Package, given: Path | None) -> dict[str, Any] | None:
    """The report to publish, without the path of the machine that made it, or the one there.

    given: a file of `bench --json` of this package.
    """
    kept = _read(package.path / BENCH) if BENCH in package.digests else None
    if given is None:
        return kept
    value = _read(given)
    stripped = value | {"package": value["package"] and shown_name(value["package"])}
    expected = content_sha256(package)
    if stripped != kept and value["content_sha256"] != expected:
        raise FormatError(
            f"{given}: content_sha256 is {value['content_sha256']}, the package's is {expected}; "
            "measure this package"
        )
    return stripped


def _read(path: Path) -> dict[str, Any]:
    value = schema.read(path, "report")
    if value["kind"] != "bench":
        raise FormatError(f"{path} is a report of {value['kind']}, expected one of bench --json")
    names = [way["way"] for way in value["ways"]]
    if len(set(names)) < len(names):
        raise FormatError(f"{path}: a way stands twice in {names}")
    for row in value["rows"]:
        found = [result["way"] for result in row["results"]]
        if found != names:
            raise FormatError(
                f"{path}: {row['tokens']} tokens have results of {found}, not {names}"
            )
    return value
