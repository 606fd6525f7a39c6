"""JSON and its schemas: strict parsing, checks that name the JSON path, one way to write.

The only place that knows where the schemas lie.
"""

import functools
import hashlib
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, relevance
from jsonschema.validators import extend

from qsrt_runtime.format import paths
from qsrt_runtime.format.errors import FormatError

# Installed beside the package's own folders, in a source tree at the top.
_HERE = Path(__file__).resolve()
_FOLDERS = (_HERE.parents[1] / "schemas", _HERE.parents[2] / "schemas")


_MAX_ERRORS = 1000  # mismatches looked at, of what may be millions


def _is_integer(_checker: object, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(_checker: object, value: object) -> bool:
    """Neither NaN nor beyond every float, in which numbers are reckoned with."""
    is_real = _is_integer(_checker, value) or isinstance(value, float)
    return is_real and abs(value) <= sys.float_info.max


def _unique_items(
    _validator: object, wanted: bool, value: object, _schema: object
) -> Iterator[ValidationError]:
    """In linear time, where the library compares all with all."""
    if wanted and isinstance(value, list):
        texts = {json.dumps(item, sort_keys=True) for item in value}
        if len(texts) < len(value):
            yield ValidationError(f"{value!r} has non-unique elements")


# The draft counts 4.0 as an integer and NaN as a number; we do not.
_Validator = extend(
    Draft202012Validator,
    validators={"uniqueItems": _unique_items},
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer).redefine(
        "number", _is_number
    ),
)


@functools.cache
def load(name: str) -> dict[str, Any]:
    """The schema `schemas/<name>.schema.json`."""
    for folder in _FOLDERS:
        path = folder / f"{name}.schema.json"
        if path.is_file():
            schema = json.loads(path.read_text(encoding="utf-8"))
            _Validator.check_schema(schema)
            return schema
    raise FileNotFoundError(f"{name}.schema.json is in none of {[str(f) for f in _FOLDERS]}")


def check(value: Any, name: str, where: str) -> None:
    """Raise FormatError with the JSON path of the worst mismatch, or return.

    where: names the file in the message.
    """
    try:
        found = islice(_Validator(load(name)).iter_errors(value), _MAX_ERRORS)
        errors = sorted(found, key=_weight)
    except RecursionError:
        raise FormatError(f"{where}: nested too deep") from None
    if errors:
        error = errors[-1]
        while error.context:
            error = min(error.context, key=lambda e: (-len(e.absolute_path), e.message))
        message = error.message
        if error.validator == "const":
            message += f", found {error.instance!r}"
        if len(message) > 300:
            message = f"{message[:200]} ... {message[-95:]}"
        raise FormatError(f"{where}: {error.json_path}: {message}")


def _weight(error: ValidationError) -> tuple[bool, Any]:
    """Another kind or version of file explains every other mismatch."""
    return error.json_path in ("$.schema", "$.version"), relevance(error)


def parse(text: str | bytes, where: str) -> Any:
    """Parse JSON, refusing what json.loads lets through: repeated keys and bad nesting.

    NaN and infinities parse, so that `check` can name their path.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode()  # json.loads would guess UTF-16 and UTF-32 too
        value = json.loads(text, object_pairs_hook=_unique_keys)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # refuses lone surrogates
        return value
    except RecursionError:
        raise FormatError(f"{where}: JSON nested too deep") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, repeated keys
        raise FormatError(f"{where}: not valid JSON: {error}") from None


def read(path: Path, name: str | None = None) -> Any:
    """Read a JSON file and check it against a schema if one is named."""
    value = parse(paths.read_document(path), str(path))
    if name is not None:
        check(value, name, str(path))
    return value


def dump(value: Any) -> bytes:
    """The bytes of a JSON file that we write: sorted keys, indent 2, one trailing newline."""
    text = json.dumps(value, sort_keys=True, indent=2, allow_nan=False, ensure_ascii=False)
    return (text + "\n").encode()


def require_json(value: Any, where: str) -> None:
    """Refuse a parsed value that strict JSON cannot write back."""
    try:
        dump(value)
    except ValueError as error:  # infinities and NaN; UnicodeEncodeError for lone surrogates
        raise FormatError(f"{where} cannot be written back as JSON: {error}") from None


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON of a value, 64 lower-case hex digits."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        key = next(k for k, _ in pairs if k in seen or seen.add(k))
        raise ValueError(f"key {key[:100]!r} stands twice in one object")
    return value
