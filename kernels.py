"""The residual stream's functions as Triton kernels: what model.py computes in plain PyTorch, in one pass over memory.

Read model.py first: it has the same functions, in PyTorch, and a test holds the two together. Here each is a lesson of
four steps: the kernel forward, the kernel backward, the operators that launch them, the public function. Letters are
the paper's: r direction, f the branch's output, g gain, s log-norm; G and D are the gradients of what comes out. A row
is one token's d features, a program holds whole rows in registers, ⟨·,·⟩ and mean run over one row.

    forward     c = f − mean f         κ = ⟨c,r⟩/d              p = c − κ·r             P = ⟨p,p⟩/d
                a = (P + ε)^−½         u = a·p                  y = r + g·u             b = (⟨y,y⟩/d + 1e-12)^−½
                r' = b·y               ν² = P·a²                s' = s + ½·log1p(g²·ν²)

    backward    h  = ⟨G,r'⟩/d          dy = b·(G − h·r')                                through the measured RMS
                t  = ⟨dy,u⟩            dg = t + D·g·ν²/(1 + g²·ν²)
                dp = a·g·dy + (D·g²·ε·a³/(1 + g²·ν²) − a·g·t)·u/d                       through ‖p‖, and through ν
                q  = ⟨dp,r⟩/d          dr = dy − κ·dp − q·c                             κ depends on r and on c
                e  = dp − q·r          df = e − mean e                                  through the centring

These functions do a few operations for each byte, so bytes are what they cost: a *unit* is one read or write of all N·d
activations. Only inputs are kept for the backward pass, which computes the rest anew while the row is in registers:

                                        forward                  backward
    nag_update                          3: r, f, r'              5: G, r, f, dr, df
    nag_update, share k of rows kept    2 + k                    2 + 3k
    gather_rows                         2k                       2 + k
    modulator                           1                        2: r, dr, by library matrix products
    add_rmsnorm (the baseline)          4: x, f, x + f, norm     4: x + f, two gradients, one gradient

All statistics are float32. A row's result depends on that row only, and there are no atomics: equal inputs give equal bits.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("kernels.py needs Triton, which model.py does without: pip install triton (Linux)") from error

MAX_D = 8192            # a row is held by one program
REDUCING_PROGRAMS = 512     # that each add up a part of what is summed over all rows; a fixed number, for equal bits
INTERPRETED = triton.knobs.runtime.interpret     # TRITON_INTERPRET=1: kernels run on the CPU, for tests


# ---------------------------------------------------------------------------------------------------------------------
# Launching


def tile(d: int, lanes: int = 64 if torch.version.hip else 32) -> dict:
    """How many rows of d a program takes, and by how many warps: one vector of 8 features a thread, at most 16 warps.

    It depends on d alone, never on the number of rows or on a timing, since it fixes the order of each sum.
    """
    block_d = max(16, triton.next_power_of_2(d))
    block_rows = 1 if d > 256 else 1024 // block_d
    return {"BLOCK_D": block_d, "BLOCK_ROWS": block_rows, "num_warps": min(16, block_rows * block_d // (8 * lanes))}


def launch(kernel, n_rows: int, most: int | None = None, **arguments):
    """Run a kernel over all tiles of BLOCK_ROWS rows, by at most `most` programs, on the device of its tensors."""
    programs = programs_for(n_rows, arguments["BLOCK_ROWS"], most)
    device = next(value for value in arguments.values() if isinstance(value, Tensor))
    if programs:
        with torch.cuda.device_of(device):
            # Fused multiply-adds are Triton's default in one version and not in another: say it.
            kernel[(programs,)](n_rows=n_rows, **arguments, enable_fp_fusion=True)


def programs_for(n_rows: int, block_rows: int, most: int | None = None) -> int:
    return min(most or n_rows, triton.cdiv(n_rows, block_rows))


def like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """New tensors, to be filled, of the same shapes and types: what an operator allocates, and what its fake returns."""
    return tuple(map(torch.empty_like, tensors))


def check(name: str, tensor: Tensor, shape: tuple, dtypes: tuple, beside: Tensor):
    """ValueError, in one line, unless a tensor is contiguous and has the shape, one of the dtypes, and beside's device."""
    found = (f"shape {tuple(tensor.shape)}, expected {tuple(shape)}" if tensor.shape != shape else
             f"{tensor.dtype}, expected {' or '.join(map(str, dtypes))}" if tensor.dtype not in dtypes else
             f"on {tensor.device}, expected {beside.device}" if tensor.device != beside.device else
             f"strides {tensor.stride()}, expected a contiguous tensor" if not tensor.is_contiguous() else "")
    if found:
        raise ValueError(f"{name}: {found}")


ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)


def check_stream(r: Tensor) -> tuple[int, int]:
    """Rows and width of (…, d) activations."""
    if r.dim() == 0 or not 1 <= r.size(-1) <= MAX_D:
        raise ValueError(f"direction: shape {tuple(r.shape)}, expected (…, d) with d from 1 to {MAX_D}")
    check("direction", r, r.shape, ACTIVATIONS, r)
    return r.numel() // r.size(-1), r.size(-1)


@triton.jit
def place(first, n_rows, d: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows from `first` on (R,), which of them exist (R,), which lanes hold a feature (R, BLOCK_D), and the offsets of these.

    Offsets are int64: a million tokens of width 2048 pass 2³¹.
    """
    row = (first + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    exists = row < n_rows
    return row, exists, exists[:, None] & (column < d)[None, :], row[:, None] * d + column[None, :]


@triton.jit
def among_kept(inverse_ptr, row, exists, at, d: tl.constexpr):
    """Which rows are kept (R,), and where their features lie in a tensor of the kept rows alone (R, BLOCK_D)."""
    source = tl.load(inverse_ptr + row, mask=exists, other=-1).to(tl.int64)
    return source >= 0, at + ((source - row) * d)[:, None]


# ---------------------------------------------------------------------------------------------------------------------
# nag_update: turn each direction by atan(g·ν)


@triton.jit
def mean(x, d: tl.constexpr):
    """Over the features of each row: (R, BLOCK_D) -> (R, 1). Lanes beyond d must hold 0."""
    return tl.sum(x, axis=1)[:, None] / d


@triton.jit
def log1p(x):
    """log(1 + x) to float32's precision for x ≥ 0; plain log(1 + x) is 0 for small x, and Triton has no portable log1p."""
    h = 1 + x
    return tl.where(h == 1, x, tl.log(h) * (x / tl.where(h == 1, 1.0, h - 1)))


@triton.jit
def turn(r, f, g, inside, d: tl.constexpr, eps: tl.constexpr):
    """The forward formulas for rows in registers, r, f (R, BLOCK_D) and g (R, 1): c, κ, a, u, b, r', ν²."""
    c = tl.where(inside, f - mean(f, d), 0.0)       # lanes beyond d are zero again
    kappa = mean(c * r, d)
    p = c - kappa * r
    p_square = mean(p * p, d)
    a = tl.rsqrt(p_square + eps)
    u = a * p
    y = r + g * u
    b = tl.rsqrt(mean(y * y, d) + 1e-12)
    return c, kappa, a, u, b, b * y, p_square * a * a


@triton.jit(do_not_specialize=["n_rows"])
def nag_update_forward_kernel(r_ptr, f_ptr, g_ptr, s_ptr, inverse_ptr, r_new_ptr, s_new_ptr, n_rows, d: tl.constexpr,
                              eps: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """r', s' from r, f, g, s by the forward formulas at the top of the file; a skipped row is copied, not computed.

    Bytes a row: d·(r + f + r') and 12 or 16; of a skipped row d·(r + r') and 16. Statistics are float32.
    inverse_ptr: for each row its place in f, −1 if it is skipped; None: f has all rows.
    """
    row, exists, inside, at = place(tl.program_id(0) * BLOCK_ROWS, n_rows, d, BLOCK_ROWS, BLOCK_D)
    kept, at_f = exists, at
    if inverse_ptr is not None:
        kept, at_f = among_kept(inverse_ptr, row, exists, at, d)
    r = tl.load(r_ptr + at, mask=inside, other=0.0)
    f = tl.load(f_ptr + at_f, mask=inside & kept[:, None], other=0.0).to(tl.float32)
    g = tl.load(g_ptr + row, mask=kept, other=0.0)[:, None]
    s = tl.load(s_ptr + row, mask=exists, other=0.0)[:, None]
    c, kappa, a, u, b, turned, nu_square = turn(r.to(tl.float32), f, g, inside, d, eps)
    turned = tl.where(kept[:, None], turned.to(r.dtype), r)
    tl.store(r_new_ptr + at, turned, mask=inside)
    grown = tl.where(kept[:, None], s + 0.5 * log1p(g * g * nu_square), s)
    tl.store(s_new_ptr + row[:, None], grown, mask=exists[:, None])


@triton.jit(do_not_specialize=["n_rows"])
def nag_update_backward_kernel(G_ptr, D_ptr, r_ptr, f_ptr, g_ptr, inverse_ptr, dr_ptr, df_ptr, dg_ptr, n_rows,
                               d: tl.constexpr, eps: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """dr, df, dg from G = dr', D = ds' by the backward formulas at the top of the file. (ds is D itself.)

    A skipped row has dr = G and dg = 0, and no row of df. Bytes a row: d·(G + r + f + dr + df) and 12 or 16; of a skipped
    row d·(G + dr) and 8. Statistics are float32.
    """
    row, exists, inside, at = place(tl.program_id(0) * BLOCK_ROWS, n_rows, d, BLOCK_ROWS, BLOCK_D)
    kept, at_f = exists, at
    if inverse_ptr is not None:
        kept, at_f = among_kept(inverse_ptr, row, exists, at, d)
    moved = inside & kept[:, None]
    G_here = tl.load(G_ptr + at, mask=inside, other=0.0)
    G, D = G_here.to(tl.float32), tl.load(D_ptr + row, mask=kept, other=0.0)[:, None]
    r = tl.load(r_ptr + at, mask=moved, other=0.0).to(tl.float32)
    f = tl.load(f_ptr + at_f, mask=moved, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + row, mask=kept, other=0.0)[:, None]
    c, kappa, a, u, b, turned, nu_square = turn(r, f, g, moved, d, eps)

    growth = D / (1 + g * g * nu_square)
    dy = b * (G - mean(G * turned, d) * turned)
    t = tl.sum(dy * u, axis=1)[:, None]
    dg = t + growth * g * nu_square
    dp = a * g * dy + (growth * g * g * eps * a * a * a - a * g * t) / d * u
    q = mean(dp * r, d)
    dr = dy - kappa * dp - q * c
    e = dp - q * r                                  # zero beyond d, as dp and r are
    df = e - mean(e, d)

    dr = tl.where(kept[:, None], dr.to(G_here.dtype), G_here)
    tl.store(dr_ptr + at, dr, mask=inside)
    tl.store(df_ptr + at_f, df.to(df_ptr.dtype.element_ty), mask=moved)
    tl.store(dg_ptr + row[:, None], tl.where(kept[:, None], dg, 0.0), mask=exists[:, None])


@torch.library.custom_op("nag::update_forward", mutates_args=())
def update_forward(r: Tensor, f: Tensor, g: Tensor, s: Tensor, inverse: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    (r_new, s_new), (n_rows, d) = like(r, s), r.shape
    launch(nag_update_forward_kernel, n_rows, r_ptr=r, f_ptr=f, g_ptr=g, s_ptr=s,
           inverse_ptr=inverse, r_new_ptr=r_new, s_new_ptr=s_new, d=d, eps=eps, **tile(d))
    return r_new, s_new

update_forward.register_fake(lambda r, f, g, s, inverse, eps: like(r, s))


@torch.library.custom_op("nag::update_backward", mutates_args=())
def update_backward(G: Tensor, D: Tensor, r: Tensor, f: Tensor, g: Tensor, inverse: Tensor | None,
                    eps: float) -> tuple[Tensor, Tensor, Tensor]:
    (dr, df, dg), (n_rows, d) = like(r, f, g), r.shape
    launch(nag_update_backward_kernel, n_rows, G_ptr=G, D_ptr=D, r_ptr=r, f_ptr=f,
           g_ptr=g, inverse_ptr=inverse, dr_ptr=dr, df_ptr=df, dg_ptr=dg, d=d, eps=eps, **tile(d))
    return dr, df, dg

update_backward.register_fake(lambda G, D, r, f, g, inverse, eps: like(r, f, g))


class NagUpdate(torch.autograd.Function):
    """Keeps r, f and g for the backward pass, nothing else. No second derivatives."""

    @staticmethod
    def forward(ctx, r, f, g, s, inverse, eps):
        ctx.save_for_backward(r, f, g, inverse)
        ctx.eps = eps
        return update_forward(r, f, g, s, inverse, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, G, D):
        G, D = G.contiguous(), D.contiguous()       # a sum's gradient is one number, expanded
        return *update_backward(G, D, *ctx.saved_tensors, ctx.eps), D, None, None


def nag_update(direction: Tensor, out: Tensor, gain: Tensor, log_norm: Tensor, rows=None,
               eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """model.nag_update for GPUs: turn each direction (eq 10–17), grow its norm. Returns direction (…, d), log_norm (…).

    direction: (…, d), d up to 8192, float32, bfloat16 or float16.  gain, log_norm: (…), float32.
    out: (…, d), or with rows (k, d); its own dtype, of the same three.  rows: None, or the pair (kept, inverse).
    All contiguous. ValueError for anything else: a silent copy would cost two units.
    """
    n_rows, d = check_stream(direction)
    lead = direction.shape[:-1]
    expected = direction.shape if rows is None else (rows.kept.numel(), d)
    check("out", out, expected, ACTIVATIONS, direction)
    check("gain", gain, lead, (torch.float32,), direction)
    check("log_norm", log_norm, lead, (torch.float32,), direction)
    if rows is not None:
        check("rows.inverse", rows.inverse, (n_rows,), (torch.int32,), direction)
    turned, grown = NagUpdate.apply(direction.view(n_rows, d), out.view(-1, d), gain.view(-1), log_norm.view(-1),
                                    rows and rows.inverse, eps)
    return turned.view(direction.shape), grown.view(lead)


# ---------------------------------------------------------------------------------------------------------------------
# gather_rows: the kept tokens of a stream, which itself passes through


@triton.jit(do_not_specialize=["n_rows"])
def gather_rows_backward_kernel(G_ptr, dk_ptr, inverse_ptr, dr_ptr, n_rows, d: tl.constexpr, BLOCK_ROWS: tl.constexpr,
                                BLOCK_D: tl.constexpr):
    """dr = G + dk[inverse], or G where the row was not gathered: (N, d). Bytes a row: d·(G + dr), of a kept one d·dk more."""
    row, exists, inside, at = place(tl.program_id(0) * BLOCK_ROWS, n_rows, d, BLOCK_ROWS, BLOCK_D)
    kept, at_dk = among_kept(inverse_ptr, row, exists, at, d)
    G = tl.load(G_ptr + at, mask=inside, other=0.0)
    dk = tl.load(dk_ptr + at_dk, mask=inside & kept[:, None], other=0.0)
    summed = (G.to(tl.float32) + dk.to(tl.float32)).to(G.dtype)
    tl.store(dr_ptr + at, tl.where(kept[:, None], summed, G), mask=inside)


@torch.library.custom_op("nag::gather_backward", mutates_args=())
def gather_backward(G: Tensor, dk: Tensor, inverse: Tensor) -> Tensor:
    dr, (n_rows, d) = torch.empty_like(G), G.shape
    launch(gather_rows_backward_kernel, n_rows, G_ptr=G, dk_ptr=dk,
           inverse_ptr=inverse, dr_ptr=dr, d=d, **tile(d))
    return dr

gather_backward.register_fake(lambda G, dk, inverse: torch.empty_like(G))


class GatherRows(torch.autograd.Function):
    """The stream is returned as well, so that both gradients meet here: one pass in place of zeros, a scatter and a sum."""

    @staticmethod
    def forward(ctx, r, kept, inverse):
        ctx.save_for_backward(inverse)
        return r.view_as(r), r.index_select(0, kept)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, G, dk):
        return gather_backward(G.contiguous(), dk.contiguous(), *ctx.saved_tensors), None, None


def gather_rows(direction: Tensor, rows=None) -> tuple[Tensor, Tensor]:
    """model.gather_rows for GPUs: the stream (…, d) to go on with, and its kept rows (k, d); the stream twice for None.

    direction: (…, d), contiguous, float32, bfloat16 or float16.  rows: None, or the pair (kept, inverse).
    """
    if rows is None:
        return direction, direction
    n_rows, d = check_stream(direction)
    check("rows.inverse", rows.inverse, (n_rows,), (torch.int32,), direction)
    stream, gathered = GatherRows.apply(direction.view(n_rows, d), *rows)
    return stream.view(direction.shape), gathered


# ---------------------------------------------------------------------------------------------------------------------
# modulator: how much a layer would like to turn each token
#
#     z = r·wᵀ + b      x = Σ_i softmax(q)_i·σ(z_i)      m = max(x, 1e-6)^β                                         eq 13
#
#     dx = dm·β·m/x, or 0 where x < 1e-6     dz_i = dx·π_i·σ_i·(1 − σ_i)     dr = dz·w     dw = dzᵀ·r     db = Σ_n dz
#     with π = softmax(q) and S_i = Σ_n dx·σ_i: dq = π ⊙ (S − ⟨π,S⟩)         dβ = Σ_n dm·m·log max(x, 1e-6)
#
# One kernel forward, with a matrix product and the rest fused: z comes in float32 straight from the accumulator, and does not
# depend on the number of rows, so that prefill and decoding agree on who is skipped. Backward, one kernel makes dz and all
# the sums; the two large products are a library's.

MODULATOR_TILE = {"BLOCK_ROWS": 32, "num_warps": 4}


@triton.jit(do_not_specialize=["n_rows"])
def modulator_forward_kernel(r_ptr, w_ptr, b_ptr, pi_ptr, beta_ptr, m_ptr, z_ptr, n_rows, d: tl.constexpr, C: tl.constexpr,
                             BLOCK_ROWS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr):
    """m (N,) and, for the backward pass, z (N, C), both float32. Bytes a row: d·r, 4·(C + 1); w stays in the cache.

    UPCAST is for the interpreter, whose tl.dot multiplies the bit patterns of bfloat16 numbers.
    """
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    channel = tl.arange(0, BLOCK_C)
    exists, channels = row[:, None] < n_rows, channel[None, :] < C
    z = tl.zeros((BLOCK_ROWS, BLOCK_C), tl.float32)
    for start in range(0, d, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        r = tl.load(r_ptr + row[:, None] * d + column[None, :], mask=exists & (column < d)[None, :], other=0.0)
        w = tl.load(w_ptr + channel[:, None] * d + column[None, :], mask=(channel < C)[:, None] & (column < d)[None, :], other=0.0)
        if UPCAST:
            r, w = r.to(tl.float32), w.to(tl.float32)
        z = tl.dot(r, tl.trans(w), z, input_precision="ieee")
    z += tl.load(b_ptr + channel, mask=channel < C, other=0.0)[None, :]
    tl.store(z_ptr + row[:, None] * C + channel[None, :], z, mask=exists & channels)
    pi = tl.load(pi_ptr + channel, mask=channel < C, other=0.0)[None, :]
    x = tl.sum(pi * tl.sigmoid(z), axis=1)[:, None]
    m = tl.exp(tl.load(beta_ptr) * tl.log(tl.maximum(x, 1e-6)))
    tl.store(m_ptr + row[:, None], m, mask=exists)


@triton.jit(do_not_specialize=["n_rows"])
def modulator_backward_kernel(dm_ptr, z_ptr, pi_ptr, beta_ptr, dz_ptr, sums_ptr, n_rows, C: tl.constexpr,
                              BLOCK_ROWS: tl.constexpr, BLOCK_C: tl.constexpr):
    """dz (N, C), and from each program its part of the sums db, S and dβ over rows: (programs, 2·C + 1), float32.

    A program takes every num_programs-th tile of rows. Bytes a row: 4 + 4·C and C·dz.
    """
    channel = tl.arange(0, BLOCK_C)
    pi, beta = tl.load(pi_ptr + channel, mask=channel < C, other=0.0)[None, :], tl.load(beta_ptr)
    db, S = tl.zeros((BLOCK_C,), tl.float32), tl.zeros((BLOCK_C,), tl.float32)
    dbeta = tl.zeros((BLOCK_ROWS,), tl.float32)
    for first in range(tl.program_id(0) * BLOCK_ROWS, n_rows, tl.num_programs(0) * BLOCK_ROWS):
        row = (first + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        exists = row < n_rows
        at, inside = row[:, None] * C + channel[None, :], exists[:, None] & (channel < C)[None, :]
        dm = tl.load(dm_ptr + row, mask=exists, other=0.0)
        sigma = tl.sigmoid(tl.load(z_ptr + at, mask=inside, other=0.0))
        x = tl.sum(pi * sigma, axis=1)
        log_x = tl.log(tl.maximum(x, 1e-6))
        m = tl.exp(beta * log_x)
        dx = tl.where(x < 1e-6, 0.0, dm * beta * m / tl.maximum(x, 1e-6))[:, None]
        dz = dx * pi * sigma * (1 - sigma)
        tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=inside)
        db += tl.sum(dz, axis=0)
        S += tl.sum(dx * sigma, axis=0)
        dbeta += dm * m * log_x
    at = sums_ptr + tl.program_id(0) * (2 * C + 1) + channel
    tl.store(at, db, mask=channel < C)
    tl.store(at + C, S, mask=channel < C)
    tl.store(sums_ptr + tl.program_id(0) * (2 * C + 1) + 2 * C, tl.sum(dbeta, axis=0))


def m_and_z(r: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return r.new_empty(len(r), dtype=torch.float32), r.new_empty((len(r), len(b)), dtype=torch.float32)


@torch.library.custom_op("nag::modulator_forward", mutates_args=())
def modulator_forward(r: Tensor, w: Tensor, b: Tensor, q: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    (n_rows, d), C, (m, z) = r.shape, len(b), m_and_z(r, b)
    launch(modulator_forward_kernel, n_rows, r_ptr=r, w_ptr=w, b_ptr=b,
           pi_ptr=q.softmax(0), beta_ptr=beta, m_ptr=m, z_ptr=z, d=d, C=C,
           BLOCK_C=max(16, triton.next_power_of_2(C)), BLOCK_K=64, UPCAST=INTERPRETED, num_stages=3, **MODULATOR_TILE)
    return m, z

modulator_forward.register_fake(lambda r, w, b, q, beta: m_and_z(r, b))


@torch.library.custom_op("nag::modulator_backward", mutates_args=())
def modulator_backward(dm: Tensor, r: Tensor, w: Tensor, q: Tensor, beta: Tensor,
                       z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n_rows, C = z.shape
    # In float16 small dz would vanish; bfloat16 has float32's range.
    dz = torch.empty_like(z, dtype=torch.bfloat16 if r.dtype == torch.bfloat16 else torch.float32)
    sums = z.new_empty((programs_for(n_rows, MODULATOR_TILE["BLOCK_ROWS"], REDUCING_PROGRAMS), 2 * C + 1))
    pi = q.softmax(0)
    launch(modulator_backward_kernel, n_rows, REDUCING_PROGRAMS, dm_ptr=dm, z_ptr=z, pi_ptr=pi, beta_ptr=beta, dz_ptr=dz, sums_ptr=sums,
           C=C, BLOCK_C=max(16, triton.next_power_of_2(C)), **MODULATOR_TILE)
    with torch.autocast(r.device.type, enabled=False):
        dr, dw = dz @ w.to(dz.dtype), dz.T @ r.to(dz.dtype)
    db, S, dbeta = sums.sum(0).split((C, C, 1))
    return dr.to(r.dtype), dw.to(w.dtype), db.clone(), pi * (S - pi @ S), dbeta.clone()

modulator_backward.register_fake(lambda dm, r, w, q, beta, z: like(r, w, q, q, beta))


class Modulator(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r, w, b, q, beta):
        m, z = modulator_forward(r, w, b, q, beta)
        ctx.save_for_backward(r, w, q, beta, z)
        return m

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dm):
        return modulator_backward(dm.contiguous(), *ctx.saved_tensors)


def modulator(direction: Tensor, preferred: Tensor, bias: Tensor, mix: Tensor, beta: Tensor) -> Tensor:
    """model.modulator for GPUs: m in [0, 1], (…) float32, from directions (…, d) in float32, bfloat16 or float16 (eq 13).

    preferred: (C, d), taken in direction's dtype.  bias, mix: (C,), beta: (1,), float32. All contiguous.
    """
    n_rows, d = check_stream(direction)
    C = bias.numel()
    check("preferred", preferred, (C, d), ACTIVATIONS, direction)
    for name, tensor, shape in (("bias", bias, (C,)), ("mix", mix, (C,)), ("beta", beta, (1,))):
        check(name, tensor, shape, (torch.float32,), direction)
    m = Modulator.apply(direction.view(n_rows, d), preferred.to(direction.dtype), bias, mix, beta)
    return m.view(direction.shape[:-1])


# ---------------------------------------------------------------------------------------------------------------------
# add_rmsnorm: the baseline's residual, so that the two are compared with equal care
#
#     y = x + f      a = (mean y² + ε)^−½      ŷ = a·y      n = ŷ ⊙ w
#     with v = dn ⊙ w:      dx = df = dy + a·(v − mean(v·ŷ)·ŷ)      dw = Σ_rows dn ⊙ ŷ


@triton.jit(do_not_specialize=["n_rows"])
def add_rmsnorm_forward_kernel(x_ptr, f_ptr, w_ptr, y_ptr, n_ptr, n_rows, d: tl.constexpr, eps: tl.constexpr,
                               BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """y = x + f in x's dtype and n in f's, from y as it is stored. Bytes a row: d·(x + f + y + n). Statistics are float32."""
    row, exists, inside, at = place(tl.program_id(0) * BLOCK_ROWS, n_rows, d, BLOCK_ROWS, BLOCK_D)
    column = tl.arange(0, BLOCK_D)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    y = (x.to(tl.float32) + tl.load(f_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
    tl.store(y_ptr + at, y, mask=inside)
    y = y.to(tl.float32)
    w = tl.load(w_ptr + column, mask=column < d, other=0.0).to(tl.float32)[None, :]
    n = tl.rsqrt(mean(y * y, d) + eps) * y * w
    tl.store(n_ptr + at, n.to(n_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def add_rmsnorm_backward_kernel(dy_ptr, dn_ptr, y_ptr, w_ptr, dx_ptr, dw_ptr, n_rows, d: tl.constexpr, eps: tl.constexpr,
                                BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """dx (which is df too), and from each program its part of dw: (programs, d), float32.

    A program takes every num_programs-th tile of rows. Bytes a row: d·(dy + dn + y + dx). Statistics are float32.
    """
    column = tl.arange(0, BLOCK_D)
    w = tl.load(w_ptr + column, mask=column < d, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)
    for first in range(tl.program_id(0) * BLOCK_ROWS, n_rows, tl.num_programs(0) * BLOCK_ROWS):
        row, exists, inside, at = place(first, n_rows, d, BLOCK_ROWS, BLOCK_D)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0)
        dn = tl.load(dn_ptr + at, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        a = tl.rsqrt(mean(y * y, d) + eps)
        y_hat = a * y
        dw += dn * y_hat
        v = dn * w
        dx = dy.to(tl.float32) + a * (v - mean(v * y_hat, d) * y_hat)
        tl.store(dx_ptr + at, dx.to(dy.dtype), mask=inside)
    tl.store(dw_ptr + tl.program_id(0) * d + column, tl.sum(dw, axis=0), mask=column < d)


@torch.library.custom_op("nag::rmsnorm_forward", mutates_args=())
def rmsnorm_forward(x: Tensor, f: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    (y, n), (n_rows, d) = like(x, f), x.shape
    launch(add_rmsnorm_forward_kernel, n_rows, x_ptr=x, f_ptr=f, w_ptr=w, y_ptr=y,
           n_ptr=n, d=d, eps=eps, **tile(d))
    return y, n

rmsnorm_forward.register_fake(lambda x, f, w, eps: like(x, f))


@torch.library.custom_op("nag::rmsnorm_backward", mutates_args=())
def rmsnorm_backward(dy: Tensor, dn: Tensor, y: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dx, (n_rows, d) = torch.empty_like(y), y.shape
    dw = y.new_empty((programs_for(n_rows, tile(d)["BLOCK_ROWS"], REDUCING_PROGRAMS), d), dtype=torch.float32)
    launch(add_rmsnorm_backward_kernel, n_rows, REDUCING_PROGRAMS, dy_ptr=dy, dn_ptr=dn, y_ptr=y, w_ptr=w, dx_ptr=dx, dw_ptr=dw,
           d=d, eps=eps, **tile(d))
    return dx, dw.sum(0).to(w.dtype)

rmsnorm_backward.register_fake(lambda dy, dn, y, w, eps: like(y, w))


class AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, f, w, eps):
        y, n = rmsnorm_forward(x, f, w, eps)
        ctx.save_for_backward(y, w)
        ctx.eps = eps
        ctx.f_dtype = f.dtype
        return y, n

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, dn):
        dx, dw = rmsnorm_backward(dy.contiguous(), dn.contiguous(), *ctx.saved_tensors, ctx.eps)
        return dx, dx.to(ctx.f_dtype), dw, None


def add_rmsnorm(residual: Tensor, out: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """model.add_rmsnorm for GPUs: residual + out (…, d), and that normalised by its RMS, times weight (d,), in out's dtype.

    residual, out: (…, d), contiguous, d up to 8192, each float32, bfloat16 or float16.  weight: (d,), of the same three.
    """
    n_rows, d = check_stream(residual)
    check("out", out, residual.shape, ACTIVATIONS, residual)
    check("weight", weight, (d,), ACTIVATIONS, residual)
    total, normalised = AddRMSNorm.apply(residual.view(n_rows, d), out.view(n_rows, d), weight, eps)
    return total.view(residual.shape), normalised.view(residual.shape)
