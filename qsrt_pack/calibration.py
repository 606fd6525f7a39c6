"""Calibration statistics: made from a checkpoint and a text, kept in a folder, read by convert.

The folder holds calibration.json, a file of rows for each layer with experts and, after a backward
pass, one of gradients. While it is made, the residual rows between the layers lie beside them in
mapped files, so that memory holds one layer and one batch.
"""

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from qsrt_pack.calibrate import capture
from qsrt_pack.calibrate.statistics import LayerRows, gather
from qsrt_pack.calibration_input import ROWS, CalibrationInput, embedding_name, read_input
from qsrt_pack.output import discard, replacing, state_file
from qsrt_pack.progress import bar
from qsrt_pack.source.checkpoint import digest_files, read_weight, source_stamp
from qsrt_pack.source.models import one_layer_changes, outer_names
from qsrt_pack.statistics import (
    DOCUMENT,
    Statistics,
    gradients_name,
    open_statistics,
    rows_name,
)
from qsrt_pack.workers import is_out_of_memory
from qsrt_runtime.format import paths, schema
from qsrt_runtime.format.errors import FormatError

_BATCH_TOKENS = 4096  # run at once
_RECEIVED = "received.bin"  # what a layer's experts receive, or the gradients there
_log = logging.getLogger(__name__)


def calibrate(
    source: Path,
    text: Path,
    out: Path,
    *,
    window: int | None = None,
    windows: int | None = None,
    rows: int = ROWS,
    seed: int = 0,
    backward: bool = True,
    device: torch.device | None = None,
    overwrite: bool = False,
    show_progress: bool = True,
) -> Statistics:
    """Run a checkpoint over a text and write the statistics of its layers to a folder.

    window, windows: tokens in a window and how many of them, as for evaluate; each window counts
    as a document.   rows: kept of each expert.   backward: also take the gradients, which needs
    every layer's residual rows on disk at once, tokens x H x 4 bytes each.
    Stopped by whatever, it leaves the finished layers in OUT.partial; the same call continues. On
    statistics that are whole and of the same input it changes nothing.
    """
    device = device or torch.device("cpu")
    given = read_input(
        source,
        text,
        device=device,
        window=window,
        windows=windows,
        rows=rows,
        seed=seed,
        backward=backward,
    )
    given.document["source"] = digest_files(given.checkpoint)
    found = given.finished(out, overwrite=overwrite)
    if found is not None:
        discard(out)
        return found
    with _orderly(device), replacing(out, overwrite=overwrite, resumable=True) as folder:
        run = _Run(**vars(given), folder=folder, state=state_file(out), device=device)
        run.resume()
        run.check_disk()
        run.forward(show_progress)
        if backward:
            run.backward(show_progress)
        run.finish()
    return open_statistics(out)


def planned(
    source: Path, text: Path, out: Path, *, device: torch.device, overwrite: bool = False
) -> Statistics | None:
    """What `calibrate` by its default settings would find finished; None where it would set out.

    Refuses what that would refuse before it runs the model, except that shards are compared by
    name alone. Writes nothing, but puts back what a killed run had moved aside.
    """
    given = read_input(source, text, device=device)
    found = given.finished(out, overwrite=overwrite)
    if found is None:
        given.stopped(state_file(out))
    return found


@dataclass(frozen=True)
class _Run(CalibrationInput):
    """A calibration at work, its source hashed. document: grows with each layer."""

    folder: Path
    state: Path
    device: torch.device

    @property
    def layers(self) -> int:
        return self.experts.naming.count

    def resume(self) -> None:
        """Take over what a stopped run of the same input has finished."""
        found = self.stopped(self.state)
        if found is not None:
            self.document["layers"], self.document["files"] = found["layers"], found["files"]
        for path in self.folder.iterdir():
            if path.name not in self.document["files"]:
                path.unlink()
        for name, digest in list(self.document["files"].items()):
            path = self.folder / name
            if not path.is_file() or paths.sha256_file(path) != digest:
                raise FormatError(f"{path} is not as it was written; delete {self.state.parent}")

    def check_disk(self) -> None:
        """Refuse to start where the residual rows will not fit."""
        both = self.document["settings"]["backward"]
        files = self.layers + 4 if both else 3  # of residual rows at once
        need = files * self.tokens.numel() * self.experts.true_sizes.hidden * 4
        here = sum(path.stat().st_size for path in self.folder.iterdir())
        free = shutil.disk_usage(self.folder).free + here
        if free < need:
            hint = "; calibrate --no-backward takes less" if both else ""
            raise FormatError(
                f"{self.folder.parent.parent} has {free:,} bytes free, calibrating takes "
                f"{need:,}{hint}"
            )

    def forward(self, show_progress: bool) -> None:
        """Run every layer and gather the rows that reach its experts."""
        if not self._forwarded() and not self._done(_hidden_name(0)):
            self._embed()
        with bar("calibrate", self.layers * self.tokens.numel(), "tokens", show_progress) as moved:
            for layer in range(self.layers):
                if layer < self._forwarded():
                    moved(self.tokens.numel())
                else:
                    self._forward_layer(layer, moved)

    def backward(self, show_progress: bool) -> None:
        """Run the layers backwards and keep the gradients of the gathered rows."""
        if not any(self._done(_slope_name(layer)) for layer in range(self.layers + 1)):
            self._start_backward()
        with bar("backward", self.layers * self.tokens.numel(), "tokens", show_progress) as moved:
            for layer in range(self.layers - 1, -1, -1):
                if any(self._done(_slope_name(below)) for below in range(layer + 1)):
                    moved(self.tokens.numel())
                else:
                    self._backward_layer(layer, moved)

    def finish(self) -> None:
        """Leave the statistics alone in the folder, the document last."""
        self._forget(*(name for name in self.document["files"] if name.endswith(".bin")))
        for path in self.folder.glob("*.bin"):
            path.unlink()
        schema.check(self.document, "calibration", DOCUMENT)
        paths.write_file(self.folder / DOCUMENT, schema.dump(self.document))

    def _forwarded(self) -> int:
        """How many layers have been run forwards; all, once the backward pass has begun."""
        if any(self._done(_slope_name(layer)) for layer in range(self.layers + 1)):
            return self.layers
        return max((n for n in range(self.layers + 1) if self._done(_hidden_name(n))), default=0)

    def _done(self, name: str) -> bool:
        return name in self.document["files"]

    def _record(self, *names: str) -> None:
        """Note files that are whole, so that a later run need not make them again."""
        for name in names:
            with (self.folder / name).open("rb") as file:
                os.fsync(file.fileno())
            self.document["files"][name] = paths.sha256_file(self.folder / name)
        if source_stamp(self.checkpoint) != self.stamp:
            raise FormatError(f"{self.checkpoint.path} changed since it was opened; start over")
        self._write_state()

    def _write_state(self) -> None:
        schema.check(self.document, "calibration", str(self.state))
        paths.write_file(self.state, schema.dump(self.document))

    def _forget(self, *names: str) -> None:
        """Remove files that nothing needs any more; first from the state, which is then right."""
        for name in names:
            self.document["files"].pop(name, None)
        self._write_state()
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def _residual(self, name: str) -> torch.Tensor:
        """A mapped file of residual rows: [windows, window, H] float32."""
        rows = self._mapped(name, self.tokens.numel(), torch.float32)
        return rows.unflatten(0, self.tokens.shape)

    def _mapped(self, name: str, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """A mapped file: [rows, H]. Its room is taken at once, or a full disk would be a crash."""
        path, hidden = self.folder / name, self.experts.true_sizes.hidden
        with paths.naming(path), path.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, rows * hidden * dtype.itemsize)
        size = rows * hidden
        return torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(-1, hidden)

    def _weights(self, *names: str) -> dict[str, torch.Tensor]:
        return {name: read_weight(self.checkpoint, name) for name in names}

    def _runner(self, layer: int) -> capture.LayerRunner:
        prefix = self.experts.naming.path(layer)
        names = [name for name in self.checkpoint.weights if name.startswith(prefix)]
        changes = one_layer_changes(self.experts, layer)
        found = self._weights(*names)
        weights = {name.removeprefix(prefix): weight for name, weight in found.items()}
        config = self.checkpoint.model_config
        return capture.LayerRunner(config, layer, changes, weights, self.device)

    def _batches(self) -> Iterator[slice]:
        """Windows that are run at once."""
        step = max(1, _BATCH_TOKENS // self.tokens.shape[1])
        for start in range(0, len(self.tokens), step):
            yield slice(start, min(start + step, len(self.tokens)))

    def _embed(self) -> None:
        (embedding,) = self._weights(embedding_name(self.checkpoint)).values()
        rows = self._residual(_hidden_name(0))
        for some in self._batches():
            rows[some] = embedding[self.tokens[some]]
        self._record(_hidden_name(0))

    @torch.no_grad()
    def _forward_layer(self, layer: int, moved: Callable[[int], None]) -> None:
        runner = self._runner(layer)
        before, after = (self._residual(_hidden_name(n)) for n in (layer, layer + 1))
        received = self._mapped(_RECEIVED, self.tokens.numel(), torch.bfloat16)
        routes: list[tuple[torch.Tensor, torch.Tensor]] = []
        place = 0
        for some in self._batches():
            with runner.watching() as seen:
                after[some] = runner(before[some].to(self.device)).cpu()
            for rows, ids, gates in seen:
                received[place : place + len(rows)] = rows
                routes.append((ids.int().cpu(), gates.float().cpu()))
                place += len(rows)
            moved(self.tokens[some].numel())
        written = [_hidden_name(layer + 1)]
        if layer in self.experts.layers:
            self._write_rows(layer, received, *map(torch.cat, zip(*routes, strict=True)))
            written.append(rows_name(layer))
        self._record(*written)
        if not self.document["settings"]["backward"]:
            self._forget(_hidden_name(layer))

    def _write_rows(
        self, layer: int, rows: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor
    ) -> None:
        documents = torch.arange(len(self.tokens)).repeat_interleave(self.tokens.shape[1])
        settings = self.document["settings"]
        found = gather(
            rows,
            ids,
            gates,
            documents,
            self.experts.geometry.experts,
            limit=settings["rows"],
            seed=settings["seed"],
            device=self.device,
        )
        self.document["layers"][str(layer)] = {
            "tokens": found.tokens.tolist(),
            "dropped": int(found.dropped),
        }
        if found.dropped:
            _log.warning("layer %d: %d rows are not finite and left out", layer, int(found.dropped))
        tensors = {f.name: getattr(found, f.name).contiguous() for f in fields(LayerRows)}
        _save(tensors, self.folder / rows_name(layer))

    def _start_backward(self) -> None:
        weights = self._weights(*outer_names(self.checkpoint, self.experts))
        gradient = capture.loss_gradient(self.checkpoint.model_config, weights, self.device)
        rows, slopes = (
            self._residual(_hidden_name(self.layers)),
            self._residual(_slope_name(self.layers)),
        )
        generator = torch.Generator().manual_seed(self.document["settings"]["seed"])
        for some in self._batches():
            flat = rows[some].flatten(0, 1).to(self.device)
            draws = torch.rand(len(flat), generator=generator, dtype=torch.float64)
            found = gradient(flat, draws.to(self.device))
            slopes[some] = found.nan_to_num(0, 0, 0).cpu().view_as(slopes[some])
        self._record(_slope_name(self.layers))

    def _backward_layer(self, layer: int, moved: Callable[[int], None]) -> None:
        runner = self._runner(layer)
        rows, above = self._residual(_hidden_name(layer)), self._residual(_slope_name(layer + 1))
        below = self._residual(_slope_name(layer))
        inner = self._mapped(_RECEIVED, self.tokens.numel(), torch.bfloat16)
        window = self.tokens.shape[1]
        for some in self._batches():
            found, part = runner.backward(rows[some].to(self.device), above[some].to(self.device))
            below[some] = found.nan_to_num(0, 0, 0).cpu()
            if part is not None:
                inner[some.start * window : some.stop * window] = part.nan_to_num(0, 0, 0)
            moved(self.tokens[some].numel())
        written = [_slope_name(layer)]
        if layer in self.experts.layers:
            places = load_file(self.folder / rows_name(layer))["places"]
            _save({"gradients": inner[places]}, self.folder / gradients_name(layer))
            written.append(gradients_name(layer))
        self._record(*written)
        self._forget(_slope_name(layer + 1), _hidden_name(layer + 1))


@contextmanager
def _orderly(device: torch.device) -> Iterator[None]:
    """Sums in one order on a GPU, and its memory's end as an error of one line."""
    before = torch.are_deterministic_algorithms_enabled()
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise FormatError(
            f"{device} has too little memory; give another device, or calibrate with a shorter "
            "--window"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before)


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file with the mode that the umask gives; save_file's own is 0600."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path)
    path.chmod(mode)


def _hidden_name(layer: int) -> str:
    return f"hidden-{layer:03d}.bin"


def _slope_name(layer: int) -> str:
    return f"slopes-{layer:03d}.bin"
