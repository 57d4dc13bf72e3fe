"""The NAG Transformer, whole: the residual stream, its layers, the head, generation, cost and checkpoints.

A token's way through the model, to be read from top to bottom:

    tokens (B, T) ─ embed ─> Stream(direction (B, T, d), log_norm (B, T))
      for each of 2·n_layer layers (attention, MLP, attention, …):
          m      = modulator(direction)          how much this layer would like to turn each token, known beforehand
          rows   = the tokens the layer runs for where m is large; a token whose m is small may skip the layer
          out    = branch(direction, rows)       attention or MLP; it reads the direction alone
          stream = nag_update(stream, out, α·m)  turn the direction by atan(α·m), grow the norm to match
    ─ head ─> logits (B, T, V): the direction's agreement with each vocabulary entry, times the norm

Shape letters: B sequences, T tokens of each, N = B·T tokens of a batch in one row, k of them kept by a layer, d width
(n_embd), H heads of hd = d/H features, V vocabulary, C preferred directions, L = 2·n_layer layers. The method is that
of Figliolia & Millidge, "Scaling Adaptive Depth with Norm-Agnostic Residual Networks" (arXiv 2606.16112); its equation
numbers stand beside the lines that compute them.
[R] marks what the paper leaves open and we had to choose.
"""

import bisect
import contextlib
import copy
import errno
import functools
import hashlib
import itertools
import json
import math
import os
import pickle
import shutil
import warnings
import zipfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO, Callable, Iterator, NamedTuple, Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint


class ModelError(ValueError):
    """A mistake of the caller's, told in one line: what was found, where, and what to do."""


# ---------------------------------------------------------------------------------------------------------------------
# Configuration


@dataclass
class Config:
    """The shape of a model: all that is needed to build one and load its weights."""

    vocab_size: int = 257       # ids 0 … vocab_size−1; the tables are padded to a multiple of 64
    block_size: int = 256       # context, in tokens
    n_layer: int = 6            # blocks; each is two layers, attention and MLP
    n_head: int = 4
    n_embd: int = 128           # d
    residual: str = "nag"       # or "prenorm", the baseline
    n_directions: int = 16      # C, preferred directions of each modulator
    dropout: float = 0.0
    alpha_scale: float = 1.0    # α starts at alpha_scale · l^−alpha_power in layer l = 1, 2, … The paper's start is 1/√l
    alpha_power: float = 0.5    # (eq 23–24), which suits Muon; a flat 0.7 does better under AdamW

    def __post_init__(self):
        for field in fields(self):
            value, wanted = getattr(self, field.name), field.type
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (isinstance(value, wanted) or (wanted is float and number)) or isinstance(value, bool):
                raise ModelError(f"{field.name} {value!r}: expected {wanted.__name__}")
            if number and not 0 <= value < float("inf"):
                raise ModelError(f"{field.name} {value}: expected a finite number that is not negative")
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "n_directions"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} {getattr(self, name)}: expected at least 1")
        if self.residual not in ("nag", "prenorm"):
            raise ModelError(f"residual {self.residual!r}: expected nag or prenorm")
        if self.n_embd % (2 * self.n_head):
            raise ModelError(f"n_embd {self.n_embd}, n_head {self.n_head}: n_embd must be a multiple of 2·n_head, "
                             f"since rotary positions turn pairs of a head's features")
        if self.dropout >= 1:
            raise ModelError(f"dropout {self.dropout}: expected at least 0 and below 1")

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // 64) * 64

    @property
    def least_params(self) -> int:
        """Entries of embeddings, branches and preferred directions: all parameters but a few a layer, without a model."""
        directions = 2 * self.n_directions if self.residual == "nag" else 0
        return self.n_embd * (2 * self.padded_vocab_size + self.n_layer * (12 * self.n_embd + directions))


# ---------------------------------------------------------------------------------------------------------------------
# The two lanes of the residual stream


class Stream(NamedTuple):
    """The residual R of each token, in two lanes: R = exp(log_norm) · direction."""

    direction: torch.Tensor     # (B, T, d): r = √d · R/‖R‖, eq 3–5. In the pre-norm baseline: R itself
    log_norm: torch.Tensor      # (B, T), float32 or wider: log(‖R‖/√d). None in the baseline


class Rows(NamedTuple):
    """The tokens that a layer runs for. Where all N tokens of a batch are meant, there is None in place of this."""

    kept: torch.Tensor          # (k,) int64, ascending, into the flattened N
    inverse: torch.Tensor       # (N,) int32: kept[inverse[n]] = n; −1 for a skipped token


def rows_of(kept, n: int) -> Rows | None:
    """The Rows of kept tokens (k,) int64, ascending and unique, of n; None where they are all."""
    if len(kept) == n:
        return None
    places = torch.arange(len(kept), dtype=torch.int32, device=kept.device)
    return Rows(kept, torch.full((n,), -1, dtype=torch.int32, device=kept.device).scatter(0, kept, places))


def nag_update(direction, out, gain, log_norm, rows=None, eps: float = 1e-6) -> Stream:
    """Turn each token's direction towards a branch's output, and let its norm grow accordingly.

    direction: (…, d), rows of norm √d.  gain, log_norm: (…), float32 or wider, of every token.
    out: (…, d), the branch's output; with `rows`, (k, d) for those tokens alone. The others pass to the last bit.
    Returns the new Stream: direction in its own dtype, all statistics in log_norm's.

    With g the gain that is realised (below), the direction turns by exactly atan(g) and the norm grows by √(1 + g²),
    whatever the norm was: that is what "norm-agnostic" says. Equations 10–17 of the paper.

    `eps` [R] keeps the gradient finite where nothing is left of `out` besides its mean and its part along the
    direction. The turn fades smoothly there: u has an RMS ν below 1, and the realised gain is gain · ν.
    """
    return Stream(*NagUpdate.apply(direction, out, gain, log_norm, None if rows is None else rows.kept, eps))


def take_rows(x, kept):
    """The kept tokens' features: (…, d) -> (k, d); all of them, as they are, where kept is None."""
    return x if kept is None else x.flatten(0, -2).index_select(0, kept)


def put_rows(y, kept, x):
    """x (…, d) with the kept tokens' features replaced by y (k, d); y itself where kept is None."""
    return y if kept is None else x.flatten(0, -2).index_copy(0, kept, y).view(x.shape)


class NagUpdate(torch.autograd.Function):
    """The update and its derivative. Only the inputs are kept for the backward pass, which computes the rest anew: on
    a CPU that takes half the time of letting autograd record each operation. No second derivatives."""

    @staticmethod
    def rotate(r, out, gain, eps):
        """The forward pass, and what the backward pass needs of it. r, out: (…, d); gain: (…, 1)."""
        c = out - out.mean(-1, keepdim=True)                            # centre
        along = (c * r).mean(-1, keepdim=True)
        p = c - along * r                                               # orthogonalise: ⟨p, r⟩ = 0         eq 10–11
        p_square = p.square().mean(-1, keepdim=True)
        scale = (p_square + eps).rsqrt()
        u = p.mul_(scale)                                               # normalise: ‖u‖ = √d               eq 12
        y = r + gain * u                                                # R_{l+1}, in units of ρ_l          eq 14
        # The paper divides by √(1 + g²). The measured RMS is the same number, and keeps rounding from piling up.
        shrink = (y.square().mean(-1, keepdim=True) + 1e-12).rsqrt()
        return c, along, scale, u, shrink, y.mul_(shrink), p_square * scale**2

    @staticmethod
    def forward(ctx, direction, out, gain, log_norm, kept, eps):
        ctx.save_for_backward(direction, out, gain, kept)
        ctx.eps, dtype = eps, log_norm.dtype
        g = take_rows(gain.unsqueeze(-1), kept)
        *_, turned, nu_square = NagUpdate.rotate(take_rows(direction, kept).to(dtype), out.to(dtype), g, eps)
        grown = take_rows(log_norm.unsqueeze(-1), kept) + 0.5 * torch.log1p(g.square() * nu_square)     # eq 15–17
        return (put_rows(turned.to(direction.dtype), kept, direction),
                put_rows(grown, kept, log_norm.unsqueeze(-1)).squeeze(-1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_turned, d_log_norm):
        direction, out, gain, kept = ctx.saved_tensors
        dtype = d_log_norm.dtype
        r, g = take_rows(direction, kept).to(dtype), take_rows(gain.unsqueeze(-1), kept)
        G, D = take_rows(d_turned, kept).to(dtype), take_rows(d_log_norm.unsqueeze(-1), kept)
        c, along, scale, u, shrink, turned, nu_square = NagUpdate.rotate(r, out.to(dtype), g, ctx.eps)
        growth = D / (1 + g.square() * nu_square)
        dy = turned.mul_((G * turned).mean(-1, keepdim=True)).neg_().add_(G).mul_(shrink)   # through the measured RMS
        t = (dy * u).mean(-1, keepdim=True) * r.size(-1)
        d_gain = t + growth * g * nu_square
        # p reaches the output through u, whose length it does not change (less t), and through ν in the log-norm
        d_length = growth * g.square() * ctx.eps * scale**3 - scale * g * t
        dp = u.mul_(d_length / r.size(-1)).addcmul_(dy, scale * g)
        q = (dp * r).mean(-1, keepdim=True)
        dr = dy.addcmul_(dp, along, value=-1).addcmul_(c, q, value=-1)                      # along depends on r and c
        dc = dp.addcmul_(r, q, value=-1)
        d_out = dc - dc.mean(-1, keepdim=True)                                              # through the centring
        d_gain = put_rows(d_gain, kept, torch.zeros_like(gain).unsqueeze(-1)).squeeze(-1)   # none for a skipped token
        return put_rows(dr.to(direction.dtype), kept, d_turned), d_out.to(out.dtype), d_gain, d_log_norm, None, None


def modulator(direction, preferred, bias, mix, beta) -> torch.Tensor:
    """m in [0, 1]: how much a layer would like to turn each token, from the token's direction alone (eq 13).

    m = ( Σ_i softmax(mix)_i · σ(⟨r, w_i⟩ + b_i) )^β  with C preferred directions w_i.

    direction: (…, d).  preferred: (C, d).  bias, mix: (C,).  beta: (1,), positive.
    Returns (…) in bias's dtype, float32 or wider, also under autocast: m decides which layers a token skips.
    """
    with torch.autocast(direction.device.type, enabled=False):
        preferred = preferred.to(direction.dtype).to(bias.dtype)            # rounded as the direction is
        agreement = torch.sigmoid(F.linear(direction.to(bias.dtype), preferred, bias))                      # (…, C)
        average = agreement @ torch.softmax(mix, dim=0)                                                     # (…)
        return average.clamp_min(1e-6) ** beta          # the clamp keeps the power's gradient finite


def gather_rows(direction, rows):
    """The stream (…, d) to go on with, and the rows (k, d) of it that a layer runs for; all of them for None."""
    return direction, direction if rows is None else take_rows(direction, rows.kept)


def add_rmsnorm(residual, out, weight, eps: float = 1e-6):
    """The baseline's step: residual + out, and that normalised by its RMS, times weight (d,)."""
    total = residual + out
    return total, F.rms_norm(total, weight.shape, weight, eps)


class Operations(NamedTuple):
    """The four functions of the stream, from this file or from kernels.py, which has them as Triton kernels."""

    nag_update: Callable
    modulator: Callable
    gather_rows: Callable
    add_rmsnorm: Callable

    @classmethod
    def of(cls, module) -> "Operations":
        """Those of a module that has them under these names."""
        return cls(*(getattr(module, name) for name in cls._fields))


PLAIN = Operations(nag_update, modulator, gather_rows, add_rmsnorm)


def operations(kernels: str, device: torch.device) -> Operations:
    """Who computes the stream's functions: "torch", this file; "triton", kernels.py; "auto", kernels.py on a GPU that has it.

    ModelError for another name, and for "triton" where it cannot run.
    """
    if kernels not in ("auto", "torch", "triton"):
        raise ModelError(f"--kernels {kernels}: expected auto, torch or triton")
    if kernels == "torch" or kernels == "auto" and device.type != "cuda":       # ROCm's GPUs are named cuda as well
        return PLAIN
    try:
        import kernels as triton_kernels
    except ImportError as error:
        if kernels == "auto":
            return PLAIN
        raise ModelError(f"--kernels triton: {error}") from error
    if device.type != "cuda" and not triton_kernels.INTERPRETED:
        raise ModelError(f"--kernels triton: runs on NVIDIA and AMD GPUs, found the device {device.type}; take auto or torch (or "
                         f"set TRITON_INTERPRET=1 to run them on the CPU, slowly, as the tests do)")
    return Operations.of(triton_kernels)


def angle_between(before, after) -> torch.Tensor:
    """Angle through which each token's direction has turned: (…, d), (…, d) -> (…), radians in [0, π].

    Computed in float32 or wider, from the half-angle's tangent, which stays accurate where the arc cosine does not.
    """
    dtype = torch.promote_types(before.dtype, torch.float32)
    a, b = F.normalize(before.to(dtype), dim=-1), F.normalize(after.to(dtype), dim=-1)
    return 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1))


# ---------------------------------------------------------------------------------------------------------------------
# Branches: what a layer computes. Both read the normalised direction, so there is no LayerNorm here


def rotary(positions, head_size: int, dtype):
    """Cosines and sines of the rotary position angles: (…, T) int64 -> two (…, T, hd/2) tensors."""
    pair = torch.arange(0, head_size, 2, device=positions.device, dtype=dtype)
    angles = positions.to(dtype).unsqueeze(-1) * 10_000 ** (-pair / head_size)
    return angles.cos(), angles.sin()


def apply_rotary(x, cos, sin) -> torch.Tensor:
    """Turn the feature pairs (i, i + hd/2) of (B, H, T, hd) by their position's angles."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def banded_mask(query_positions, key_positions, window: int) -> torch.Tensor:
    """Which keys a query sees: itself and the window − 1 positions before it. (B, T), (B, S) -> (B, 1, T, S) bool."""
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    return ((distance >= 0) & (distance < window)).unsqueeze(1)


class Context(NamedTuple):
    """What every attention layer of one forward pass shares."""

    cos: torch.Tensor               # (B or 1, 1, T, hd/2)
    sin: torch.Tensor
    mask: torch.Tensor | None       # (B or 1, 1, T, S); None: plain causal attention over the T tokens themselves
    cache: "KVCache | None" = None
    operations: Operations = PLAIN
    activation_checkpointing: bool = False


class KVCache:
    """Keys and values of the last block_size positions, in all layers, for decoding one token after another.

    A ring: position p lives in slot p mod block_size, so that the newest token replaces the oldest. The sequences of a
    batch may differ in length. Which positions the ring holds is known on the host, hence no device synchronisation.
    """

    def __init__(self, config: Config, batch: int, device, dtype):
        self.window = config.block_size
        shape = (config.n_layer, batch, config.n_head, self.window, config.n_embd // config.n_head)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = [0] * batch                      # tokens seen so far, for each sequence
        self.unit_table = None                          # the head's normalised table, which each token needs again

    def begin(self, n: int):
        """Announce n new tokens for each sequence. Returns their positions (B, n) and the mask of `extend`'s keys."""
        device = self.keys.device
        past, self.new = torch.tensor(self.lengths, device=device).unsqueeze(1), n
        self.filled = min(self.window, max(self.lengths) + (n == 1))
        self.lengths = [length + n for length in self.lengths]
        positions = past + torch.arange(n, device=device)                                        # (B, n)
        newest = past if n == 1 else past - 1                   # the newest position in the ring when it is read
        slot_positions = newest - (newest - torch.arange(self.filled, device=device)) % self.window   # (B, filled)
        # An empty slot comes out as a negative position; far away it is outside of every window.
        slot_positions = slot_positions.masked_fill(slot_positions < 0, -self.window - n)
        keys_at = slot_positions if n == 1 else torch.cat((slot_positions, positions), dim=1)
        self.slots = positions[:, -self.window:] % self.window                                   # (B, min(n, window))
        self.sequence = torch.arange(len(self.lengths), device=device).unsqueeze(1)
        return positions, banded_mask(positions, keys_at, self.window)

    def extend(self, block: int, k, v):
        """Store one block's new k, v (B, H, n, hd); return all that the new tokens may attend to, (B, H, S, hd)."""
        keys, values = self.keys[block], self.values[block]
        held_k, held_v = keys[:, :, :self.filled], values[:, :, :self.filled]
        if self.new > 1:        # the first new tokens still need the old keys that the last ones replace: copy these
            held_k, held_v = torch.cat((held_k, k), dim=2), torch.cat((held_v, v), dim=2)
        for ring, new in ((keys, k), (values, v)):
            ring[self.sequence, :, self.slots] = new[:, :, -self.window:].transpose(1, 2).to(ring.dtype)
        return held_k, held_v

    @staticmethod
    def join(caches: Sequence["KVCache"]) -> "KVCache":
        """One cache for the sequences of several, in their order."""
        joined = copy.copy(caches[0])
        joined.keys = torch.cat([cache.keys for cache in caches], dim=1)
        joined.values = torch.cat([cache.values for cache in caches], dim=1)
        joined.lengths = [length for cache in caches for length in cache.lengths]
        return joined


class Attention(nn.Module):
    """Causal multi-head attention. Keys and values are made for every token, so that later ones find them whoever
    skips this layer; the query and the output, which have matrices of their own, for the kept rows only."""

    def __init__(self, config: Config, block: int):
        super().__init__()
        self.n_head, self.dropout, self.block = config.n_head, config.dropout, block
        self.query = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.key_value = nn.Linear(config.n_embd, 2 * config.n_embd, bias=False)
        self.output = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def keys_and_values(self, x, context: Context):
        """x: (B, T, d) -> k, v: (B, H, S, hd) each, of these T tokens and of those in the cache, which keeps them all."""
        B, T, d = x.shape
        k, v = self.key_value(x).view(B, T, 2 * self.n_head, -1).transpose(1, 2).chunk(2, dim=1)     # (B, H, T, hd)
        k = apply_rotary(k, context.cos, context.sin)
        return (k, v) if context.cache is None else context.cache.extend(self.block, k, v)

    def forward(self, x, x_kept, kept, context: Context) -> torch.Tensor:
        """x: (B, T, d), x_kept: the k rows of it that are kept -> (k, d); both are all of x, as is the output, for None."""
        B, T, d = x.shape
        k, v = self.keys_and_values(x, context)
        q = self.query(x_kept)
        if kept is not None:
            q = put_rows(q, kept, torch.zeros_like(x, dtype=q.dtype))                            # (B, T, d)
        q = apply_rotary(q.view(B, T, self.n_head, -1).transpose(1, 2), context.cos, context.sin)      # (B, H, T, hd)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=context.mask, is_causal=context.mask is None,
                                           dropout_p=self.dropout if self.training else 0.0)     # (B, H, T, hd)
        return self.output(take_rows(y.transpose(1, 2).reshape(B, T, d), kept))


class MLP(nn.Module):
    """Two matrices with a GELU between them; 4·d features in the middle."""

    def __init__(self, config: Config):
        super().__init__()
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.output = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x, x_kept, kept, context: Context) -> torch.Tensor:
        """x_kept: (k, d) -> (k, d), or (B, T, d) -> (B, T, d); it looks at nothing else."""
        return self.output(F.gelu(self.up(x_kept)))


# ---------------------------------------------------------------------------------------------------------------------
# Layers: a branch and how its output enters the stream


def recomputed(function):
    """The function, keeping for the backward pass only its arguments; what lies between is computed again."""
    return functools.partial(torch.utils.checkpoint.checkpoint, function, use_reentrant=False)


class NAGLayer(nn.Module):
    """A branch that turns the direction by atan(α·m)."""

    def __init__(self, config: Config, branch: nn.Module):
        super().__init__()
        self.branch = branch
        self.dropout = nn.Dropout(config.dropout)
        self.alpha = nn.Parameter(torch.empty(1))
        self.beta_raw = nn.Parameter(torch.empty(1))            # β = softplus(beta_raw) > 0
        self.preferred = nn.Parameter(torch.empty(config.n_directions, config.n_embd))      # w_i
        self.bias = nn.Parameter(torch.empty(config.n_directions))                          # b_i
        self.mix = nn.Parameter(torch.empty(config.n_directions))                           # q

    def modulate(self, direction, operations: Operations = PLAIN) -> torch.Tensor:
        """m, (B, T): known before the branch runs."""
        return operations.modulator(direction, self.preferred, self.bias, self.mix, F.softplus(self.beta_raw))

    def forward(self, stream: Stream, choose, context: Context):
        """The stream after this layer, and the rows it ran for: choose(m), or all (None) where there is no choice."""
        direction, log_norm = stream
        m = self.modulate(direction, context.operations)                                         # (B, T)
        rows = choose(m.detach()) if choose is not None else None
        if rows is not None and len(rows.kept) == 0 and context.cache is not None:
            # Decoding, and nobody runs this layer: nothing is left to do but to keep what later tokens may attend to.
            if isinstance(self.branch, Attention):
                self.branch.keys_and_values(direction, context)
            return stream, rows
        act = recomputed(self.act) if context.activation_checkpointing else self.act
        return Stream(*act(direction, m, log_norm, rows, context)), rows

    def act(self, direction, m, log_norm, rows, context: Context):
        """Run the branch for the rows that were chosen, and turn their directions."""
        kept = None if rows is None else rows.kept
        direction, x_kept = context.operations.gather_rows(direction, rows)                      # (B, T, d), (k, d)
        out = self.dropout(self.branch(direction, x_kept, kept, context))                        # (k, d) or (B, T, d)
        return context.operations.nag_update(direction, out, self.alpha * m, log_norm, rows)


class PreNormStream(NamedTuple):
    """The baseline's residual, as its layers hand it on: R = residual + pending.

    A layer leaves the addition to the next one, which so adds and normalises in one pass over memory.
    """

    residual: torch.Tensor                  # (B, T, d)
    pending: torch.Tensor | None = None     # (B, T, d), the last branch's output; None at the start

    def normalised(self, weight, operations: Operations):
        """R, and what the next branch or the head reads of it: (B, T, d) each."""
        if self.pending is None:
            return self.residual, F.rms_norm(self.residual, weight.shape, weight, 1e-6)
        return operations.add_rmsnorm(self.residual, self.pending, weight)

    def settled(self) -> Stream:
        return Stream(self.residual if self.pending is None else self.residual + self.pending, None)


class PreNormLayer(nn.Module):
    """The baseline: a branch reads the normalised residual, and its output is added to the residual."""

    def __init__(self, config: Config, branch: nn.Module):
        super().__init__()
        self.branch = branch
        self.dropout = nn.Dropout(config.dropout)
        self.norm = nn.RMSNorm(config.n_embd, eps=1e-6)

    def forward(self, stream: PreNormStream, choose, context: Context):
        act = recomputed(self.act) if context.activation_checkpointing else self.act
        return PreNormStream(*act(*stream, context)), None

    def act(self, residual, pending, context: Context):
        residual, x = PreNormStream(residual, pending).normalised(self.norm.weight, context.operations)
        return residual, self.dropout(self.branch(x, x, None, context))


# ---------------------------------------------------------------------------------------------------------------------
# Depth: which tokens a layer runs for. A token whose modulator is small would hardly be turned, and skips the layer


def tie_break(positions, n_layers: int) -> torch.Tensor:
    """A fixed pseudo-random number in [0, 1) for each layer and position: (B, T) int64 -> (L, B, T) float32.

    What is ranked or cut is m + 1e-4 · this number. Ties would be common without it: the first layer sees token ids
    alone, so that all blanks of a text share one m, and tokens that skip a layer together stay tied at the next. It
    depends on layer and position only: the same in training, evaluation and decoding, and causal.
    """
    layers = torch.arange(n_layers, device=positions.device).view(-1, 1, 1)
    x = (positions * 0x9E3779B1 + layers * 0x85EBCA6B) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):          # mixes the bits of a 32-bit number
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return ((x ^ (x >> 16)) >> 8).float() / 2**24


def kept_count(rate: float, n: int) -> int:
    """k = n − ⌊rate · n⌋, the tokens of n that a layer runs for at a skip rate."""
    return n - math.floor(rate * n + 1e-9)


class Depth:
    """Which tokens each layer runs for: all of them, unless a subclass says otherwise."""

    def rows(self, layer: int, score) -> Rows | None:
        """The kept tokens of score (B, T). None: all."""
        return None

    def drops(self, layer: int) -> bool:
        """Whether the layer is left out whole, keys and values too."""
        return False


class TopShare(Depth):
    """For training: layer l runs for the share 1 − rates[l] of the batch's tokens with the largest score.

    The number of rows is fixed by the rate, so shapes are static and no device is waited for. The choice looks at the
    whole batch, later tokens included: it is not causal, which is why losses are measured with `AboveCut`.
    """

    def __init__(self, rates: Sequence[float], n_tokens: int | None = None):
        """n_tokens: B·T, where it is known; a compiled step can then take the counts as symbols, see train.py."""
        self.rates = tuple(rates)
        self.counts = None if n_tokens is None else [kept_count(rate, n_tokens) for rate in rates]

    def rows(self, layer: int, score):
        k = self.counts[layer] if self.counts else kept_count(self.rates[layer], score.numel())
        if k == score.numel():
            return None
        return rows_of(score.flatten().topk(k, sorted=False).indices.sort().values, score.numel())


class RandomShare(TopShare):
    """The control: the same shares, of tokens drawn at random."""

    def rows(self, layer: int, score):
        return super().rows(layer, torch.rand_like(score))


class AboveCut(Depth):
    """For evaluation and sampling: layer l runs for the tokens whose score is above cuts[l]. Causal."""

    def __init__(self, cuts: Sequence[float]):
        self.cuts = tuple(cuts)

    def rows(self, layer: int, score):
        if self.cuts[layer] == -math.inf:
            return None
        return rows_of((score > self.cuts[layer]).flatten().nonzero().squeeze(1), score.numel())


class MeasureCuts(TopShare):
    """A top share that notes where it cut: half-way between the last score that was kept and the first that was not."""

    def __init__(self, rates: Sequence[float]):
        super().__init__(rates)
        self.cuts = [0.0] * len(self.rates)

    def rows(self, layer: int, score):
        ordered, k = score.flatten().sort(descending=True).values, kept_count(self.rates[layer], score.numel())
        self.cuts[layer] = ordered[max(k - 1, 0):k + 1].mean().item()
        return super().rows(layer, score)


class StaticDrop(Depth):
    """The other control: some layers are left out whole, for every token."""

    def __init__(self, layers: Sequence[int]):
        self.layers = frozenset(layers)

    def drops(self, layer: int) -> bool:
        return layer in self.layers


def layer_rates(rate, n_layers: int) -> list[float]:
    """One rate a layer from one number for all, or from a list of them. ModelError outside of [0, 1) or of L entries."""
    rates = [float(x) for x in rate] if isinstance(rate, (list, tuple)) else [float(rate)] * n_layers
    if len(rates) != n_layers:
        raise ModelError(f"skip_rate: {len(rates)} numbers, expected one or {n_layers} (2·n_layer)")
    for x in rates:
        if not 0 <= x < 1:
            raise ModelError(f"skip_rate {x:g}: expected at least 0 and below 1; try 0.25")
    return rates


def rate_from_depth(depth_budget: float, n_layers: int) -> float:
    """The skip rate that leaves each token `depth_budget` of its n_layers layers, on average."""
    rate = 1 - depth_budget / n_layers
    if not 0 <= rate < 1:
        raise ModelError(f"depth_budget {depth_budget:g}: expected above 0 and at most {n_layers} (2·n_layer) layers")
    return rate


def interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """The piecewise linear function through (xs, ys), xs ascending, at x; constant outside."""
    i = min(max(bisect.bisect_right(xs, x), 1), len(xs) - 1)
    step = xs[i] - xs[i - 1]
    share = 0.5 if step == 0 else min(1.0, max(0.0, (x - xs[i - 1]) / step))
    return ys[i - 1] + share * (ys[i] - ys[i - 1])


# ---------------------------------------------------------------------------------------------------------------------
# The whole model


class NAGTransformer(nn.Module):
    """A decoder-only language model on a norm-agnostic residual stream, or its pre-norm twin."""

    RATES = tuple(i / 20 for i in range(21))        # the skip rates of the threshold table: 0, 0.05, … 1

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        layer = NAGLayer if config.residual == "nag" else PreNormLayer
        self.embedding = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.layers = nn.ModuleList()
        for block in range(config.n_layer):
            self.layers += [layer(config, Attention(config, block)), layer(config, MLP(config))]
        self.unembedding = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        if config.residual == "nag":
            self.log_norm_start = nn.Parameter(torch.empty(1))
            n_rates, n_layers = len(self.RATES), len(self.layers)
            self.register_buffer("quantiles", torch.full((n_rates, n_layers), torch.nan))   # cuts at RATES; not yet known
            self.register_buffer("gains", torch.full((n_layers,), torch.nan))               # |α| when they were measured
            self.register_buffer("default_rates", torch.zeros(n_layers))                    # that sampling skips at,
            self.register_buffer("default_cuts", torch.full((n_layers,), torch.nan))        # and its own thresholds
        else:
            self.final_norm = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.operations, self.activation_checkpointing = PLAIN, False
        self.init_weights()

    def use_kernels(self, kernels: str = "auto") -> "NAGTransformer":
        """Let `operations` choose the stream's functions, for the device that the model is on. Returns the model."""
        self.operations = operations(kernels, self.unembedding.weight.device)
        return self

    @torch.no_grad()
    def init_weights(self):
        """Every initial value, in one place. Each arm has those that an equal search found for it (recipe.py).

                              NAG                           pre-norm
        embedding             normal, std 0.02              normal, std 1
        unembedding           normal, std 1/√d              the same
        branch matrices       normal, std 1/√fan_in         the same; output matrices divided by 4√L
        log-norm at the start −1.2                          –        (first loss close to log V)
        α of layer l = 1, …   alpha_scale · l^−alpha_power  –        (eq 23–24)
        w, b, q, β            std 0.02, 0, 0, 1             –
        RMSNorm gains         –                             1

        NAG's output matrices are not shrunk: the update normalises a branch's output, and where little of it is left
        the turn fades and the gradient grows. Of its unembedding rows only the direction counts: the larger they start,
        the less a step turns them. The baseline's branches start small beside its embedding, and add as they learn.
        """
        for name, parameter in self.named_parameters():
            if name.startswith("embedding"):
                parameter.normal_(std=1 if self.config.residual == "prenorm" else 0.02)
            elif name.startswith("unembedding") or ".branch." in name:
                parameter.normal_(std=parameter.size(1) ** -0.5)
                if self.config.residual == "prenorm" and ".output." in name:
                    parameter.div_(4 * math.sqrt(len(self.layers)))
        if self.config.residual == "prenorm":
            return
        self.log_norm_start.fill_(-1.2)
        for l, layer in enumerate(self.layers, start=1):
            layer.alpha.fill_(self.config.alpha_scale * l**-self.config.alpha_power)
            layer.beta_raw.fill_(math.log(math.expm1(1.0)))
            layer.preferred.normal_(std=0.02)
            layer.bias.zero_()
            layer.mix.zero_()

    def embed(self, tokens) -> Stream:
        """tokens (B, T) -> Stream. A row of the table is centred and normalised; all tokens start with one norm [R]."""
        rows = self.embedding(tokens)                                                            # (B, T, d)
        if self.config.residual == "prenorm":
            return PreNormStream(rows)
        log_norm = self.log_norm_start.repeat(tokens.shape)
        direction = F.rms_norm(rows - rows.mean(-1, keepdim=True), rows.shape[-1:], eps=1e-12)
        device = direction.device.type
        if torch.is_autocast_enabled(device):                   # decided once, here: branches and updates follow
            direction = direction.to(torch.get_autocast_dtype(device))
        return Stream(direction, log_norm)

    def unit_table(self) -> torch.Tensor:
        """The rows ŵ_v/√d of the unembedding: centred, of norm 1. (padded V, d)"""
        table = self.unembedding.weight
        return F.normalize(table - table.mean(-1, keepdim=True), dim=-1)

    def head(self, stream: Stream, unit_table=None) -> torch.Tensor:
        """Stream -> logits (B, T, V), float32 or wider.

        logits = ⟨r, ŵ_v⟩/√d · exp(log_norm) with rows ŵ_v centred and of norm √d: the cosine times √d, times the norm,
        which so acts as an inverse temperature [R for the 1/√d].
        """
        if self.config.residual == "prenorm":
            _, x = stream.normalised(self.final_norm.weight, self.operations)
            logits = self.unembedding(x)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        else:
            logits = F.linear(stream.direction, self.unit_table() if unit_table is None else unit_table)
            logits = logits.to(stream.log_norm.dtype) * stream.log_norm.exp().unsqueeze(-1)
        return logits[..., :self.config.vocab_size]             # the padding of the vocabulary is never seen outside

    def run_layers(self, tokens, depth=None, cache: KVCache | None = None, watch=None) -> Stream:
        """tokens (B, T) int64 -> the stream after the last layer; depth, cache and watch as in `forward`."""
        T, window = tokens.size(1), self.config.block_size
        if cache is not None:
            positions, mask = cache.begin(T)
        else:
            positions = torch.arange(T, device=tokens.device).unsqueeze(0)                       # (1, T)
            mask = None if T <= window else banded_mask(positions, positions, window)
        stream = self.embed(tokens)
        table_dtype = torch.promote_types(self.unembedding.weight.dtype, torch.float32)
        cos, sin = rotary(positions.unsqueeze(1), self.config.n_embd // self.config.n_head, table_dtype)
        context, choose = Context(cos, sin, mask, cache, self.operations,
                                  self.activation_checkpointing and torch.is_grad_enabled()), None
        if depth is not None:
            ties = 1e-4 * tie_break(positions, len(self.layers))                                 # (L, B or 1, T)
        for l, layer in enumerate(self.layers):
            if depth is not None:
                if depth.drops(l):
                    continue
                if self.config.residual == "nag":
                    choose = lambda m: depth.rows(l, m + ties[l])
            before = stream
            stream, rows = layer(stream, choose, context)
            if watch is not None:
                nag = self.config.residual == "nag"
                watch(l, before if nag else before.settled(), stream if nag else stream.settled(), rows)
        return stream

    def forward(self, tokens, depth=None, cache: KVCache | None = None, watch=None) -> torch.Tensor:
        """tokens (B, T) int64 -> logits (B, T, V), float32 or wider.

        depth: who runs, a TopShare, AboveCut, RandomShare or StaticDrop; None: every layer for every token.
        cache: tokens are the next T of each sequence. Without one they start at position 0; a text longer than
        block_size is attended through a band of that width, which is what decoding with the cache computes.
        watch: called after each layer with its number, the streams before and after, and the Rows it ran for, or None.
        """
        stream = self.run_layers(tokens, depth, cache, watch)
        if cache is None or self.config.residual == "prenorm":
            return self.head(stream)
        if cache.unit_table is None:
            cache.unit_table = self.unit_table()
        return self.head(stream, cache.unit_table)

    def loss(self, tokens, targets, depth=None) -> torch.Tensor:
        """Mean cross-entropy in nats a token; tokens, targets (B, T) int64."""
        return F.cross_entropy(self(tokens, depth).flatten(0, 1), targets.flatten())

    # -----------------------------------------------------------------------------------------------------------------
    # The dial: one checkpoint, any depth

    @torch.no_grad()
    def measured_cuts(self, tokens, rates: Sequence[float]) -> list[float]:
        """The cuts at which a forward pass of tokens (B, T) skips at these rates, one a layer."""
        measure = MeasureCuts(rates)
        self.run_layers(tokens, measure)
        return measure.cuts

    @torch.no_grad()
    def measure_table(self, tokens):
        """Fill the table of thresholds from tokens (B, T): for each of RATES, the cuts of a forward pass at that rate."""
        alphas = [layer.alpha.full_tensor() if hasattr(layer.alpha, "full_tensor") else layer.alpha for layer in self.layers]
        self.gains.copy_(torch.cat(alphas).abs())               # whole also where processes share the parameters
        for i, rate in enumerate(self.RATES):
            self.quantiles[i] = torch.tensor(self.measured_cuts(tokens, [rate] * len(self.layers)))

    @torch.no_grad()
    def set_default_depth(self, tokens, rates: Sequence[float]):
        """Make `rates`, one a layer, those that `cuts_for` takes unless told otherwise; their cuts come from tokens."""
        self.default_rates.copy_(torch.tensor(rates))
        self.default_cuts.copy_(torch.tensor(self.measured_cuts(tokens, rates)))

    def can_skip(self) -> bool:
        """Whether it has a threshold table."""
        return self.config.residual == "nag" and not self.quantiles.isnan().any()

    def table(self) -> list[list[float]]:
        """For each layer its cuts at RATES. ModelError where there are none."""
        if self.config.residual != "nag":
            raise ModelError("skip_rate: a pre-norm model has no modulator to skip by; it can only drop whole layers "
                             "(train.py --eval_only --choose static)")
        if not self.can_skip():
            raise ModelError("skip_rate: the checkpoint has no threshold table, so it runs at full depth only (skip rate "
                             "0); train.py writes the table at each evaluation")
        return self.quantiles.T.tolist()

    def global_rates(self, rate: float, floor: float = 0.1) -> list[float]:
        """Rates a layer, `rate` on average, by which one cut on |α|·m serves all layers; each keeps a share `floor`."""
        highest = max(rate, 1 - floor)
        columns = [[gain * cut for cut in itertools.accumulate(cuts, max)]      # ascending, as a quantile should be
                   for gain, cuts in zip(self.gains.tolist(), self.table())]
        low, high = min(map(min, columns)), max(map(max, columns))
        for _ in range(60):                                                     # bisection for the common cut
            middle = (low + high) / 2
            rates = [min(highest, interpolate(middle, column, self.RATES)) for column in columns]
            low, high = (middle, high) if sum(rates) / len(rates) < rate else (low, middle)
        return [min(x, 0.999) for x in rates]

    def cuts_for(self, skip_rate=None, depth_budget: float | None = None, allocation: str = "per_layer") -> AboveCut | None:
        """The thresholds, read from the table, at which the model skips at a rate: what `depth` is for evaluation.

        skip_rate: a number, or a list with one a layer; None and no budget: the rates the model was trained for.
        depth_budget: the same said as layers a token, of 2·n_layer.  allocation: "per_layer", each layer skips at the
        rate; "global", layers skip by their gain.  Returns None where nothing is skipped.
        Raises ModelError for what is outside of its range, both at once, and a model that cannot skip.

        A row of the table was measured with all layers at one rate. For unequal rates, other than those of training,
        each layer reads the row of its own rate, so the share it keeps can be off by a few percent.
        """
        if allocation not in ("per_layer", "global"):
            raise ModelError(f"allocation {allocation!r}: expected per_layer or global")
        n_layers = len(self.layers)
        if skip_rate is not None and depth_budget is not None:
            raise ModelError("skip_rate and depth_budget: the same thing twice; give one of them")
        if depth_budget is not None:
            skip_rate = rate_from_depth(depth_budget, n_layers)
        if skip_rate is None:
            skip_rate = self.default_rates.tolist() if self.config.residual == "nag" else 0.0
        rates = layer_rates(skip_rate, n_layers)
        if not any(rates):
            return None
        if allocation == "global" and len(set(rates)) == 1:             # unequal rates are an allocation already
            rates = self.global_rates(rates[0])
        table, own = self.table(), torch.equal(torch.tensor(rates), self.default_rates.cpu())
        own = own and not self.default_cuts.isnan().any()       # an entry that a checkpoint may lack, as it may the table
        cuts = self.default_cuts.tolist() if own else [interpolate(rate, self.RATES, cuts) for rate, cuts in zip(rates, table)]
        return AboveCut([cut if rate else -math.inf for rate, cut in zip(rates, cuts)])

    # -----------------------------------------------------------------------------------------------------------------
    # Training

    def configure_optimizers(self, optimizer: str = "muon", learning_rate: float | None = None,
                             matrix_learning_rate: float | None = None, gate_learning_rate: float = 4e-3,
                             weight_decay: float = 0.1) -> list[torch.optim.Optimizer]:
        """One or two optimizers that together hold every parameter once; each group keeps its "initial_lr".

        The branches' matrices go to Muon (default rate 0.02: twice that learns faster at first, and ends no better) or,
        with "adamw", to AdamW (default 6e-3, the best for both arms); they alone decay. Everything else is AdamW's:
        embeddings and norms at `learning_rate` (default 4e-3; the baseline beside AdamW's matrices 8e-3); modulators, α
        and β at `gate_learning_rate`, since what multiplies a whole branch wants its own pace; the log-norm at the
        start at five times that.
        """
        if learning_rate is None:
            learning_rate = 8e-3 if (self.config.residual, optimizer) == ("prenorm", "adamw") else 4e-3
        if matrix_learning_rate is None:
            matrix_learning_rate = 0.02 if optimizer == "muon" else 6e-3
        gates = {"alpha", "beta_raw", "preferred", "bias", "mix"}
        groups = {"matrices": [], "gates": [], "log_norm": [], "others": []}
        for name, parameter in self.named_parameters():
            last = name.rpartition(".")[2]
            kind = ("matrices" if ".branch." in name else "gates" if last in gates else
                    "log_norm" if last == "log_norm_start" else "others")
            groups[kind].append(parameter)
        matrices = {"params": groups["matrices"], "lr": matrix_learning_rate, "weight_decay": weight_decay}
        rates = {"gates": gate_learning_rate, "log_norm": 5 * gate_learning_rate, "others": learning_rate}
        adamw_groups = [{"params": groups[kind], "lr": rate, "weight_decay": 0.0}
                        for kind, rate in rates.items() if groups[kind]]
        if optimizer == "muon":
            optimizers = [torch.optim.Muon([matrices])]
        elif optimizer == "adamw":
            optimizers, adamw_groups = [], [matrices] + adamw_groups
        else:
            raise ModelError(f"optimizer {optimizer!r}: expected muon or adamw")
        optimizers.append(torch.optim.AdamW(adamw_groups, betas=(0.9, 0.95), fused=True))
        for group in (group for each in optimizers for group in each.param_groups):
            group["initial_lr"] = group["lr"]
        return optimizers

    # -----------------------------------------------------------------------------------------------------------------
    # Cost

    def num_params(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, kept_share: Sequence[float | None] | None = None, context: int | None = None) -> float:
        """FLOPs executed for one token's forward pass, on average; training takes 3 times as many.

        kept_share: of the tokens, for each layer; None for a layer that is left out whole. Default: all.
        context: tokens of the text, default block_size.

        Counted are matrix products, a multiply-add as 2, and attention's scores and values over the whole square of
        the context, as torch.utils.flop_counter does. A skipped token still costs an attention layer its key and value,
        4d² of the 8d², and the 4dT of scores that are computed for all; an MLP nothing of its 16d².
        """
        d, T = self.config.n_embd, context or self.config.block_size
        modulator = 2 * self.config.n_directions * d if self.config.residual == "nag" else 0
        total = 2 * d * self.config.padded_vocab_size
        for l, share in enumerate(kept_share or [1] * len(self.layers)):
            if share is not None:
                total += modulator + (4 * d**2 + 4 * d * T + share * 4 * d**2 if l % 2 == 0 else share * 16 * d**2)
        return total

    # -----------------------------------------------------------------------------------------------------------------
    # Generation

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int], depth=None, watch=None) -> tuple[torch.Tensor, KVCache]:
        """Read a prompt of at least one token, a window at a time. Returns the next token's logits (1, V) and cache."""
        weight = self.unembedding.weight
        tokens = torch.as_tensor(prompt, dtype=torch.int64, device=weight.device).reshape(1, -1)
        if tokens.numel() == 0:
            raise ModelError("prompt: found no token, expected at least one; start from the end-of-text token")
        cache = KVCache(self.config, 1, weight.device, weight.dtype)
        for piece in tokens.split(self.config.block_size, dim=1):
            logits = self(piece, depth, cache, watch)
        return logits[:, -1], cache

    @torch.inference_mode()
    def decode_one_token(self, tokens, cache: KVCache, depth=None, watch=None) -> torch.Tensor:
        """tokens (B,), the newest of each sequence -> logits (B, V) for the next."""
        return self(tokens.unsqueeze(1), depth, cache, watch)[:, -1]

    def stream(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float = 1.0,
               top_k: int | None = None, top_p: float | None = None, seed: int = 0, depth=None,
               watch=None) -> Iterator[torch.Tensor]:
        """Continue each prompt; yields the next token of every one, (B,) int64, max_new_tokens times.

        temperature 0 takes the likeliest token; else one is drawn among the top_k likeliest and the smallest set that
        holds a share top_p of the probability. Sequence i draws from a generator of its own, seeded with seed + i, so
        what it becomes does not depend on its neighbours. depth: who runs, from `cuts_for`; watch: as in `forward`.
        """
        was_training = self.training
        self.eval()
        try:
            logits, caches = zip(*(self.prefill(prompt, depth, watch) for prompt in prompts))
            logits, cache = torch.cat(logits), KVCache.join(caches)
            generators = [torch.Generator(logits.device).manual_seed(seed + i) for i in range(len(prompts))]
            for n in range(max_new_tokens):
                tokens = sample(logits, temperature, top_k, top_p, generators)
                yield tokens
                if n + 1 < max_new_tokens:
                    logits = self.decode_one_token(tokens, cache, depth, watch)
        finally:
            self.train(was_training)

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **sampling) -> list[torch.Tensor]:
        """Each prompt with its continuation, 1-D int64 tensors on the CPU; `sampling` as in `stream`."""
        new = [tokens.cpu() for tokens in self.stream(prompts, max_new_tokens, **sampling)]
        prompts = [torch.as_tensor(prompt, dtype=torch.int64).cpu() for prompt in prompts]
        return [torch.cat((prompt, *(tokens[i:i + 1] for tokens in new))) for i, prompt in enumerate(prompts)]


def sample(logits, temperature: float, top_k: int | None, top_p: float | None, generators) -> torch.Tensor:
    """Draw a token for each row of logits (B, V): (B,) int64; one generator a row."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = (logits - logits.max(-1, keepdim=True).values).double() / temperature     # a tiny temperature is no overflow
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probabilities = logits.softmax(-1)
    if top_p is not None:
        ordered, order = probabilities.sort(-1, descending=True)
        outside = ordered.cumsum(-1) - ordered >= top_p         # the likelier ones hold top_p already; keeps at least one
        probabilities = probabilities.masked_fill(outside.scatter(-1, order, outside), 0.0)
    # The largest of p_v / e_v with exponential e_v is v with probability p_v / Σp: a draw without leaving the device.
    noise = torch.stack([torch.empty_like(probabilities[0]).exponential_(generator=g) for g in generators])
    return (probabilities / noise).argmax(-1)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints: tensors and plain values in one file, with a digest of each, replaced as a whole


SAFETENSORS = ".safetensors"        # the ending of the files of that format


def leaves(value, path: str = "") -> Iterator[tuple[str, object]]:
    """Every tensor and plain value inside nested dicts and lists, with its path."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def digests(checkpoint: dict) -> dict[str, str]:
    """SHA-256 of each tensor, and under "" of everything else."""
    result, plain = {}, hashlib.sha256()
    for path, leaf in leaves(checkpoint):
        if isinstance(leaf, torch.Tensor):
            data = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            result[path] = hashlib.sha256(f"{leaf.dtype} {tuple(leaf.shape)} ".encode() + data.tobytes()).hexdigest()
        else:
            plain.update(f"{path}={leaf!r}\n".encode())
    return result | {"": plain.hexdigest()}


def sealed(model: NAGTransformer, meta: dict, weights: dict | None = None, **entries) -> dict:
    """What a checkpoint holds, with its digests."""
    checkpoint = {"format": 1, "config": asdict(model.config), "model": weights or model.state_dict(), "meta": meta, **entries}
    return checkpoint | {"sha256": digests(checkpoint)}


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`: what is written there within takes the place of `path`, or goes if that fails."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, checkpoint: dict, write: Callable[[BinaryIO], object]):
    """Let `write` write a checkpoint to a file under a temporary name, flush that to the disk, and rename it to `path`.

    So `path` is always whole. Raises OSError where it cannot be written; what was there before is still there then.
    """
    try:
        with replaced(path) as temporary, open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:    # torch's writer turns a failed write, such as on a full disk, into the latter
        reason = error.strerror if isinstance(error, OSError) else "a write failed; is the disk full?"
        needed = sum(leaf.nbytes for _, leaf in leaves(checkpoint) if isinstance(leaf, torch.Tensor))
        raise OSError(errno.EIO, f"{reason}, {needed:,} bytes needed, {shutil.disk_usage(path.parent).free:,} free",
                      str(path)) from error
    if os.name == "posix":      # the new name outlives a power cut once its folder is on the disk; Windows opens no folders
        with contextlib.suppress(OSError):      # some network file systems cannot do it, and the file itself is safe
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def save_checkpoint(path: Path, model: NAGTransformer, meta: dict, weights: dict | None = None, **entries):
    """Write model, config, `meta` (the data's meta.json) and further entries of tensors and plain values to `path`.

    weights: the model's state_dict, where it has been gathered from several processes.
    Raises OSError where it cannot be written, as `write_whole` says.
    """
    checkpoint = sealed(model, meta, weights, **entries)
    write_whole(Path(path), checkpoint, lambda file: torch.save(checkpoint, file))


def export_checkpoint(path: Path, model: NAGTransformer, meta: dict):
    """Write model, config and meta to a file of safetensors, which other programs read as well: `path` ends so.

    What is no tensor is in its metadata, each entry as JSON. Raises ModelError where the package is missing or meta is
    more than JSON can say, OSError as `write_whole` says.
    """
    safetensors = safetensors_module(path)
    checkpoint = sealed(model, meta)
    try:
        plain = {entry: json.dumps(value) for entry, value in checkpoint.items() if entry != "model"}
    except (TypeError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: meta of the data is more than JSON can say ({error})") from error
    weights = {name: weight.cpu().contiguous() for name, weight in checkpoint["model"].items()}
    write_whole(Path(path), checkpoint, lambda file: file.write(safetensors.torch.save(weights, plain)))


def safetensors_module(path: Path):
    """The optional package; ModelError where it is missing."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ModelError(f"{path}: needs safetensors; pip install safetensors") from error
    return safetensors


def read_safetensors(path: Path) -> dict:
    """What `export_checkpoint` has written; an empty dict where another program has."""
    with safetensors_module(path).safe_open(path, framework="pt") as file:
        plain = file.metadata() or {}
        if "sha256" not in plain:
            return {}
        weights = {name: file.get_tensor(name) for name in file.keys()}
    entries = {entry: json.loads(plain[entry]) for entry in ("format", "config", "meta", "sha256") if entry in plain}
    return {"format": None, "config": None, "model": weights} | entries         # in the order in which they were sealed


def read_torch(path: Path) -> dict:
    """What `save_checkpoint` has written: tensors and plain values, of which the reader executes nothing."""
    with zipfile.ZipFile(path) as file:         # whose parts need not be compressed, and in ours are not
        if sum(part.file_size for part in file.infolist()) > path.stat().st_size:
            raise ValueError("larger inside than outside")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")         # a damaged stream makes PyTorch wonder at it before it fails
        return torch.load(path, map_location="cpu", weights_only=True)


def is_larger_than(size: int, checkpoint) -> bool:
    """Whether a checkpoint holds more than its file, of so many bytes, by repeating a part of it without end."""
    waiting = [checkpoint]
    while waiting and size >= 0:
        value = waiting.pop()
        size -= value.nbytes if isinstance(value, torch.Tensor) else 1
        if isinstance(value, (dict, list, tuple)):
            waiting += value.values() if isinstance(value, dict) else value
    return size < 0


def read_checkpoint(path: Path) -> dict:
    """The entries of a checkpoint, its tensors on the CPU. Nothing in the file is executed.

    A file whose name ends in .safetensors has config, model and meta alone. Raises ModelError where the file is missing,
    is not one of ours, or fails its digests.
    """
    path = Path(path)
    try:
        found = None if path.is_file() else "a folder" if path.is_dir() else "no such file"
    except OSError as error:        # such as a name that is too long
        found = error.strerror
    if found:
        raise ModelError(f"checkpoint {path}: {found}; python train.py writes out/ckpt.pt")
    try:
        checkpoint = (read_safetensors if path.suffix == SAFETENSORS else read_torch)(path)
    except ModelError:
        raise
    except pickle.UnpicklingError as error:
        raise ModelError(f"checkpoint {path}: not opened, since it holds more than tensors and plain values or is "
                         f"damaged; take an earlier one or train anew") from error
    except Exception as error:      # a damaged file can fail in any layer below: zip, storage, tensor
        raise ModelError(f"checkpoint {path}: damaged ({type(error).__name__} on reading it); take an earlier one or "
                         f"train anew") from error
    if not isinstance(checkpoint, dict) or "format" not in checkpoint:
        raise ModelError(f"checkpoint {path}: not a checkpoint of this project; python train.py writes out/ckpt.pt")
    for entry in ("config", "model", "meta", "sha256"):
        if not isinstance(checkpoint.get(entry), dict):
            found = "is no dict" if entry in checkpoint else "is missing"
            raise ModelError(f"checkpoint {path}: its {entry!r} entry {found}, so it can be neither sampled nor resumed")
    for prefix in ("_orig_mod.", "module."):
        if any(str(name).startswith(prefix) for name in checkpoint["model"]):
            raise ModelError(f"checkpoint {path}: names of its weights begin with {prefix!r}, which a wrapper of the model has "
                             f"put there; take the state_dict of the model itself")
    recorded = checkpoint.pop("sha256")
    try:
        intact = not is_larger_than(path.stat().st_size, checkpoint) and recorded == digests(checkpoint)
    except (RuntimeError, RecursionError, TypeError, ValueError):      # a tensor, a value or nesting of no kind that we write
        intact = False
    if not intact:
        raise ModelError(f"checkpoint {path}: its content does not match its SHA-256 digests; the file is damaged")
    check_config(checkpoint["config"], path)
    if checkpoint["meta"].get("vocab_size") != checkpoint["config"].get("vocab_size"):
        raise ModelError(f"checkpoint {path}: vocab_size is {checkpoint['meta'].get('vocab_size')!r:.60} in its meta, but "
                         f"{checkpoint['config'].get('vocab_size')!r} in its config; take another checkpoint")
    return checkpoint


def check_config(config: dict, path: Path):
    """ModelError where a checkpoint's config is none that a flag could have asked for, whatever it says."""
    large = [name for name, value in config.items() if isinstance(value, int) and abs(value) >= 2**31]
    try:
        if large:
            raise ModelError(f"{large[0]} is 2^31 or more")
        Config(**config)
    except (TypeError, ModelError) as error:
        raise ModelError(f"checkpoint {path}: its config does not fit this model.py ({str(error):.300}); take another "
                         f"checkpoint") from error


def choose_device(name: str = "auto") -> torch.device:
    """The device of that name; "auto" takes a GPU where there is one. ModelError where it is not on this machine."""
    possible = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    possible += ["mps"] if torch.backends.mps.is_available() else []
    wanted = possible[min(1, len(possible) - 1)] if name == "auto" else "cuda:0" if name == "cuda" else name
    if wanted not in possible:
        raise ModelError(f"--device {name}: not on this machine, which has {', '.join(possible)}")
    return torch.device(wanted)


def memory_of(device: torch.device) -> int | None:
    """Bytes of memory that a device has; None where that cannot be told."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None


def model_from(checkpoint: dict, device="cpu", path="checkpoint", kernels: str = "auto") -> NAGTransformer:
    """The model in a checkpoint that `read_checkpoint` returned; `path` is for the message of a ModelError."""
    def refuse(why):
        raise ModelError(f"{path}: its config and weights do not fit this model.py ({' '.join(str(why).split()):.300})")

    config, weights = Config(**checkpoint["config"]), checkpoint["model"]
    entries = sum(weight.numel() for weight in weights.values() if isinstance(weight, torch.Tensor))
    if entries < config.least_params:       # before a model is built that may be larger than the machine
        refuse(f"{entries:,} weights, its config asks for {config.least_params:,}")
    try:
        model = NAGTransformer(config).to(device)
        tables = {name: buffer for name, buffer in model.named_buffers()}       # may be missing: then it cannot skip
        model.load_state_dict(tables | weights)
    except (TypeError, AttributeError, RuntimeError) as error:      # load_state_dict raises each, by what is wrong
        refuse(error)
    return model.use_kernels(kernels)


def load_checkpoint(path: Path, device="cpu", kernels: str = "auto") -> tuple[NAGTransformer, dict]:
    """Model in evaluation mode, and the meta of the data it was trained on (prepare_data.encoding_from_meta reads it).

    kernels: who computes the stream's functions, as `operations` says. Raises ModelError as `read_checkpoint` does.
    """
    checkpoint = read_checkpoint(path)
    return model_from(checkpoint, device, path, kernels).eval(), checkpoint["meta"]
