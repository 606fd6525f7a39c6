"""Reports of eval: held to the package they are of, whatever push has written beside it."""

from pathlib import Path

import checkpoints
import pytest

from qsrt_pack.evaluation import check_evaluation, content_sha256, shown_name
from qsrt_runtime.format import manifest, schema
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.package import open_package, seal


def test_the_digest_is_that_of_what_push_leaves_alone(package: Path) -> None:
    before = open_package(package)
    for name in (manifest.CARD, manifest.REPORT, ".gitattributes"):
        (package / name).write_bytes(schema.dump({"kind": name}))
    seal(package)
    after = open_package(package)
    assert after.seal_sha256 != before.seal_sha256
    assert content_sha256(after) == content_sha256(before)


def test_other_weights_configuration_or_tokenizer_give_another(package: Path) -> None:
    found = [content_sha256(open_package(package))]
    evidence = package / "qsrt-layer-000.json"
    checkpoints.edit_json(evidence, lambda e: e["experts"][0].update(tokens=7))
    seal(package)
    found.append(content_sha256(open_package(package)))
    checkpoints.edit_json(package / "config.json", lambda c: c.update(rope_theta=1.0))
    seal(package)
    found.append(content_sha256(open_package(package)))
    (package / "tokenizer.json").write_text("{}")
    seal(package)
    found.append(content_sha256(open_package(package)))
    assert len(set(found)) == 4


def test_which_digest_decides(package: Path) -> None:
    opened = open_package(package)
    other, given, held = "1" * 64, Path("eval.json"), package / manifest.REPORT
    fingerprint = opened.documents.marker["encoder_fingerprint"]
    of_this = {"seal_sha256": other, "content_sha256": content_sha256(opened)}
    check_evaluation(of_this, opened, given)  # before push the seal was another
    for wrong in (
        {"seal_sha256": opened.seal_sha256, "content_sha256": other},
        {"seal_sha256": other, "encoder_fingerprint": fingerprint},
    ):
        with pytest.raises(FormatError, match=r"eval\.json: .*_sha256 is 1+, .*evaluate this"):
            check_evaluation(wrong, opened, given)
    check_evaluation({"seal_sha256": opened.seal_sha256}, opened, given)
    check_evaluation({"encoder_fingerprint": fingerprint}, opened, held)
    with pytest.raises(FormatError, match=r"qsrt-eval\.json: encoder_fingerprint is 1+"):
        check_evaluation({"encoder_fingerprint": other}, opened, held)
    with pytest.raises(FormatError, match=r"qsrt-eval\.json: content_sha256 is 1+"):
        check_evaluation(of_this | {"content_sha256": other}, opened, held)


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("/home/someone/model-qsrt", "model-qsrt"),
        ("/home/someone/model-qsrt/", "model-qsrt"),
        ("/hub/models--owner--some-model/snapshots/" + 40 * "a", "owner/some-model"),
        ("/hub/models--gpt2/snapshots/" + 40 * "a", "gpt2"),
        ("/home/snapshots/model", "model"),
        ("owner/name", "owner/name"),
        ("model", "model"),
        ("/model", "model"),
        ("../someone/private/model", "model"),
        ("/", "/"),
        ("//", "//"),
        (".", "."),
        ("//model", "model"),
        ("/hub/models--/snapshots/" + 40 * "a", 40 * "a"),
    ],
)
def test_names_that_others_see(place: str, shown: str) -> None:
    assert shown_name(place) == shown
    assert shown_name(shown) == shown
