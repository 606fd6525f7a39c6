"""What a stopped conversion has finished, and from what: the state file beside its output."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qsrt_runtime.format import paths, schema
from qsrt_runtime.format.errors import FormatError

_SHOWN = 3  # changes named in a message


@dataclass(frozen=True)
class State:
    """The layers that are whole and on disk, and all that decided their bytes.

    source: SHA-256 of config, index and shards by name.   encoder_settings: Settings.fingerprinted,
    the calibration's digest among them.   versions: of qsrt, torch and triton.   layers: number of
    a finished layer -> SHA-256 of its evidence file, which states that of the layer file.
    """

    source: dict[str, str]
    encoder_settings: dict[str, Any]
    versions: dict[str, str | None]
    layers: dict[int, str] = field(default_factory=dict)


def read_state(path: Path) -> State | None:
    """The state at a path, None where there is none; FormatError for a damaged one."""
    if not path.exists():
        return None
    try:
        value = schema.read(path, "state")
    except FormatError as error:
        raise FormatError(f"{error}; delete {path.parent} to start over") from None
    layers = {int(key): digest for key, digest in value["layers"].items()}
    return State(value["source"], value["encoder_settings"], value["versions"], layers)


def write_state(path: Path, state: State) -> None:
    """Replace the state file; what it lists must be on disk already."""
    value = {
        "schema": "qsrt_state_v1",
        "source": state.source,
        "encoder_settings": state.encoder_settings,
        "versions": state.versions,
        "layers": {str(layer): digest for layer, digest in sorted(state.layers.items())},
    }
    schema.check(value, "state", str(path))
    paths.write_file(path, schema.dump(value))


def changes(state: State, now: State) -> list[str]:
    """What decides bytes and is not as it was; a source not yet hashed, {}, is not compared."""
    pairs = [("setting", state.encoder_settings, now.encoder_settings)]
    pairs += [("version of", state.versions, now.versions)]
    pairs += [("source file", state.source, now.source)] if now.source else []
    return [
        f"{title} {key} was {_short(before.get(key))} and is {_short(after.get(key))}"
        for title, before, after in pairs
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def check_same(state: State, now: State, path: Path) -> None:
    """Refuse to continue from other input."""
    found = changes(state, now)
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise FormatError(
            f"{path.parent} holds {len(state.layers)} finished layer(s) of another conversion: "
            f"{'; '.join(found[:_SHOWN])}{more}. Convert as it was to continue, or delete that "
            "folder to start over"
        )


def _short(value: Any) -> str:
    """A value in a message; digests by their first digits."""
    if value is None:
        return "absent"
    text = str(value)
    return text[:12] if len(text) == 64 else text
