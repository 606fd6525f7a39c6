"""A report of bench, made up."""

from typing import Any


def result(way: str, us: float | None = None, **changes: Any) -> dict[str, Any]:
    """Of a way, measured or left out."""
    if us is None:
        return {"way": way, "skipped": "takes too much"} | changes
    times = {"us": us, "us_low": us - 1, "us_high": us + 1}
    facts = {"choice": "some", "error": 0.004, "bytes": 2e6, "share": 0.25}
    return {"way": way} | times | facts | changes


def with_ways(report: dict[str, Any]) -> dict[str, Any]:
    """The report with all ways that can be asked for, of which one takes a single token alone."""
    ways = {"qsrt a8": (1_916_928, [20, None]), "qsrt expanded": (4_866_048, [25, 500])}
    for place, (name, (size, times)) in enumerate(ways.items(), start=1):
        report["ways"].insert(place, {"way": name, "weights": "packed", "expert_bytes": size})
        for row, us in zip(report["rows"], times, strict=True):
            row["results"].insert(place, result(name, us))
    return report


def bench_report() -> dict[str, Any]:
    """Two numbers of tokens, of which the second left out a way and fits in the cache."""
    ways = [("qsrt", "packed", 1_916_928), *((n, "dense", 9_437_184) for n in ("torch", "triton"))]
    return {
        "schema": "qsrt_report_v1",
        "kind": "bench",
        "package": "/home/someone/model-qsrt",
        "seal_sha256": "2" * 64,
        "content_sha256": "3" * 64,
        "load": {"layers": 4, "bytes": 3_000_000_000, "seconds": 1.5, "verify_seconds": 2.25},
        "hidden_size": 2048,
        "intermediate_size": 768,
        "experts": 128,
        "topk": 8,
        "dtype": "bfloat16",
        "gpu": {
            "name": "NVIDIA H200",
            "capability": "9.0",
            "multiprocessors": 132,
            "memory_bytes": 150_000_000_000,
            "l2_bytes": 60_000_000,
            "copy_bytes_per_s": 4.1e12,
        },
        "layers_in_turn": 2,
        "ways": [{"way": n, "weights": w, "expert_bytes": b} for n, w, b in ways],
        "dense_absent": None,
        "rows": [
            {
                **{"tokens": 1, "calls": 16, "experts": 8.0, "distinct_bytes": 200_000_000},
                "results": [result("qsrt", 30), result("torch", 90), result("triton", 24)],
            },
            {
                **{"tokens": 4096, "calls": 4, "experts": 128.0, "distinct_bytes": 50_000_000},
                "results": [result("qsrt", 800), result("torch", 1000), result("triton")],
            },
        ],
        "versions": {"qsrt": "0.1.0", "torch": "2.13.0", "triton": "3.6.0"},
        "seconds": 100.0,
    }
