"""What a hidden side shared by a layer's experts costs in quality.

    python tests/bench/bench_hidden_side.py MODEL TEXT [--seeds 8] [--windows 48]

Converts a checkpoint on the first CUDA device with each kind of hidden side and several seeds, and
prints KL(original || package) and top-1 agreement on windows of 1,024 tokens of the text.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from qsrt_pack import evaluate, job
from qsrt_pack.encode.expert import Settings
from qsrt_pack.restore import DensePackage

WINDOW = 1024
SIDES = ("layer", "expert")


def score(original: torch.nn.Module, package: torch.nn.Module, rows: torch.Tensor) -> list[float]:
    """Mean KL and top-1 agreement. rows: [n, WINDOW] tokens."""
    kl = same = 0.0
    with torch.inference_mode():
        for row in rows:
            p, q = (m(row[None]).logits[0].float().log_softmax(-1) for m in (original, package))
            kl += float((p.exp() * (p - q)).sum(-1).double().mean())
            same += float((p.argmax(-1) == q.argmax(-1)).double().mean())
    return [kl / len(rows), same / len(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--windows", type=int, default=48)
    arguments = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    tokens = torch.tensor(tokenizer(arguments.text.read_text())["input_ids"])
    count = min(len(tokens) // WINDOW, arguments.windows)
    rows = tokens[: count * WINDOW].view(count, WINDOW).cuda()
    original = evaluate._reference_model(arguments.model).cuda()
    for side in SIDES:
        found = []
        for seed in range(arguments.seeds):
            with tempfile.TemporaryDirectory() as folder:
                settings = Settings(seed=seed, hidden_side=side, device="cuda")
                out, devices = Path(folder) / "out", (torch.device("cuda", 0),)
                job.run(job.prepare(arguments.model, out, settings, devices=devices))
                package = evaluate._packed_model(DensePackage(out)).cuda()
            found.append(score(original, package, rows))
        kls, same = zip(*found, strict=True)
        sys.stdout.write(
            f"hidden side of each {side:7} KL {statistics.mean(kls):.5f} "
            f"(standard deviation {statistics.stdev(kls):.5f}), "
            f"top-1 {statistics.mean(same):.4f}, {arguments.seeds} seeds, {count} windows\n"
        )


if __name__ == "__main__":
    main()
