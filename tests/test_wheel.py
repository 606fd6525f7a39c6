"""The built wheel, away from the source tree and without what only packing needs."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A child process that cannot import what an empty environment lacks.
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy, so that building leaves nothing in the tree
    ignore = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*-qsrt", "golden")
    shutil.copytree(ROOT, source, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--quiet", "--wheel-dir", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def _run(wheel: Path, folder: Path, code: str, blocked: set[str], *args: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    script = f"BLOCKED = {blocked!r}\n{BLOCK}\n{code}"
    search = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": search, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", script, *args]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_holds_both_packages_the_schemas_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"qsrt_pack", "qsrt_runtime"}
    schemas = {Path(n).name for n in names if n.startswith("qsrt_runtime/schemas/")}
    assert schemas == {path.name for path in (ROOT / "schemas").iterdir()}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "qsrt_pack/report/page.html" in names
    assert "qsrt_runtime/reader.c" in names
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    plugin = "[vllm.general_plugins]\nqsrt = qsrt_runtime.integrations.vllm:register\n"
    assert plugin in zipfile.ZipFile(wheel).read(entry_points).decode()


def test_runtime_works_alone_without_triton(
    wheel: Path, tmp_path: Path, clean_package: Path
) -> None:
    code = """
import pathlib, sys
import qsrt_runtime, torch
assert pathlib.Path(qsrt_runtime.__file__).is_relative_to(pathlib.Path.cwd())
package = qsrt_runtime.load_package(sys.argv[1])
x = torch.ones(1, 128)
ids, weights = torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]])
out = qsrt_runtime.moe_forward_reference(x, package.layers[0], ids, weights)
print(tuple(out.shape), bool(out.any()))
"""
    blocked = {"triton", "qsrt_pack", "numba", "rich", "click", "transformers"}
    assert _run(wheel, tmp_path, code, blocked, str(clean_package)) == "(1, 128) True\n"


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        ("convert", "numba", "pack"),
        ("report", "matplotlib", "report"),
        ("report", "jinja2", "report"),
    ],
)
def test_missing_extra_is_named(
    wheel: Path, tmp_path: Path, clean_checkpoint: Path, command: str, module: str, extra: str
) -> None:
    code = """
import sys
from click.testing import CliRunner
from qsrt_pack.cli import main
result = CliRunner().invoke(main, sys.argv[1:])
print(result.exit_code, result.stderr.strip())
"""
    found = _run(wheel, tmp_path, code, {module}, command, str(clean_checkpoint))
    assert found == f"1 Error: {module} is not installed; pip install 'qsrt[{extra}]'\n"
