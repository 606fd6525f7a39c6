"""A package in the Hub's cache, whole."""

from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download

from qsrt_runtime.format.manifest import CHECKSUMS, MARKER


def sealed_snapshot(
    repository: str, revision: str | None = None, cache_dir: str | Path | None = None
) -> Path:
    """The folder of a repository's package: what its seal binds is fetched, and nothing else."""
    place = {"revision": revision, "cache_dir": cache_dir}
    listing = Path(hf_hub_download(repository, CHECKSUMS, **place))
    place["revision"] = listing.parent.name  # the commit, which the rest must be of too
    sealed = [line.partition("  ")[2] for line in listing.read_text().splitlines()]
    return Path(snapshot_download(repository, allow_patterns=[*sealed, CHECKSUMS, MARKER], **place))
