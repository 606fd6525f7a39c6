"""A report of bench as a table for people."""

from typing import Any


def describe(report: dict[str, Any]) -> str:
    """What was measured on what, and a line for each number of tokens."""
    gpu, versions = report["gpu"], report["versions"]
    sizes = f"{report['hidden_size']} x {report['intermediate_size']}"
    lines = [
        f"{report['package'] or 'random words'}: {sizes}, {report['experts']} experts, "
        f"top-{report['topk']}, {report['dtype']} rows",
        f"{gpu['name']}, compute capability {gpu['capability']}, L2 cache "
        f"{gpu['l2_bytes'] / 1e6:.0f} MB, copies {gpu['copy_bytes_per_s'] / 1e12:.2f} TB/s; "
        f"torch {versions['torch']}, triton {versions['triton']}",
    ]
    load = report["load"]
    if load is not None:
        lines.append(
            f"loaded {load['layers']} layers, {load['bytes'] / 1e9:.3f} GB, in "
            f"{load['seconds']:.2f} s ({load['bytes'] / load['seconds'] / 1e9:.2f} GB/s) after "
            f"{load['verify_seconds']:.2f} s of checks"
        )
    lines += ["", *_table(report), ""]
    lines.append("us: median of a layer's time; share: of what copying moves in that time, weights")
    lines.append("read once and rows in and out; speed: of the fastest dense way, in its times.")
    if report["dense_absent"] is not None:
        lines.append(f"No dense ways: {report['dense_absent']}.")
    if any(_is_cached(report, row) for row in report["rows"]):
        lines.append("*: what the calls go through is not larger than the L2 cache.")
    lines += [
        f"M = {row['tokens']}, {result['way']} left out: {result['skipped']}"
        for row in report["rows"]
        for result in row["results"]
        if "skipped" in result
    ]
    return "\n".join(lines)


def speeds(report: dict[str, Any], row: dict[str, Any]) -> dict[str, float]:
    """By packed way: the time of the fastest dense way over its own; {} without any."""
    weights = {way["way"]: way["weights"] for way in report["ways"]}
    times = {result["way"]: result["us"] for result in row["results"] if "us" in result}
    dense = [us for way, us in times.items() if weights[way] == "dense"]
    packed = {way: us for way, us in times.items() if weights[way] == "packed"}
    return {way: min(dense) / us for way, us in packed.items()} if dense else {}


def _is_cached(report: dict[str, Any], row: dict[str, Any]) -> bool:
    found = row["distinct_bytes"]
    return found is not None and found <= report["gpu"]["l2_bytes"]


def _table(report: dict[str, Any]) -> list[str]:
    names = [way["way"] for way in report["ways"]]
    packed = [way["way"] for way in report["ways"] if way["weights"] == "packed"]
    head = ["M", *(f"{name} {what}" for name in names for what in ("us", "MB", "share"))]
    rows = [[*head, *(f"{name} speed" for name in packed)]]
    for row in report["rows"]:
        cells = [f"{row['tokens']:,}" + ("*" if _is_cached(report, row) else "")]
        for result in row["results"]:
            cells += _cells(result)
        found = speeds(report, row)
        cells += [f"{found[name]:.2f}" if name in found else "-" for name in packed]
        rows.append(cells)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]


def _cells(result: dict[str, Any]) -> list[str]:
    if "us" not in result:
        return ["-"] * 3
    return [
        f"{result['us']:.1f}",
        f"{result['bytes'] / 1e6:,.1f}",
        f"{100 * result['share']:.0f} %",
    ]
