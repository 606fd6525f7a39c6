"""push and pull through the real client against a Hub on the loopback interface."""

import json
import logging
import shutil
import signal
import subprocess
import time
from pathlib import Path

import checkpoints
import huggingface_hub.constants
import packages
import pytest
import torch
from benched import bench_report
from click.testing import CliRunner, Result
from fakehub import FakeHub, Request, command, environment

from qsrt_pack import evaluate
from qsrt_pack.cli import main
from qsrt_pack.evaluation import content_sha256
from qsrt_pack.hub import pull, push
from qsrt_pack.report import write_report
from qsrt_pack.validate import validate
from qsrt_runtime import hub as client
from qsrt_runtime import load_package
from qsrt_runtime.format import paths
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.format.package import open_package, seal
from qsrt_runtime.hub import HubError, redacted

NAME, MARKER = "me/packed", "QSRT_COMPLETE.json"
FACTS = {"license_id": "apache-2.0", "base_model": "org/base", "show_progress": False}


def write(path: Path, layers: tuple[int, ...] = (0, 1), seed: int = 0) -> Path:
    weights = checkpoints.tensors(seed=seed)
    base = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    packages.write_package(path, Geometry(128, 256, 4), layers=layers, base=base)
    (path / ".gitattributes").write_bytes(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
    (path / "tokenizer.model").write_bytes(b"\0binary")
    seal(path)
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("good") / "pkg")


@pytest.fixture
def pkg(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "pkg")


def tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def is_valid(files: dict[str, bytes], folder: Path) -> bool:
    """Whether what a repository holds at one commit passes as a package."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    try:
        validate(folder, show_progress=False)
    except FormatError:
        return False
    return True


def test_what_is_pushed_is_what_is_pulled(hub: FakeHub, pkg: Path, tmp_path: Path) -> None:
    before = open_package(pkg).digests
    digest = push(pkg, NAME, **FACTS)
    package = open_package(pkg)
    assert package.seal_sha256 == digest
    assert (
        before.items() <= (package.digests | {".gitattributes": before[".gitattributes"]}).items()
    )
    assert set(package.digests) - set(before) == {"README.md"}
    repository = hub.repositories[NAME]
    assert repository.files() == tree(pkg) and not repository.private
    assert [MARKER in files for _, files in repository.branches["main"]] == [False, False, True]
    assert pull(NAME, tmp_path / "out", expect=digest, show_progress=False) == digest
    assert tree(tmp_path / "out") == tree(pkg)
    assert not list(tmp_path.glob("*.partial"))


def test_a_second_push_sends_nothing(hub: FakeHub, pkg: Path) -> None:
    digest = push(pkg, NAME, **FACTS)
    sent = hub.count("^(POST|PUT) ")
    assert push(pkg, NAME, show_progress=False) == digest  # license and base model from the card
    assert hub.count("^(POST|PUT) ") == sent


def test_the_streamed_upload_in_many_commits(
    hub: FakeHub, pkg: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's other way, by hf_xet, here one file a commit; no order of files is promised."""
    pipeline = pytest.importorskip("huggingface_hub._upload_pipeline")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setattr(pipeline, "COMMIT_SIZE_SCALE", [1])
    monkeypatch.setattr(pipeline, "INITIAL_COMMIT_SIZE_INDEX", 0)
    hub.threshold = None
    push(write(tmp_path / "older", layers=(0, 1, 2), seed=1), NAME, **FACTS)
    push(pkg, NAME, **FACTS)
    commits = [files for _, files in hub.repositories[NAME].branches["main"]]
    sealed = [files for files in commits if MARKER in files]
    assert len(commits) > 20 and sealed == [tree(tmp_path / "older"), tree(pkg)]


def test_a_package_made_elsewhere_is_not_pushed(hub: FakeHub, golden: Path) -> None:
    with pytest.raises(FormatError, match="was made elsewhere"):
        push(golden / "publication", NAME, **FACTS)
    assert hub.requests == []


def test_a_branch_and_a_private_repository(hub: FakeHub, pkg: Path, tmp_path: Path) -> None:
    digest = push(pkg, NAME, private=True, revision="v1", **FACTS)
    repository = hub.repositories[NAME]
    assert repository.private and repository.files("v1") == tree(pkg)
    assert list(repository.files("main")) == [".gitattributes"]
    assert pull(NAME, tmp_path / "out", revision="v1", show_progress=False) == digest


def test_pk_7a_interrupted_anywhere_and_run_again(hub: FakeHub, good: Path, tmp_path: Path) -> None:
    """Whatever request is the last that works, the Hub never holds a seal without all files."""
    pkg = tmp_path / "pkg"
    for last in range(30):
        hub.repositories.clear()
        hub.large.clear()
        shutil.rmtree(pkg, ignore_errors=True)
        shutil.copytree(good, pkg)
        start = len(hub.requests)
        hub.fault = lambda r, limit=start + last: 0 if r.number > limit else None
        failed = False
        try:
            push(pkg, NAME, **FACTS)
        except HubError:
            failed = True
        hub.fault = lambda request: None
        commits = hub.repositories[NAME].branches["main"] if hub.repositories else []
        complete = [files == tree(pkg) for _, files in commits]
        assert [MARKER in files for _, files in commits] == complete
        push(pkg, NAME, **FACTS)
        assert hub.repositories[NAME].files() == tree(pkg)
        if not failed:
            break
    assert 12 < last < 29, "the loop must end because a push went through"


def test_pk_7a_what_arrived_is_not_sent_again(hub: FakeHub, pkg: Path) -> None:
    hub.fault = lambda request: 403 if hub.count("^PUT ") > 2 else None
    with pytest.raises(HubError, match="403"):
        push(pkg, NAME, **FACTS)
    arrived = set(hub.large)
    assert arrived
    hub.fault = lambda request: None
    start = len(hub.requests)
    push(pkg, NAME, **FACTS)
    again = {r.path.removeprefix("/lfs/") for r in hub.requests[start:] if r.method == "PUT"}
    assert again and not again & arrived


@pytest.mark.parametrize(
    ("card", "changes", "message"),
    [
        ("---\nlicense: [mit\n---\n", {}, "README.md: its metadata cannot be read"),
        ("---\n- license\n---\n", {}, "README.md: its metadata cannot be read"),
        ("---\nlicense: mit\nbase_model: /data/model\n---\n", {}, "base_model is '/data/model'"),
        (None, {"license_id": "mit", "base_model": "./model"}, "base_model is './model'"),
        (None, {"license_id": "mit", "base_model": "a/b/c"}, "base_model is 'a/b/c'"),
        (None, {"license_id": "mit"}, "no base model is known; give --base-model"),
        (None, {"license_id": "MIT license", "base_model": "a/b"}, "license is 'MIT license'"),
        (None, {"base_model": "a/b"}, "no license is known; give --license"),
    ],
)
def test_pk_7b_a_card_that_cannot_be_made(
    hub: FakeHub, pkg: Path, card: str | None, changes: dict, message: str
) -> None:
    if card is not None:
        (pkg / "README.md").write_text(card)
        seal(pkg)
    before = tree(pkg)
    with pytest.raises(FormatError, match=message):
        push(pkg, NAME, show_progress=False, **changes)
    assert hub.requests == [] and tree(pkg) == before


@pytest.mark.parametrize(("is_private", "wanted"), [(False, True), (True, False)])
def test_pk_7c_another_visibility_than_the_wanted(
    hub: FakeHub, pkg: Path, is_private: bool, wanted: bool
) -> None:
    hub.create(NAME, private=is_private)
    with pytest.raises(HubError, match=r"is private; give --private|is public; do not"):
        push(pkg, NAME, private=wanted, **FACTS)
    assert hub.count("^(POST|PUT) ") == 0


def test_pk_7d_an_older_package_is_replaced_at_once(
    hub: FakeHub, pkg: Path, tmp_path: Path
) -> None:
    older = write(tmp_path / "older", layers=(0, 1, 2), seed=1)
    push(older, NAME, **FACTS)
    begin = len(hub.repositories[NAME].branches["main"])
    push(pkg, NAME, **FACTS)
    commits = [files for _, files in hub.repositories[NAME].branches["main"]][begin - 1 :]
    sealed = [MARKER in files for files in commits]
    assert sealed == [True, False, False, True]
    assert sealed == [is_valid(files, tmp_path / "at") for files in commits]
    assert "qsrt-layer-002.json" in commits[-2] and commits[-1] == tree(pkg)


def test_pk_7d_of_a_foreign_repository_nothing_is_removed(hub: FakeHub, pkg: Path) -> None:
    hub.create(NAME, **{"weights.bin": b"precious"})
    with pytest.raises(HubError, match=r"holds weights.bin, and no package"):
        push(pkg, NAME, **FACTS)
    assert hub.repositories[NAME].messages() == ["initial commit"]


def test_another_commit_meanwhile_is_noticed(hub: FakeHub, pkg: Path) -> None:
    def meddle(request: Request) -> None:
        commits = hub.repositories[NAME].branches["main"] if NAME in hub.repositories else []
        if len(commits) == 2 and request.method == "POST":
            commits.append(("other", commits[-1][1] | {"config.json": b"{}"}))

    hub.fault = meddle
    with pytest.raises(HubError, match="412, something else has changed it"):
        push(pkg, NAME, **FACTS)
    assert MARKER not in hub.repositories[NAME].files()
    push(pkg, NAME, **FACTS)
    assert hub.repositories[NAME].files() == tree(pkg)


@pytest.mark.parametrize(
    ("status", "message", "is_retried"),
    [
        (401, "401, the repository does not exist, or no valid token", False),
        (403, "403, this token has no access", False),
        (404, "404, there is no such repository", False),
        (429, r"429, too many requests.*\(5 tries\)", True),
        (500, r"500, it has failed.*\(5 tries\)", True),
        (503, r"503, it has failed.*\(5 tries\)", True),
    ],
)
@pytest.mark.parametrize("action", ["push", "pull"])
def test_pk_7e_answers_are_told_apart(
    hub: FakeHub,
    pkg: Path,
    tmp_path: Path,
    action: str,
    status: int,
    message: str,
    is_retried: bool,
) -> None:
    push(pkg, NAME, **FACTS)
    start = len(hub.requests)
    # By then push has made sure of the repository; pull asks for nothing else first.
    kind = "/preupload/" if action == "push" else f"^GET /api/models/{NAME}$"
    asked = hub.count(kind)
    hub.fault = lambda r: status if hub.count(kind) > asked and r.number > start else None
    with pytest.raises(HubError, match=message) as caught:
        if action == "push":
            push(pkg, NAME, **FACTS | {"license_id": "mit"})
        else:
            pull(NAME, tmp_path / "out", show_progress=False)
    assert hub.token not in str(caught.value) and "\n" not in str(caught.value)
    tries = hub.count(kind) - asked
    assert (1 < tries <= 60) if is_retried else tries == 1
    assert not (tmp_path / "out").exists()


def test_pk_7e_a_fault_that_passes_is_survived(hub: FakeHub, pkg: Path, tmp_path: Path) -> None:
    seen: dict[str, int] = {}

    def flaky(request: Request) -> int | None:
        key = f"{request.method} {request.path}"
        seen[key] = seen.get(key, 0) + 1
        return (500, 429, 0)[len(seen) % 3] if seen[key] == 1 else None

    hub.fault = flaky
    digest = push(pkg, NAME, **FACTS)
    assert pull(NAME, tmp_path / "out", show_progress=False) == digest


def test_the_wait_is_the_one_that_the_hub_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)

    class Response:
        status_code, headers = 429, {"Retry-After": "7"}

    class Fault(client.HTTPError):
        response = Response()

    def call() -> None:
        raise Fault("busy")

    with pytest.raises(HubError):
        client.attempt("x", call)
    Response.headers = {"Retry-After": "86400"}
    with pytest.raises(HubError):
        client.attempt("x", call)
    Response.headers = {}
    with pytest.raises(HubError):
        client.attempt("x", call)
    assert waits == [7, 7, 7, 7, 60, 60, 60, 60, 1, 2, 4, 8]


OUTSIDE = ["../outside", "/abs/x", "sub/../../x", "..\\x", "C:\\x", "", "a\0b"]


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("place", ["the list", "a layer", "its evidence", "the index"])
def test_pk_1b_names_that_lead_out(hub: FakeHub, pkg: Path, name: str, place: str) -> None:
    lines = (pkg / "MANIFEST.sha256").read_text()
    if place == "the list":
        lines += f"{64 * '0'}  {name}\n"
    elif place == "the index":
        checkpoints.edit_json(
            pkg / "model.safetensors.index.json", lambda index: index["weight_map"].update(x=name)
        )
    else:
        field = "qsrt_atoms" if place == "a layer" else "evidence"
        edit = {field: name}
        checkpoints.edit_json(pkg / "qsrt-manifest.json", lambda m: m["layers"]["1"].update(edit))
    if place != "the list":
        names = [line.split("  ")[1] for line in lines.splitlines()]
        lines = "".join(f"{paths.sha256_file(pkg / n)}  {n}\n" for n in names)
    (pkg / "MANIFEST.sha256").write_text(lines)
    redone = {
        "checksum_manifest_sha256": paths.sha256_file(pkg / "MANIFEST.sha256"),
        "package_manifest_sha256": paths.sha256_file(pkg / "qsrt-manifest.json"),
        "model_index_sha256": paths.sha256_file(pkg / "model.safetensors.index.json"),
    }
    checkpoints.edit_json(pkg / MARKER, lambda marker: marker.update(redone))
    for read in (
        lambda: validate(pkg, show_progress=False),
        lambda: load_package(pkg),
        lambda: push(pkg, NAME, **FACTS),
    ):
        with pytest.raises(FormatError, match=r"file name|is not `<64 hex>|should be non-empty"):
            read()
    assert hub.requests == []


@pytest.mark.parametrize("damage", ["no marker", "a bit", "an extra file"])
def test_pk_7f_a_package_at_fault_is_not_pushed(hub: FakeHub, pkg: Path, damage: str) -> None:
    layer = pkg / "qsrt-layer-000.safetensors"
    if damage == "no marker":
        (pkg / MARKER).unlink()
    elif damage == "a bit":
        layer.write_bytes(layer.read_bytes()[:-1] + b"\1")
    else:
        (pkg / "extra").write_text("")
    with pytest.raises(FormatError):
        push(pkg, NAME, **FACTS)
    assert hub.requests == []


def test_pk_8_the_token_is_in_no_output(hub: FakeHub, pkg: Path, tmp_path: Path) -> None:
    """From the environment or a file, with all logs on, where the Hub repeats it, and by flag."""
    home = tmp_path / "home"
    from_file = environment(hub, home) | {"HF_DEBUG": "1", "HF_HUB_VERBOSITY": "debug"}
    from_environment = dict(from_file)
    del from_file["HF_TOKEN"]
    home.mkdir()
    (home / "token").write_text(hub.token)
    words = ["-v", "push", pkg, NAME, "--license", "mit", "--base-model", "a/b"]
    said = ""
    for env, fault in [
        (from_environment, 401),
        (from_file, 403),
        (from_file, 0),
        (from_file, None),
    ]:
        hub.fault = lambda r, f=fault: f if r.method == "POST" and "/commit/" in r.path else None
        out, err = (process := command(*words, env=env)).communicate()
        assert process.returncode == (fault is not None), err
        assert "Traceback (most recent call last)\n" not in err
        said += out + err
        assert any(r.token == hub.token for r in hub.requests), "the token was used"
    for flag in (["--token", hub.token], [f"--token={hub.token}"]):
        out, err = (process := command("push", pkg, NAME, *flag, env=from_file)).communicate()
        assert process.returncode == 2 and "No such option" in err
        said += out + err
    out, err = command("pull", NAME, tmp_path / "out", env=from_file).communicate()
    said += out + err
    assert "is complete" in said and "401" in said and "403" in said
    assert hub.token not in said
    (home / "token").unlink()
    for name, data in tree(tmp_path).items():
        assert hub.token.encode() not in data, name


def test_text_from_the_hub_is_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-of-another-form")
    text = "a\n hf_abcDEF0123 secret-of-another-form b"
    assert redacted(text) == "a *** *** b"


def _wait_for(hub: FakeHub, process: subprocess.Popen, pattern: str, count: int) -> None:
    until = time.monotonic() + 60
    while hub.count(pattern) < count and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_push_and_pull_killed_in_the_middle_and_resumed(pkg: Path, tmp_path: Path) -> None:
    with FakeHub() as hub:
        env = environment(hub, tmp_path / "home")
        words = ["push", pkg, NAME, "--license", "mit", "--base-model", "a/b"]

        def stall(method: str, pattern: str, number: int) -> None:
            def fault(request: Request) -> None:
                if hub.count(f"^{method} {pattern}") >= number:
                    hub.lock.release()  # others go on
                    time.sleep(30)
                    hub.lock.acquire()

            hub.fault = fault

        stall("PUT", "/lfs/", 3)
        process = command(*words, env=env)
        _wait_for(hub, process, "^PUT ", 3)
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.returncode == -signal.SIGKILL
        hub.fault = lambda request: None
        arrived, start = set(hub.large), len(hub.requests)
        assert MARKER not in hub.repositories[NAME].files()
        out, err = (process := command(*words, env=env)).communicate()
        assert process.returncode == 0, err
        again = {r.path.removeprefix("/lfs/") for r in hub.requests[start:] if r.method == "PUT"}
        assert arrived and again and not again & arrived
        assert hub.repositories[NAME].files() == tree(pkg)

        pattern = f"/{NAME}/resolve/.*safetensors$"
        stall("GET", pattern, 2)
        process = command("pull", NAME, tmp_path / "out", env=env)
        _wait_for(hub, process, f"^GET {pattern}", 2)
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.returncode == -signal.SIGKILL and not (tmp_path / "out").exists()
        hub.fault = lambda request: None
        start = len(hub.requests)
        again, err = (process := command("pull", NAME, tmp_path / "out", env=env)).communicate()
        assert process.returncode == 0 and again == out, err
        assert tree(tmp_path / "out") == tree(pkg)
        marker_again = [r for r in hub.requests[start:] if r.method == "GET" and MARKER in r.path]
        assert not marker_again, "what was there is not downloaded again"


def test_killed_while_the_new_seal_took_its_place(hub: FakeHub, pkg: Path) -> None:
    work = pkg.with_name(pkg.name + ".partial")
    work.mkdir()
    (work / "lock").touch()
    shutil.copytree(pkg, work / "package")
    pkg.rename(work / "old")
    push(pkg, NAME, **FACTS)
    assert hub.repositories[NAME].files() == tree(pkg) and not work.exists()


def test_a_package_that_has_its_card_is_pushed_as_it_is(hub: FakeHub, pkg: Path) -> None:
    push(pkg, NAME, **FACTS)
    inodes = {path.name: path.stat().st_ino for path in pkg.iterdir()}
    hub.repositories.clear()
    push(pkg, NAME, show_progress=False)
    assert {path.name: path.stat().st_ino for path in pkg.iterdir()} == inodes


def _report(pkg: Path, **changes: object) -> dict:
    package = open_package(pkg)
    score = {"cross_entropy": 2.0, "perplexity": 7.389}
    value = {
        "schema": "qsrt_report_v2",
        "kind": "eval",
        "package": "/home/somebody/private/pkg",
        "reference": "/home/somebody/private/model",
        "text": "/home/somebody/private/eval.txt",
        "seal_sha256": package.seal_sha256,
        "encoder_fingerprint": package.documents.marker["encoder_fingerprint"],
        "dtype": "float32",
        "bits_per_expert_weight": 3.5,
        "expert_weights": 1000,
        "versions": {"qsrt": "0.1.0", "torch": torch.__version__, "transformers": "5.0.0"},
        "positions": 1024,
        "kl_mean": 0.0421,
        "kl_median": 0.012,
        "kl_p90": 0.1,
        "kl_p99": 0.51,
        "kl_max": 1.5,
        "kl_mean_interval": {"low": 0.0398, "high": 0.0444},
        "kl_histogram": {"edges": [0.01, 0.1, 1], "counts": [924, 100]},
        "top1_agreement": 0.91,
        "top10_agreement": 0.95,
        "reference_score": score,
        "package_score": score | {"perplexity": 7.951},
        "reference_is_source": True,
        "text_sha256": 64 * "0",
        "window": 512,
        "windows": 2,
        "documents": 2,
        "device": "cpu",
        "stored_bytes": 437,
        "noise_floor": None,
        "against": [],
        "seconds": 1.0,
    }
    return value | changes


def test_a_report_is_published_without_paths(hub: FakeHub, pkg: Path, tmp_path: Path) -> None:
    report = tmp_path / "eval.json"
    report.write_text(json.dumps(_report(pkg)))
    digest = push(pkg, NAME, report=report, **FACTS)
    files = hub.repositories[NAME].files()
    assert b"| 7.3890 | 7.9510 |" in files["README.md"] and b"0.04210" in files["README.md"]
    assert b"| 0.04210 (95 %: 0.03980 to 0.04440) |" in files["README.md"]
    assert b"| 0.01200, 0.51000 |" in files["README.md"]
    assert json.loads(files["qsrt-eval.json"])["reference"] == "model"
    assert not any(b"somebody" in data for data in files.values())
    assert push(pkg, NAME, report=report, **FACTS) == digest  # the same command again
    assert push(pkg, NAME, show_progress=False) == digest  # the report stays


@pytest.mark.parametrize("place", ["/", "//", "."])
def test_places_without_a_name(hub: FakeHub, pkg: Path, tmp_path: Path, place: str) -> None:
    report, places = tmp_path / "eval.json", dict.fromkeys(("package", "reference", "text"), place)
    report.write_text(json.dumps(_report(pkg, **places)))
    digest = push(pkg, NAME, report=report, **FACTS)
    assert json.loads((pkg / "qsrt-eval.json").read_text()).items() >= places.items()
    assert push(pkg, NAME, show_progress=False) == digest


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ("", "not valid JSON"),
        (json.dumps({"schema": "qsrt_report_v2", "kind": "eval"}), "is a required property"),
        (json.dumps(bench_report()), "is a report of bench, expected one of eval --json"),
    ],
)
def test_a_report_there_that_is_none_is_replaced(
    hub: FakeHub, pkg: Path, tmp_path: Path, held: str, message: str
) -> None:
    (pkg / "qsrt-eval.json").write_text(held)
    seal(pkg)
    with pytest.raises(FormatError, match=f"{message}.*; give a new one with --report$"):
        push(pkg, NAME, **FACTS)
    assert hub.requests == [] and (pkg / "qsrt-eval.json").read_text() == held
    (tmp_path / "eval.json").write_text(json.dumps(_report(pkg)))
    push(pkg, NAME, report=tmp_path / "eval.json", **FACTS)
    assert json.loads((pkg / "qsrt-eval.json").read_text())["reference"] == "model"


def test_a_report_made_before_push_is_of_the_package_after_it(
    hub: FakeHub, pkg: Path, tmp_path: Path
) -> None:
    """Push seals again, which changes no weight; another package's report stays refused."""
    report = tmp_path / "eval.json"
    content = content_sha256(open_package(pkg))
    report.write_text(json.dumps(_report(pkg, content_sha256=content)))
    push(pkg, NAME, **FACTS)
    write_report(pkg, tmp_path / "page.html", evaluation=report, show_progress=False)
    assert "<td>7.9510</td>" in (tmp_path / "page.html").read_text()
    push(pkg, NAME, report=report, **FACTS)
    assert b"| 7.3890 | 7.9510 |" in hub.repositories[NAME].files()["README.md"]

    checkpoints.edit_json(pkg / "qsrt-layer-000.json", lambda e: e["experts"][0].update(tokens=7))
    seal(pkg)
    with pytest.raises(FormatError, match=r"qsrt-eval\.json: content_sha256 is .*evaluate this"):
        write_report(pkg, tmp_path / "other.html", show_progress=False)
    report.write_text(json.dumps(_report(pkg, content_sha256=content)))
    with pytest.raises(FormatError, match=r"eval\.json: content_sha256 is .*evaluate this"):
        push(pkg, NAME, report=report, **FACTS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seal_sha256": 64 * "1"}, "seal_sha256 is 1111.*evaluate this package"),
        ({"kind": "validate", "schema": "qsrt_report_v1"}, "kind|required|unexpected"),
        ({"schema": "qsrt_report_v1"}, r"schema: 'qsrt_report_v2' was expected, found 'qsrt_rep"),
        ({"kl_mean": "small"}, "kl_mean"),
    ],
)
def test_a_report_of_something_else(
    hub: FakeHub, pkg: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    (tmp_path / "eval.json").write_text(json.dumps(_report(pkg, **changes)))
    with pytest.raises(FormatError, match=message):
        push(pkg, NAME, report=tmp_path / "eval.json", **FACTS)
    assert hub.requests == []


def test_pull_refuses_another_seal_than_the_pinned(hub: FakeHub, pkg: Path, tmp_path: Path) -> None:
    push(pkg, NAME, **FACTS)
    with pytest.raises(FormatError, match=f"has the seal .*, expected {64 * '1'}"):
        pull(NAME, tmp_path / "out", expect=64 * "1", show_progress=False)
    assert hub.count("GET .*safetensors$") == 0
    assert sorted(path.name for path in tmp_path.glob("out*")) == []


def test_pull_refuses_what_has_no_seal(hub: FakeHub, tmp_path: Path) -> None:
    hub.create(NAME, **{"config.json": b"{}"})
    with pytest.raises(FormatError, match=f"{NAME} has no {MARKER} at"):
        pull(NAME, tmp_path / "out", show_progress=False)
    assert not list(tmp_path.glob("out*"))


def test_pull_writes_nothing_outside(hub: FakeHub, pkg: Path, tmp_path: Path) -> None:
    push(pkg, NAME, **FACTS)
    commits = hub.repositories[NAME].branches["main"]
    commits.append(("evil", commits[-1][1] | {"../../../evil": b"x"}))
    with pytest.raises(FormatError, match=r"file name '\.\./\.\./\.\./evil' is not a plain"):
        pull(NAME, tmp_path / "out" / "deep", show_progress=False)
    assert not list(tmp_path.rglob("evil")) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "file", ["qsrt-layer-001.safetensors", "config.json", "README.md", "new.py"]
)
def test_pull_refuses_what_was_altered(hub: FakeHub, pkg: Path, tmp_path: Path, file: str) -> None:
    push(pkg, NAME, **FACTS)
    commits = hub.repositories[NAME].branches["main"]
    data = bytearray(commits[-1][1].get(file, b"print()"))
    data[len(data) // 2] ^= 1
    commits.append(("altered", commits[-1][1] | {file: bytes(data)}))
    with pytest.raises(FormatError, match=file):
        pull(NAME, tmp_path / "out", show_progress=False)
    assert not list(tmp_path.glob("out*"))


def test_pull_replaces_only_when_told(hub: FakeHub, pkg: Path, tmp_path: Path) -> None:
    push(pkg, NAME, **FACTS)
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    with pytest.raises(FormatError, match=r"is not empty; .*--overwrite"):
        pull(NAME, out, show_progress=False)
    assert tree(out) == {"mine": b"x"}
    pull(NAME, out, overwrite=True, show_progress=False)
    assert tree(out) == tree(pkg)


def test_pull_drops_what_it_has_of_another_commit(hub: FakeHub, pkg: Path, tmp_path: Path) -> None:
    push(pkg, NAME, **FACTS)
    hub.fault = lambda r: 403 if r.method == "GET" and "001.safetensors" in r.path else None
    with pytest.raises(HubError, match="403"):
        pull(NAME, tmp_path / "out", show_progress=False)
    assert (tmp_path / "out.partial" / "package" / MARKER).exists()
    hub.fault = lambda request: None
    push(write(tmp_path / "next", seed=2), NAME, **FACTS)
    pull(NAME, tmp_path / "out", show_progress=False)
    assert tree(tmp_path / "out") == tree(tmp_path / "next")


def test_pull_leaves_a_stopped_conversion_alone(hub: FakeHub, pkg: Path, tmp_path: Path) -> None:
    push(pkg, NAME, **FACTS)
    work = tmp_path / "out.partial"
    work.mkdir()
    (work / "lock").touch()
    (work / "state.json").write_text('{"schema": "qsrt_state_v1"}')
    with pytest.raises(FormatError, match="holds a conversion that was stopped"):
        pull(NAME, tmp_path / "out", show_progress=False)
    assert (work / "state.json").exists()


def test_a_package_on_the_hub_is_loaded_by_name(
    hub: FakeHub, pkg: Path, caplog: pytest.LogCaptureFixture
) -> None:
    digest = push(pkg, NAME, **FACTS)
    with caplog.at_level(logging.INFO):
        loaded = load_package(NAME)
    assert loaded.seal_sha256 == digest and list(loaded.layers) == [0, 1]
    assert load_package(f"{NAME}@main").seal_sha256 == digest
    with pytest.raises(HubError, match="no such revision"):
        load_package(f"{NAME}@other")
    with pytest.raises(HubError, match="404"):
        load_package("me/nothing")


def on_the_hub(hub: FakeHub, name: str, folder: Path, **more: bytes) -> None:
    hub.create(name, **(tree(folder) | more))


def test_pk_9a_convert_from_the_hub_neither_fetches_nor_carries_code(
    hub: FakeHub,
    clean_checkpoint: Path,
    clean_package: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    canary = tmp_path / "canary"
    code = f"open({str(canary)!r}, 'w')".encode()
    on_the_hub(hub, "org/model", clean_checkpoint, **{"modeling_x.py": code, "old.bin": code})
    out = tmp_path / "out"
    done = CliRunner().invoke(main, ["convert", "org/model", str(out), "--search", "fast"])
    assert done.exit_code == 0, done.output
    assert "code and pickles are never run: modeling_x.py, old.bin" in caplog.text
    assert hub.count(r"(modeling_x.py|old\.bin)$") == 0 and not canary.exists()
    names = {"qsrt-layer-000.safetensors", "model-00001-of-00001.safetensors"}
    found, expected = tree(out), tree(clean_package)
    assert names <= set(found) == set(expected)
    assert {n for n in found if found[n] != expected[n]} == set()


def test_pk_9b_pickles_on_the_hub_are_not_fetched(hub: FakeHub, tmp_path: Path) -> None:
    hub.create("org/model", **{"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    done = CliRunner().invoke(main, ["convert", "org/model", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "only as pytorch_model.bin, which is never opened; save it as safetensors" in done.output
    assert hub.count("pytorch_model.bin") == 0


def test_eval_takes_names(
    hub: FakeHub, clean_package: Path, clean_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []

    def see(package: Path, reference: Path, text: Path, **_: object) -> dict:
        seen.extend([package, reference])
        return {}

    monkeypatch.setattr(evaluate, "evaluate", see)
    on_the_hub(hub, "me/package", clean_package)
    on_the_hub(hub, "org/model", clean_checkpoint)
    words = ["me/package@main", "--reference", "org/model", "--text", "README.md", "--json"]
    done = CliRunner().invoke(main, ["eval", *words])
    assert done.exit_code == 0, done.output
    assert open_package(seen[0]).seal_sha256 == open_package(clean_package).seal_sha256
    assert tree(clean_checkpoint).items() <= tree(seen[1]).items()


def test_a_name_that_is_neither_folder_nor_repository(hub: FakeHub, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["convert", "org/nothing", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "Error: org/nothing is no folder here; on the Hub: the Hub answered 404" in done.output


def test_the_commands_print_the_digest(hub: FakeHub, pkg: Path, tmp_path: Path) -> None:
    def run(*words: object) -> Result:
        return CliRunner().invoke(main, ["-q", *map(str, words)])

    report = tmp_path / "eval.json"
    report.write_text(json.dumps(_report(pkg)))
    words = ["--private", "--revision", "v2", "--license", "mit", "--base-model", "a/b"]
    pushed = run("push", pkg, NAME, *words, "--report", report)
    digest = open_package(pkg).seal_sha256
    assert (pushed.exit_code, pushed.stdout, pushed.stderr) == (0, f"{digest}\n", "")
    repository = hub.repositories[NAME]
    assert repository.private and repository.files("v2") == tree(pkg)
    assert b"license: mit" in repository.files("v2")["README.md"]

    out = tmp_path / "out"
    pulled = run("pull", NAME, out, "--revision", "v2", "--expect", digest)
    assert (pulled.exit_code, pulled.stdout, pulled.stderr) == (0, f"{digest}\n", "")
    again = run("pull", NAME, out, "--revision", "v2")
    assert again.exit_code == 1 and "--overwrite" in again.stderr
    assert run("pull", NAME, out, "--revision", "v2", "--overwrite").exit_code == 0
    other = run("pull", NAME, tmp_path / "other", "--revision", "v2", "--expect", 64 * "1")
    assert other.exit_code == 1 and other.stderr.startswith("Error: ")
    assert run("pull", NAME, out, "--expect", "short").exit_code == 2
