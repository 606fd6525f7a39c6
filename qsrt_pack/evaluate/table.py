"""Reports as tables for people."""

from typing import Any

from qsrt_pack.evaluation import shown_name


def describe(report: dict[str, Any]) -> str:
    """A report of eval."""
    found, floor = report["kl_mean_interval"], report["noise_floor"]
    mean = f"{report['kl_mean']:.5f} nats"
    if found is not None:
        mean += f" (95 %: {found['low']:.5f} to {found['high']:.5f})"
    lines = [
        ("KL(reference || package), mean", mean),
        ("KL, median", f"{report['kl_median']:.5f} nats"),
        ("KL, 90 %", f"{report['kl_p90']:.5f} nats"),
        ("KL, 99 %", f"{report['kl_p99']:.5f} nats"),
        ("KL, largest at one position", f"{report['kl_max']:.3f} nats"),
        ("top-1 agreement", f"{100 * report['top1_agreement']:.2f} %"),
        ("top-10 agreement", f"{100 * report['top10_agreement']:.2f} %"),
        ("perplexity, reference", f"{report['reference_score']['perplexity']:.4f}"),
        ("perplexity, package", f"{report['package_score']['perplexity']:.4f}"),
        ("stored bits an expert weight", f"{report['bits_per_expert_weight']:.4f}"),
        ("positions", f"{report['positions']:,} in windows of {report['window']:,}"),
    ]
    if floor is not None:
        lines.append(("noise floor (bf16), mean KL", f"{floor['kl_mean']:.5f} nats"))
    if not report["reference_is_source"]:
        lines.append(("note", "the reference is not the checkpoint that was packed"))
    width = max(len(name) for name, _ in lines)
    text = "\n".join(f"{name:<{width}}  {value}" for name, value in lines)
    return text + (f"\n\n{_candidates(report)}" if report["against"] else "")


def _candidates(report: dict[str, Any]) -> str:
    """The package and what it is held against, a line each."""
    package = report | {
        "name": shown_name(report["package"]),
        "score": report["package_score"],
    }
    head = ("candidate", "KL mean", "KL 99 %", "top-1", "perplexity", "bytes", "bits a weight")
    rows = [head]
    for item in (package, *report["against"]):
        rows.append(
            (
                item["name"],
                f"{item['kl_mean']:.5f}",
                f"{item['kl_p99']:.5f}",
                f"{100 * item['top1_agreement']:.2f} %",
                f"{item['score']['perplexity']:.4f}",
                f"{item['stored_bytes']:,}",
                f"{item['bits_per_expert_weight']:.4f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    )
