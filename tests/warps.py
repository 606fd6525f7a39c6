"""Kernels by warps under Triton's interpreter: their PTX is interpreted, all threads at once.

Just the instructions that they use are here, each as the PTX manual has it. A fragment of an mma
lies in the lanes as the manual draws it, so that layouts are tested, and not only sums.
"""

import ctypes
import re
from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(0xFFFF)
_KINDS = {"e4m3": torch.float8_e4m3fn, "f16": torch.float16, "bf16": torch.bfloat16}
_WIDTHS = {"u8": 1, "u16": 2, "u32": 4, "b32": 4, "f32": 4, "b64": 8}
_TYPES = {"r": np.uint32, "f": np.float32, "l": np.uint64}
_UNSET = np.full(1024, 0x7FC12345, np.uint64)  # in registers nothing was written to, NaN as a float


def floats(value):
    return (value & _MASK).astype(np.uint32).view(np.float32)


def bits(value):
    return np.asarray(value, np.float32).view(np.uint32).astype(np.uint64)


def numbers(words, kind):
    """Words [...] of packed numbers as float32 [..., numbers in a word]."""
    raw = np.ascontiguousarray(words.astype(np.uint32)).view(np.uint8).reshape(*words.shape, 4)
    return torch.from_numpy(raw).view(kind).float().numpy()


@cache
def statements(text):
    """(predicate, operation, operands) of each; brackets and braces around operands are kept.

    A label is an operation that ends in a colon.
    """
    found = []
    text = re.sub(r"\{\s*(?=[.a-z@])(?![a-z0-9]+,)", " ", text)  # blocks, but no lists of registers
    for statement in re.split(r";\s*", re.sub(r"\b([a-z]\w*:)(?!:)", r"\1;", text)):
        statement = re.sub(r"^[}\s]*", "", statement).strip()
        if not statement or statement.startswith(".reg"):
            continue
        predicate, operation, rest = re.match(r"(?:@(\w+) )?(\S+) ?(.*)", statement).groups()
        if operation == ".shared":
            found.append((None, "mov.u32", [re.search(r"(\w+)\[", rest).group(1), "1024"]))
            continue
        operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)
        found.append((predicate, operation, operands))
    return found


class Waiting(BaseException):
    """A program waits for another one; not an error, which Triton would make one of its own."""


class Machine:
    """1,024 threads and their shared memory.

    allowed: the tensor that loads which the L1 cache does not keep are from, None for any.
    """

    def __init__(self):
        self.shared = np.zeros(1 << 18, np.uint8)
        self.loads, self.allowed = 0, None

    def run(self, text, constraints, values):
        kinds = [c.strip("=&") for c in constraints.split(",")]
        outputs = sum("=" in c for c in constraints.split(","))
        registers = {}
        for i, value in enumerate(values):
            kind = _TYPES[kinds[outputs + i]]
            raw = np.ascontiguousarray(value).astype(kind, copy=False)
            if value.dtype.itemsize == 4:
                raw = np.ascontiguousarray(value).view(np.uint32)
            registers[f"${outputs + i}"] = np.atleast_1d(raw).astype(np.uint64)
        active = np.ones(1024, bool)
        elsewhere = {}  # threads that have jumped, by label
        for predicate, operation, operands in statements(text):
            if operation.endswith(":"):
                active |= elsewhere.pop(operation[:-1], False)
            elif operation == "bra":
                jumps = active & registers[predicate].astype(bool)
                if operands[0] == "waiting":
                    if jumps.any():
                        raise Waiting
                    continue
                active = active & ~jumps
                elsewhere[operands[0]] = elsewhere.get(operands[0], False) | jumps
            elif active.all():
                self.step(registers, predicate, operation, operands)
            else:
                self.step_some(active, registers, predicate, operation, operands)
        assert not any(threads.any() for threads in elsewhere.values())  # jumps go forward
        found = [registers.get(f"${i}", _UNSET).astype(np.uint32) for i in range(outputs)]
        return [
            v.view(np.float32) if k == "f" else v.view(np.int32)
            for v, k in zip(found, kinds, strict=False)
        ]

    def step_some(self, active, registers, predicate, operation, operands):
        """As step, of the active threads alone."""
        before = dict(registers)
        there = registers[predicate].astype(bool) if predicate else True
        registers["active"] = active & there
        self.step(registers, "active", operation, operands)
        del registers["active"]
        for name, value in registers.items():
            old = before.get(name, _UNSET)
            if value is not old:
                registers[name] = np.where(active, value, old)

    def step(self, registers, predicate, operation, operands):
        half = np.uint64(32 if operation.endswith("b64") else 16)

        def read(name):
            if name in registers:
                return registers[name]
            if name.startswith("{"):
                low, high = map(read, name[1:-1].split(","))
                return low | high << half
            if name == "%tid.x":
                return np.arange(1024, dtype=np.uint64)
            if name.startswith("0f"):
                return np.full(1024, int(name[2:], 16), np.uint64)
            return np.full(1024, int(name, 0) & 0xFFFFFFFF, np.uint64)

        name = operation.split(".")[0]
        if name == "mma":
            self.mma(registers, operation, operands, read)
        elif name in ("ld", "cp", "st", "red"):
            self.move(registers, operation, operands, read, predicate)
        elif name not in ("fence", "prefetch"):
            assert predicate in (None, "active")
            method = _ARITHMETIC.get(name) or getattr(self, name)
            result = method(operation, *map(read, operands[1:]))
            if operands[0].startswith("{"):
                low, high = operands[0][1:-1].split(",")
                registers[low] = result & ((np.uint64(1) << half) - np.uint64(1))
                registers[high] = result >> half
            else:
                registers[operands[0]] = result

    def address(self, operand, read):
        base, _, offset = operand[1:-1].partition("+")
        return read(base) + np.uint64(int(offset or 0))

    def move(self, registers, operation, operands, read, predicate):
        if operation.startswith("cp.async.wait_all"):
            return
        if operation.startswith("cp.async"):
            target, source = (self.address(o, read) for o in operands[:2])
            for to, at in zip(target.tolist(), source.tolist(), strict=True):
                self.shared[to : to + 16] = np.frombuffer(ctypes.string_at(at, 16), np.uint8)
            return
        there = registers[predicate].astype(bool) if predicate else np.ones(1024, bool)
        if operation.startswith("red."):
            for at in np.broadcast_to(self.address(operands[0], read), 1024)[there].tolist():
                ctypes.c_uint32.from_address(at).value += int(operands[1])
            return
        width = _WIDTHS[operation.split(".")[-1]]
        if operation.startswith("st."):
            address = np.broadcast_to(self.address(operands[0], read), 1024)[there].tolist()
            for i, name in enumerate(operands[1].strip("{}").split(",")):
                values = np.broadcast_to(read(name), 1024)[there].tolist()
                for at, value in zip(address, values, strict=True):
                    self.write(operation, at + width * i, value.to_bytes(8, "little")[:width])
            return
        address = np.broadcast_to(self.address(operands[1], read), 1024)
        if self.allowed is not None and "no_allocate" in operation:
            first = self.allowed.data_ptr()
            assert (address[there] >= first).all()
            assert (address[there] + 16 <= first + self.allowed.nbytes).all()
        for i, name in enumerate(operands[0].strip("{}").split(",")):
            if operation.startswith("ld.shared"):
                each = address[:, None] + np.arange(width * i, width * (i + 1), dtype=np.uint64)
                raw = np.ascontiguousarray(self.shared[each & np.uint64(0x3FFFF)])
                found = raw.view(f"<u{width}")[:, 0].astype(np.uint64)
                old = registers.get(name, _UNSET)
                registers[name] = found if there.all() else np.where(there, found, old)
                continue
            assert operation.startswith(
                ("ld.global.", "ld.acquire.gpu.global.u32", "ld.relaxed.gpu.global.v2.b64")
            )
            found = np.broadcast_to(registers.get(name, _UNSET), 1024).copy()
            for thread in np.flatnonzero(there):
                raw = ctypes.string_at(int(address[thread]) + width * i, width)
                found[thread] = int.from_bytes(raw, "little")
            registers[name] = found
        if operation.startswith("ld.shared"):
            return
        self.loads += int(there.sum())

    def write(self, operation, at, raw):
        if operation.startswith("st.shared"):
            self.shared[at : at + len(raw)] = np.frombuffer(raw, np.uint8)
        else:
            assert operation == "st.relaxed.gpu.global.b64"
            ctypes.memmove(at, raw, len(raw))

    def mma(self, registers, operation, operands, read):
        kind = _KINDS[operation.split(".")[-2]]
        each = 4 // kind.itemsize  # numbers of a word
        d, a, b, c = (o[1:-1].split(",") for o in operands)
        lane = np.arange(32)
        group, quarter = lane // 4, lane % 4
        weights = np.zeros((32, 16, 8 * each), np.float32)  # of each warp
        rows = np.zeros((32, 8 * each, 8), np.float32)
        sums = np.zeros((32, 16, 8), np.float32)
        for i, name in enumerate(a):
            found = numbers(read(name).reshape(32, 32), kind)
            for number in range(each):
                depth = quarter * each + number + 4 * each * (i // 2)
                weights[:, group + 8 * (i % 2), depth] = found[:, :, number]
        for i, name in enumerate(b):
            found = numbers(read(name).reshape(32, 32), kind)
            for number in range(each):
                rows[:, quarter * each + number + 4 * each * i, group] = found[:, :, number]
        places = [(group + 8 * (i // 2), 2 * quarter + i % 2) for i in range(4)]
        for name, (row, column) in zip(c, places, strict=True):
            sums[:, row, column] = floats(read(name)).reshape(32, 32)
        sums += weights @ rows
        for name, (row, column) in zip(d, places, strict=True):
            registers[name] = bits(sums[:, row, column].reshape(-1))

    def mov(self, _operation, a):
        return a

    def setp(self, operation, a, b):
        _, compare, kind = operation.split(".")
        if kind == "s32":
            a, b = (v.astype(np.uint32).view(np.int32) for v in (a, b))
        compared = {"ne": a != b, "eq": a == b, "le": a <= b, "lt": a < b, "gt": a > b}[compare]
        return np.broadcast_to(compared, 1024)

    def selp(self, _operation, a, b, predicate):
        return np.where(predicate, a, b)

    def shfl(self, operation, value, lane, *_):
        warps, lane = (np.broadcast_to(v, 1024).reshape(32, 32) for v in (value, lane))
        if operation == "shfl.sync.bfly.b32":
            lane = lane ^ np.arange(32, dtype=np.uint64)
        else:
            assert operation == "shfl.sync.idx.b32"
        return np.take_along_axis(warps, (lane & np.uint64(31)).astype(int), 1).ravel()


def _prmt(_operation, a, b, selector):
    both, found = a | b << np.uint64(32), np.zeros_like(a)
    for i in range(4):
        nibble = selector >> np.uint64(4 * i) & np.uint64(15)
        byte = both >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = (byte >> np.uint64(7)) * np.uint64(255)  # of the byte, eight times
        found |= np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * i)
    return found


def _lop3(_operation, a, b, c, table):
    found = np.zeros_like(a)
    for case in range(8):
        if int(table[0]) >> case & 1:
            terms = [v if case >> i & 1 else ~v for v, i in ((a, 2), (b, 1), (c, 0))]
            found |= terms[0] & terms[1] & terms[2]
    return found & _MASK


def _shf(_operation, low, high, count):
    return (low | high << np.uint64(32)) >> (count & np.uint64(31)) & _MASK


def _brev(_operation, a):
    found = np.zeros_like(a)
    for i in range(32):
        found |= (a >> np.uint64(i) & np.uint64(1)) << np.uint64(31 - i)
    return found


def _packed(kind, *values):
    """Floats, the lowest first, rounded and packed."""
    found = torch.stack([torch.from_numpy(v) for v in values], -1)
    if kind == torch.float8_e4m3fn:
        found = found.clamp(-448, 448)
    size = {2: np.uint16, 4: np.uint32}[kind.itemsize * len(values)]
    return found.to(kind).view(torch.uint8).numpy().view(size)[:, 0].astype(np.uint64)


def _cvt(operation, a, b=None):
    if operation == "cvt.u32.u16":
        return a & _HALF
    if operation == "cvt.f32.f16":
        return bits(numbers(a, torch.float16)[:, 0])
    if operation == "cvt.rn.f16x2.e4m3x2":
        return _packed(torch.float16, *numbers(a, torch.float8_e4m3fn)[:, :2].T.copy())
    kind = {"bf16x2": torch.bfloat16, "f16x2": torch.float16, "e4m3x2": torch.float8_e4m3fn}[
        operation.split(".")[-2]
    ]
    return _packed(kind, floats(b), floats(a))


def _fma(operation, a, b, c):
    kind = operation.split(".")[-1]
    if kind != "f32":
        a, b, c = (numbers(v, _KINDS[kind[:-2]]).astype(np.float64) for v in (a, b, c))
        return _packed(_KINDS[kind[:-2]], *(a * b + c).T.copy())
    a, b, c = (floats(v).astype(np.float64) for v in (a, b, c))
    return bits((a * b + c).astype(np.float32))


_ARITHMETIC = {
    "add": lambda _, a, b: bits(floats(a) + floats(b)),
    "sub": lambda _, a, b: bits(floats(a) - floats(b)),
    "and": lambda _, a, b: a & b,
    "xor": lambda _, a, b: a ^ b,
    "shr": lambda _, a, b: a >> b,
    "shl": lambda _, a, b: a << b & _MASK,
    "bfe": lambda _, a, first, count: a >> first & ((np.uint64(1) << count) - np.uint64(1)),
    "mad": lambda _, a, b, c: a * b + c & _MASK,
    "mul": lambda _, a, b: bits(floats(a) * floats(b)),
    "neg": lambda _, a: a ^ np.uint64(1 << 31),
    "lg2": lambda _, a: bits(np.log2(floats(a))),
    "prmt": _prmt,
    "lop3": _lop3,
    "shf": _shf,
    "brev": _brev,
    "cvt": _cvt,
    "fma": _fma,
}


def _range(*ends):
    return range(*(int(end.handle.data.item()) for end in ends))


def _with_mask(name, place):
    """A load or store whose mask, argument `place`, may be of integers, as compiled ones' may."""
    original = getattr(InterpreterBuilder, name)

    def masked(builder, *arguments):
        mask = arguments[place]
        mask = TensorHandle(mask.data.astype(bool), tl.int1)
        return original(builder, *arguments[:place], mask, *arguments[place + 1 :])

    return masked


def interpret(monkeypatch, *modules):
    """Have Triton's interpreter run inline PTX, and kernel modules' ranges between tensors.

    Returns the machine.
    """
    for module in modules:
        monkeypatch.setattr(module, "range", _range, raising=False)
    machine = Machine()
    kinds = {"r": tl.int32, "f": tl.float32}

    def create(_builder, text, constraints, values, _types, _is_pure, _pack):
        results = machine.run(text, constraints, [v.data for v in values])
        if not values:  # a scalar, by which all threads go the first one's way
            results = [r[:1] for r in results]
        types = [kinds[c.strip("=&")] for c in constraints.split(",") if "=" in c]
        handles = [TensorHandle(r, t) for r, t in zip(results, types, strict=True)]
        return SimpleNamespace(get_result=handles.__getitem__)

    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", create)
    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        monkeypatch.setattr(InterpreterBuilder, name, _with_mask(name, place))
    return machine


def run_together(kernel, programs, arguments, options):
    """Programs that wait for each other: one that has to wait begins anew when others have run.

    What they have written by then they write again.
    """
    builder = interpreter.interpreter_builder
    left = range(programs)
    for _ in range(5):
        waiting = []
        for program in left:

            def choose(*_, program=program):
                builder.grid_idx = (program, 0, 0)

            with patch.object(builder, "set_grid_idx", choose):
                try:
                    kernel[(1,)](*arguments, **options)
                except Waiting:
                    waiting.append(program)
        left = waiting
    assert not left  # or they would wait for ever


class Launched:
    """A kernel that, interpreted, returns what a compiled one does of its shared memory."""

    def __init__(self, kernel, shared):
        self.kernel, self.found = kernel, SimpleNamespace(metadata=SimpleNamespace(shared=shared))

    def __getitem__(self, grid):
        def launch(*arguments, launch_cooperative_grid=False, **options):
            if launch_cooperative_grid:
                run_together(self.kernel, grid[0], arguments, options)
            else:
                self.kernel[grid](*arguments, **options)
            return self.found

        return launch
