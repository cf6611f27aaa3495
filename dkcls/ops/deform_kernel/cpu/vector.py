"""Short float32 vectors for numba: operations on 8 or 32 numbers at once, on any CPU's registers.

LLVM splits a vector that is wider than a register, so that a wide one is an unrolled loop. Memory
is reached through `pointer(address, 0)`, which numba can index as it does an array. No operation
assumes that a number is finite.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

_FLOAT, _INT, _BIT = ir.FloatType(), ir.IntType(32), ir.IntType(1)
_POINTER = types.CPointer(types.float32)


class Vector(types.Type):
    """Vector of `width` float32 numbers."""

    def __init__(self, width: int):
        super().__init__(name=f"Vector({width})")
        self.width = width


class Lanes(types.Type):
    """Lanes that a load or a store touches: all of a vector or, if partial, the first few."""

    def __init__(self, width: int, partial: bool):
        super().__init__(name=f"Lanes({width}, {partial})")
        self.width, self.partial = width, partial


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, vector):
        super().__init__(manager, vector, ir.VectorType(_FLOAT, vector.width))


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, lanes):
        super().__init__(manager, lanes, ir.VectorType(_BIT, lanes.width))


@intrinsic
def pointer(typing, start, index):
    """Return a pointer to the numbers from `index` on of an address, a pointer or an array.

    The array is not kept alive. None gives None.
    """
    if isinstance(start, types.NoneType):
        return types.none(
            start, types.int64
        ), lambda context, builder, signature, args: context.get_dummy_value()

    def generate(context, builder, signature, args):
        first = args[0]
        if isinstance(start, types.Array):
            first = context.make_array(start)(context, builder, first).data
        elif isinstance(start, types.Integer):
            first = builder.inttoptr(first, context.get_value_type(_POINTER))
        return builder.gep(first, [args[1]])

    kind = (
        types.CPointer(start.dtype)
        if isinstance(start, (types.Array, types.CPointer))
        else _POINTER
    )
    return kind(start, types.int64), generate


@intrinsic(prefer_literal=True)
def every(typing, width):
    """Return all the lanes of a vector."""

    def generate(context, builder, signature, args):
        return ir.Constant(context.get_value_type(signature.return_type), [1] * width.literal_value)

    return Lanes(width.literal_value, False)(width), generate


@intrinsic(prefer_literal=True)
def leading(typing, width, count):
    """Return the first `count` lanes of a vector, or all if it has fewer.

    The other lanes load as zero and are not stored.
    """

    def generate(context, builder, signature, args):
        lane = _constant(_INT, range(width.literal_value))
        return builder.icmp_signed(
            "<", lane, _broadcast(builder, builder.trunc(args[1], _INT), width.literal_value)
        )

    return Lanes(width.literal_value, True)(width, types.int64), generate


@intrinsic
def load(typing, lanes, data, index):
    """Load the vector that starts at `index`."""

    def generate(context, builder, signature, args):
        mask, place = args[0], _place(builder, *args[1:], lanes.width)
        kind = place.type.pointee
        if not lanes.partial:
            return builder.load(place, align=4)
        return _call(
            builder,
            f"llvm.masked.load.v{lanes.width}f32.p0",
            kind,
            [place, _INT(4), mask, ir.Constant(kind, None)],
        )

    return Vector(lanes.width)(lanes, _POINTER, types.int64), generate


@intrinsic
def store(typing, lanes, data, index, vector):
    """Store a vector from `index` on."""

    def generate(context, builder, signature, args):
        mask, place, value = args[0], _place(builder, *args[1:3], lanes.width), args[3]
        if lanes.partial:
            _call(
                builder,
                f"llvm.masked.store.v{lanes.width}f32.p0",
                ir.VoidType(),
                [value, place, _INT(4), mask],
            )
        else:
            builder.store(value, place, align=4)
        return context.get_dummy_value()

    return types.void(lanes, _POINTER, types.int64, vector), generate


@intrinsic
def splat(typing, lanes, number):
    """Return a vector with a number in every lane."""

    def generate(context, builder, signature, args):
        return _broadcast(builder, args[1], lanes.width)

    return Vector(lanes.width)(lanes, types.float32), generate


@intrinsic
def alternate(typing, lanes, even, odd):
    """Return a vector of two numbers in turn, `even` first."""

    def generate(context, builder, signature, args):
        pair = (_broadcast(builder, number, lanes.width) for number in args[1:])
        return builder.shuffle_vector(
            *pair, _constant(_INT, [i + lanes.width * (i % 2) for i in range(lanes.width)])
        )

    return Vector(lanes.width)(lanes, types.float32, types.float32), generate


@intrinsic
def add(typing, a, b):
    """Return a + b."""
    return a(a, a), lambda context, builder, signature, args: builder.fadd(*args)


@intrinsic
def sub(typing, a, b):
    """Return a - b."""
    return a(a, a), lambda context, builder, signature, args: builder.fsub(*args)


@intrinsic
def mul(typing, a, b):
    """Return a * b."""
    return a(a, a), lambda context, builder, signature, args: builder.fmul(*args)


@intrinsic
def fma(typing, a, b, c):
    """Return a * b + c, in one instruction where the CPU has it."""

    def generate(context, builder, signature, args):
        return _call(builder, f"llvm.fmuladd.v{a.width}f32", args[0].type, args)

    return a(a, a, a), generate


@intrinsic
def clamp(typing, a, low, high):
    """Return a clamped to [low, high]; NaN stays NaN."""

    def generate(context, builder, signature, args):
        value, low, high = args
        value = builder.select(builder.fcmp_ordered("<", value, low), low, value)
        return builder.select(builder.fcmp_ordered(">", value, high), high, value)

    return a(a, a, a), generate


@intrinsic
def floor(typing, a):
    """Return a rounded down, with 0 for NaN, so that it can become an index."""

    def generate(context, builder, signature, args):
        number = builder.select(
            builder.fcmp_ordered("ord", *args, *args), args[0], ir.Constant(args[0].type, None)
        )
        return _call(builder, f"llvm.floor.v{a.width}f32", number.type, [number])

    return a(a), generate


@intrinsic
def equal(typing, a, b):
    """Return 1 where a and b are equal or one of them is NaN, else 0."""
    return a(a, a), lambda context, builder, signature, args: builder.uitofp(
        builder.fcmp_unordered("==", *args), args[0].type
    )


@intrinsic
def totals(typing, a, b):
    """Return the sums over the lanes of a and of b, always in the same order."""

    def generate(context, builder, signature, args):
        half = a.width // 2
        first, second = (
            [*range(start, start + half), *range(start + a.width, start + a.width + half)]
            for start in (0, half)
        )
        # From here on the first half sums a, the second b.
        sums = builder.fadd(
            *(builder.shuffle_vector(*args, _constant(_INT, lanes)) for lanes in (first, second))
        )
        step = half // 2
        while step:
            sums = builder.fadd(
                sums,
                builder.shuffle_vector(
                    sums, sums, _constant(_INT, [i ^ step for i in range(a.width)])
                ),
            )
            step //= 2
        pair = builder.extract_element(sums, _INT(0)), builder.extract_element(sums, _INT(half))
        return context.make_tuple(builder, signature.return_type, pair)

    return types.UniTuple(types.float32, 2)(a, a), generate


def _constant(kind, numbers):
    return ir.Constant(ir.VectorType(kind, len(numbers)), list(numbers))


def _broadcast(builder, number, width: int):
    undefined = ir.Constant(ir.VectorType(number.type, width), ir.Undefined)
    return builder.shuffle_vector(
        builder.insert_element(undefined, number, _INT(0)), undefined, _constant(_INT, [0] * width)
    )


def _place(builder, data, index, width: int):
    return builder.bitcast(builder.gep(data, [index]), ir.VectorType(_FLOAT, width).as_pointer())


def _call(builder, name: str, result, args):
    function = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), args)
