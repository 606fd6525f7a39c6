"""The README: its commands run or parse, its messages are the code's, its links lead somewhere."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fakehub import FakeHub, environment

from qsrt_pack.cli import main

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
EXAMPLE = "examples/tiny_moe/model"
OTHERS = {  # options that are not of our commands, but of pip, torchrun, vLLM, and our scripts
    *("--help", "--check", "--nproc_per_node", "--tensor-parallel-size"),
    *("--enable-expert-parallel", "--hypothesis-profile"),
    *("--a8", "--expanded", "--by", "--each", "--experts", "--layers", "--points", "--seeds"),
}
_MESSAGES = TEXT[TEXT.index("<!-- messages -->") : TEXT.index("\n# Details")]
MESSAGES = re.findall(r"^\| `([^`]*)` \| ", _MESSAGES, re.M)


def blocks(language: str, text: str = TEXT) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def commands(text: str = TEXT) -> list[str]:
    """Every line of a bash block, those that go on joined."""
    lines = "".join(blocks("bash", text)).replace("\\\n", "").replace("&&\n", "\n").splitlines()
    return [line.strip() for line in lines]


def five_minutes() -> str:
    start = TEXT.index("## Five minutes")
    return TEXT[start : TEXT.index("\n## ", start + 1)]


@pytest.mark.parametrize("line", [c for c in commands() if c.startswith("qsrt-pack ")])
def test_commands_parse(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, name, *words = shlex.split(line.partition(">")[0])
    command = main.commands[name]
    context = command.make_context(name, words)
    assert len(context.params) == len(command.params)


def test_options_are_those_of_our_commands() -> None:
    known = {option for c in main.commands.values() for p in c.params for option in p.opts}
    found = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", TEXT))
    assert found - known <= OTHERS and len(found & known) > 10


def _walk(folder: Path, lines: list[str], env: dict[str, str]) -> str:
    """What the lines print, run by bash one after another; `qsrt-pack` is that of this tree."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(lines)],
        cwd=folder, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _clone(folder: Path) -> dict[str, str]:
    """A folder with the examples, as in a clone; the environment that has `qsrt-pack`."""
    shutil.copytree(
        ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("*-qsrt*")
    )
    program = folder / "bin" / "qsrt-pack"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m qsrt_pack "$@"\n')
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def test_five_minutes(tmp_path: Path) -> None:
    """Word for word, on a Hub here on which the bundled example has the model's name."""
    lines = [c for c in commands(five_minutes()) if c.startswith("qsrt-pack ")]
    (original,) = {word for c in lines for word in shlex.split(c) if word.startswith("allenai/")}
    with FakeHub() as hub:
        hub.threshold = 10_000_000  # the Hub's own
        files = {path.name: path.read_bytes() for path in (ROOT / EXAMPLE).iterdir()}
        hub.create(original, **files)
        env = environment(hub, tmp_path / "home") | _clone(tmp_path)
        printed = _walk(tmp_path, lines, env)
        after_push = "qsrt-pack -q report olmoe-qsrt --eval eval.json --html again.html"
        assert _walk(tmp_path, [after_push], env).endswith("again.html\n")
        (script,) = blocks("python", five_minutes())
        (tmp_path / "generate.py").write_text(script)
        said = _walk(tmp_path, [f"{shlex.quote(sys.executable)} generate.py"], env)
    assert "olmoe-qsrt is valid: 2 layers, 8 experts" in printed
    digests = re.findall("^[0-9a-f]{64}$", printed, re.M)  # of push, and of pull
    assert len(digests) == 2 and len(set(digests)) == 1
    assert (tmp_path / "olmoe-qsrt-report.html").is_file()
    assert (tmp_path / "plots" / "worst.png").is_file()
    assert said.startswith("A module is") and len(said) > 30


def test_code_for_torch_runs(example: tuple[Path, Path], tmp_path: Path) -> None:
    (script,) = (b for b in blocks("python") if "moe_forward(x" in b)
    (tmp_path / EXAMPLE).parent.mkdir(parents=True)
    shutil.copytree(example[1], tmp_path / f"{EXAMPLE}-qsrt")
    check = "assert y.shape == x.shape and y.isfinite().all() and y.any()\n"
    (tmp_path / "run.py").write_text(script + check)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    _walk(tmp_path, [f"{shlex.quote(sys.executable)} run.py"], env)


def _constants(trees: list[ast.Module]) -> dict[str, str]:
    """Texts that modules give a name in capitals."""
    return {
        target.id: node.value.value
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Every string of the code, with … for each value that is put into it and is no constant."""
    files = [*ROOT.glob("qsrt_pack/**/*.py"), *ROOT.glob("qsrt_runtime/**/*.py")]
    trees = [ast.parse(path.read_text()) for path in files]
    known = _constants(trees)

    def part(node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return node.value
        return known.get(node.value.id, "…") if isinstance(node.value, ast.Name) else "…"

    nodes = [node for tree in trees for node in ast.walk(tree)]
    joined = ["".join(map(part, n.values)) for n in nodes if isinstance(n, ast.JoinedStr)]
    plain = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return joined + plain


def _is_said(message: str, texts: list[str]) -> bool:
    """Whether one of the texts has the message's words, with anything in the place of …"""
    pattern = re.compile(".*".join(re.escape(words) for words in message.split("…")), re.S)
    return any(pattern.search(text) for text in texts)


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_are_those_of_the_code(message: str, texts: list[str]) -> None:
    assert len(message.replace("…", "")) > 15
    assert _is_said(message, texts)


def test_a_message_of_no_code_would_be_seen(texts: list[str]) -> None:
    assert len(MESSAGES) > 30
    assert not _is_said("… is not a folder; feed it again", texts)


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", TEXT)
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", TEXT, flags=re.S), re.M)
    anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
    assert len(targets) > 20
    for target in targets:
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif "://" not in target:
            assert (ROOT / target).exists(), target


def test_counts_of_what_is_supported() -> None:
    from qsrt_pack.source.architectures import CALIBRATED

    rows = re.findall(r"^\| `(\w+)` \| `(?:language_)?model\.", TEXT, re.M)
    assert f"| models | {len(rows)} values of `model_type`" in TEXT
    assert f"<summary>{len(rows)} values of model_type" in TEXT
    assert f"| calibration | {len(CALIBRATED)} of the {len(rows)};" in TEXT
    assert set(rows) >= CALIBRATED
