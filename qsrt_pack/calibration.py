"""Calibration statistics: made from a checkpoint and a text, kept in a folder, read by convert.

The folder holds calibration.json, a file of rows for each layer with experts and, after a backward
pass, one of gradients. While it is made, the residual rows between the layers lie beside them in
mapped files, so that memory holds one layer and one batch.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from qsrt_pack.assemble.package import library_versions
from qsrt_pack.calibrate import capture
from qsrt_pack.calibrate.statistics import LayerRows, gather
from qsrt_pack.output import check_output, replacing, state_file
from qsrt_pack.progress import bar
from qsrt_pack.source.checkpoint import Checkpoint, digest_files, open_checkpoint, read_tensor
from qsrt_pack.source.dtypes import to_float32
from qsrt_pack.source.models import RoutedExperts, find_experts, one_layer_changes
from qsrt_pack.statistics import (
    DOCUMENT,
    Statistics,
    gradients_name,
    open_statistics,
    rows_name,
)
from qsrt_pack.text import count_windows, read_text, tokenize
from qsrt_runtime.format import paths, schema
from qsrt_runtime.format.errors import FormatError

ROWS = 1 << 16  # kept of an expert
_INPUT = ("source", "settings", "versions")  # of calibration.json, what decides the rest
_BATCH_TOKENS = 4096  # run at once
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
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
    reuse: bool = False,
    show_progress: bool = True,
) -> Statistics:
    """Run a checkpoint over a text and write the statistics of its layers to a folder.

    window, windows: tokens in a window and how many of them, as for evaluate; each window counts
    as a document.   rows: kept of each expert.   backward: also take the gradients, which needs
    every layer's residual rows on disk at once, tokens x H x 4 bytes each.   reuse: take what is
    at OUT if it is what would be made.
    Stopped by whatever, it leaves the finished layers in OUT.partial; the same call continues.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # a layer alone lacks what is not run
    device = device or torch.device("cpu")
    checkpoint = open_checkpoint(source)
    experts = find_experts(checkpoint)
    data = read_text(text)
    vocabulary = checkpoint.config["vocab_size"]
    tokens = tokenize(source, data, vocabulary, text)
    longest = checkpoint.config.get("max_position_embeddings")
    size, count = count_windows(len(tokens), longest, window, windows, text)
    settings = {
        "text_sha256": hashlib.sha256(data).hexdigest(),
        "window": size,
        "windows": count,
        "rows": rows,
        "seed": seed,
        "backward": backward,
        "device": device.type,
    }
    document = {
        "schema": "qsrt_calibration_v1",
        "source": digest_files(checkpoint),
        "settings": settings,
        "versions": library_versions(),
        "layers": {},
        "files": {},
    }
    if reuse and (out / DOCUMENT).exists():
        found = open_statistics(out)
        if all(found.document[key] == document[key] for key in _INPUT):
            return found
    check_output(out, source, overwrite, resumable=True)
    with replacing(out, overwrite=overwrite, resumable=True) as folder:
        run = _Run(
            checkpoint=checkpoint,
            experts=experts,
            tokens=tokens[: size * count].unflatten(0, (count, size)),
            folder=folder,
            state=state_file(out),
            device=device,
            document=document,
        )
        run.resume()
        run.forward(show_progress)
        if backward:
            run.backward(show_progress)
        run.finish()
    return open_statistics(out)


@dataclass(frozen=True)
class _Run:
    """A calibration at work. tokens: [windows, window] int64.   document: grows with each layer."""

    checkpoint: Checkpoint
    experts: RoutedExperts
    tokens: torch.Tensor
    folder: Path
    state: Path
    device: torch.device
    document: dict[str, Any]

    @property
    def layers(self) -> int:
        return self.checkpoint.config["num_hidden_layers"]

    def resume(self) -> None:
        """Take over what a stopped run of the same input has finished."""
        found = schema.read(self.state, "calibration") if self.state.exists() else None
        if found is not None:
            for key in _INPUT:
                if found[key] != self.document[key]:
                    raise FormatError(
                        f"{self.state.parent} holds the work of another calibration: {key} was "
                        f"{found[key]!s:.200} and is {self.document[key]!s:.200}; delete that "
                        "folder to start over"
                    )
            self.document["layers"], self.document["files"] = found["layers"], found["files"]
        for path in self.folder.iterdir():
            if path.name not in self.document["files"]:
                path.unlink()
        for name, digest in list(self.document["files"].items()):
            path = self.folder / name
            if not path.is_file() or paths.sha256_file(path) != digest:
                raise FormatError(f"{path} is not as it was written; delete {self.state.parent}")

    def forward(self, show_progress: bool) -> None:
        """Run every layer and gather the rows that reach its experts."""
        if not self._done(_hidden_name(0)):
            self._embed()
        with bar("calibrate", self.layers * self.tokens.numel(), "tokens", show_progress) as moved:
            for layer in range(self.layers):
                if self._done(_hidden_name(layer + 1)):
                    moved(self.tokens.numel())
                else:
                    self._forward_layer(layer, moved)

    def backward(self, show_progress: bool) -> None:
        """Run the layers backwards and keep the gradients of the gathered rows."""
        if not self._done(_slope_name(self.layers)):
            self._start_backward()
        with bar("backward", self.layers * self.tokens.numel(), "tokens", show_progress) as moved:
            for layer in range(self.layers - 1, -1, -1):
                if self._done(_slope_name(layer)):
                    moved(self.tokens.numel())
                else:
                    self._backward_layer(layer, moved)

    def finish(self) -> None:
        """Leave the statistics alone in the folder, the document last."""
        names = [name for name in self.document["files"] if name.endswith(".bin")]
        for name in names:
            del self.document["files"][name]
        for path in self.folder.glob("*.bin"):
            path.unlink()
        schema.check(self.document, "calibration", DOCUMENT)
        paths.write_file(self.folder / DOCUMENT, schema.dump(self.document))

    def _done(self, name: str) -> bool:
        return name in self.document["files"]

    def _record(self, *names: str) -> None:
        """Note files that are whole, so that a later run need not make them again."""
        for name in names:
            self.document["files"][name] = paths.sha256_file(self.folder / name)
        schema.check(self.document, "calibration", str(self.state))
        paths.write_file(self.state, schema.dump(self.document))

    def _forget(self, name: str) -> None:
        self.document["files"].pop(name, None)
        (self.folder / name).unlink(missing_ok=True)

    def _residual(self, name: str) -> torch.Tensor:
        """A mapped file of residual rows: [windows, window, H] float32."""
        shape = (*self.tokens.shape, self.experts.geometry.hidden)
        size = shape[0] * shape[1] * shape[2]
        path = str(self.folder / name)
        return torch.from_file(path, shared=True, size=size, dtype=torch.float32).view(shape)

    def _weights(self, *names: str) -> dict[str, torch.Tensor]:
        return {name: to_float32(read_tensor(self.checkpoint, name)) for name in names}

    def _runner(self, layer: int) -> capture.LayerRunner:
        prefix = f"model.layers.{layer}."
        names = [name for name in self.checkpoint.tensors if name.startswith(prefix)]
        changes = one_layer_changes(self.experts, layer)
        weights = self._weights(*names)
        return capture.LayerRunner(self.checkpoint.config, layer, changes, weights, self.device)

    def _batches(self) -> Iterator[slice]:
        """Windows that are run at once."""
        step = max(1, _BATCH_TOKENS // self.tokens.shape[1])
        for start in range(0, len(self.tokens), step):
            yield slice(start, min(start + step, len(self.tokens)))

    def _embed(self) -> None:
        embedding = self._weights(_EMBEDDING)[_EMBEDDING]
        rows = self._residual(_hidden_name(0))
        for some in self._batches():
            rows[some] = embedding[self.tokens[some]]
        self._record(_hidden_name(0))

    @torch.no_grad()
    def _forward_layer(self, layer: int, moved: Callable[[int], None]) -> None:
        runner = self._runner(layer)
        before, after = (self._residual(_hidden_name(n)) for n in (layer, layer + 1))
        seen: list[capture.Routes] = []
        for some in self._batches():
            with runner.watching() as routes:
                after[some] = runner(before[some].to(self.device)).cpu()
            seen += [_on_cpu(one) for one in routes]
            moved(self.tokens[some].numel())
        written = [_hidden_name(layer + 1)]
        if layer in self.experts.layers:
            rows, ids, gates = (torch.cat(parts) for parts in zip(*seen, strict=True))
            self._write_rows(layer, rows, ids, gates)
            written.append(rows_name(layer))
        if not self.document["settings"]["backward"]:
            self._forget(_hidden_name(layer))
        self._record(*written)

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
        save_file(tensors, self.folder / rows_name(layer))

    def _start_backward(self) -> None:
        head = _EMBEDDING if _HEAD not in self.checkpoint.tensors else _HEAD
        weights = self._weights(_NORM, _EMBEDDING, head)
        gradient = capture.loss_gradient(self.checkpoint.config, weights, self.device)
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
        gathered: list[torch.Tensor] = []
        for some in self._batches():
            found, inner = runner.backward(rows[some].to(self.device), above[some].to(self.device))
            below[some] = found.nan_to_num(0, 0, 0).cpu()
            if inner is not None:
                gathered.append(inner.nan_to_num(0, 0, 0).to(torch.bfloat16).cpu())
            moved(self.tokens[some].numel())
        written = [_slope_name(layer)]
        if layer in self.experts.layers:
            places = load_file(self.folder / rows_name(layer))["places"]
            gradients = torch.cat(gathered)[places]
            save_file({"gradients": gradients}, self.folder / gradients_name(layer))
            written.append(gradients_name(layer))
        self._record(*written)


def _on_cpu(routes: capture.Routes) -> capture.Routes:
    rows, ids, gates = routes
    return rows.to(torch.bfloat16).cpu(), ids.int().cpu(), gates.float().cpu()


def _hidden_name(layer: int) -> str:
    return f"hidden-{layer:03d}.bin"


def _slope_name(layer: int) -> str:
    return f"slopes-{layer:03d}.bin"
