"""Draw the README's picture: what goes into a package, to scale, and what reads it.

    python examples/draw_overview.py examples/overview.svg

The heights of the experts are bits a weight: 16, and those of a layer file of 256 experts of
1024 x 512, the padding and scales counted. The picture has colours for light and dark pages.
"""

import argparse
from pathlib import Path

from qsrt_runtime.format.geometry import Geometry

GEOMETRY = Geometry(hidden=1024, intermediate=512, experts=256)
HEIGHT_16 = 176  # of 16 bits
READERS = ("transformers", "vLLM", "torch: moe_forward", "qsrt-pack decode")
STYLE = """
  .page { fill: #ffffff; } .box { fill: #f6f8fa; stroke: #7d8590; }
  .experts { fill: #0969da; } .other { fill: #57606a; }
  text { fill: #24292f; font: 14px system-ui, sans-serif; } .on { fill: #ffffff; }
  .small { font-size: 12px; } .head { font-weight: 600; }
  .arrow { stroke: #57606a; stroke-width: 2; fill: none; } .tip { fill: #57606a; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; } .box { fill: #161b22; stroke: #7d8590; }
    .experts { fill: #1f6feb; } .other { fill: #6e7681; }
    text { fill: #e6edf3; } .on { fill: #ffffff; }
    .arrow { stroke: #9198a1; } .tip { fill: #9198a1; }
  }
"""


def bits(geometry: Geometry) -> float:
    """Stored bits an expert weight of a layer file without its header."""
    slab = geometry.slots * geometry.slot_stride(geometry.experts)
    scales = geometry.experts * 3 * geometry.hidden * 2
    codes = geometry.experts
    return 8 * (slab + scales + codes) / (geometry.experts * geometry.weights_per_expert)


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="middle">{words}</text>'


def box(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height:.1f}" rx="4"/>'


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    tip = f"{to_x},{to_y} {to_x - 9},{to_y - 5} {to_x - 9},{to_y + 5}"
    line = f'<path class="arrow" d="M{x},{y} L{to_x - 8},{to_y}"/>'
    return f'{line}<polygon class="tip" points="{tip}"/>'


def draw() -> str:
    """The picture, 860 x 300."""
    stored = bits(GEOMETRY)
    height = HEIGHT_16 * stored / 16
    middle = 150
    readers = [
        part
        for place, name in enumerate(READERS)
        for part in (
            box("box", 670, 66 + 44 * place, 170, 34),
            text(755, 88 + 44 * place, name),
            arrow(585, middle, 668, 83 + 44 * place),
        )
    ]
    parts = [
        box("page", 0, 0, 860, 300),
        text(115, 24, "Hugging Face checkpoint", "head"),
        box("box", 20, 36, 190, 244),
        box("other", 32, 48, 166, 40),
        text(115, 73, "all other tensors", "on"),
        box("experts", 32, 92, 166, HEIGHT_16),
        text(115, 176, "routed experts", "on"),
        text(115, 196, "16 bits a weight", "on"),
        text(302, 128, "qsrt-pack convert", "head"),
        arrow(214, middle, 391, middle),
        text(302, 172, "exact trellis search,", "small"),
        text(302, 188, "calibrated by a text", "small"),
        text(490, 24, "sealed package", "head"),
        box("box", 395, 36, 190, 244),
        box("other", 407, 48, 166, 40),
        text(490, 73, "the same, bit for bit", "on"),
        box("experts", 407, 92, 166, height),
        text(490, 92 + height / 2 + 5, f"{stored:.2f} bits a weight", "on"),
        text(490, 240, "one digest binds every byte,", "small"),
        text(490, 256, "each is checked on loading", "small"),
        text(755, 24, "read by", "head"),
        *readers,
    ]
    title = f"A checkpoint's experts go from 16 to {stored:.2f} bits a weight; all else is carried."
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 300" role="img">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("svg", type=Path)
    parser.parse_args().svg.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
