"""A checkpoint on the Hub, of which headers are read, and shards fetched one at a time."""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import SafetensorsParsingError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import SafetensorsFileMetadata

import qsrt_runtime
from qsrt_pack.hub import is_same, literal, refused_files, remote_files, show_bars
from qsrt_pack.source.checkpoint import SINGLE
from qsrt_runtime.format import paths, schema
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.manifest import INDEX
from qsrt_runtime.format.tensorfile import Header, parse_header
from qsrt_runtime.hub import HubError, attempt

_log = logging.getLogger(__name__)
_AT_ONCE = 8  # requests for headers
_SHARD = ".safetensors"


@dataclass(frozen=True)
class Repository:
    """One commit of a repository.

    path: its snapshot in the Hub's cache, which has all files but shards, code and pickles.
    files: by name.   headers: of the shards, by name, as the Hub has them.
    """

    name: str
    commit: str
    path: Path
    files: dict[str, RepoFile]
    headers: dict[str, Header]

    def digest(self, shard: str) -> str:
        """SHA-256 as the Hub states it; of small ones, of which it states none, as fetched."""
        lfs = self.files[shard].lfs
        return lfs.sha256 if lfs is not None else paths.sha256_file(self.fetch(shard, None))

    def fetch(self, shard: str, folder: Path | None) -> Path:
        """Download a shard into a folder, or into the Hub's cache; what has arrived is kept.

        HubError where it has not the digest that the Hub states.
        """
        place = {"revision": self.commit} | ({"local_dir": folder} if folder else {})
        what = f"{self.name}: {shard}"
        path = Path(attempt(what, lambda: hf_hub_download(self.name, shard, **place)))
        found = paths.sha256_file(path)
        if not is_same(self.files[shard], path, found):
            if folder is not None:
                path.unlink()
            raise HubError(
                f"{path.resolve()} has the SHA-256 {found}, which is not what the Hub states of "
                f"{shard} in {self.name}; "
                + ("run the command" if folder else "delete it and fetch it")
                + " again"
            )
        return path


def open_repository(text: str, *, show_progress: bool = True) -> Repository:
    """OWNER/NAME[@REVISION] as it is now. Fetches all files but shards; of those the headers.

    Raises FormatError for a repository without safetensors, HubError for what the Hub does.
    """
    show_bars(show_progress)
    name, _, revision = text.partition("@")
    api = HfApi(library_name="qsrt", library_version=qsrt_runtime.__version__)
    commit = attempt(
        f"{text} is no folder here; on the Hub",
        lambda: api.repo_info(name, revision=revision or None),
    ).sha
    _, files = remote_files(api, name, commit)
    for file in files:
        paths.relative_name(file, name)
    ignored = [f"*{_SHARD}", *map(literal, refused_files(text, files))]
    path = Path(
        attempt(name, lambda: snapshot_download(name, revision=commit, ignore_patterns=ignored))
    )

    def read(shard: str) -> Header:
        return _read_header(api, name, commit, path / shard, shard, files[shard].size)

    _log.info("%s is at commit %s; %s@%s stays with it", text, commit, name, commit)
    shards = _shards(path, files)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        headers = dict(zip(shards, pool.map(read, shards), strict=True))
    return Repository(name, commit, path, files, headers)


def _shards(path: Path, files: dict[str, RepoFile]) -> list[str]:
    """Those that the index names; where there is none, the single one, or all at the top."""
    if INDEX not in files and SINGLE in files:
        return [SINGLE]
    if INDEX not in files:
        return sorted(name for name in files if name.endswith(_SHARD) and "/" not in name)
    index = schema.read(path / INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    named = weight_map.values() if isinstance(weight_map, dict) else ()
    return sorted({shard for shard in named if isinstance(shard, str) and shard in files})


def _read_header(api: HfApi, name: str, commit: str, path: Path, shard: str, size: int) -> Header:
    """A shard's header by the client's range requests; checked like that of a file here."""

    def ask() -> SafetensorsFileMetadata:
        return api.parse_safetensors_file_metadata(name, shard, revision=commit)

    try:
        found = attempt(f"{name}: header of {shard}", ask)
        value: dict[str, Any] = {
            tensor: {
                "dtype": info.dtype,
                "shape": list(info.shape),
                "data_offsets": list(info.data_offsets),
            }
            for tensor, info in found.tensors.items()
        }
        data = max((entry["data_offsets"][1] for entry in value.values()), default=0)
        start = size - data  # the client does not say how long the header is
    except (SafetensorsParsingError, AttributeError, IndexError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise FormatError(f"{name}: {shard} has no header that can be read: {reason}") from None
    if start < 8:
        raise FormatError(f"{name}: {shard} is truncated: {size} bytes, {data} of them of tensors")
    return parse_header(path, value, start, size)
