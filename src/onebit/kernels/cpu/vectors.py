"""Vectors for the compiled loops: 64 numbers in registers, and their signs as 64 bits.

numba turns Python functions into machine code with LLVM, a compiler library. LLVM makes vector
instructions out of plain loops, but not out of what these kernels consist of: comparisons that
become bits, and bits that become numbers. Therefore this file teaches numba a type `Vector`, which
is LLVM's own type of 64 numbers, and functions on it. LLVM maps it to registers of whatever width
the processor has.

An `@intrinsic` is a function that numba may call in compiled code. It returns a signature and a
function `generate(context, builder, signature, args)`, which emits the LLVM instructions for one
call: `builder` appends instructions, and `args` are the values that the call gets. Memory is given
by its address, an int64, so that loops can read packed messages that have no NumPy type.
"""

import operator

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

from onebit.layout import ALIGNMENT

LANES = ALIGNMENT  # the numbers of a Vector, which are the lanes of a sum in `torch_ops`
BITS = types.uint64  # of a Vector's elements, the first one lowest


class Vector(types.Type):
    """64 numbers in registers with + - * /. Each operation rounds its own result."""

    def __init__(self, dtype):
        self.dtype = dtype
        super().__init__(name=f"Vector({dtype})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    """How numba represents a Vector in LLVM."""

    def __init__(self, manager, vector):
        super().__init__(
            manager, vector, ir.VectorType(manager[vector.dtype].get_value_type(), LANES)
        )


def _operator(symbol, instruction):
    """Give two equal Vectors a Python operator, which becomes one LLVM instruction."""

    @type_callable(symbol)
    def declare(context):
        return lambda a, b: a if isinstance(a, Vector) and a == b else None

    @lower_builtin(symbol, Vector, Vector)
    def generate(context, builder, signature, args):
        return getattr(builder, instruction)(*args)


_operator(operator.add, "fadd")
_operator(operator.sub, "fsub")
_operator(operator.mul, "fmul")
_operator(operator.truediv, "fdiv")


@intrinsic
def pointer(typing, T, address):
    """The memory at an address as an array of T, aligned for it."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[1], context.get_value_type(signature.return_type))

    return types.CPointer(T.dtype)(T, address), generate


@intrinsic
def record(typing, T, address):
    """The record of type T at an address."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[1], context.get_value_type(T.dtype))

    return T.dtype(T, address), generate


@intrinsic
def size_of(typing, T):
    """Bytes of a T."""
    return types.intp(T), lambda context, builder, signature, args: ir.IntType(64)(
        T.dtype.bitwidth // 8
    )


def _load(result, T, address):
    def generate(context, builder, signature, args):
        return builder.load(
            builder.inttoptr(args[1], context.get_value_type(result).as_pointer()), align=1
        )

    return result(T, address), generate


@intrinsic
def load(typing, T, address):
    """The number of type T at an address, aligned or not."""
    return _load(T.dtype, T, address)


@intrinsic
def load_vector(typing, T, address):
    """The Vector of T at an address, aligned or not."""
    return _load(Vector(T.dtype), T, address)


@intrinsic
def store(typing, address, value):
    """Write a number or Vector to an address, aligned or not."""

    def generate(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], args[1].type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(address, value), generate


@intrinsic
def store_past_caches(typing, address, value):
    """Write a Vector to an address that is a multiple of 64, without reading what is there first.

    Another thread may see it only after `fence`.
    """

    def generate(context, builder, signature, args):
        place = builder.inttoptr(args[0], args[1].type.as_pointer())
        instruction = builder.store(args[1], place, align=64)
        one = ir.Constant(ir.IntType(32), 1)
        instruction.set_metadata("nontemporal", builder.module.add_metadata([one]))
        return context.get_dummy_value()

    return types.void(address, value), generate


@intrinsic
def fence(typing):
    """What was written before is visible to whoever sees what is written after."""

    def generate(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def prefetch(typing, address):
    """Ask for the cache line at an address, which need not be valid."""

    def generate(context, builder, signature, args):
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        options = (number(0), number(3), number(1))  # for reading, into every cache, data
        builder.call(function, (builder.inttoptr(args[0], byte), *options))
        return context.get_dummy_value()

    return types.void(address), generate


@intrinsic
def fetch_and_increment(typing, address):
    """The int64 at an address, which grows by one. No two threads get the same value."""

    def generate(context, builder, signature, args):
        place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, ir.IntType(64)(1), "monotonic")

    return types.int64(address), generate


@intrinsic
def splat(typing, x):
    """The Vector whose elements all are x."""

    def generate(context, builder, signature, args):
        vector = ir.VectorType(args[0].type, LANES)
        one = builder.insert_element(ir.Constant(vector, ir.Undefined), args[0], ir.IntType(32)(0))
        return builder.shuffle_vector(
            one, one, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        )

    return Vector(x)(x), generate


@intrinsic
def select(typing, bits, yes, no):
    """The elements of `yes` where the bit is 1, those of `no` where it is 0."""

    def generate(context, builder, signature, args):
        return builder.select(
            builder.bitcast(args[0], ir.VectorType(ir.IntType(1), LANES)), *args[1:]
        )

    return yes(BITS, yes, no), generate


@intrinsic
def greater(typing, x, y):
    """Bits: x > y. NaN is not greater than anything."""

    def generate(context, builder, signature, args):
        return builder.bitcast(builder.fcmp_ordered(">", *args), ir.IntType(LANES))

    return BITS(x, y), generate


def _comparison(compare, symbol):
    def generate(context, builder, signature, args):
        flags = getattr(builder, compare)(symbol, args[0], ir.Constant(args[0].type, [0.0] * LANES))
        return builder.bitcast(flags, ir.IntType(LANES))

    return generate


@intrinsic
def sign_bits(typing, x):
    """Bits: x >= 0."""
    return BITS(x), _comparison("fcmp_ordered", ">=")


@intrinsic
def nonzero_bits(typing, x):
    """Bits: x != 0. NaN counts as not zero."""
    return BITS(x), _comparison("fcmp_unordered", "!=")


@intrinsic
def nan_bits(typing, x):
    """Bits: x is NaN."""
    return BITS(x), _comparison("fcmp_unordered", "uno")


@intrinsic
def finite_bits(typing, x):
    """Bits: x is neither NaN nor infinite."""
    compare = _comparison("fcmp_ordered", "==")

    def generate(context, builder, signature, args):
        difference = builder.fsub(args[0], args[0])  # 0, or NaN
        return compare(context, builder, signature, (difference,))

    return BITS(x), generate


@intrinsic
def count_ones(typing, bits):
    """The number of bits that are 1."""

    def generate(context, builder, signature, args):
        return builder.ctpop(args[0])

    return types.int64(bits), generate


@intrinsic
def square_root(typing, x):
    """sqrt(x), rounded correctly as IEEE 754 demands."""

    def generate(context, builder, signature, args):
        name = f"llvm.sqrt.v{LANES}f{x.dtype.bitwidth}"
        return builder.call(
            cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(args[0].type, [args[0].type]), name
            ),
            args,
        )

    return x(x), generate


@intrinsic
def add_squares(typing, sums, x):
    """sums + x * x, in float64."""

    def generate(context, builder, signature, args):
        sums, x = args
        if x.type == sums.type:
            return builder.fadd(sums, builder.fmul(x, x))
        wide = builder.fpext(x, sums.type)
        # To fuse product and sum rounds once instead of twice. Here it changes nothing, because
        # the product of two float32 is exact in float64.
        fused = ("contract",)
        return builder.fadd(sums, builder.fmul(wide, wide, flags=fused), flags=fused)

    return sums(sums, x), generate


@intrinsic
def add_halves(typing, sums):
    """The left half is added to the right half until one number is left."""

    def generate(context, builder, signature, args):
        vector, width = args[0], LANES
        while width > 1:
            width //= 2
            lanes = [
                ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(first, first + width)))
                for first in (0, width)
            ]
            left, right = (builder.shuffle_vector(vector, vector, half) for half in lanes)
            vector = builder.fadd(left, right)
        return builder.extract_element(vector, ir.IntType(32)(0))

    return sums.dtype(sums), generate
