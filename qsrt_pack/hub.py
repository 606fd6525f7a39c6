"""Packages to the Hub and back. A repository has its seal only while every sealed byte is there."""

import hashlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

import qsrt_runtime
from qsrt_pack.assemble.package import GIT_ATTRIBUTES
from qsrt_pack.card import build_card
from qsrt_pack.output import check_output, recover, replacing, state_file
from qsrt_pack.published import published_bench, published_evaluation
from qsrt_pack.validate import validate
from qsrt_runtime.format import paths, schema
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.manifest import (
    ATTRIBUTES,
    BENCH,
    CARD,
    CHECKSUMS,
    MANIFEST,
    MARKER,
    REPORT,
)
from qsrt_runtime.format.package import Package, open_package, seal
from qsrt_runtime.hub import HubError, attempt, is_repository, local_folder, resolve

_OF_THE_HUB = {ATTRIBUTES, "README.md", "LICENSE"}  # what a new repository may hold
_LARGE = 10_000_000  # bytes from which the Hub stores any file as a large one
_SAMPLE = 1 << 20
_log = logging.getLogger(__name__)


@contextmanager
def _resumable() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note("the same command continues")
        raise


@_resumable()
def push(
    path: Path,
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    license_id: str | None = None,
    base_model: str | None = None,
    report: Path | None = None,
    bench: Path | None = None,
    show_progress: bool = True,
) -> str:
    """Publish a package; returns its seal's digest, which the model card has changed.

    Validates, writes card and report, seals again, and then talks to the Hub: makes the repository
    or checks its visibility, takes away the seal of another package, sends all files but the seal,
    checks what has arrived, and commits the seal together with the removal of what is not of the
    package. Run again after a failure, it sends what is missing. report: of `eval --json`.
    bench: of `bench --json`.
    Raises FormatError for a package at fault, HubError for what the Hub does.
    """
    recover(path)
    validate(path, show_progress=show_progress)
    package = _described(path, repository, license_id, base_model, report, bench)
    show_bars(show_progress)
    api = HfApi(library_name="qsrt", library_version=qsrt_runtime.__version__)
    _prepare_repository(api, repository, private, revision)
    head, remote = remote_files(api, repository, revision)
    missing = _differing(package, remote)
    leftovers = sorted(set(remote) - {*package.digests, CHECKSUMS, MARKER})
    if not missing and not leftovers:
        _log.info("%s has it already", repository)
        return package.seal_sha256
    _refuse_foreign(repository, remote, leftovers)
    if MARKER in remote:
        message = f"Begin {package.seal_sha256[:12]}"
        _commit(api, repository, revision, message, head, delete=[MARKER])
    _send(api, package, repository, revision)
    return package.seal_sha256


@_resumable()
def pull(
    repository: str,
    out: Path,
    *,
    revision: str | None = None,
    expect: str | None = None,
    overwrite: bool = False,
    show_progress: bool = True,
) -> str:
    """Download a package into a folder that appears when it is whole; returns its seal's digest.

    expect: what that digest must be. Run again after a failure, it downloads what is missing.
    Raises FormatError for a package that is unsealed or altered, HubError for what the Hub does.
    """
    check_output(out, None, overwrite, resumable=True)
    show_bars(show_progress)
    api = HfApi(library_name="qsrt", library_version=qsrt_runtime.__version__)
    commit = resolve(api, repository, revision)
    with replacing(out, overwrite=overwrite, resumable=True) as folder:
        _continue_or_clear(folder, state_file(out), repository, commit)
        try:
            _download(api, repository, commit, folder, expect)
            report = validate(folder, show_progress=show_progress)
        except FormatError:
            state_file(out).unlink()  # without which what was downloaded goes, too
            raise
    return report["seal_sha256"]


def _download(api: HfApi, repository: str, commit: str, folder: Path, expect: str | None) -> None:
    """A commit's files, the seal first, which is refused if it is not the expected one."""
    place = {"revision": commit, "local_dir": folder}
    names = attempt(repository, lambda: api.list_repo_files(repository, revision=commit))
    for name in names:
        paths.relative_name(name, repository)
    if MARKER not in names:
        raise FormatError(
            f"{repository} has no {MARKER} at {commit[:12]}: it is not a package, or one whose "
            "push was not finished"
        )
    attempt(repository, lambda: hf_hub_download(repository, MARKER, **place))
    found = paths.sha256_file(folder / MARKER)
    if expect is not None and found != expect:
        raise FormatError(f"{repository} at {commit[:12]} has the seal {found}, expected {expect}")
    attempt(repository, lambda: snapshot_download(repository, **place))
    shutil.rmtree(folder / paths.HUB_CACHE)
    if not any((folder / paths.HUB_CACHE).parent.iterdir()):
        (folder / paths.HUB_CACHE).parent.rmdir()


def _send(api: HfApi, package: Package, repository: str, revision: str | None) -> None:
    """All files, and, when they have arrived, the seal."""
    attempt(
        f"{repository}: upload",
        lambda: api.upload_folder(
            repo_id=repository,
            revision=revision,
            folder_path=package.path,
            ignore_patterns=[MARKER],
            commit_message=f"Files of {package.seal_sha256[:12]}",
        ),
    )
    head, remote = remote_files(api, repository, revision)
    missing = _differing(package, remote) - {MARKER}
    if missing:
        raise HubError(f"{repository}: {min(missing)} has not arrived as sent; push again")
    leftovers = sorted(set(remote) - {*package.digests, CHECKSUMS, MARKER})
    message, marker = f"Seal {package.seal_sha256[:12]}", package.path / MARKER
    _commit(api, repository, revision, message, head, add=marker, delete=leftovers)


def checkpoint_folder(path: str | Path) -> Path:
    """local_folder of a checkpoint: of a repository everything but code and other weights.

    FormatError where it has no safetensors.
    """
    name = str(path)
    if not is_repository(name):
        return Path(path)
    repository, _, revision = name.partition("@")
    api = HfApi(library_name="qsrt", library_version=qsrt_runtime.__version__)
    names = attempt(
        f"{name} is no folder here; on the Hub",
        lambda: api.list_repo_files(repository, revision=revision or None),
    )
    return local_folder(name, ignore=[literal(n) for n in refused_files(name, names)])


def refused_files(repository: str, names: Collection[str]) -> list[str]:
    """Those of a checkpoint's files that are not fetched: code and weights but safetensors.

    FormatError where it has no safetensors.
    """
    refused = [n for n in names if paths.WEIGHTS_OR_CODE.search(n)]
    refused = sorted(n for n in refused if not n.endswith(".safetensors"))
    if refused:
        _log.info("not downloaded, since code and pickles are never run: %s", ", ".join(refused))
    if refused and not any(n.endswith(".safetensors") for n in names):
        raise FormatError(
            f"{repository} has its weights only as {refused[0]}, which is never opened; save it as "
            "safetensors first (transformers: model.save_pretrained(folder))"
        )
    return refused


def literal(name: str) -> str:
    """The pattern that matches just this name."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def _described(
    path: Path,
    repository: str,
    license_id: str | None,
    base_model: str | None,
    report: Path | None,
    bench: Path | None,
) -> Package:
    """The package with its card and report, sealed again if they are not those it has."""
    package = open_package(path)
    if not package.documents.is_ours:
        raise FormatError(f"{path} was made elsewhere; push takes packages that convert has made")
    evaluation = published_evaluation(package, report)
    speed = published_bench(package, bench)
    names = {"license_id": license_id, "base_model": base_model}
    card = build_card(package, repository, **names, report=evaluation, bench=speed)
    wanted = {CARD: card.encode(), ATTRIBUTES: _attributes(package)}
    if evaluation is not None:
        wanted[REPORT] = schema.dump(evaluation)
    if speed is not None:
        wanted[BENCH] = schema.dump(speed)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in wanted.items()}
    if all(package.digests.get(name) == digest for name, digest in digests.items()):
        return package
    with replacing(path, overwrite=True) as folder:
        kept = {n: digest for n, digest in package.digests.items() if n not in wanted}
        for name in kept:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _link(path / name, folder / name)
        for name, data in wanted.items():
            paths.write_file(folder / name, data)
        seal(folder, known=kept)
    return open_package(path)


def _attributes(package: Package) -> bytes:
    """.gitattributes naming every large file, lest the Hub add what is missing and break the seal.

    The Hub stores as such what is binary or of 10 MB and more.
    """
    text = GIT_ATTRIBUTES.decode()
    for name in package.side_files:
        path = package.path / name
        with path.open("rb") as file:
            binary = b"\0" in file.read(_SAMPLE)
        if binary or path.stat().st_size >= _LARGE:
            pattern = re.sub(r"\s", "[[:space:]]", name)
            text += f"{pattern} filter=lfs diff=lfs merge=lfs -text\n"
    return text.encode()


def _link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the file system has no such names."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def _prepare_repository(api: HfApi, repository: str, private: bool, revision: str | None) -> None:
    """Make what is not there; refuse another visibility than the wanted one."""

    def ensure() -> Any:
        if not api.repo_exists(repository):
            api.create_repo(repository, private=private, exist_ok=True)
        return api.repo_info(repository)

    found = attempt(repository, ensure)
    if bool(found.private) != private:
        is_now, wish = ("private", "give --private") if found.private else ("public", "do not")
        raise HubError(
            f"{repository} is {is_now}; {wish}, or change its visibility on the Hub first"
        )
    if revision is not None:
        attempt(
            f"{repository}: branch {revision}",
            lambda: api.create_branch(repository, branch=revision, exist_ok=True),
        )


def remote_files(
    api: HfApi, repository: str, revision: str | None
) -> tuple[str, dict[str, RepoFile]]:
    """The branch's head and its files by name."""
    head = resolve(api, repository, revision)
    tree = attempt(
        repository, lambda: list(api.list_repo_tree(repository, recursive=True, revision=head))
    )
    return head, {item.path: item for item in tree if isinstance(item, RepoFile)}


def _differing(package: Package, remote: dict[str, RepoFile]) -> set[str]:
    """Names of sealed files, and of the seal, that the repository has not as they are here."""
    digests = package.digests | {
        MARKER: package.seal_sha256,
        CHECKSUMS: package.documents.marker["checksum_manifest_sha256"],
    }
    return {
        name
        for name, digest in digests.items()
        if name not in remote or not is_same(remote[name], package.path / name, digest)
    }


def is_same(remote: RepoFile, path: Path, sha256: str) -> bool:
    """Whether a file here, of a digest, is one that the Hub has."""
    if remote.size != path.stat().st_size:
        return False
    if remote.lfs is not None:
        return remote.lfs.sha256 == sha256
    data = path.read_bytes()  # small, or the Hub would store it as a large file
    return remote.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _refuse_foreign(repository: str, remote: Collection[str], leftovers: Collection[str]) -> None:
    """Only what an older package left may be removed."""
    foreign = sorted(set(leftovers) - _OF_THE_HUB)
    if foreign and MANIFEST not in remote:
        raise HubError(
            f"{repository} holds {foreign[0]}, and no package; push to another repository or "
            "another --revision"
        )


def _commit(
    api: HfApi,
    repository: str,
    revision: str | None,
    message: str,
    head: str,
    *,
    delete: Collection[str],
    add: Path | None = None,
) -> None:
    """One commit on top of the head, or none."""
    attempt(
        f"{repository}: commit",
        lambda: api.create_commit(
            repository,
            revision=revision,
            operations=[
                *([CommitOperationAdd(add.name, add)] if add else []),
                *(CommitOperationDelete(name, is_folder=False) for name in delete),
            ],
            commit_message=message,
            parent_commit=head,
        ),
    )


def _continue_or_clear(folder: Path, state: Path, repository: str, commit: str) -> None:
    """Keep what was downloaded of this commit before; of anything else, nothing."""
    wanted = {"schema": "qsrt_pull_v1", "repository": repository, "commit": commit}
    if state.exists():
        found = schema.read(state)
        if found.get("schema") != wanted["schema"]:
            raise FormatError(
                f"{state.parent} holds a conversion that was stopped; finish it, or delete that "
                "folder"
            )
        if found == wanted:
            return
        shutil.rmtree(folder)
        folder.mkdir()
    schema.check(wanted, "pull", str(state))
    paths.write_file(state, schema.dump(wanted))


def show_bars(show: bool) -> None:
    """Whether the client shows its own bars, which it does on a terminal alone."""
    (enable_progress_bars if show and sys.stderr.isatty() else disable_progress_bars)()
