"""A tiny model from checkpoint to package to outputs, through the public names only."""

import json
from pathlib import Path

import checkpoints
import torch
from safetensors.torch import load_file

from qsrt_runtime import load_package, moe_forward_reference


def experts_forward(
    weights: dict[str, torch.Tensor],
    layer: int,
    x: torch.Tensor,
    ids: torch.Tensor,
    gates: torch.Tensor,
) -> torch.Tensor:
    """A layer's routed experts on rows x [T, H], from dense matrices by the checkpoint's names."""
    expected = torch.zeros_like(x)
    for row in range(len(x)):
        for choice in range(ids.shape[1]):
            w1, w3, w2 = (
                weights[checkpoints.expert_key(layer, int(ids[row, choice]), part)].float()
                for part in checkpoints.PARTS
            )
            middle = torch.nn.functional.silu(w1 @ x[row]) * (w3 @ x[row])
            expected[row] += gates[row, choice] * (w2 @ middle)
    return expected


def test_packed_experts_compute_what_the_source_computes(
    clean_checkpoint: Path, clean_package: Path
) -> None:
    source = {}
    for shard in sorted(clean_checkpoint.glob("*.safetensors")):
        source |= load_file(shard)
    package = load_package(clean_package)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(7, checkpoints.HIDDEN, generator=generator)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(7)])
    weights = torch.rand(7, 2, generator=generator)
    for layer in range(checkpoints.LAYERS):
        expected = experts_forward(source, layer, x, ids, weights)
        found = moe_forward_reference(x, package.layers[layer], ids, weights)
        # Three matrices with about 2% of squared error each: 0.25 of the norm is well above.
        error = float((found - expected).norm() / expected.norm())
        assert 0.01 < error < 0.35


def test_top_k_and_geometry_are_the_models(clean_checkpoint: Path, clean_package: Path) -> None:
    config = json.loads((clean_checkpoint / "config.json").read_text())
    package = load_package(clean_package)
    assert package.topk == config["num_experts_per_tok"]
    assert (package.geometry.hidden, package.geometry.intermediate) == (128, 256)
    assert sorted(package.layers) == [0, 1]
