"""A Hub on the loopback interface: what the real client needs to make, fill and read repositories.

Endpoints of the Hub's API as huggingface_hub calls them; repositories live in memory.
"""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

ROOT = Path(__file__).parents[1]
LARGE = 1 << 14  # bytes from which a file is a large one
Fault = Callable[["Request"], int | None]


class _Server(ThreadingHTTPServer):
    """A server that says nothing of clients that have gone."""

    def handle_error(self, *request: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(*request)


@dataclass(frozen=True)
class Request:
    """One request. number: counted from 1 over all."""

    number: int
    method: str
    path: str
    token: str | None
    range: str | None = None


@dataclass
class Repository:
    """branches: name -> commits, each (message, {file: content}), the newest last."""

    private: bool
    branches: dict[str, list[tuple[str, dict[str, bytes]]]] = field(default_factory=dict)

    def files(self, branch: str = "main") -> dict[str, bytes]:
        return self.branches[branch][-1][1]

    def messages(self, branch: str = "main") -> list[str]:
        return [message for message, _ in self.branches[branch]]


class FakeHub:
    """A context in which `url` answers.

    fault: called for each request; a status it returns is the answer, 0 breaks the connection.
    token: the only one that is known.   writable: whether it may write.   threshold: bytes from
    which a file is a large one; None: no file is, as the Xet protocol of those is not spoken here.
    altered: bodies that files have instead of their own, by name.
    """

    def __init__(self, token: str = "hf_TESTTOKEN0123456789abcdef") -> None:
        self.token, self.writable = token, True
        self.threshold: int | None = LARGE
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.altered: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.fault: Fault = lambda request: None
        self.lock = threading.RLock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = _Server(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "FakeHub":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def create(self, name: str, private: bool = False, **files: bytes) -> Repository:
        """A repository as the Hub makes one, with a first commit."""
        first = {".gitattributes": b"* text\n"} | files
        repository = Repository(private, {"main": [("initial commit", first)]})
        self.repositories[name] = repository
        return repository

    def is_large(self, start: bytes, size: int) -> bool:
        """Whether a file that begins so is stored as a large one: binary or of some size."""
        return self.threshold is not None and (size >= self.threshold or b"\0" in start[:512])

    def count(self, pattern: str) -> int:
        """Requests so far whose `METHOD path` matches."""
        return sum(bool(re.search(pattern, f"{r.method} {r.path}")) for r in self.requests)


def environment(hub: FakeHub, home: Path) -> dict[str, str]:
    """Of a process whose client talks to a Hub and keeps its things at home."""
    changes = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    changes |= {"HF_HOME": str(home), "HF_TOKEN": hub.token, "OMP_NUM_THREADS": "1"}
    return os.environ | changes


def command(*arguments: object, env: dict[str, str]) -> subprocess.Popen:
    """qsrt-pack, started."""
    words = [sys.executable, "-m", "qsrt_pack", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, env=env, cwd=ROOT, text=True, **pipes)


def commit_id(name: str, branch: str, number: int) -> str:
    return hashlib.sha1(f"{name} {branch} {number}".encode()).hexdigest()


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def handle_any(self) -> None:
        hub, url = self.hub, urlsplit(self.path)
        body = self._body()
        authorization = self.headers.get("Authorization", "")
        token = authorization.removeprefix("Bearer ") or None
        with hub.lock:
            wanted = self.headers.get("Range")
            request = Request(len(hub.requests) + 1, self.command, url.path, token, wanted)
            hub.requests.append(request)
            status = hub.fault(request)
        if status == 0:
            self.close_connection = True
            self.connection.close()
            return
        if status is not None:
            self._refuse(status, f"fault for {authorization}")
            return
        with hub.lock:
            self._route(url.path, parse_qs(url.query), body, token)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _route(self, path: str, query: dict, body: bytes, token: str | None) -> None:
        for pattern, answer in _ROUTES:
            match = re.fullmatch(pattern, f"{self.command} {path}")
            if match:
                answer(self, *(unquote(g) for g in match.groups()), query=query, body=body)
                return
        self._refuse(404, f"no such endpoint: {self.command} {path}")

    def _answer(self, value: Any, status: int = 200, headers: dict | None = None) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        headers = {"Content-Length": str(len(data))} | (headers or {})
        for key, item in headers.items():
            self.send_header(key, item)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _refuse(self, status: int, message: str, code: str = "") -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._answer({"error": message}, status, headers)

    def _repository(self, name: str, write: bool = False) -> Repository | None:
        """The repository, or None after a refusal."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        found = self.hub.repositories.get(name)
        if token not in (None, self.hub.token) or (write and token is None):
            self._refuse(401, "Invalid credentials in Authorization header")
        elif found is None or (found.private and token is None):
            self._refuse(404 if token else 401, "Repository not found", "RepoNotFound")
        elif write and not self.hub.writable:
            self._refuse(403, "the token has no write access")
        else:
            return found
        return None

    def _commit(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repository = self._repository(name)
        if repository is None:
            return None
        for branch, commits in repository.branches.items():
            for number, (_, files) in reversed(list(enumerate(commits))):
                oid = commit_id(name, branch, number)
                if revision in (branch, oid):
                    return oid, files
        self._refuse(404, "Invalid rev id", "RevisionNotFound")
        return None

    def harnesses(self, **_: object) -> None:
        self._answer({})

    def create(self, body: bytes, **_: object) -> None:
        value = json.loads(body)
        name = f"{value['organization']}/{value['name']}"
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token != self.hub.token:
            self._refuse(401, "Invalid credentials in Authorization header")
        elif not self.hub.writable:
            self._refuse(403, "the token has no write access")
        elif name in self.hub.repositories:
            self._refuse(409, "You already created this repo")
        else:
            private = value.get("private") or value.get("visibility") == "private"
            self.hub.create(name, bool(private))
            self._answer({"url": f"{self.hub.url}/{name}"})

    def validate_yaml(self, **_: object) -> None:
        self._answer({"errors": [], "warnings": []})

    def info(self, name: str, revision: str = "main", **_: object) -> None:
        found = self._commit(name, revision)
        if found:
            siblings = [{"rfilename": file} for file in found[1]]
            private = self.hub.repositories[name].private
            self._answer(
                {"id": name, "sha": found[0], "private": private, "siblings": siblings, "tags": []}
            )

    def tree(self, name: str, revision: str, **_: object) -> None:
        found = self._commit(name, revision)
        if found:
            self._answer([self._entry(file, data) for file, data in found[1].items()])

    def _entry(self, file: str, data: bytes) -> dict[str, Any]:
        entry = {"type": "file", "path": file, "size": len(data), "oid": blob_id(data)}
        if self.hub.is_large(data, len(data)):
            sha256 = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"oid": sha256, "size": len(data), "pointerSize": 130}
        return entry

    def branch(self, name: str, branch: str, **_: object) -> None:
        repository = self._repository(name, write=True)
        if repository is None:
            return
        if branch in repository.branches:
            self._refuse(409, "Reference already exists")
            return
        repository.branches[branch] = [("branch", dict(repository.files()))]
        self._answer({})

    def preupload(self, name: str, branch: str, body: bytes, **_: object) -> None:
        repository = self._repository(name, write=True)
        if repository is None:
            return
        there = repository.files(branch)
        answer = []
        for file in json.loads(body)["files"]:
            path = file["path"]
            large = self.hub.is_large(base64.b64decode(file["sample"]), file["size"])
            entry = {"path": path, "uploadMode": "lfs" if large else "regular"}
            if path in there:
                data = there[path]
                sha256 = hashlib.sha256(data).hexdigest()
                entry["oid"] = sha256 if self.hub.is_large(data, len(data)) else blob_id(data)
            answer.append(entry | {"shouldIgnore": False})
        self._answer({"files": answer})

    def lfs_batch(self, name: str, body: bytes, **_: object) -> None:
        if self._repository(name, write=True) is None:
            return
        objects = []
        for item in json.loads(body)["objects"]:
            if item["oid"] not in self.hub.large:
                href = f"{self.hub.url}/lfs/{item['oid']}"
                item = item | {"actions": {"upload": {"href": href}}}
            objects.append(item)
        self._answer({"transfer": "basic", "objects": objects})

    def lfs_put(self, oid: str, body: bytes, **_: object) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.large[oid] = body
        self._answer({})

    def commit(self, name: str, branch: str, body: bytes, **_: object) -> None:
        repository = self._repository(name, write=True)
        if repository is None:
            return
        lines = [json.loads(line) for line in body.splitlines()]
        number = len(repository.branches[branch]) - 1
        header = lines[0]["value"]
        if header.get("parentCommit") not in (None, commit_id(name, branch, number)):
            self._refuse(412, "A commit has happened since")
            return
        files, large = dict(repository.files(branch)), []
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
                large.append(value["path"])
            else:
                assert line["key"] == "deletedFile", line["key"]
                del files[value["path"]]
        for path in large:  # as the Hub does
            rules = [line.split() for line in files[".gitattributes"].decode().splitlines()]
            if not any("filter=lfs" in rule and fnmatch(path, rule[0]) for rule in rules):
                files[".gitattributes"] += f"{path} filter=lfs diff=lfs merge=lfs -text\n".encode()
        repository.branches[branch].append((header["summary"], files))
        oid = commit_id(name, branch, number + 1)
        self._answer({"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid})

    def resolve(self, name: str, revision: str, file: str, **_: object) -> None:
        found = self._commit(name, revision)
        if not found:
            return
        if file not in found[1]:
            self._refuse(404, "Entry not found", "EntryNotFound")
            return
        data = found[1][file]
        etag = (
            hashlib.sha256(data).hexdigest()
            if self.hub.is_large(data, len(data))
            else blob_id(data)
        )
        data = self.hub.altered.get(file, data)
        start, end, status = 0, len(data), 200
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, status = int(match[1]), 206
            end = min(end, int(match[2]) + 1) if match[2] else end
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": found[0], "Accept-Ranges": "bytes"}
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        self._answer(data[start:end], status, headers)


_NAME = r"([^/]+/[^/]+)"
_ROUTES = [
    (r"GET /api/agent-harnesses", _Handler.harnesses),
    (r"POST /api/repos/create", _Handler.create),
    (r"POST /api/validate-yaml", _Handler.validate_yaml),
    (rf"GET /api/models/{_NAME}", _Handler.info),
    (rf"GET /api/models/{_NAME}/revision/([^/]+)", _Handler.info),
    (rf"GET /api/models/{_NAME}/tree/([^/]+)", _Handler.tree),
    (rf"POST /api/models/{_NAME}/branch/([^/]+)", _Handler.branch),
    (rf"POST /api/models/{_NAME}/preupload/([^/]+)", _Handler.preupload),
    (rf"POST /api/models/{_NAME}/commit/([^/]+)", _Handler.commit),
    (rf"POST /{_NAME}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (r"PUT /lfs/([0-9a-f]{64})", _Handler.lfs_put),
    (rf"(?:GET|HEAD) /{_NAME}/resolve/([^/]+)/(.+)", _Handler.resolve),
]
