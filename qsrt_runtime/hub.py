"""The Hub: the folder that a repository's name stands for, and its errors in one line each."""

import json
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, get_token, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HTTPError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)

from qsrt_runtime.format.manifest import CHECKSUMS, MARKER

T = TypeVar("T")
TRIES = 5
LONGEST_WAIT_S = 60
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?", re.ASCII)
_TOKEN = re.compile(r"\bhf_\w+")
_UNSURE = (HTTPError, json.JSONDecodeError, RuntimeError)  # may pass
_FAULTS = (*_UNSURE, EntryNotFoundError, OfflineModeIsEnabled, ValueError)
_MEANINGS = {
    400: "it does not accept the request",
    401: "the repository does not exist, or no valid token was given; log in: hf auth login",
    403: "this token has no access to it; take one that has: hf auth login",
    404: "there is no such repository, or this token does not see it",
    409: "something else has changed it meanwhile; run the command again",
    412: "something else has changed it meanwhile; run the command again",
    429: "too many requests; run the command again later",
}
logger = logging.getLogger(__name__)


class HubError(OSError):
    """The Hub refused, failed or was not reached. Holds no token, whatever the Hub answered."""


def is_repository(name: str) -> bool:
    """Whether a name that is no path here has the form of a repository's, OWNER/NAME[@REVISION]."""
    return not Path(name).exists() and _NAME.fullmatch(name) is not None


def attempt(what: str, call: Callable[[], T]) -> T:
    """What the call returns; HubError in place of the client's own errors.

    what: names the step in messages.   A Hub that is busy (429), fails (5xx) or is not reached is
    asked TRIES times, with growing waits or those that it asks for; any other answer is final.
    """
    for number in range(TRIES):
        try:
            return call()
        except Exception as error:
            fault = _fault(error)
            if fault is None:
                raise
            response = getattr(fault, "response", None)
            status = response.status_code if response is not None else None
            passing = isinstance(fault, _UNSURE) and (status in (None, 429) or status >= 500)
            message = redacted(f"{what}: {_describe(fault, status)}")
            if not passing or number == TRIES - 1:
                tried = f" ({TRIES} tries)" if passing else ""
                raise HubError(message + tried) from None
            wait = _wait_s(response, number)
        logger.warning("%s; trying again in %d s", message, wait)
        time.sleep(wait)
    raise AssertionError("unreachable")


def redacted(text: str) -> str:
    """A text in one line, without anything that is or looks like a token."""
    token = get_token()
    text = text.replace(token, "***") if token else text
    return " ".join(_TOKEN.sub("***", text).split())


def resolve(api: HfApi, repository: str, revision: str | None = None) -> str:
    """The commit, 40 hex digits, that a branch, tag or commit of a repository stands for now."""
    return attempt(repository, lambda: api.repo_info(repository, revision=revision)).sha


def local_folder(path: str | Path, ignore: list[str] | None = None) -> Path:
    """A local folder as it is; for OWNER/NAME[@REVISION] its snapshot in the Hub's cache.

    ignore: patterns of files that are not downloaded.
    """
    name = str(path)
    if not is_repository(name):
        return Path(path)
    repository, _, revision = name.partition("@")
    found = attempt(
        f"{name} is no folder here; on the Hub",
        lambda: snapshot_download(repository, revision=revision or None, ignore_patterns=ignore),
    )
    return Path(found)


def sealed_snapshot(
    repository: str, revision: str | None = None, cache_dir: str | Path | None = None
) -> Path:
    """The folder of a repository's package: what its seal binds is fetched, and nothing else."""
    place = {"revision": revision, "cache_dir": cache_dir}
    listing = Path(hf_hub_download(repository, CHECKSUMS, **place))
    place["revision"] = listing.parent.name  # the commit, which the rest must be of too
    sealed = [line.partition("  ")[2] for line in listing.read_text().splitlines()]
    return Path(snapshot_download(repository, allow_patterns=[*sealed, CHECKSUMS, MARKER], **place))


def _fault(error: BaseException | None) -> BaseException | None:
    """The transport's error behind one of the client's, which wraps it in others."""
    found = error if isinstance(error, _FAULTS) else None
    while error is not None and not isinstance(error, HTTPError):
        found = error if isinstance(error, OfflineModeIsEnabled) else found
        error = error.__cause__ or error.__context__
    return error or found


def _describe(fault: BaseException, status: int | None) -> str:
    if isinstance(fault, OfflineModeIsEnabled):
        return "not in the Hub's cache here, and HF_HUB_OFFLINE forbids to look further"
    if isinstance(fault, RevisionNotFoundError):
        return "there is no such revision"
    if status is None:
        said = str(fault).strip()[:200] or type(fault).__name__
        return f"the Hub was not reached: {said}" if isinstance(fault, HTTPError) else said
    said = str(getattr(fault, "server_message", None) or "")[:200]
    meaning = _MEANINGS.get(status, "it has failed" if status >= 500 else "it refuses")
    return f"the Hub answered {status}, {meaning}" + (f" ({said})" if said else "")


def _wait_s(response: object, number: int) -> float:
    """Seconds that the Hub asks for, or 1, 2, 4, ..."""
    asked = getattr(response, "headers", {}).get("Retry-After", "")
    return min(float(asked), LONGEST_WAIT_S) if asked.isdecimal() else 2**number
