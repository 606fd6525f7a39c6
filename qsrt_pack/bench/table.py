"""A report of bench as a table for people."""

from typing import Any

A8 = "qsrt a8"  # the way that takes rows in MXFP8


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
    return "\n".join([*lines, *largest_errors(report), *_left_out(report)])


def speeds(report: dict[str, Any], row: dict[str, Any]) -> dict[str, float]:
    """By packed way: the time of the fastest dense way over its own; {} without any."""
    weights = {way["way"]: way["weights"] for way in report["ways"]}
    times = {result["way"]: result["us"] for result in row["results"] if "us" in result}
    dense = [us for way, us in times.items() if weights[way] == "dense"]
    packed = {way: us for way, us in times.items() if weights[way] == "packed"}
    return {way: min(dense) / us for way, us in packed.items()} if dense else {}


def fixed(value: float, digits: int) -> str:
    """With so many digits behind the point, unless it is too large or too small for them."""
    is_plain = 10**-digits <= value < 1e7
    return f"{value:.{digits}f}" if is_plain else f"{value:.1e}"


def _is_cached(report: dict[str, Any], row: dict[str, Any]) -> bool:
    found = row["distinct_bytes"]
    return found is not None and found <= report["gpu"]["l2_bytes"]


def largest_errors(report: dict[str, Any]) -> list[str]:
    """A line of each way's largest error, none where nothing was measured."""
    found: dict[str, float] = {}
    for row in report["rows"]:
        for result in row["results"]:
            if "us" in result:
                found[result["way"]] = max(result["error"], found.get(result["way"], 0))
    if not found:
        return []
    errors = ", ".join(f"{name} {error:.1e}" for name, error in found.items())
    return [f"Largest relative errors: {errors}."]


def _left_out(report: dict[str, Any]) -> list[str]:
    """A line for each way and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in report["rows"]:
        for result in row["results"]:
            if "us" not in result:
                key = (result["way"], result["skipped"])
                found.setdefault(key, []).append(str(row["tokens"]))
    return [f"M = {', '.join(m)}: {way} left out: {why}" for (way, why), m in found.items()]


def _table(report: dict[str, Any]) -> list[str]:
    """Columns of each way under its name."""
    tokens = [f"{row['tokens']:,}" + "*" * _is_cached(report, row) for row in report["rows"]]
    blocks = [_block("", [["M"], *([text] for text in tokens)])]
    for place, way in enumerate(report["ways"]):
        head = ["us", "MB", "share"] + ["speed"] * (way["weights"] == "packed")
        rows = [_cells(row["results"][place], speeds(report, row)) for row in report["rows"]]
        blocks.append(_block(f" {way['way']} ", [head, *(cells[: len(head)] for cells in rows)]))
    return ["   ".join(parts) for parts in zip(*blocks, strict=True)]


def _block(name: str, rows: list[list[str]]) -> list[str]:
    """A line of the name, and one for each row of cells, all of one length."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    width = max(len(name), len(lines[0]))
    return [name.center(width, "-" if name else " "), *(line.rjust(width) for line in lines)]


def _cells(result: dict[str, Any], speed: dict[str, float]) -> list[str]:
    if "us" not in result:
        return ["-"] * 4
    return [
        fixed(result["us"], 1),
        f"{result['bytes'] / 1e6:,.1f}",
        f"{100 * result['share']:.0f} %",
        fixed(speed[result["way"]], 2) if result["way"] in speed else "-",
    ]
