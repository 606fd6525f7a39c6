"""What a stopped conversion has finished, and from what: the state file beside its output."""

import logging
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qsrt_pack.output import starting_over
from qsrt_runtime.format import manifest as manifests
from qsrt_runtime.format import paths, schema
from qsrt_runtime.format.errors import FormatError

_log = logging.getLogger(__name__)
_SHOWN = 3  # changes named in a message


@dataclass(frozen=True)
class State:
    """The layers that are whole and on disk, and all that decided their bytes.

    source: SHA-256 of config, index and shards by name.   encoder_settings: Settings.fingerprinted,
    the calibration's digest among them.   versions: of qsrt, torch and triton.   layers: number of
    a finished layer -> SHA-256 of its evidence file, which states that of the layer file.
    slices: shard -> SHA-256 of what was kept of it before it was removed; see slices.py.
    """

    source: dict[str, str]
    encoder_settings: dict[str, Any]
    versions: dict[str, str | None]
    layers: dict[int, str] = field(default_factory=dict)
    slices: dict[str, str] = field(default_factory=dict)


def read_state(path: Path) -> State | None:
    """The state at a path, None where there is none; FormatError for a damaged one."""
    if not path.exists():
        return None
    try:
        value = schema.read(path, "state")
    except FormatError as error:
        how = starting_over(path.parent)
        raise FormatError(f"{error}; to start over, {how}") from None
    layers = {int(key): digest for key, digest in value["layers"].items()}
    decided = (value["source"], value["encoder_settings"], value["versions"])
    return State(*decided, layers, value.get("slices", {}))


def write_state(path: Path, state: State) -> None:
    """Replace the state file; what it lists must be on disk already."""
    value = {
        "schema": "qsrt_state_v1",
        "source": state.source,
        "encoder_settings": state.encoder_settings,
        "versions": state.versions,
        "layers": {str(layer): digest for layer, digest in sorted(state.layers.items())},
    }
    if state.slices:
        value["slices"] = state.slices
    schema.check(value, "state", str(path))
    paths.write_file(path, schema.dump(value))


def changes(state: State, now: State) -> list[str]:
    """What decides bytes and is not as it was; a source not yet hashed, {}, is not compared."""
    found = differences("setting", state.encoder_settings, now.encoder_settings)
    found += differences("version of", state.versions, now.versions)
    return found + (differences("source file", state.source, now.source) if now.source else [])


def differences(title: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A phrase for every key whose value is not as it was."""
    return [
        f"{title} {key} was {_short(before.get(key))} and is {_short(after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def listed(found: list[str]) -> str:
    """The first phrases, and how many more there are."""
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


def check_same(state: State, now: State, path: Path) -> None:
    """Refuse to continue from other input."""
    found = changes(state, now)
    if found:
        raise FormatError(
            f"{path.parent} holds {len(state.layers)} finished layer(s) of another conversion: "
            f"{listed(found)}. Convert as it was to continue; to start over, "
            f"{starting_over(path.parent)}"
        )


def layer_files(layers: Iterable[int]) -> set[str]:
    """Names of the files of some layers."""
    names = (manifests.evidence_file_name, manifests.layer_file_name)
    return {name(layer) for layer in layers for name in names}


def read_finished(
    folder: Path, state: State, advance: Callable[[int], None]
) -> dict[int, dict[str, Any]]:
    """The evidence of the layers that lie in the folder as the state says; forgets the others.

    advance: called with the bytes of layer files read since last time.
    """
    evidence = {}
    for layer in list(state.layers):
        try:
            evidence[layer] = _read_layer_evidence(folder, layer, state.layers[layer], advance)
        except FormatError as error:
            _log.warning("%s; layer %d is encoded again", error, layer)
            del state.layers[layer]
    return evidence


def remove_all_but(folder: Path, kept: set[str]) -> None:
    """Remove what a stopped run left besides finished layers; all of it is made again."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in kept:
            path.unlink()


def _read_layer_evidence(
    folder: Path, layer: int, digest: str, advance: Callable[[int], None]
) -> dict[str, Any]:
    path = folder / manifests.evidence_file_name(layer)
    paths.regular_file(path, folder)
    if paths.sha256_file(path) != digest:
        raise FormatError(f"{path} is not as it was written")
    evidence = schema.read(path, "evidence")
    path = folder / manifests.layer_file_name(layer)
    paths.regular_file(path, folder)
    if paths.sha256_file(path, advance) != evidence["safetensors_sha256"]:
        raise FormatError(f"{path} is not as it was written")
    return evidence


def _short(value: Any) -> str:
    """A value in a message; digests by their first digits."""
    if value is None:
        return "absent"
    text = str(value)
    return text[:12] if len(text) == 64 else text
