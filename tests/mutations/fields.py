"""Every field of a document, changed in many ways; and the fields that nothing contradicts."""

import copy
import json
import random
import re
from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]

# File and field, and what the change must keep for nothing to contradict it. What the README
# lists as protected by the pinned digest of the seal alone.
FREE = {
    "config.json": (
        r"(?!quantization_config\b|(hidden_size|moe_intermediate_size|num_experts|"
        r"num_experts_per_tok|hidden_act)$).*"
    ),
    "qsrt-layer-000.json": r"experts\.\d+\.(functional_nmse|nmse\.w\d|rms\.w\d|tokens|fallback)",
}
# Where experts lie and which model they are of: `validate` knows the architectures, and refuses;
# `load_package` does not, and leaves them to the model's own code.
OF_THE_ARCHITECTURE = {"decoder_sparse_step", "mlp_only_layers", "model_type", "num_hidden_layers"}
_HARSH = [None, True, False, -1, 1.5, "", "x", [], {}, [[]], {"a": 1}, 2**63, -(2**63), "9" * 5000]


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """The place of every number, text, list and object below a document's top."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    if isinstance(value, dict | list):
        for key, item in items:
            if isinstance(item, dict | list):
                yield from leaves(item, (*path, key))
            else:
                yield (*path, key)


def is_free(name: str, path: Path) -> bool:
    pattern = FREE.get(name)
    return pattern is not None and bool(re.fullmatch(pattern, ".".join(map(str, path))))


def edits(
    name: str, document: dict, path: Path, count: int, rng: random.Random
) -> Iterator[tuple[str, bool]]:
    """(the document's new text, whether nothing contradicts it), count times."""
    old = _at(document, path)
    if name == "config.json" and path[0] in OF_THE_ARCHITECTURE:
        return
    if is_free(name, path):
        for new in _alike(old, rng)[:count]:
            yield _with(document, path, new), True
        return
    texts = [_with(document, path, new) for new in _others(old, rng, count)]
    texts += _structural(document, path)
    if name == "config.json" and len(path) == 1:
        texts = [
            t for t in texts if json.loads(t).get(path[0]) is not None
        ]  # an absent one is free
    rng.shuffle(texts)
    for text in texts[:count]:
        yield text, False


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def _with(document: dict, path: Path, new: Any) -> str:
    changed = copy.deepcopy(document)
    _at(changed, path[:-1])[path[-1]] = new
    return json.dumps(changed)


def _alike(old: Any, rng: random.Random) -> list[Any]:
    """Other values of the same kind."""
    if isinstance(old, bool):
        return [not old]
    if isinstance(old, int):
        return [old + 1]
    if isinstance(old, float):
        return [old * 1.5, old / 2]
    if old is None:
        return [None]
    return [old]


def _others(old: Any, rng: random.Random, count: int) -> list[Any]:
    """Other values of all kinds, none of them equal and of the same type."""
    new = list(_HARSH)
    if isinstance(old, bool):
        new += [int(old), str(old).lower(), not old]
    elif isinstance(old, int | float):
        new += [old + 1, old - 1, float(old), str(old), old * 2, -old, [old], float("inf")]
        new += [float("nan"), *(rng.randrange(2**40) for _ in range(count))]
    elif isinstance(old, str):
        new += [old + "0", old[:-1], old.swapcase(), [old], old + "\0", " " + old]
        new += [_one_letter_off(old, rng) for _ in range(count)]
    elif isinstance(old, list) and old:
        new += [old[1:], old[:-1], [*old, old[-1]], old[::-1], [old], [*old, None], old * 2]
        new += [[*old[:i], "x", *old[i + 1 :]] for i in range(len(old))]
    elif isinstance(old, dict) and old:
        new += [old | {"surprise": 1}, old | {"": None}, [old]]
        new += [{k: v for k, v in old.items() if k != key} for key in old]
        new += [{k + "x" * (k == key): v for k, v in old.items()} for key in old]
    return [value for value in new if _differs(value, old)]


def _differs(new: Any, old: Any) -> bool:
    return json.dumps(new) != json.dumps(old)


def _one_letter_off(old: str, rng: random.Random) -> str:
    place = rng.randrange(len(old)) if old else 0
    return old[:place] + rng.choice("0123456789abcdef") + old[place + 1 :]


def _structural(document: dict, path: Path) -> list[str]:
    """The field gone, under another name, and twice."""
    parent = _at(document, path[:-1])
    if not isinstance(parent, dict):
        return []
    gone = copy.deepcopy(document)
    value = _at(gone, path[:-1]).pop(path[-1])
    renamed = copy.deepcopy(gone)
    _at(renamed, path[:-1])[f"{path[-1]}_"] = value
    doubled = copy.deepcopy(gone)
    _at(doubled, path[:-1])["TWICE"] = value
    key, text = json.dumps(path[-1]), json.dumps(doubled)
    twice = text.replace('"TWICE": ', f"{key}: {json.dumps(value)}, {key}: ")
    return [json.dumps(gone), json.dumps(renamed), twice]
