"""Vector instructions for compiled code: what the searches' numba intrinsics are put together from.

LLVM's own vectoriser cannot tell that outputs and inputs lie apart, and gives up on the short
inner loops of a trellis. Nothing here checks a bound: the caller's loop answers for it.
"""

from llvmlite import ir

INDEX = ir.IntType(64)
FLOAT = ir.FloatType()


def integers(width: int, numbers: list[int]) -> ir.Constant:
    """A constant vector of integers of `width` bits."""
    return ir.Constant(ir.VectorType(ir.IntType(width), len(numbers)), numbers)


def spread(builder, scalar, lanes: int):
    """A vector with the scalar in every lane."""
    empty = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    first = builder.insert_element(empty, scalar, ir.IntType(32)(0))
    return builder.shuffle_vector(first, empty, integers(32, [0] * lanes))


class Arguments:
    """The arguments of an intrinsic being generated; arrays are read and written flat."""

    def __init__(self, context, builder, signature, arguments):
        self._context, self._builder = context, builder
        self._types, self._arguments = signature.args, arguments

    def load(self, argument: int, place, lanes: int):
        """The vector at element `place` of an array."""
        pointer, alignment = self._pointer(argument, place, lanes)
        return self._builder.load(pointer, align=alignment)

    def store(self, vector, argument: int, place) -> None:
        """Write a vector at element `place` of an array."""
        pointer, alignment = self._pointer(argument, place, vector.type.count)
        self._builder.store(vector, pointer, align=alignment)

    def _pointer(self, argument, place, lanes):
        make = self._context.make_array(self._types[argument])
        data = make(self._context, self._builder, self._arguments[argument]).data
        kind = ir.VectorType(data.type.pointee, lanes).as_pointer()
        pointer = self._builder.bitcast(self._builder.gep(data, [place]), kind)
        return pointer, self._types[argument].dtype.bitwidth // 8
