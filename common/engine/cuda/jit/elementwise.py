"""Row-wise kernels: RMSNorm, SiLU; and what every kernel here begins with."""

import triton
import triton.language as tl


@triton.jit
def begin(PDL: tl.constexpr):
    """Every kernel's first access to what the kernel before it wrote comes after this call.

    With programmatic dependent launch the next kernel may take its place on the SMs from now on; it waits here in its turn until
    all of this one has been written. What is never written, such as weights, may be read before.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(lines):
    """Sends for lines of 128 bytes, from memory to L2; waits for nothing and takes no registers. lines: a tile of pointers."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def rms_norm_kernel(x, weight, out, x_stride, out_stride, eps, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program: one row, held in registers."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < H
    if weight is not None:
        w = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    begin(PDL)
    values = tl.load(x + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    values *= inverse_rms(values, eps, H)
    if weight is not None:
        values *= w
    tl.store(out + row * out_stride + cols, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def inverse_rms(values, eps, WIDTH: tl.constexpr):
    """values: a row of WIDTH, float32, and zeros."""
    return tl.rsqrt(tl.sum(values * values, axis=0) / WIDTH + eps)


@triton.jit
def inverse_root(x, row, stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """inverse_rms of this row of x, which is read whole."""
    at = tl.arange(0, BLOCK)
    return inverse_rms(tl.load(x + row * stride + at, mask=at < WIDTH, other=0.0).to(tl.float32), eps, WIDTH)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def silu_and_mul_kernel(
    gate_up, out, source, gate_up_stride, out_stride, source_stride, eps,
    INNER: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK columns of one row."""
    begin(PDL)
    BLOCKS: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = (program // BLOCKS).to(tl.int64)
    cols = program % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    mask = cols < INNER
    gate = tl.load(gate_up + row * gate_up_stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + INNER + cols, mask=mask, other=0.0).to(tl.float32)
    if source is not None:
        scale = inverse_root(source, row, source_stride, eps, WIDTH, WIDTH_BLOCK)
        gate *= scale
        up *= scale
    tl.store(out + row * out_stride + cols, (silu(gate) * up).to(out.dtype.element_ty), mask=mask)
