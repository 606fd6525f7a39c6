"""The reports that push adds to a package, and later pushes keep."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qsrt_pack.evaluation import check_evaluation, content_sha256, read_evaluation, shown_name
from qsrt_runtime.format import schema
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.manifest import BENCH, REPORT
from qsrt_runtime.format.package import Package


def published_evaluation(package: Package, given: Path | None) -> dict[str, Any] | None:
    """The report to publish, without the paths of the machine that made it, or the one there.

    given: a file of `eval --json` of this package. The one there is read only without it.
    """
    if given is None:
        return _kept(package, REPORT, read_evaluation, "--report")
    value = read_evaluation(given)
    stripped = _stripped(value, ("package", "reference", "text"), given)
    if hashlib.sha256(schema.dump(stripped)).hexdigest() != package.digests.get(REPORT):
        check_evaluation(value, package, given)
    return stripped


def published_bench(package: Package, given: Path | None) -> dict[str, Any] | None:
    """As published_evaluation, of a file of `bench --json`."""
    if given is None:
        return _kept(package, BENCH, _read_bench, "--bench")
    value, expected = _read_bench(given), content_sha256(package)
    if value["content_sha256"] != expected:
        raise FormatError(
            f"{given}: content_sha256 is {value['content_sha256']}, the package's is {expected}; "
            "measure this package"
        )
    return _stripped(value, ("package",), given)


def _kept(
    package: Package, name: str, read: Callable[[Path], dict[str, Any]], option: str
) -> dict[str, Any] | None:
    """The report that the package holds, if any. option: of push, for another."""
    if name not in package.digests:
        return None
    try:
        return read(package.path / name)
    except FormatError as error:
        raise FormatError(f"{error}; give a new one with {option}") from None


def _stripped(value: dict[str, Any], keys: tuple[str, ...], where: Path) -> dict[str, Any]:
    """The report with the names of these places alone, which a later push can read."""
    stripped = value | {key: value[key] and shown_name(value[key]) for key in keys}
    schema.check(stripped, "report", str(where))
    return stripped


def _read_bench(path: Path) -> dict[str, Any]:
    value = schema.read(path, "report")
    if value["kind"] != "bench":
        raise FormatError(f"{path} is a report of {value['kind']}, expected one of bench --json")
    names = [way["way"] for way in value["ways"]]
    if len(set(names)) < len(names):
        raise FormatError(f"{path}: a way stands twice in {names}")
    tokens = [row["tokens"] for row in value["rows"]]
    if len(set(tokens)) < len(tokens):
        raise FormatError(f"{path}: a number of tokens stands twice in {tokens}")
    for row in value["rows"]:
        found = [result["way"] for result in row["results"]]
        if found != names:
            raise FormatError(
                f"{path}: {row['tokens']} tokens have results of {found}, not {names}"
            )
    return value
