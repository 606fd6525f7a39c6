"""Change a good package in every way that its own words can contradict; all must be refused.

    python tests/mutations/run.py --each 20

Each mutation is one change to a fresh copy: of bytes, of the files there are, or, with every
checksum redone as a forger would, of one field of a document or one region of a layer file.
`validate` and `load_package` must both raise FormatError, and name the file or the field. Fields
that nothing contradicts (FREE) are listed; that they are accepted is checked too. Exits 1 if
anything was accepted, unnamed, or failed in another way.
"""

import argparse
import json
import logging
import os
import random
import re
import shutil
import socket
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

import checkpoints  # noqa: E402
import packages  # noqa: E402
from fields import FREE, edits, leaves  # noqa: E402
from forging import (  # noqa: E402
    CONFIG,
    INDEX,
    LISTING,
    MANIFEST,
    MARKER,
    bind_base,
    bind_layer,
    edit_header,
    read_header,
    redo_checksums,
    reseal_listing,
)

from qsrt_pack.validate import validate  # noqa: E402
from qsrt_runtime import load_package  # noqa: E402
from qsrt_runtime.format.errors import FormatError  # noqa: E402
from qsrt_runtime.format.geometry import Geometry, align  # noqa: E402
from qsrt_runtime.format.package import seal  # noqa: E402

GEOMETRY = Geometry(hidden=128, intermediate=256, experts=3)
LAYER, EVIDENCE, SHARD = "qsrt-layer-000.safetensors", "qsrt-layer-000.json", "model.safetensors"
DOCUMENTS = (CONFIG, INDEX, MANIFEST, MARKER, EVIDENCE)


@dataclass(frozen=True)
class Mutation:
    """change: applied to a copy of the package.   names: one of them stands in the error."""

    target: str
    change: Callable[[Path], None]
    names: tuple[str, ...]
    is_free: bool = False


def write_package(path: Path) -> Path:
    """The good package: two layers, a shard, side files in a folder of their own."""
    weights = checkpoints.tensors(experts=GEOMETRY.experts)
    base = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    packages.write_package(path, GEOMETRY, layers=(0, 1), base=base)
    (path / "tokenizer.json").write_text('{"model": "none"}\n')
    (path / "extra").mkdir()
    (path / "extra" / "notes.txt").write_text("side files may lie in folders\n")
    seal(path)
    return path


def mutations(good: Path, each: int, rng: random.Random) -> Iterator[Mutation]:
    """`each` of every kind, and every kind once at least."""
    for name in sorted(p.relative_to(good).as_posix() for p in good.rglob("*") if p.is_file()):
        yield from _byte_mutations(good, name, each, rng)
    yield from _region_mutations(good, each, rng)
    yield from _file_mutations(good, each, rng)
    yield from _listing_mutations(good, each, rng)
    for name in DOCUMENTS:
        yield from _field_mutations(good, name, each, rng)
    yield from _layer_mutations(good, each, rng)
    yield from _shard_mutations(good, each, rng)


def _byte_mutations(good: Path, name: str, each: int, rng: random.Random) -> Iterator[Mutation]:
    """Bit flips, truncations and extensions; no checksum is redone."""
    size = (good / name).stat().st_size
    names = (name, MARKER) if name == LISTING else (name,)

    def flip(folder: Path, bit: int) -> None:
        data = bytearray((folder / name).read_bytes())
        data[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(data)

    for _ in range(each):
        bit, cut, more = rng.randrange(8 * size), rng.randrange(size), rng.randbytes(1 + each)
        # A flipped bit of the seal may change a digest, which then names the file it is of.
        flipped = (*names, LISTING, INDEX, MANIFEST, CONFIG) if name == MARKER else names
        yield Mutation(f"{name}: a bit", lambda f, b=bit: flip(f, b), flipped)
        yield Mutation(f"{name}: cut", lambda f, c=cut: os.truncate(f / name, c), names)
        yield Mutation(
            f"{name}: extended",
            lambda f, m=more: (f / name).write_bytes((f / name).read_bytes() + m),
            names,
        )


def regions(path: Path) -> dict[str, range]:
    """The regions of a layer file."""
    header, start = read_header(path)
    (sections, _), (scales, scales_end), (slab, slab_end) = (
        [start + n for n in header[key]["data_offsets"]]
        for key in ("_qsrt_format_section", "_qsrt_shared_scale_section", "qsrt_atoms")
    )
    experts, bundle = GEOMETRY.experts, GEOMETRY.bundle_bytes
    used, payload = 6 * experts * GEOMETRY.hidden, experts * bundle
    assert slab + GEOMETRY.slots * GEOMETRY.slot_stride(experts) == slab_end
    assert scales + align(used) == scales_end
    return {
        "length word": range(8),
        "header": range(8, start),
        "format codes": range(sections, sections + experts),
        "padding of codes": range(sections + experts, scales),
        "hidden scales": range(scales, scales + used),
        "padding of scales": range(scales + used, scales_end),
        "trellis words": range(slab, slab + bundle - 192),
        "local scales": range(slab + bundle - 192, slab + bundle),
        "padding of slots": range(slab + payload, slab + GEOMETRY.slot_stride(experts)),
    }


def _set_byte(path: Path, place: int, change: Callable[[int], int]) -> None:
    data = bytearray(path.read_bytes())
    data[place] = change(data[place])
    path.write_bytes(data)


def _region_mutations(good: Path, each: int, rng: random.Random) -> Iterator[Mutation]:
    for region, places in regions(good / LAYER).items():
        for _ in range(each if places else 0):
            place, bit = rng.choice(places), 1 << rng.randrange(8)
            yield Mutation(
                f"layer file: a bit of {region}",
                lambda f, p=place, b=bit: _set_byte(f / LAYER, p, lambda old: old ^ b),
                (LAYER,),
            )


def _file_mutations(good: Path, each: int, rng: random.Random) -> Iterator[Mutation]:
    """Files deleted, added, exchanged, and replaced by links and other things."""
    names = sorted(p.relative_to(good).as_posix() for p in good.rglob("*") if p.is_file())
    strange = [".hidden", "a b", "deep/er/file", "model.bin", "x.py", "README", "ü", "-", "#"]
    pairs = [(a, b) for a in names for b in names if a < b]
    same = {(a, b) for a, b in pairs if (good / a).read_bytes() == (good / b).read_bytes()}
    for a, b in rng.sample(sorted(set(pairs) - same), min(2 * each, len(pairs) - len(same))):

        def swap(folder: Path, a: str = a, b: str = b) -> None:
            (folder / a).rename(folder / "swap")
            (folder / b).rename(folder / a)
            (folder / "swap").rename(folder / b)

        yield Mutation("files exchanged", swap, (a, b, LISTING, MARKER))
    for count in range(each):
        name = rng.choice(names)
        added = f"{rng.choice(strange)}{count}"
        yield Mutation("file deleted", lambda f, n=name: (f / n).unlink(), (name,))
        yield Mutation("file added", lambda f, n=added: _add(f / n), (added,))
        for what, place in _REPLACEMENTS.items():
            yield Mutation(f"file replaced by {what}", lambda f, n=name, p=place: p(f / n), (name,))
            yield Mutation(f"{what} added", lambda f, n=added, p=place: p(f / n), (added,))


def _add(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"more")


def _put(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        make(path)

    return put


def _link_to_copy(path: Path) -> None:
    """A link to a file outside that has the right bytes."""
    root = next(parent for parent in path.parents if (parent / MANIFEST).exists())
    outside = root.with_name("outside")
    outside.write_bytes(b"right")
    path.symlink_to(outside)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket is short
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


_REPLACEMENTS = {
    "a link outside": _put(lambda p: p.symlink_to("/etc/hostname")),
    "a link to a device": _put(lambda p: p.symlink_to("/dev/zero")),
    "a link up": _put(lambda p: p.symlink_to("../outside")),
    "a loop of links": _put(lambda p: p.symlink_to(p.name)),
    "a link to a folder": _put(lambda p: p.symlink_to("/tmp", target_is_directory=True)),
    "a pipe": _put(os.mkfifo),
    "a socket": _put(_socket),
}


def _listing_mutations(good: Path, each: int, rng: random.Random) -> Iterator[Mutation]:
    """Lines of MANIFEST.sha256, the marker's digest of it redone."""
    lines = (good / LISTING).read_text().splitlines()

    def listing(what: str, lines: list[str], *names: str) -> Mutation:
        text = "".join(f"{line}\n" for line in lines)
        return Mutation(f"{LISTING}: {what}", lambda f: reseal_listing(f, text), (LISTING, *names))

    bad_names = ["../x", "/etc/passwd", "a/../b", "..\\x", "C:\\x", "", ".", "a//b", "a/", "nul\0"]
    bad_names += ["./config.json", "x\ty", "e\x7f", "CONFIG.JSON", "\u2028", MARKER, LISTING]
    for _ in range(each):
        number = rng.randrange(len(lines))
        digest, name = lines[number].split("  ")
        others = lines[:number] + lines[number + 1 :]
        place = rng.randrange(64)
        other = rng.choice([c for c in "0123456789abcdef" if c != digest[place]])
        yield listing("line missing", others, name)
        yield listing("line twice", [*lines, lines[number]], name)
        changed = f"{digest[:place]}{other}{digest[place + 1 :]}"
        yield listing("digest changed", [*others, f"{changed}  {name}"], name)
        bad = rng.choice([digest[1:], digest + "0", digest.upper() + "G", "", "sha256:" + digest])
        yield listing("digest of wrong form", [*others, f"{bad}  {name}"], name)
        yield listing("bad name", [*lines, f"{digest}  {rng.choice(bad_names)}"], MARKER)
        yield listing("name of nothing", [*lines, f"{digest}  none{number}"], f"none{number}")
        blank = rng.choice([" ", " *", "\t", "", "   "])
        yield listing("wrong separator", [*others, f"{digest}{blank}{name}"], name)


def _field_mutations(good: Path, name: str, each: int, rng: random.Random) -> Iterator[Mutation]:
    """Every field of a document, all checksums redone; of free ones, that they are accepted."""
    value = json.loads((good / name).read_text())
    for path in leaves(value):
        label = f"{name}: {'.'.join(map(str, path))}"
        label = re.sub(r"\.\d+\b", ".N", label)
        last = next((key for key in reversed(path) if isinstance(key, str)), name)
        for text, is_free in edits(name, value, path, each, rng):

            def change(folder: Path, text: str = text) -> None:
                (folder / name).write_text(text)
                redo_checksums(folder, name)

            yield Mutation(label, change, (name, last), is_free)


def _layer_mutations(good: Path, each: int, rng: random.Random) -> Iterator[Mutation]:
    """A layer file's header and sections, with manifest, evidence and checksums redone."""
    header, _ = read_header(good / LAYER)
    for key, old in header["__metadata__"].items():
        for _ in range(each):
            new = _other_text(old, rng)

            def change(folder: Path, key: str = key, new: str | None = new) -> None:
                edit_header(folder / LAYER, lambda h: _put_or_drop(h["__metadata__"], key, new))
                bind_layer(folder, LAYER, EVIDENCE)

            # A header of another length is caught by the size that follows from the geometry.
            yield Mutation(f"layer header: {key}", change, (LAYER, key, "layers.0.bytes"))
    places = regions(good / LAYER)
    bad = {
        "format codes": lambda old: rng.choice([c for c in range(256) if c != old]),
        "padding of codes": lambda old: rng.randrange(1, 256),
        "padding of scales": lambda old: rng.randrange(1, 256),
        "padding of slots": lambda old: rng.randrange(1, 256),
    }
    for region, value in bad.items():
        for _ in range(each if places[region] else 0):
            place, new = rng.choice(places[region]), value(0)

            def change(folder: Path, place: int = place, new: int = new) -> None:
                _set_byte(folder / LAYER, place, lambda _: new)
                bind_layer(folder, LAYER, EVIDENCE)

            yield Mutation(f"layer file, redone: {region}", change, (LAYER, EVIDENCE))
    for region in ("hidden scales", "local scales"):
        for _ in range(each):
            start = places[region].start + 2 * rng.randrange(len(places[region]) // 2)
            half = rng.choice([0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF]).to_bytes(2, "little")

            def change(folder: Path, start: int = start, half: bytes = half) -> None:
                data = bytearray((folder / LAYER).read_bytes())
                data[start : start + 2] = half
                (folder / LAYER).write_bytes(data)
                bind_layer(folder, LAYER, EVIDENCE)

            yield Mutation(f"layer file, redone: {region} not finite", change, (LAYER,))
    for region in ("trellis words",):
        for _ in range(each):
            place = rng.choice(places[region])

            def change(folder: Path, place: int = place) -> None:
                _set_byte(folder / LAYER, place, lambda old: old ^ 1)
                bind_layer(folder, LAYER, EVIDENCE)

            yield Mutation(f"layer file, redone: {region}", change, (), is_free=True)


def _put_or_drop(value: dict, key: str, new: str | None) -> None:
    value.pop(key)
    if new is not None:
        value[key] = new


def _other_text(old: str, rng: random.Random) -> str | None:
    """Another string, or None for the key's removal."""
    number = str(rng.choice([0, 1, 2, 3, 96, 127, 256, 4096, 2**31, 2**63, -1]))
    place = rng.randrange(len(old))
    near = old[:place] + rng.choice("0123456789abcdefx ") + old[place + 1 :]
    choices = [None, "", number, near, old + "0", " " + old, old + "\n", old[:-1], "0" + old]
    return rng.choice([new for new in choices if new != old])


def _shard_mutations(good: Path, each: int, rng: random.Random) -> Iterator[Mutation]:
    """The header of a base shard, with the manifest's digest of the base and checksums redone."""
    header, _ = read_header(good / SHARD)
    names = sorted(set(header) - {"__metadata__"})

    def rename(header: dict, name: str) -> None:
        header[name + "x"] = header.pop(name)

    def grow(header: dict, name: str) -> None:
        header[name]["shape"] = [*header[name]["shape"], 2]

    def shift(header: dict, name: str) -> None:
        header[name]["data_offsets"] = [n + 2 for n in header[name]["data_offsets"]]

    def retype(header: dict, name: str) -> None:
        header[name]["dtype"] = rng.choice(["F32", "U8", "BF17", "", None, 7])

    def drop(header: dict, name: str) -> None:
        del header[name]

    for edit in (rename, grow, shift, retype, drop):
        for _ in range(each):

            def change(folder: Path, edit: Callable = edit, name: str = rng.choice(names)) -> None:
                edit_header(folder / SHARD, lambda header: edit(header, name))
                bind_base(folder)

            yield Mutation(f"shard header: {edit.__name__}", change, (SHARD, INDEX))


def judge(good: Path, mutation: Mutation, room: Path) -> list[str]:
    """Apply a mutation to a copy; what is wrong about how it was received."""
    folder = Path(tempfile.mkdtemp(dir=room)) / "package"
    shutil.copytree(good, folder)
    try:
        mutation.change(folder)
        wrong = []
        for check in (lambda: validate(folder, show_progress=False), lambda: load_package(folder)):
            problem = _problem(check, mutation)
            if problem:
                wrong.append(f"{mutation.target}: {problem}")
        return wrong
    finally:
        shutil.rmtree(folder.parent)


def _problem(check: Callable[[], object], mutation: Mutation) -> str | None:
    try:
        check()
    except FormatError as error:
        message = str(error)
        if mutation.is_free:
            return f"is listed as free, but refused: {message}"
        if "\n" in message:
            return f"more than one line: {message}"
        if not any(name and name in message for name in mutation.names):
            return f"none of {mutation.names} is named: {message}"
        return None
    except Exception:
        return f"another error: {traceback.format_exc()}"
    return None if mutation.is_free else "accepted"


def run(each: int, seed: int, sample: int | None = None) -> tuple[Counter, Counter, list[str]]:
    """(mutations tried by target, free ones accepted by target, what is wrong)."""
    rng = random.Random(seed)
    tried: Counter[str] = Counter()
    free: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as room:
        good = write_package(Path(room) / "good")
        validate(good, show_progress=False)
        load_package(good)
        chosen = list(mutations(good, each, rng))
        if sample is not None:
            chosen = rng.sample(chosen, sample)
        for mutation in chosen:
            (free if mutation.is_free else tried)[mutation.target] += 1
            wrong += judge(good, mutation, Path(room))
    return tried, free, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=20, help="mutations of every kind")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        tried, free, wrong = run(arguments.each, arguments.seed)
    write = sys.stdout.write
    for target, count in sorted(tried.items()):
        write(f"{count:6} {target}\n")
    for target, count in sorted(free.items()):
        write(f"{count:6} {target} (free: nothing contradicts it)\n")
    for line in wrong:
        write(f"WRONG {line}\n")
    write(f"{tried.total()} mutations, {len(tried)} kinds: {len(wrong)} wrong\n")
    write(f"{free.total()} changes of the {len(FREE)} free kinds of fields, accepted\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
