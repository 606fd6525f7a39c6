"""The command line: what it prints where, and its exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import checkpoints
import pytest
import torch
from checkpoints import config, write_checkpoint
from click.testing import CliRunner, Result

import qsrt_runtime
from qsrt_pack import job, plan
from qsrt_pack.cli import main
from qsrt_pack.inspect import describe, inspect
from qsrt_pack.ranks import Ranks
from qsrt_pack.validate import validate
from qsrt_runtime.format import schema
from qsrt_runtime.format.errors import FormatError

READING = ("validate", "inspect", "decode", "eval", "report", "bench")
COMMANDS = ("calibrate", "convert", *READING, "push", "pull")
ROOT = Path(__file__).parents[2]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def child(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess:
    """A process of its own: what a person's shell sees."""
    return subprocess.run(
        [sys.executable, "-m", "qsrt_pack", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        timeout=120,
        check=False,
    )


@pytest.fixture
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "probe", lambda _method, _device: 1e6)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer of one expert. Not to be written to."""
    value = config(num_hidden_layers=1, num_experts=1, num_experts_per_tok=1)
    weights = checkpoints.tensors(layers=1, experts=1)
    folder = tmp_path_factory.mktemp("small") / "model"
    return write_checkpoint(folder, config_value=value, weights=weights)


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help(command: tuple[str, ...], option: str) -> None:
    result = invoke(*command, option)
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: ")
    if not command:
        assert all(name in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_of_a_command_parses(command: str) -> None:
    words = invoke(command, "--help").stdout.split("Example:\n")[1].splitlines()[0].split()
    assert words[:2] == ["qsrt-pack", command]
    found = main.commands[command]
    found.make_context(command, words[2:])


def test_the_shell_completes_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_QSRT_PACK_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "qsrt-pack va")
    monkeypatch.setenv("COMP_CWORD", "1")
    done = CliRunner().invoke(main, prog_name="qsrt-pack")
    assert done.stdout == "plain,validate\n"


def test_the_commands_are_those_tested() -> None:
    assert sorted(main.commands) == sorted(COMMANDS)


def test_version() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (
        0,
        f"qsrt-pack, version {qsrt_runtime.__version__}\n",
    )


def test_help_loads_no_command() -> None:
    code = """if True:
        import sys
        from qsrt_pack.cli import main
        main(["convert", "--help"], standalone_mode=False)
        assert not {"torch", "numba", "transformers"} & set(sys.modules)"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("fly",),
        ("convert",),
        ("convert", "m", "o", "extra"),
        ("convert", "m", "--search", "slow"),
        ("convert", "m", "--modes", "R1"),
        ("convert", "m", "--seed", "-1"),
        ("convert", "m", "--seed", str(2**63)),
        ("convert", "m", "--loader", "vllm"),
        ("convert", "m", "--no-such-option"),
        ("calibrate", "m"),
        ("calibrate", "m", "--text", "t"),
        ("calibrate", "m", "--text", "t", "-o", "o", "--rows", "0"),
        ("calibrate", "m", "--text", "t", "-o", "o", "--device", "gpu"),
        ("validate",),
        ("inspect",),
        ("inspect", "p", "extra"),
        ("inspect", "p", "--deep"),
        ("decode", "p"),
        ("decode", "p", "o", "--dtype", "int8"),
        ("eval", "p", "--text", "t"),
        ("eval", "p", "--reference", "r"),
        ("eval", "p", "--reference", "r", "--text", "t", "--window", "1"),
        ("eval", "p", "--reference", "r", "--text", "t", "--windows", "0"),
        ("eval", "p", "--reference", "r", "--text", "t", "--device", "0,0"),
        ("eval", "p", "--reference", "r", "--text", "t", "--max-kl", "-1"),
        ("bench",),
        ("bench", "H=128"),
        ("bench", "H=128,I=256,E=4,k=5"),
        ("bench", "H=100,I=256,E=4,k=2"),
        ("bench", "fruit", "-m", "0"),
        ("bench", "fruit", "-m", "1,,2"),
        ("bench", "fruit", "-m", "65537"),
        ("bench", "fruit", "-m", 5000 * "1"),
        ("bench", "fruit", "-m", ",".join(map(str, range(1, 66)))),
        ("bench", "fruit", "--device", "0,1"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage: " in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("convert", "none"),
        ("validate", "none"),
        ("inspect", "none"),
        ("decode", "none", "out"),
        ("eval", "none", "--reference", "none", "--text", "none"),
    ],
)
def test_a_failure_is_one_line_and_exit_code_1(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"Error: {tmp_path / 'none'} is not a folder")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (FormatError("layer 5 is short"), 1, "Error: layer 5 is short\n"),
        (OSError(28, "No space left on device"), 1, "Error: [Errno 28] No space left on device\n"),
        (
            ModuleNotFoundError("no numba", name="numba"),
            1,
            "Error: numba is not installed; pip install 'qsrt[pack]'\n",
        ),
        (
            RuntimeError("CUDA error: device-side assert triggered\nand what to compile with"),
            1,
            "Error: CUDA error: device-side assert triggered\n",
        ),
        (torch.AcceleratorError("device lost"), 1, "Error: device lost\n"),
        (torch.OutOfMemoryError("CUDA is full"), 1, "Error: too little memory: CUDA is full\n"),
        (MemoryError(), 1, "Error: too little memory\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_that_a_user_can_cause(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(job, "prepare", fail)
    result = invoke("convert", "model")
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", message)


@pytest.mark.parametrize("error", [RuntimeError("a defect"), ModuleNotFoundError(name="os")])
def test_a_defect_is_not_hidden(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(job, "prepare", fail)
    assert invoke("convert", "model").exception is error


def test_a_child_fails_in_one_line(tmp_path: Path) -> None:
    done = child("validate", "none", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"Error: {tmp_path / 'none'} is not a folder\n"


@pytest.mark.usefixtures("no_probe")
def test_dry_run_writes_nothing(clean_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    result = invoke(
        "convert", clean_checkpoint, out, "--dry-run", "--json", "--seed", str(2**63 - 1)
    )
    assert result.exit_code == 0
    value = json.loads(result.stdout)
    schema.check(value, "plan", "plan")
    assert (value["output"], value["seed"], value["search"]) == (str(out), 2**63 - 1, "exact")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_probe")
def test_the_default_output_stands_beside_the_model(
    clean_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = str(clean_checkpoint.with_name("model-qsrt"))
    monkeypatch.chdir(clean_checkpoint)
    for model in (clean_checkpoint, f"{clean_checkpoint}/", ".", "../model"):
        result = invoke("convert", model, "--dry-run", "--json")
        assert json.loads(result.stdout)["output"] == expected


def test_convert_and_all_that_follows(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--search", "fast", "--loader", "kquant", "--json")
    done = child("convert", small, out, *options)
    assert done.returncode == 0
    value = json.loads(done.stdout)
    schema.check(value, "plan", "plan")
    assert (value["loader"], value["modes"], value["search"]) == ("kquant", "R0", "fast")
    assert "layer 0: NMSE" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("complete; check it with: qsrt-pack validate ")
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == "modelopt"

    result = invoke("validate", out, "--deep", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == validate(out, deep=True, show_progress=False)
    result = invoke("validate", out)
    assert result.stdout.startswith(f"{out} is valid: 1 layers, 1 experts, 8 files")
    assert invoke("validate", out, "--deep").stdout.endswith("every expert decoded\n")

    dense = tmp_path / "dense"
    assert invoke("decode", out, dense, "--dtype", "float32").exit_code == 0
    again = invoke("decode", out, dense)
    assert again.exit_code == 1
    assert "is not empty" in again.stderr
    assert invoke("decode", out, dense, "--overwrite").exit_code == 0


def test_inspect_prints_text_or_json(clean_package: Path, golden: Path) -> None:
    for path in (clean_package, golden / "publication", golden / "kimi_layer.safetensors"):
        report = inspect(path, show_progress=False)
        result = invoke("inspect", path, "--json")
        assert (result.exit_code, result.stderr) == (0, "")
        assert json.loads(result.stdout) == report
        result = invoke("inspect", path)
        assert (result.exit_code, result.stdout) == (0, describe(report) + "\n")


def test_inspect_of_what_it_cannot_read_is_one_line(clean_checkpoint: Path) -> None:
    for path in (clean_checkpoint, clean_checkpoint / "config.json"):
        result = invoke("inspect", path, "--json")
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
        assert result.stderr.startswith(f"Error: {path}")


@pytest.mark.usefixtures("no_probe")
def test_quiet_logs_nothing_and_shows_no_progress(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shown, real = [], job.run

    def run(prepared: job.Job, *, show_progress: bool, ranks: Ranks) -> job.Evidence:
        shown.append(show_progress)
        return real(prepared, show_progress=show_progress, ranks=ranks)

    monkeypatch.setattr(job, "run", run)
    arguments = ("convert", small, tmp_path / "out", "--search", "fast")
    result = invoke("-q", *arguments)
    assert (result.exit_code, result.output, caplog.records) == (0, "", [])
    result = invoke("-v", *arguments, "--overwrite")
    assert (result.exit_code, result.stdout) == (0, "")
    levels = {record.levelname for record in caplog.records}
    assert levels == {"INFO", "DEBUG"}
    assert "layer 0 expert 0: NMSE" in caplog.text
    assert shown == [False, True]


def test_a_quiet_child_prints_nothing(clean_package: Path, tmp_path: Path) -> None:
    done = child("-q", "decode", clean_package, tmp_path / "dense")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.usefixtures("no_probe")
def test_options_reach_the_plan(clean_checkpoint: Path, tmp_path: Path) -> None:
    options = ("--search", "fast", "--modes", "all", "--loader", "kquant", "--seed", "7")
    result = invoke("convert", clean_checkpoint, tmp_path / "out", "--dry-run", "--json", *options)
    value = json.loads(result.stdout)
    found = [value[key] for key in ("search", "modes", "loader", "seed")]
    assert found == ["fast", "all", "kquant", 7]


def test_eval_prints_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def evaluate(*arguments: object, **options: object) -> dict:
        given.append((arguments, options))
        return {"kind": "eval"}

    monkeypatch.setattr("qsrt_pack.evaluate.evaluate", evaluate)
    monkeypatch.setattr("qsrt_pack.evaluate.describe", lambda report: f"a {report['kind']}")
    arguments = ("eval", "/p", "--reference", "/r", "--text", "/t", "--device", "cpu")
    assert invoke("-q", *arguments).stdout == "a eval\n"
    result = invoke(*arguments, "--window", "5", "--windows", "3", "--json")
    assert json.loads(result.stdout) == {"kind": "eval"}
    places = (Path("/p"), Path("/r"), Path("/t"))
    others = {"device": torch.device("cpu"), "cache": None, "against": (), "noise_floor": False}
    assert given == [
        (places, others | {"window": None, "windows": None, "show_progress": False}),
        (places, others | {"window": 5, "windows": 3, "show_progress": True}),
    ]


@pytest.mark.parametrize(("limit", "code"), [("0.25", 0), ("0.2499", 1)])
def test_eval_fails_above_a_mean_kl_and_still_prints(
    monkeypatch: pytest.MonkeyPatch, limit: str, code: int
) -> None:
    monkeypatch.setattr("qsrt_pack.evaluate.evaluate", lambda *_, **__: {"kl_mean": 0.25})
    arguments = ("eval", "/p", "--reference", "/r", "--text", "/t", "--json", "--max-kl", limit)
    result = invoke(*arguments)
    assert (result.exit_code, json.loads(result.stdout)) == (code, {"kl_mean": 0.25})
    assert result.stderr == code * "Error: mean KL 0.25000 is above --max-kl 0.2499\n"


@pytest.mark.usefixtures("no_probe")
def test_overwrite_is_an_explicit_wish(small: Path, tmp_path: Path) -> None:
    (tmp_path / "old").write_text("")
    arguments = ("convert", small, tmp_path, "--search", "fast")
    refused = invoke(*arguments)
    assert refused.exit_code == 1
    assert "give --overwrite to replace it" in refused.stderr
    assert invoke(*arguments, "--overwrite").exit_code == 0
    assert not (tmp_path / "old").exists()
    validate(tmp_path, show_progress=False)


def test_an_interrupt_leaves_nothing(clean_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [sys.executable, "-m", "qsrt_pack", "convert", str(clean_checkpoint), str(out)]
    with subprocess.Popen(
        arguments, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    ) as process:
        partial = tmp_path / "out.partial" / "package"  # before it, the lock alone may stay
        deadline = time.monotonic() + 90
        while not partial.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert partial.exists()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.endswith("interrupted\n")
    assert "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_that_falls_into_a_destructor_is_not_lost(tmp_path: Path) -> None:
    code = """
import time
from click.testing import CliRunner
from qsrt_pack import cli, validate

class Compiled:
    def __del__(self):
        raise KeyboardInterrupt

def run(*_arguments, **_options):
    Compiled()
    for _ in range(50):
        time.sleep(0.02)
    print("went on")

validate.validate = run
cli.main(["validate", "x"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_pk_6a_of_two_converters_one_works(clean_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "qsrt_pack", "convert", clean_checkpoint, out]
    first, second = (
        subprocess.Popen(
            [*map(str, command)],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        for _ in range(2)
    )
    messages = [process.communicate(timeout=300)[1] for process in (first, second)]
    codes = [process.returncode for process in (first, second)]
    assert sorted(codes) == [0, 1]
    loser = messages[codes.index(1)]
    assert "is in use: another process writes the same output" in loser.splitlines()[-1]
    assert "Traceback" not in loser
    validate(out, show_progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
