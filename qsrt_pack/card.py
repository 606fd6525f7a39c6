"""The model card of a package: README.md, made from its documents and reports."""

import re
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from qsrt_pack.bench.table import A8, fixed, largest_errors, speeds
from qsrt_pack.validate import bits_per_expert_weight
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import TrueSizes
from qsrt_runtime.format.manifest import CARD
from qsrt_runtime.format.package import Package

_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]*")
_MODEL = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def build_card(
    package: Package,
    repository: str,
    *,
    license_id: str | None,
    base_model: str | None,
    report: dict[str, Any] | None,
    bench: dict[str, Any] | None = None,
) -> str:
    """The card's text. license_id, base_model: by default what the package's card says.

    report: of `eval`.   bench: of `bench`. The same package and arguments give the same text.
    Raises FormatError where license or base model is not known or no name of one.
    """
    known = _read_card(package)
    license_id = license_id or known.get("license")
    base_model = base_model or known.get("base_model")
    if not license_id:
        raise FormatError(f"{package.path}: no license is known; give --license, as apache-2.0")
    if not isinstance(license_id, str) or not _LICENSE.fullmatch(license_id):
        raise FormatError(
            f"{package.path}: license is {license_id!r}, expected an identifier as apache-2.0"
        )
    if not base_model:
        raise FormatError(f"{package.path}: no base model is known; give --base-model OWNER/NAME")
    if not isinstance(base_model, str) or not _MODEL.fullmatch(base_model):
        raise FormatError(
            f"{package.path}: base_model is {base_model!r}, expected OWNER/NAME on the Hub, no path"
        )
    data = ModelCardData(
        base_model=base_model,
        license=license_id,
        library_name="qsrt",
        pipeline_tag="text-generation" if _is_causal(package) else None,
        tags=_tags(package),
        base_model_relation="quantized",
        **_license_link(package, license_id),
    )
    measured = _measured(report) + _timed(bench)
    return f"---\n{data.to_yaml()}\n---\n\n{_body(package, repository, base_model, measured)}"


def _read_card(package: Package) -> dict[str, Any]:
    """The metadata of the package's own card, {} without one."""
    path = package.path / CARD
    if CARD not in package.digests:
        return {}
    try:
        return ModelCard(
            path.read_text(encoding="utf-8"), ignore_metadata_errors=False
        ).data.to_dict()
    except Exception as error:  # the YAML reader has many
        line = " ".join(str(error).split())[:200]
        raise FormatError(f"{path}: its metadata cannot be read: {line}") from None


def _is_causal(package: Package) -> bool:
    architectures = package.documents.config.get("architectures")
    return any(str(name).endswith("ForCausalLM") for name in architectures or [])


def _tags(package: Package) -> list[str]:
    kind = package.documents.config.get("model_type")
    return ["qsrt", "quantized", "3-bit", "moe", *([kind] if isinstance(kind, str) else [])]


def _license_link(package: Package, license_id: str) -> dict[str, str]:
    """What the Hub wants beside a license that is not one of its own."""
    if license_id != "other" or "LICENSE" not in package.digests:
        return {}
    return {"license_link": "LICENSE"}


def _body(package: Package, repository: str, base_model: str, measured: str) -> str:
    geometry, layers = package.geometry, package.layers
    weights = {n for n in package.digests if n.endswith(".safetensors")}
    size = sum((package.path / name).stat().st_size for name in weights)
    bits = bits_per_expert_weight(package)
    name = repository.partition("/")[2]
    return f"""# {name}

[{base_model}](https://huggingface.co/{base_model}) with its routed experts in QSRT trellis
payloads, about {bits:.2f} bits a weight. Everything else is the original's, bit for bit.

| | |
|---|---|
| packed layers | {len(layers)} ({layers[0]} to {layers[-1]}) |
| experts a layer | {geometry.experts}, of which a token goes to \
{package.documents.manifest["geometry"]["topk"]} |
| expert size | hidden {geometry.hidden}, intermediate {geometry.intermediate} |
| stored bits an expert weight | {bits:.4f} |
| bytes of weights | {size:,} |

{measured}## Load

```bash
pip install 'qsrt[transformers]'
```

```python
import torch
import qsrt_runtime.integrations.transformers  # first
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(
    "{repository}", dtype=torch.bfloat16, device_map="auto"
)
tokenizer = AutoTokenizer.from_pretrained("{repository}")
```

`qsrt-pack pull {repository} FOLDER` downloads and checks every byte of it and prints the digest of
the seal, which `--expect` pins.
"""


def _measured(report: dict[str, Any] | None) -> str:
    if report is None:
        return ""
    reference, packed = report["reference_score"], report["package_score"]
    mean, interval = f"{report['kl_mean']:.5f}", report["kl_mean_interval"]
    if interval is not None:
        mean += f" (95 %: {interval['low']:.5f} to {interval['high']:.5f})"
    return f"""## Measured

Against the unquantized model on {report["positions"]:,} positions in windows of \
{report["window"]:,}, in float32:

| | original | this package |
|---|---|---|
| perplexity | {reference["perplexity"]:.4f} | {packed["perplexity"]:.4f} |
| mean KL(original \\|\\| package), nats | | {mean} |
| its median and 99th percentile | | {report["kl_median"]:.5f}, {report["kl_p99"]:.5f} |
| same most likely next token | | {100 * report["top1_agreement"]:.2f} % |

"""


def _timed(report: dict[str, Any] | None) -> str:
    if report is None:
        return ""
    names = [way["way"] for way in report["ways"]]
    titles = [f"{way['way']}, {way['weights']}" for way in report["ways"]]
    packed = [way["way"] for way in report["ways"] if way["weights"] == "packed"]
    lines = [
        " | ".join(["| tokens", *titles, *(f"speed of {name}" for name in packed)]) + " |",
        "|---" * (1 + len(names) + len(packed)) + "|",
    ]
    for row in report["rows"]:
        found = speeds(report, row)
        cells = [fixed(r["us"], 1) if "us" in r else "" for r in row["results"]]
        cells += [fixed(found[name], 2) if name in found else "" for name in packed]
        lines.append(" | ".join([f"| {row['tokens']:,}", *cells]) + " |")
    lines += ["", *_bits(report), *largest_errors(report)]
    text = "\n".join(lines).rstrip()
    return f"""## Speed

Microseconds of a layer's experts on one {report["gpu"]["name"]}, in {report["dtype"]}, by \
`qsrt-pack bench`. Dense are the same weights decoded; speed is the fastest dense way's time over \
the packed one's:

{text}

"""


def _bits(report: dict[str, Any]) -> list[str]:
    """A line of what packed ways read of an expert, none without any."""
    sizes = TrueSizes(report["hidden_size"], report["intermediate_size"])
    found = [
        f"{way['way']} {8 * way['expert_bytes'] / sizes.weights_per_expert:.2f}"
        + (", rows in MXFP8" if way["way"] == A8 else "")
        for way in report["ways"]
        if way["weights"] == "packed"
    ]
    return [f"Bits a weight: {'; '.join(found)}."] if found else []
