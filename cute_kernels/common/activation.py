"""The ReLU family at a non-zero gate g with up projection u, which is 1 without one:

    relu, fatrelu    h = g u                  d_gate = dh u                  d_up = dh g
    relu2            h = g^2 u                d_gate = dh 2 g u              d_up = dh g^2
    drelu            h = g max(u, 0)          d_gate = dh max(u, 0)          d_up = dh g where u > 0, else 0

What is zero is decided where gates are packed, by one threshold or by one for each neuron. The latter lie behind the
biases, as the second half of a vector. ``activation`` is a code of ``geometry.ACTIVATIONS`` at run time: one kernel for
all. For the code 0 the other factor is 1, so relu costs a few more instructions and no bit. Selects rather than
branches, or than `max`, with which overflow.py spills registers. The square of a 16-bit value is exact in fp32.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint16, Uint32, const_expr

from .. import geometry
from .architecture import at_least
from .copies import load_values
from .values import ptx_type

RELU2, DRELU = geometry.ACTIVATIONS["relu2"], geometry.ACTIVATIONS["drelu"]


@cute.jit
def above(pair: Uint32, threshold: Int32 | Uint32, dtype: cutlass.Constexpr) -> Uint32:
    """Both values after ReLU where they are NaN or above the 16-bit value that `threshold` holds twice; else 0."""
    if const_expr(at_least(90)):
        mask = cute.arch.inline_ptx(
            f"set.gtu.u32.{ptx_type(dtype)}x2 {{$w0}}, {{$r0}}, {{$r1}};",
            write_only_types=[Uint32],
            read_only_args=[pair, Uint32(threshold)],
        )
        return pair & mask
    return above_bits(pair, Uint32(threshold))


@cute.jit
def above_bits(pair: Uint32, levels: Uint32) -> Uint32:
    """The same of values after ReLU, in the order of their bits: so NaN is above all others, also as a level."""
    signs = above_signs(pair, levels)
    return pair & Uint32(cute.arch.prmt(signs, signs, 0xBB99))


@cute.jit
def level_of(bias: cute.Tensor, neurons: Int32, neuron: Int32, threshold: Int32) -> Int32:
    """What `above` takes of a neuron: its own value, if there are thresholds behind the biases, else `threshold`."""
    found = threshold
    if (bias.shape[0] > neurons) & (neuron < neurons):
        bits = cute.make_tensor(cute.recast_ptr(bias.iterator, dtype=Uint16), bias.layout)
        found = bits[neurons + neuron].to(Int32) * Int32(0x10001)
    return found


@cute.jit
def levels_of(bias: cute.Tensor, neurons: Int32, neuron: Int32, threshold: Int32) -> cute.Tensor:
    """The same of eight neurons from `neuron`, a multiple of eight: of two in each of four registers."""
    levels = cute.make_rmem_tensor((4,), Uint32)
    levels.fill(Uint32(threshold))
    if (bias.shape[0] > neurons) & (neuron < neurons):
        load_values(bias.iterator + (neurons + neuron), levels)
    return levels


@cute.jit
def above_signs(pair: Uint32, threshold: Int32 | Uint32) -> Uint32:
    """Bits 15 and 31 say whether `above` keeps the values; the other bits say nothing."""
    return (pair | Uint32(0x80008000)) - (Uint32(threshold) + Uint32(0x00010001))


@cute.jit
def power(gate: Float32, activation: Int32) -> Float32:
    """What h is proportional to: g, or its square."""
    return gate * cutlass.select_(activation == RELU2, gate, Float32(1.0))


@cute.jit
def power_pair(pair: Uint32, activation: Int32, dtype: cutlass.Constexpr) -> Uint32:
    """`power` of both values of a pair, rounded once."""
    ones = Uint32(0x3F803F80 if const_expr(dtype is cutlass.BFloat16) else 0x3C003C00)
    factor = cutlass.select_(activation == RELU2, pair, ones)
    return cute.arch.inline_ptx(
        # sm_80 has no product of bfloat16 pairs; adding -0, which must be in a register, changes no bit
        f"{{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.{ptx_type(dtype)}x2 {{$w0}}, {{$r0}}, {{$r1}}, zero; }}",
        write_only_types=[Uint32],
        read_only_args=[pair, Uint32(factor)],
    )


@cute.jit
def rectify(up: Float32, activation: Int32) -> Float32:
    """u, or max(u, 0); NaN stays NaN."""
    return cutlass.select_((activation == DRELU) & (up <= 0.0), Float32(0.0), up)


@cute.jit
def hidden(gate: Float32, up: Float32, activation: Int32) -> Float32:
    """h of a non-zero in fp32."""
    return power(gate, activation) * rectify(up, activation)


@cute.jit
def add_l1(product: Float32, dl1: Float32, h: Float32) -> Float32:
    """dh, the sum of `product` and the gradient of dl1 |h|."""
    sign = Float32(1.0) if h > 0.0 else Float32(0.0)
    sign = Float32(-1.0) if h < 0.0 else sign
    return product + dl1 * sign


@cute.jit
def gradients(dh: Float32, gate: Float32, up: Float32, activation: Int32) -> Any:
    """d_gate and d_up of h in fp32."""
    slope = cutlass.select_(activation == RELU2, gate + gate, Float32(1.0))
    silent = (activation == DRELU) & (up <= 0.0)
    d_gate = dh * slope * rectify(up, activation)
    return d_gate, cutlass.select_(silent, Float32(0.0), dh * power(gate, activation))
