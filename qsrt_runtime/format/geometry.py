"""Channels, records, pairs, atoms, slots and byte sizes of one layer."""

from dataclasses import dataclass

from qsrt_runtime.format.errors import FormatError

TILE = 16  # rows and columns of a tile
RECORD = 128  # intermediate channels of a record, and the Hadamard block
ATOM = 32  # intermediate channels of an atom: 16 of a low record, 16 of a high one
SLOTS_PER_PAIR = 8
LOCAL_BYTES = 3 * 2 * ATOM  # of one expert in one slot: scales, float16, of three matrices
ALIGNMENT = 4096
ROTATION_MULTIPLIER = 5
# Low and high side of each of three matrices: what the field also calls atoms ("96 an expert").
SIDES_PER_SLOT = 6


def round_up(size: int, multiple: int) -> int:
    """The least multiple that is not below a size."""
    return -(-size // multiple) * multiple


def align(size: int) -> int:
    """Round a byte count up to a multiple of ALIGNMENT."""
    return round_up(size, ALIGNMENT)


@dataclass(frozen=True)
class Geometry:
    """The sizes of one layer's routed experts, as stored.

    hidden: H, a multiple of 128.   intermediate: I, a multiple of 256.   experts: E, at least 1.
    """

    hidden: int
    intermediate: int
    experts: int

    def __post_init__(self) -> None:
        if self.hidden <= 0 or self.hidden % RECORD:
            raise FormatError(
                f"hidden size {self.hidden} is not a positive multiple of {RECORD}, as every "
                "stored one is, padding included"
            )
        if self.intermediate <= 0 or self.intermediate % (2 * RECORD):
            raise FormatError(
                f"expert intermediate size {self.intermediate} is not a positive multiple of "
                f"{2 * RECORD}, as every stored one is, padding included"
            )
        if self.experts <= 0:
            raise FormatError(f"{self.experts} experts; a layer holds at least one")

    @property
    def records(self) -> int:
        return self.intermediate // RECORD

    @property
    def pairs(self) -> int:
        return self.records // 2

    @property
    def slots(self) -> int:
        return self.intermediate // ATOM

    @property
    def hidden_tiles(self) -> int:
        return self.hidden // TILE

    @property
    def atoms_per_expert(self) -> int:
        return self.slots * SIDES_PER_SLOT

    @property
    def weights_per_expert(self) -> int:
        return 3 * self.hidden * self.intermediate

    @property
    def trellis_bytes(self) -> int:
        """Bytes of one matrix in one bundle; the same for P33 and P24."""
        return 12 * self.hidden

    @property
    def bundle_bytes(self) -> int:
        """Bytes of one expert in one slot: three trellis parts and three local scale parts."""
        return 3 * self.trellis_bytes + LOCAL_BYTES

    @property
    def profile(self) -> str:
        """`fruit` for the canonical geometry (16 slots, 96 atoms an expert), else `generic`."""
        return "fruit" if (self.hidden, self.intermediate) == (1024, 512) else "generic"

    def slot_stride(self, compressed: int) -> int:
        """Bytes from one slot row to the next when `compressed` experts are in the slab."""
        return align(compressed * self.bundle_bytes)

    def pair_shift(self, layer: int, expert: int) -> int:
        """How many pairs further on than its logical place each pair of an expert stands."""
        return (ROTATION_MULTIPLIER * expert + layer) % self.pairs

    def physical_slots(self, layer: int, expert: int) -> list[int]:
        """The slot in which each logical atom of an expert stands. Whole pairs move."""
        shift = SLOTS_PER_PAIR * self.pair_shift(layer, expert)
        return [(atom + shift) % self.slots for atom in range(self.slots)]


@dataclass(frozen=True)
class TrueSizes:
    """The sizes of a model's experts as the model has them, any from 1.

    Where hidden is no multiple of 128 or intermediate none of 256, the last channels of what is
    stored are zeros: gate, up and down each end with them, and their scales are 0.
    """

    hidden: int
    intermediate: int

    @property
    def weights_per_expert(self) -> int:
        return 3 * self.hidden * self.intermediate

    @property
    def is_padded(self) -> bool:
        """Whether what is stored is larger."""
        return bool(self.hidden % RECORD or self.intermediate % (2 * RECORD))

    def padded(self, experts: int) -> Geometry:
        """The sizes of so many experts as stored."""
        hidden = round_up(self.hidden, RECORD)
        return Geometry(hidden, round_up(self.intermediate, 2 * RECORD), experts)


def extent(count: int, parts: int, index: int) -> range:
    """The consecutive share `index` of `count` slots (or pairs) over `parts` parts.

    The first count % parts shares have one more. Raises ValueError when a share would be empty.
    """
    if not 1 <= parts <= count or not 0 <= index < parts:
        raise ValueError(f"part {index} of {parts} of {count}: need 0 <= index < parts <= count")
    base, more = divmod(count, parts)
    start = index * base + min(index, more)
    return range(start, start + base + (index < more))
