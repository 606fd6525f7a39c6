"""Where a checkpoint keeps each matrix of an expert: what reading, checks and decode share."""

import re
from dataclasses import dataclass
from functools import cache

import torch

MATRICES = ("w1", "w3", "w2")  # gate, up, down
MTP_PREFIX = "mtp."
_NUMBER = r"(0|[1-9]\d{0,8})"


@dataclass(frozen=True)
class ExpertWeight:
    """Where one matrix [out, in] of an expert is stored.

    tensor: the name of what holds it.   index: on the leading axis of a stack of experts, None
    where the tensor is one expert's.   rows: its part of the out axis there.
    is_transposed: stored as [in, out].
    """

    tensor: str
    index: int | None
    rows: range
    is_transposed: bool

    @property
    def block(self) -> tuple[str, int | None]:
        """What is read at once: the tensor, or one index of it."""
        return self.tensor, self.index

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """The matrix [out, in] in what is read at once, a view."""
        matrix = block.T if self.is_transposed else block
        return matrix[self.rows.start : self.rows.stop : self.rows.step]


@dataclass(frozen=True)
class Layout:
    """The tensors of a layer's experts, by names below the layer's.

    gate, up, down: those of w1, w3 and w2, with {expert} where each expert has its own, else
    stacks of all. Where gate and up are one tensor, gate comes first on the out axis.
    is_transposed: matrices are stored as [in, out].
    """

    name: str
    gate: str
    up: str
    down: str
    is_transposed: bool = False

    @property
    def is_stack(self) -> bool:
        return "{expert}" not in self.gate

    def template(self, matrix: str) -> str:
        """The name of what holds w1, w3 or w2."""
        return (self.gate, self.up, self.down)[MATRICES.index(matrix)]

    def stored_shape(self, matrix: str, shape: tuple[int, int], experts: int) -> tuple[int, ...]:
        """The shape of what holds a matrix of shape [out, in]."""
        out, inner = shape
        if matrix != "w2" and self.up == self.gate:
            out *= 2
        block = (inner, out) if self.is_transposed else (out, inner)
        return (experts, *block) if self.is_stack else block

    def expert_of(self, name: str) -> int | None:
        """The expert that a name below the layer's belongs to, 0 for a stack, None for no such."""
        for template in (self.gate, self.up, self.down):
            match = _pattern(template).fullmatch(name)
            if match is not None:
                return int(match[1]) if match.groups() else 0
        return None


@dataclass(frozen=True)
class Naming:
    """The names of a checkpoint's experts.

    prefix: of `layers.0`, with its dot.   count: the layers that config.json counts; those of
    next-token prediction have the numbers from there on.   mtp_layout: that of these if they are
    named apart, below MTP_PREFIX and from 0; None where they are named like the others.
    """

    layout: Layout
    prefix: str
    count: int
    mtp_layout: Layout | None = None

    def document(self) -> dict[str, str | None]:
        """A manifest's `expert_tensors`."""
        return {
            "layout": self.layout.name,
            "prefix": self.prefix,
            "mtp_layout": self.mtp_layout and self.mtp_layout.name,
        }

    def is_apart(self, layer: int) -> bool:
        """Whether a layer is named below MTP_PREFIX."""
        return self.mtp_layout is not None and layer >= self.count

    def layout_of(self, layer: int) -> Layout:
        """The layout of a layer's experts."""
        return self.mtp_layout if self.mtp_layout and self.is_apart(layer) else self.layout

    def path(self, layer: int) -> str:
        """What the names of a layer's tensors begin with."""
        if self.is_apart(layer):
            return f"{MTP_PREFIX}layers.{layer - self.count}."
        return f"{self.prefix}layers.{layer}."

    def template(self) -> str:
        """What gate matrices are called, with {layer} and, unless they are stacked, {expert}."""
        return f"{self.prefix}layers.{{layer}}.{self.layout.gate}"

    def parse(self, name: str) -> tuple[int, str] | None:
        """The layer of a tensor and its name there; None for one outside the layers."""
        match = _pattern(self.prefix + "layers.{}.").match(name)
        if match is not None:
            return int(match[1]), name[match.end() :]
        if self.mtp_layout is not None:
            match = _pattern(MTP_PREFIX + "layers.{}.").match(name)
            if match is not None:
                return self.count + int(match[1]), name[match.end() :]
        return None

    def expert_of(self, name: str) -> int | None:
        """The expert that a tensor belongs to, 0 for a stack, None for no such."""
        layer, inner = self.parse(name) or (0, "")
        return self.layout_of(layer).expert_of(inner)

    def is_nextn(self, name: str) -> bool:
        """Whether a tensor belongs to a layer of next-token prediction, which models leave out."""
        layer, _ = self.parse(name) or (0, "")
        return layer >= self.count or (self.is_apart(self.count) and name.startswith(MTP_PREFIX))

    def weight(self, layer: int, expert: int, matrix: str, out: int) -> ExpertWeight:
        """w1, w3 or w2 of an expert, with so many rows."""
        layout = self.layout_of(layer)
        first = out if matrix == "w3" and layout.up == layout.gate else 0
        return ExpertWeight(
            self.path(layer) + layout.template(matrix).format(expert=expert),
            expert if layout.is_stack else None,
            range(first, first + out),
            layout.is_transposed,
        )


@cache
def _pattern(template: str) -> re.Pattern[str]:
    """A template with a number in braces."""
    return re.compile(_NUMBER.join(map(re.escape, re.split(r"\{\w*\}", template))))
