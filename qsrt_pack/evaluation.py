"""Reports of `eval`: of which package they are, and what they call models and texts."""

from pathlib import Path, PurePath
from typing import Any

from qsrt_runtime.format import schema
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.manifest import OF_PUSH, REPORT
from qsrt_runtime.format.package import Package


def content_sha256(package: Package) -> str:
    """The digest over every sealed file but those that push writes: the same before and after it.

    It is of the canonical JSON of their SHA-256 by name, so that packages of which it is the same
    have the same weights, configuration and tokenizer.
    """
    return schema.digest({n: d for n, d in package.digests.items() if n not in OF_PUSH})


def read_evaluation(path: Path) -> dict[str, Any]:
    """A file of `eval --json`; FormatError where it is something else."""
    value = schema.read(path, "report")
    if value["kind"] != "eval":
        raise FormatError(f"{path} is a report of {value['kind']}, expected one of eval --json")
    return value


def check_evaluation(value: dict[str, Any], package: Package, path: Path) -> None:
    """Refuse the report of another package.

    path: where it was read. One that the package holds itself was made before the seal that binds
    it; such a report without content_sha256, as older versions wrote, is held by its encoder alone.
    """
    key, expected = "seal_sha256", package.seal_sha256
    if "content_sha256" in value:
        key, expected = "content_sha256", content_sha256(package)
    elif path == package.path / REPORT:
        key, expected = "encoder_fingerprint", package.documents.marker["encoder_fingerprint"]
    if value[key] != expected:
        raise FormatError(
            f"{path}: {key} is {value[key]}, the package's is {expected}; evaluate this package"
        )


def shown_name(place: str) -> str:
    """What others are shown of the place of a model or text: its name, no path of the machine.

    OWNER/NAME of a repository, also for its snapshot in the Hub's cache, which lies there as
    models--OWNER--NAME/snapshots/COMMIT. It is never empty: / and . have no other name.
    """
    path = PurePath(place)
    parts = path.parts
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/", 1) or path.name
    if len(parts) == 2 and not path.anchor:
        return place
    return path.name or str(path)
