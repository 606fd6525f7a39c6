"""Who may import whom, read from the source files."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(p for top in ("qsrt_runtime", "qsrt_pack") for p in (ROOT / top).rglob("*.py"))
STAGES = ("source", "calibrate", "encode", "assemble")
FORMAT_LIBRARIES = {"torch", "safetensors", "jsonschema"}
LAZY = {
    "qsrt_pack.encode.viterbi",
    "qsrt_runtime.expansion",
    "qsrt_runtime.integrations.vllm",
    "qsrt_runtime.moe",
}  # --help is quick; triton is not everywhere
RUNTIME_OF_PACK = {
    "evaluate",
    "bench",
    "hub",
    "repository",
}  # modules of qsrt_pack that may import all of it


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path) -> list[tuple[str, int]]:
    """(imported module, column) of every import of a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.col_offset) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            known = [n for n in names if (ROOT / (n.replace(".", "/") + ".py")).exists()]
            packages = [n for n in names if (ROOT / n.replace(".", "/") / "__init__.py").exists()]
            found += [(n, node.col_offset) for n in known + packages or [node.module]]
    return found


def _allowed(module: str, target: str) -> bool:
    top, ours = target.split(".")[0], target.startswith(("qsrt_runtime", "qsrt_pack"))
    if module.startswith("qsrt_runtime.format"):
        in_library = top in FORMAT_LIBRARIES or top in sys.stdlib_module_names
        return target.startswith("qsrt_runtime.format") if ours else in_library
    if module.startswith("qsrt_runtime"):
        return not target.startswith("qsrt_pack")
    if target.startswith("qsrt_runtime."):
        return target.startswith("qsrt_runtime.format") or module.split(".")[1] in RUNTIME_OF_PACK
    stage = module.split(".")[1] if "." in module else ""
    if target.startswith("qsrt_pack.") and stage in STAGES:
        return target.split(".")[1] == stage
    is_cli = target.startswith("qsrt_pack.cli")
    return not is_cli or module == "qsrt_pack.__main__" or stage == "cli"


def test_there_are_files_to_read() -> None:
    assert len(FILES) > 25


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_imports_go_the_allowed_way(path: Path) -> None:
    module = _module(path)
    for target, column in _imports(path):
        assert _allowed(module, target), f"{module} must not import {target}"
        lazy = module in LAZY or module.startswith("qsrt_pack.cli.")
        assert column == 0 or lazy, f"{module}: {target} not at the top"
        assert target.split(".")[0] != "triton" or path.name == "kernel.py"


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("qsrt_runtime.format.tile", "triton"),
        ("qsrt_runtime.format.tile", "qsrt_runtime.weights"),
        ("qsrt_runtime.load", "qsrt_pack.job"),
        ("qsrt_pack.encode.expert", "qsrt_pack.source.models"),
        ("qsrt_pack.source.models", "qsrt_pack.assemble.shards"),
        ("qsrt_pack.job", "qsrt_runtime.load"),
        ("qsrt_pack.job", "qsrt_pack.cli"),
    ],
)
def test_the_rule_refuses_what_is_not_drawn(module: str, target: str) -> None:
    assert not _allowed(module, target)
