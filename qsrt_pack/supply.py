"""The shards of a conversion's source: there when they are read, and then removed if so wished."""

import fcntl
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from qsrt_pack.output import SLICES, source_folder
from qsrt_pack.repository import Repository
from qsrt_pack.slices import is_whole, shard_header, write_slice
from qsrt_pack.source.checkpoint import (
    Checkpoint,
    digest_files,
    open_checkpoint,
    source_stamp,
)
from qsrt_pack.source.models import RoutedExperts, carried_tensors
from qsrt_pack.state import State
from qsrt_runtime.format import paths
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.tensorfile import TensorEntry, read_header

_DOWNLOADS = "shards"
_log = logging.getLogger(__name__)


class Supply:
    """The source of a conversion, opened.

    checkpoint: what its headers say.   repository: None for a folder.   slices: shard -> SHA-256
    of what is kept of it; see slices.py.
    """

    def __init__(
        self, source: Path | Repository, out: Path, state: State | None, drop: bool
    ) -> None:
        """Open the source; FormatError on any doubt.

        state: of a stopped run, which may have removed shards.   drop: remove each shard when all
        that is read of it is on disk: of a folder its files, of a repository what is downloaded
        beside the output.
        """
        self.repository = source if isinstance(source, Repository) else None
        self._drop = drop
        self._folder = source_folder(out)
        kept = state.slices if state is not None else {}
        self.slices = {n: d for n, d in kept.items() if is_whole(self._slice(n), d)}
        self._known: dict[str, str] = {}
        if self.repository is not None:
            place = self._folder / _DOWNLOADS if drop else None
            arguments = (self.repository.path, self.repository.headers, place)
        else:
            gone = [name for name in self.slices if not (source / name).exists()]
            self._known = {name: state.source[name] for name in gone} if state else {}
            arguments = (source, {name: shard_header(self._slice(name)) for name in gone})
        self.checkpoint = open_checkpoint(*arguments)
        self._stamp = source_stamp(self.checkpoint)
        if open_checkpoint(*arguments) != self.checkpoint:  # not what the stamp is of
            raise self._changed()
        if drop and self.repository is None:
            self._refuse_links()
        self._tensors: dict[str, dict[str, TensorEntry]] = {n: {} for n in self.checkpoint.shards}
        for name, (shard, entry) in self.checkpoint.tensors.items():
            self._tensors[shard][name] = entry
        self._fetched: set[str] = set()

    @property
    def is_remote(self) -> bool:
        return self.repository is not None

    @property
    def keeps_downloads(self) -> bool:
        """Whether shards are downloaded beside the output, where the next run finds them."""
        return self.is_remote and self._drop

    @property
    def is_sliced(self) -> bool:
        """Whether carried tensors are taken from slices: shards are removed, or some were."""
        return self._drop or bool(self.slices)

    def disk_bytes(self, readers: "Readers") -> int:
        """What removing shards takes on disk for a while, beyond what is there already.

        What is kept of the shards, and those of a repository that are there at once.
        """
        if not self._drop:
            return 0
        carried = (self.checkpoint.tensors[name] for name in readers.carried)
        kept = sum(entry.end - entry.start for shard, entry in carried if shard not in self.slices)
        if self.repository is None:
            return kept
        files, folder = self.repository.files, self.checkpoint.shards_at
        there = sum((folder / n).stat().st_size for n in files if (folder / n).is_file())
        most = max(sum(files[n].size for n in shards) for shards in readers.at_once())
        return kept + max(0, most - there)

    def check_unchanged(self) -> None:
        """Refuse a source that was written to since it was opened."""
        if source_stamp(self.checkpoint) != self._stamp:
            raise self._changed()

    def digests(self, advance: Callable[[int], None] | None = None) -> dict[str, str]:
        """SHA-256 of config, index and shards by name; those of the Hub as it states them."""
        known = self._known
        if self.repository is not None:
            known = {name: self.repository.digest(name) for name in self.checkpoint.shards}
        return digest_files(self.checkpoint, advance, known)

    def bring(self, shards: Iterable[str]) -> None:
        """Have shards there, whole; FormatError where one was removed, HubError of the Hub."""
        for shard in sorted(set(shards) - self._fetched):
            path = self.checkpoint.shards_at / shard
            if self.repository is not None:
                self._fetch(self.repository, shard, path)
            else:
                self.check_there([shard])
            self._fetched.add(shard)

    def check_there(self, shards: Iterable[str]) -> None:
        """Refuse to go on where a folder's shard that is still to be read was removed."""
        for shard in sorted(shards) if self.repository is None else ():
            path = self.checkpoint.shards_at / shard
            if not path.exists():
                raise FormatError(
                    f"{path} was removed when its layers were done, and one of them is no longer "
                    "whole; put the shard back to convert it again"
                )

    @contextmanager
    def held(self) -> Iterator[None]:
        """While shards of a folder are removed, no other conversion removes some of it."""
        if self.is_remote or not self._drop:
            yield
            return
        descriptor = os.open(self.checkpoint.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FormatError(
                    f"another conversion removes shards of {self.checkpoint.path}; wait for its end"
                ) from None
            yield
        finally:
            os.close(descriptor)

    def release(
        self, needed: Collection[str], carried: Collection[str], record: Callable[[], None]
    ) -> None:
        """Keep what is carried of the shards that are there and not needed, and remove them.

        carried: names of tensors.   record: writes `slices` down, before anything is removed.
        """
        if not self.is_sliced:
            return
        self.check_unchanged()
        for shard in self.checkpoint.shards:
            path = self.checkpoint.shards_at / shard
            if shard in needed or not path.exists():
                continue
            if shard not in self.slices:
                self.bring([shard])  # a run before may have left it unchecked
                tensors = self._tensors[shard]
                digest = write_slice(self._slice(shard), path, tensors, carried)
                self.check_unchanged()  # while it was copied
                self.slices[shard] = digest
                record()
            if self._drop:
                self.check_unchanged()
                path.unlink()
                _log.info("removed %s, of which all is read", path)
                paths.sync_folder(path.parent)
                self._stamp.pop(shard, None)
                self._fetched.discard(shard)

    def carried_from(self, carried: Collection[str], record: Callable[[], None]) -> Checkpoint:
        """The checkpoint with the carried tensors where they can be read, all layers done."""
        shards = {self.checkpoint.tensors[name][0] for name in carried}
        if not self.is_sliced:
            self.bring(shards)
            return self.checkpoint
        self.release((), carried, record)
        for shard in sorted(shards - set(self.slices)):
            self.bring([shard])
            self.release((), carried, record)
        found = {
            name: (shard, entry)
            for shard in shards
            for name, entry in read_header(self._slice(shard)).tensors.items()
        }
        return replace(self.checkpoint, tensors=found, shards_at=self._folder / SLICES)

    def _fetch(self, repository: Repository, shard: str, path: Path) -> None:
        if self._drop:
            paths.make_folder(self.checkpoint.shards_at)
        repository.fetch(shard, self.checkpoint.shards_at if self._drop else None)
        if read_header(path).tensors != self._tensors[shard]:
            raise FormatError(f"{path} has another header than the Hub showed before")
        self._stamp[shard] = source_stamp(self.checkpoint)[shard]

    def _slice(self, shard: str) -> Path:
        return self._folder / SLICES / shard

    def _refuse_links(self) -> None:
        for shard in self.checkpoint.shards:
            path = self.checkpoint.path / shard
            if path.is_symlink():
                raise FormatError(
                    f"{path} is a link, of which --drop-source removes none; give the folder of "
                    "the files themselves, or of the Hub OWNER/NAME"
                )

    def _changed(self) -> FormatError:
        return FormatError(f"{self.checkpoint.path} changed since it was opened; convert it again")


@dataclass(frozen=True)
class Readers:
    """Who reads what of a source.

    layers: the shards that each layer's experts are read from.   carried: names of all tensors
    that are no routed expert's, however they are to be carried, which the next run may change.
    """

    layers: dict[int, frozenset[str]]
    carried: frozenset[str]

    def at_once(self) -> Iterator[set[str]]:
        """For each layer the shards that are there while it is read: its own, and others' still."""
        layers, brought = list(self.layers), set()
        for number, layer in enumerate(layers):
            brought |= self.layers[layer]
            yield brought & self.needed(layers[number:])

    def needed(self, layers: Iterable[int]) -> set[str]:
        """The shards that some layers are read from."""
        return {shard for layer in layers for shard in self.layers[layer]}


def find_readers(checkpoint: Checkpoint, experts: RoutedExperts) -> Readers:
    """From headers alone."""
    layers: dict[int, set[str]] = {layer: set() for layer in experts.layers}
    for layer, _, _, place in experts.weights():
        parts = checkpoint.weights[place.tensor].parts.values()
        layers[layer].update(checkpoint.tensors[part][0] for part in parts)
    carried = frozenset(carried_tensors(checkpoint, experts, "stored"))
    return Readers({n: frozenset(shards) for n, shards in layers.items()}, carried)
