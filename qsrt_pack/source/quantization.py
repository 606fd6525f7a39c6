"""What a checkpoint's config.json says of its quantized weights.

Weights are read by the tensors that are there; this is what they are checked against.
"""

import fnmatch
import re
from dataclasses import dataclass
from typing import Any

from qsrt_runtime.format import schema
from qsrt_runtime.format.errors import FormatError

KEY = "quantization_config"
_TEXT = "text_config"  # where a model of images and text has its text model
_LISTS = ("modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore")
_MODELOPT = {"FP8": "fp8", "NVFP4": "nvfp4"}


@dataclass(frozen=True)
class Scheme:
    """How the weights of some modules are stored.

    formats: names of formats.FORMATS, one of which it is.   block: rows and columns that share a
    scale; None where the shape of the scales alone says it.   has_zero_points: None if unsaid.
    """

    formats: tuple[str, ...]
    block: tuple[int, int] | None = None
    has_zero_points: bool | None = None


@dataclass(frozen=True)
class _Modules:
    """Names of modules: whole, or as any run of leading or trailing parts; and patterns."""

    names: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    def __contains__(self, module: object) -> bool:
        parts = str(module).split(".")
        runs = (run for n in range(1, len(parts) + 1) for run in (parts[:n], parts[-n:]))
        return any(".".join(run) in self.names for run in runs) or any(
            pattern.match(str(module)) for pattern in self.patterns
        )


@dataclass(frozen=True)
class Quantization:
    """A quantization_config. method: None for a checkpoint that has none.

    schemes: of the modules that each covers; None for modules that are left as they are.
    """

    method: str | None
    ignored: _Modules
    schemes: tuple[tuple[_Modules | None, Scheme | None], ...]

    def scheme(self, weight: str) -> Scheme | None:
        """What is said of a weight by its name; None for one that is left as it is."""
        module = weight.removesuffix(".weight")
        if module not in self.ignored:
            for modules, scheme in self.schemes:
                if modules is None or module in modules:
                    return scheme
        return None


def stated(config: dict[str, Any]) -> Any:
    """The quantization_config of a config.json, or of the text model in it; None without one."""
    return next(iter(_all_stated(config)), None)


def _all_stated(config: dict[str, Any]) -> list[Any]:
    levels = [level for level in (config, config.get(_TEXT)) if isinstance(level, dict)]
    return [level[KEY] for level in levels if level.get(KEY) is not None]


def without(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json without any quantization_config."""
    rest = {key: value for key, value in config.items() if key != KEY}
    if isinstance(rest.get(_TEXT), dict):
        rest[_TEXT] = {key: value for key, value in rest[_TEXT].items() if key != KEY}
    return rest


def read_quantization(config: dict[str, Any], where: str) -> Quantization:
    """Read config.json's quantization_config; FormatError for a method that is not read."""
    found = _all_stated(config)
    if not found:
        return Quantization(None, _modules([], where), ())
    value = found[0]
    if found[-1] != value:
        raise FormatError(f"{where} has a {KEY} and another in {_TEXT}; which is meant")
    where = f"{where}: {KEY}"
    if isinstance(value, dict) and isinstance(value.get("quantization"), dict):
        value = {**value, **value["quantization"]}  # older modelopt
    _check(value, where)
    ignored = _modules([name for key in _LISTS for name in value.get(key) or []], where)
    method = value["quant_method"]
    if method == "compressed-tensors":
        return Quantization(method, ignored, _groups(value["config_groups"], where))
    if method == "modelopt":
        scheme = Scheme((_MODELOPT[value["quant_algo"]],))
    elif method == "fp8":
        block = value.get("weight_block_size")
        scheme = Scheme(("fp8", "mxfp4"), block and tuple(block))
    else:
        scheme = Scheme((method,))
    return Quantization(method, ignored, ((None, scheme),))


def _check(value: Any, where: str) -> None:
    try:
        schema.check(value, "published-quantization", where)
        if value["quant_method"] == "modelopt" and "quant_algo" not in value:
            raise FormatError(f"{where}: quant_algo is missing")
    except FormatError as error:
        raise FormatError(
            f"{error}; convert does not read this quantization, give it the checkpoint that this "
            "one was made from"
        ) from None


def _modules(names: list[str], where: str) -> _Modules:
    """Modules by name, by `re:` and an expression, or with * for anything."""
    expressions = [name.removeprefix("re:") for name in names if name.startswith("re:")]
    globs = [name for name in names if "*" in name and not name.startswith("re:")]
    if globs:  # as one, since there may be hundreds, and modules by the hundred thousand
        expressions.append("|".join(map(fnmatch.translate, globs)))
    try:
        patterns = [re.compile(each) for each in expressions]
    except re.error as error:
        raise FormatError(f"{where}: {error.pattern!r} is no regular expression") from None
    return _Modules(frozenset(names) - set(globs), tuple(patterns))


def _groups(
    groups: dict[str, Any], where: str
) -> tuple[tuple[_Modules | None, Scheme | None], ...]:
    """The groups of compressed-tensors, those for a class of modules after those for names."""
    found: list[tuple[_Modules | None, Scheme | None]] = []
    for key, group in groups.items():
        scheme = _group_scheme(group.get("weights"), f"{where}.config_groups.{key}")
        is_general = "Linear" in group["targets"]
        found.append((None if is_general else _modules(group["targets"], where), scheme))
    return tuple(sorted(found, key=lambda item: item[0] is None))


def _group_scheme(weights: dict[str, Any] | None, where: str) -> Scheme | None:
    if weights is None:
        return None
    kind, bits = weights.get("type", "int"), weights["num_bits"]
    size, strategy = weights.get("group_size"), weights.get("strategy")
    symmetric = weights.get("symmetric", True)
    group = (1, size) if size is not None and size > 0 else None
    if (kind, bits) == ("int", 4):
        return Scheme(("int4",), group, not symmetric)
    if symmetric and (kind, bits) == ("float", 8):
        block = weights.get("block_structure") if strategy == "block" else group
        return Scheme(("fp8",), block and tuple(block))
    if symmetric and (kind, bits, size) in (("float", 4, 16), ("float", 4, 32)):
        return Scheme(("nvfp4",) if size == 16 else ("mxfp4",))
    raise FormatError(
        f"{where}: weights of {bits} bits, type {kind}, groups of {size}, symmetric {symmetric} "
        "are not read; convert reads int 4, float 8, and float 4 in groups of 16 or 32"
    )
