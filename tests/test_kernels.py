"""Promises of kernels.py: the numbers of float64 formulas, every row on its own, no byte too many, and a model that cannot tell.

Without a GPU the kernels run in Triton's interpreter; what a compiler makes of them for GPUs is checked in test_bench.py.
"""

import functools
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import train
from conftest import ROOT, fails, tiny_model, tiny_tokens
from model import PLAIN, ModelError, Rows, TopShare, operations

kernels = pytest.importorskip("kernels", reason="Triton is not installed")
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

# Masked lanes overflow in the interpreter, and it indexes by arrays of one number: neither is the kernels' doing.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
              pytest.mark.filterwarnings("ignore::DeprecationWarning:triton.runtime.interpreter")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
N = 7           # odd, so that the last program has a tail
# Half a unit in the last place, as rounding leaves; the interpreter cuts float32 to bfloat16 off instead of rounding it.
ROUNDING = {torch.float32: 0, torch.float16: 2**-11, torch.bfloat16: 2**-8 if DEVICE == "cuda" else 2**-7}


def near(found, expected, dtype=torch.float32, relative=1e-5):
    """Equal but for the rounding of the dtype, and `relative` to the largest of the expected numbers."""
    assert found.dtype == dtype and found.shape == expected.shape
    if expected.numel():
        beyond = (found.double().cpu() - expected).abs() - ROUNDING[dtype] * expected.abs()
        assert beyond.max() <= relative * expected.abs().max() + 1e-30, (beyond.max() / expected.abs().max()).item()


def unit_rows(n, d):
    return F.normalize(torch.randn(n, d), dim=-1) * math.sqrt(d)


def case_of(name, n, d, dtype, f_dtype=None):
    """Direction, output, gain and log-norm for n rows. The output has a mean and a part along the direction: else their
    terms would be zero, and a kernel without them right."""
    torch.manual_seed(d + len(name))
    r = unit_rows(n, d).to(dtype)
    gain = torch.rand(n) + 0.2
    f = torch.randn(n, d) + 0.7 + 0.5 * r.float()
    if name == "no gain":
        gain = torch.zeros(n)
    elif name == "gain of 100":
        gain = gain * 100
    elif name == "constant output":
        f = torch.full((n, d), 0.75)       # whose mean is exact
    elif name == "output along the direction":
        f = 2 * r.float() + 0.7
    return [x.to(DEVICE) for x in (r, f.to(f_dtype or dtype), gain, torch.randn(n))]


def rows_for(kept, n) -> Rows:
    """Rows of any kept tokens, also of all, and in any order."""
    kept = torch.as_tensor(kept, dtype=torch.int64, device=DEVICE)
    inverse = torch.full((n,), -1, dtype=torch.int32, device=DEVICE)
    inverse[kept] = torch.arange(len(kept), dtype=torch.int32, device=DEVICE)
    return Rows(kept, inverse)


def plainly_written_update(r, f, g, s, kept=slice(None), eps=1e-6):
    """The formulas, for autograd to derive."""
    r_kept, g_kept = r[kept], g[kept].unsqueeze(-1)
    c = f - f.mean(-1, keepdim=True)
    p = c - (c * r_kept).mean(-1, keepdim=True) * r_kept
    p_square = p.square().mean(-1, keepdim=True)
    u = p / (p_square + eps).sqrt()
    y = r_kept + g_kept * u
    turned = y / (y.square().mean(-1, keepdim=True) + 1e-12).sqrt()
    grown = s[kept] + 0.5 * torch.log1p(g_kept**2 * p_square / (p_square + eps)).squeeze(-1)
    kept = torch.arange(len(r))[kept]
    return r.index_copy(0, kept, turned), s.index_copy(0, kept, grown)


def with_gradients(function, inputs, grads):
    """Outputs of the function, and the gradients of its inputs."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, grads)
    return [x.detach() for x in outputs], [x.grad for x in inputs]


def in_float64(tensors):
    return [x.double().cpu() for x in tensors]


# ---- nag_update -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ordinary", "no gain", "gain of 100", "constant output", "output along the direction"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [64, 96, 100, 768, 1000])
def test_update_has_the_numbers_and_gradients_of_float64(d, dtype, name):
    r, f, g, s = case_of(name, N, d, dtype)
    grads = [torch.randn(N, d).to(DEVICE, dtype), torch.randn(N, device=DEVICE)]
    nothing_left = name in ("constant output", "output along the direction")
    relative = 1e-4 if nothing_left and dtype == torch.float32 else 1e-5        # p is a difference of equal numbers
    for kept in (None, [], [4], range(N - 2), range(N)):
        inputs = [r, f if kept is None else f[:len(kept)], g, s]
        rows = None if kept is None else rows_for(kept, N)
        found, found_grads = with_gradients(functools.partial(kernels.nag_update, rows=rows), inputs, grads)
        plain = functools.partial(plainly_written_update, kept=slice(None) if kept is None else list(kept))
        expected, expected_grads = with_gradients(plain, in_float64(inputs), in_float64(grads))
        near(found[0], expected[0], dtype, relative)
        near(found[1], expected[1])
        for found_grad, expected_grad in zip(found_grads[:2], expected_grads):
            near(found_grad, expected_grad, dtype, relative)
        near(found_grads[2], expected_grads[2], relative=1e-4)
        assert torch.equal(found_grads[3].cpu(), grads[1].cpu())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_skipped_row_passes_to_the_last_bit_in_both_directions(dtype):
    r, f, g, s = case_of("ordinary", N, 100, dtype)
    kept, skipped = [1, 2, 5], [0, 3, 4, 6]
    grads = [torch.randn(N, 100).to(DEVICE, dtype), torch.randn(N, device=DEVICE)]
    r[3] *= 3       # not even a unit row is needed
    (turned, grown), (dr, _, dg, ds) = with_gradients(functools.partial(kernels.nag_update, rows=rows_for(kept, N)),
                                                      (r, f[:3], g, s), grads)
    assert torch.equal(turned[skipped], r[skipped]) and torch.equal(grown[skipped], s[skipped])
    assert torch.equal(dr[skipped], grads[0][skipped]) and torch.equal(ds, grads[1])
    assert dg[skipped].abs().max() == 0 and dg[kept].abs().min() > 0


@pytest.mark.parametrize("d", [96, 768])
def test_a_rows_result_is_its_own_whatever_stands_beside_it(d, monkeypatch):
    r, f, g, s = case_of("ordinary", N, d, torch.bfloat16)
    grads = [torch.randn(N, d).to(DEVICE, torch.bfloat16), torch.randn(N, device=DEVICE)]

    def run(rows, kept=None):
        inputs = (r[rows], f[rows] if kept is None else f[rows][kept.kept], g[rows], s[rows])
        found = with_gradients(functools.partial(kernels.nag_update, rows=kept), inputs, [x[rows] for x in grads])
        return [*found[0], *found[1]]

    everything = slice(None)
    together = run(everything)
    assert_close(run(everything), together, atol=0, rtol=0)                                 # a second run
    assert_close(run(slice(4, 5)), [x[4:5] for x in together], atol=0, rtol=0)              # alone
    some = rows_for([5, 0, 3], N)                                                           # some, out of order
    for found, expected in zip(run(everything, some), together):
        kept_rows = found if len(found) == 3 else found[some.kept]
        assert torch.equal(kept_rows, expected[some.kept])
    if DEVICE == "cpu":                                                                     # in tiles of another height
        tile = kernels.tile
        monkeypatch.setattr(kernels, "tile", lambda d: tile(d) | {"BLOCK_ROWS": 4})
        assert_close(run(everything), together, atol=0, rtol=0)


def test_a_tiny_gain_still_grows_the_norm():
    """By half its square, which log(1 + x) would lose."""
    r, f, _, _ = case_of("ordinary", N, 96, torch.float32)
    gain = torch.logspace(-6, 0, N, device=DEVICE)
    _, grown = kernels.nag_update(r, f, gain, torch.zeros(N, device=DEVICE))
    _, expected = plainly_written_update(*in_float64((r, f, gain, torch.zeros(N))))
    assert_close(grown.double().cpu(), expected, rtol=1e-5, atol=0)


def test_a_float32_stream_takes_a_bfloat16_output():
    r, f, g, s = case_of("ordinary", N, 96, torch.float32, torch.bfloat16)
    grads = [torch.randn(N, 96, device=DEVICE), torch.randn(N, device=DEVICE)]
    found, found_grads = with_gradients(kernels.nag_update, (r, f, g, s), grads)
    expected, expected_grads = with_gradients(plainly_written_update, in_float64((r, f, g, s)), in_float64(grads))
    near(found[0], expected[0])
    near(found_grads[0], expected_grads[0])
    near(found_grads[1], expected_grads[1], torch.bfloat16)


def test_expanded_gradients_one_output_alone_and_a_later_use_of_the_inputs():
    r, f, g, s = (x.requires_grad_() for x in case_of("ordinary", N, 96, torch.float32))
    before = [x.detach().clone() for x in (r, f, g, s)]
    expected_inputs = [x.requires_grad_() for x in in_float64([x.detach() for x in (r, f, g, s)])]
    weight = torch.randn(96, device=DEVICE)
    for loss in (lambda turned, grown, weight: (turned @ weight).sum() + grown.sum(),       # gradients of strides 0
                 lambda turned, grown, weight: turned.T.square()[::2].sum(),                # direction alone, strided
                 lambda turned, grown, weight: grown.square().sum()):                       # log-norm alone
        found = torch.autograd.grad(loss(*kernels.nag_update(r, f, g, s), weight) + (r * r).sum(), (r, f, g, s),
                                    materialize_grads=True)
        expected = torch.autograd.grad(loss(*plainly_written_update(*expected_inputs), weight.double().cpu())
                                       + expected_inputs[0].square().sum(), expected_inputs, materialize_grads=True)
        for each, wanted in zip(found, expected):
            near(each, wanted, relative=1e-4)
    assert all(torch.equal(x.detach(), old) for x, old in zip((r, f, g, s), before))


def test_an_unaligned_start_and_no_rows_at_all():
    r, f, g, s = case_of("ordinary", N, 100, torch.bfloat16)
    room = torch.zeros(N * 100 + 1, dtype=torch.bfloat16, device=DEVICE)
    shifted = room[1:].view(N, 100).copy_(r)
    assert_close(kernels.nag_update(shifted, f, g, s), kernels.nag_update(r, f, g, s), atol=0, rtol=0)
    turned, grown = kernels.nag_update(r[:0], f[:0], g[:0], s[:0])
    assert turned.shape == (0, 100) and grown.shape == (0,)
    w = torch.randn(5, 100, device=DEVICE)
    assert kernels.modulator(r[:0], w, w[:, 0].contiguous(), w[:, 1].contiguous(), g[:1]).shape == (0,)


# ---- gather_rows, modulator, add_rmsnorm ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kept", [[], [2], [6, 0, 3], range(N)], ids=str)
def test_gathering_passes_the_stream_on_and_joins_both_gradients(dtype, kept):
    r, rows = torch.randn(N, 100).to(DEVICE, dtype), rows_for(kept, N)
    grads = [torch.randn(N, 100).to(DEVICE, dtype), torch.randn(len(kept), 100).to(DEVICE, dtype)]
    (stream, gathered), (dr,) = with_gradients(lambda r: kernels.gather_rows(r, rows), [r], grads)
    assert torch.equal(stream, r) and torch.equal(gathered, r[rows.kept])
    near(dr, grads[0].double().cpu().index_add(0, rows.kept.cpu(), grads[1].double().cpu()), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("C, d, n", [(5, 100, 70), (16, 128, 40), (32, 768, 33)])
@pytest.mark.parametrize("beta", [0.5, 1.0, 4.0])
def test_modulator_has_the_numbers_and_gradients_of_float64(dtype, C, d, n, beta):
    torch.manual_seed(C)
    bias = torch.randn(C)
    bias[0] = -6.0
    inputs = [unit_rows(n, d).to(dtype), (torch.randn(C, d) / math.sqrt(d)).to(dtype), bias, torch.randn(C), torch.tensor([beta])]
    inputs, dm = [x.to(DEVICE) for x in inputs], torch.randn(n, device=DEVICE)
    (m,), found = with_gradients(kernels.modulator, inputs, [dm])
    (expected_m,), expected = with_gradients(PLAIN.modulator, in_float64(inputs), in_float64([dm]))
    near(m, expected_m)
    # dr and dw come from a product with dz, which is rounded to bfloat16 in a bfloat16 model
    for each, wanted in zip(found[:2], expected):
        assert each.dtype == dtype
        near(each.float(), wanted, relative={torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype])
    for each, wanted in zip(found[2:], expected[2:]):
        near(each, wanted, relative=1e-4)


def test_a_shut_modulator_has_finite_gradients_and_equals_model_py():
    inputs = [unit_rows(9, 64), torch.randn(5, 64) / 8, torch.full((5,), -30.0), torch.zeros(5), torch.ones(1)]
    inputs, dm = [x.to(DEVICE) for x in inputs], [torch.ones(9, device=DEVICE)]
    found, expected = with_gradients(kernels.modulator, inputs, dm), with_gradients(PLAIN.modulator, inputs, dm)
    assert_close(found, expected)
    assert all(x.isfinite().all() for x in found[1]) and found[1][0].abs().max() == 0


def test_a_nearly_shut_modulator_in_float16_still_learns():
    """Each row's part of the gradient is below float16's smallest number, their sum is not."""
    r, w = (1 + 0.1 * torch.randn(256, 16)).half(), 0.01 * torch.randn(5, 16).half()
    inputs = [r, w, torch.full((5,), -7.0), torch.zeros(5), torch.full((1,), 4.0)]
    inputs, dm = [x.to(DEVICE) for x in inputs], torch.full((256,), 2e4, device=DEVICE)
    _, found = with_gradients(kernels.modulator, inputs, [dm])
    _, expected = with_gradients(PLAIN.modulator, in_float64(inputs), in_float64([dm]))
    assert expected[2].abs().max() / 256 < 2**-25 < 2**-20 < expected[1].abs().max()
    near(found[1].float(), expected[1], relative=2e-2)


def test_a_modulator_of_many_rows_adds_up_over_all_of_them(monkeypatch):
    monkeypatch.setattr(kernels, "REDUCING_PROGRAMS", 2)        # each then takes several tiles
    inputs = [unit_rows(230, 16), torch.randn(5, 16) / 4, torch.randn(5), torch.randn(5), torch.ones(1)]
    inputs, dm = [x.to(DEVICE) for x in inputs], torch.randn(230, device=DEVICE)
    _, found = with_gradients(kernels.modulator, inputs, [dm])
    _, expected = with_gradients(PLAIN.modulator, in_float64(inputs), in_float64([dm]))
    for each, wanted in zip(found, expected):
        near(each, wanted, relative=1e-4)


@pytest.mark.parametrize("dtype, f_dtype", [(x, x) for x in DTYPES] + [(torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("d", [96, 100, 768])
def test_add_rmsnorm_has_the_numbers_and_gradients_of_float64(dtype, f_dtype, d, monkeypatch):
    monkeypatch.setattr(kernels, "REDUCING_PROGRAMS", 2)
    torch.manual_seed(d)
    n = 37
    inputs = [torch.randn(n, d).to(DEVICE, dtype), torch.randn(n, d).to(DEVICE, f_dtype), torch.rand(d, device=DEVICE) + 0.5]
    grads = [torch.randn(n, d).to(DEVICE, dtype), torch.randn(n, d).to(DEVICE, f_dtype)]
    found, (dx, df, dw) = with_gradients(kernels.add_rmsnorm, inputs, grads)
    near(found[0], (inputs[0].double() + inputs[1].double()).cpu(), dtype)
    # What is normalised is the sum as it was stored; so is the reference.
    total, weight = found[0].double().cpu().requires_grad_(), inputs[2].double().cpu().requires_grad_()
    normalised = F.rms_norm(total, (d,), weight, 1e-6)
    d_total, expected_dw = torch.autograd.grad((total, normalised), (total, weight), in_float64(grads))
    near(found[1], normalised.detach(), f_dtype)
    near(dx, d_total, dtype)
    near(df, d_total, f_dtype, relative=2**-8 if f_dtype != dtype else 1e-5)        # rounded twice
    near(dw, expected_dw, relative=1e-4)


# ---- memory ---------------------------------------------------------------------------------------------------------


def every_launch(n, d, dtype=torch.float32):
    """Each kernel once, as (operator, its arguments), with a share of the rows kept where it takes rows."""
    r, f, g, s = case_of("ordinary", n, d, dtype)
    G, D, kept = torch.randn(n, d).to(DEVICE, dtype), torch.randn(n, device=DEVICE), rows_for(range(0, n, 2), n)
    w, b, beta = torch.randn(5, d).to(DEVICE, dtype), torch.randn(5, device=DEVICE), torch.ones(1, device=DEVICE)
    f_kept, z = f[:len(kept.kept)], torch.randn(n, 5, device=DEVICE)
    return {"update": (kernels.update_forward, (r, f, g, s, None, 1e-6)),
            "update of rows": (kernels.update_forward, (r, f_kept, g, s, kept.inverse, 1e-6)),
            "update, backward": (kernels.update_backward, (G, D, r, f, g, None, 1e-6)),
            "update of rows, backward": (kernels.update_backward, (G, D, r, f_kept, g, kept.inverse, 1e-6)),
            "gather, backward": (kernels.gather_backward, (G, f_kept, kept.inverse)),
            "modulator": (kernels.modulator_forward, (r, w, b, b, beta)),
            "modulator, backward": (kernels.modulator_backward, (D, r, w, b, beta, z)),
            "add_rmsnorm": (kernels.rmsnorm_forward, (r, f, torch.ones(d, device=DEVICE), 1e-6)),
            "add_rmsnorm, backward": (kernels.rmsnorm_backward, (G, r, f, torch.ones(d, device=DEVICE), 1e-6))}


LAUNCHES = list(every_launch(2, 16))
OUTPUTS = {kernels.nag_update_forward_kernel: ("r_new_ptr", "s_new_ptr"),
           kernels.nag_update_backward_kernel: ("dr_ptr", "df_ptr", "dg_ptr"),
           kernels.gather_rows_backward_kernel: ("dr_ptr",),
           kernels.modulator_forward_kernel: ("m_ptr", "z_ptr"), kernels.modulator_backward_kernel: ("dz_ptr", "sums_ptr"),
           kernels.add_rmsnorm_forward_kernel: ("y_ptr", "n_ptr"), kernels.add_rmsnorm_backward_kernel: ("dx_ptr", "dw_ptr")}


@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("d", [96, 768])
def test_nothing_is_written_outside_of_the_outputs(name, d, monkeypatch):
    operator, arguments = every_launch(N, d)[name]
    launch, sentinel, rooms = kernels.launch, -12345.0, []

    def guarded(kernel, n_rows, most=None, **named):
        """Gives the kernel outputs that lie in the middle of larger tensors, and copies what it writes back."""
        moved = dict(named)
        for key in OUTPUTS[kernel]:
            room = torch.full((named[key].numel() + 2048,), sentinel, dtype=named[key].dtype, device=DEVICE)
            rooms.append((key, room))
            moved[key] = room[1024:-1024].view(named[key].shape)
        launch(kernel, n_rows, most, **moved)
        for key in OUTPUTS[kernel]:
            named[key].copy_(moved[key])

    expected = operator(*arguments)
    monkeypatch.setattr(kernels, "launch", guarded)
    assert_close(operator(*arguments), expected, atol=0, rtol=0)
    assert rooms
    for key, room in rooms:
        outside = torch.cat((room[:1024], room[-1024:]))
        assert (outside == sentinel).all() and not (room[1024:-1024] == sentinel).any(), key


@pytest.mark.skipif(DEVICE == "cuda", reason="counts what the interpreter loads and stores")
@pytest.mark.parametrize("name", LAUNCHES)
def test_each_byte_is_read_or_written_once(name, monkeypatch):
    from triton.runtime.interpreter import interpreter_builder as builder
    n, d = 40, 96
    operator, arguments = every_launch(n, d)[name]
    launch, moved, tensors = kernels.launch, {}, {}

    def noting(kernel, n_rows, most=None, **named):
        tensors.update({key: value for key, value in named.items() if isinstance(value, torch.Tensor)})
        launch(kernel, n_rows, most, **named)

    def counted(method):
        def access(pointers, *rest):
            mask = rest[0] if method is load else rest[1]       # a store's first argument is the value
            size = pointers.get_element_ty().primitive_bitwidth // 8
            addresses = pointers.data[mask.data].astype("int64")
            found = {key: ((addresses >= x.data_ptr()) & (addresses < x.data_ptr() + x.nbytes)).sum() for key, x in tensors.items()}
            assert sum(found.values()) == len(addresses)
            for key, count in found.items():
                moved[key] = moved.get(key, 0) + int(count) * size
            return method(pointers, *rest)
        return access

    load, store = builder.create_masked_load, builder.create_masked_store
    monkeypatch.setattr(builder, "create_masked_load", counted(load))
    monkeypatch.setattr(builder, "create_masked_store", counted(store))
    monkeypatch.setattr(kernels, "launch", noting)
    operator(*arguments)

    kept = len(arguments[0]) // 2 / len(arguments[0]) if "rows" in name else 1
    once = {key: x.nbytes for key, x in tensors.items()}
    if name == "update of rows, backward":      # a skipped row is neither needed nor changed
        once |= {key: int(once[key] * kept) for key in ("r_ptr", "D_ptr", "g_ptr")}
    if name == "update of rows":
        once["g_ptr"] = int(once["g_ptr"] * kept)
    for key in ("w_ptr", "b_ptr", "pi_ptr", "beta_ptr"):        # each program reads these small ones, from the cache
        once.pop(key, None)
    assert {key: moved[key] for key in once} == once
    units = sum(moved[key] for key, x in tensors.items() if x.dim() == 2 and x.size(1) == d and key not in ("w_ptr", "dw_ptr"))
    assert units / (n * d * 4) == {"update": 3, "update of rows": 2 + kept, "update, backward": 5,
                                   "update of rows, backward": 2 + 3 * kept, "gather, backward": 2.5, "modulator": 1,
                                   "modulator, backward": 0, "add_rmsnorm": 4, "add_rmsnorm, backward": 4}[name]


@triton.jit
def far_place_kernel(row_ptr, at_ptr, first, d: tl.constexpr):
    row, exists, inside, at = kernels.place(first, 2**31 - 1, d, 2, 16)
    tl.store(row_ptr + tl.arange(0, 2), row)
    tl.store(at_ptr + tl.arange(0, 2)[:, None] * 16 + tl.arange(0, 16)[None, :], at)


def test_offsets_do_not_wrap_beyond_two_to_the_31():
    first, d = 2 * 10**6, 8192
    row, at = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.zeros((2, 16), dtype=torch.int64, device=DEVICE)
    far_place_kernel[(1,)](row, at, first, d=d)
    assert row.tolist() == [first, first + 1]
    assert at[1, 3].item() == (first + 1) * d + 3 > 2**31


# ---- PyTorch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAUNCHES)
def test_operators_keep_the_rules_of_torch_library(name):
    operator, arguments = every_launch(N, 24)[name]
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("change, named", [
    ({"direction": torch.zeros(3, 8193)}, "direction: shape (3, 8193)"),
    ({"direction": torch.zeros(3, 8).double()}, "direction: torch.float64"),
    ({"direction": torch.zeros(8, 3).T}, "direction: strides (1, 3)"),
    ({"out": torch.zeros(2, 8)}, "out: shape (2, 8), expected (3, 8)"),
    ({"out": torch.zeros(3, 8, dtype=torch.int64)}, "out: torch.int64"),
    ({"out": torch.zeros(3, 16)[:, ::2]}, "out: strides (16, 2)"),
    ({"out": torch.zeros(3, 8, device="meta")}, "out: on meta, expected "),
    ({"gain": torch.zeros(4)}, "gain: shape (4,), expected (3,)"),
    ({"gain": torch.zeros(3).bfloat16()}, "gain: torch.bfloat16, expected torch.float32"),
    ({"log_norm": torch.zeros(1).expand(3)}, "log_norm: strides (0,)"),
    ({"rows": Rows(torch.tensor([0, 1]), torch.zeros(3, dtype=torch.int32))}, "out: shape (3, 8), expected (2, 8)"),
    ({"rows": Rows(torch.tensor([0, 1, 2]), torch.zeros(3, dtype=torch.int64))}, "rows.inverse: torch.int64"),
])
def test_an_argument_that_breaks_the_contract_is_named_in_one_line(change, named):
    arguments = {"direction": torch.zeros(3, 8), "out": torch.zeros(3, 8), "gain": torch.zeros(3), "log_norm": torch.zeros(3)}
    with pytest.raises(ValueError) as error:
        kernels.nag_update(**arguments | change)
    assert str(error.value).startswith(named) and "\n" not in str(error.value)


@pytest.mark.parametrize("function, arguments, named", [
    ("modulator", (torch.zeros(3, 8), torch.zeros(5, 7), torch.zeros(5), torch.zeros(5), torch.ones(1)), "preferred: shape (5, 7)"),
    ("modulator", (torch.zeros(3, 8), torch.zeros(5, 8), torch.zeros(5), torch.zeros(4), torch.ones(1)), "mix: shape (4,)"),
    ("modulator", (torch.zeros(3, 8), torch.zeros(5, 8), torch.zeros(5), torch.zeros(5), torch.ones(())), "beta: shape ()"),
    ("gather_rows", (torch.zeros(3, 8), Rows(torch.tensor([0]), torch.zeros(2, dtype=torch.int32))), "rows.inverse: shape (2,)"),
    ("add_rmsnorm", (torch.zeros(3, 8), torch.zeros(3, 8), torch.zeros(9)), "weight: shape (9,)"),
    ("add_rmsnorm", (torch.zeros(3, 8), torch.zeros(4, 8), torch.zeros(8)), "out: shape (4, 8)"),
])
def test_the_other_functions_name_what_breaks_their_contract(function, arguments, named):
    with pytest.raises(ValueError) as error:
        getattr(kernels, function)(*arguments)
    assert str(error.value).startswith(named) and "\n" not in str(error.value)


def test_compiled_update_equals_eager_for_any_number_of_rows_after_one_compilation():
    from torch._dynamo.testing import CompileCounterWithBackend
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(kernels.nag_update, backend=counter, fullgraph=True, dynamic=True)
    compilations = []
    for n in (5, 8, 13):
        inputs = case_of("ordinary", n, 24, torch.float32)
        grads = [torch.randn(n, 24, device=DEVICE), torch.randn(n, device=DEVICE)]
        assert_close(with_gradients(compiled, inputs, grads), with_gradients(kernels.nag_update, inputs, grads), atol=0, rtol=0)
        compilations.append(counter.frame_count)
    assert len(set(compilations)) == 1


# ---- the model ------------------------------------------------------------------------------------------------------


def training_losses(model, loss_of, steps=3):
    """Loss and gradients of each of some steps."""
    optimizers, seen = model.configure_optimizers("adamw"), []
    for step in range(steps):
        tokens = tiny_tokens(4, 17, seed=step).to(DEVICE)
        loss = loss_of(tokens[:, :-1], tokens[:, 1:], TopShare([0.25] * len(model.layers)))
        loss.backward()
        seen.append((loss.item(), [parameter.grad.clone() for parameter in model.parameters()]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return seen


@functools.cache
def plain_losses(residual):
    model = tiny_model(torch.float32, residual=residual, n_layer=2).to(DEVICE)
    return training_losses(model, model.loss)


@pytest.mark.parametrize("residual", ["nag", "prenorm"])
@pytest.mark.parametrize("how", ["eager", "compiled", "checkpointed"])
def test_a_model_trains_with_kernels_as_without(residual, how):
    model = tiny_model(torch.float32, residual=residual, n_layer=2).to(DEVICE).use_kernels("triton")
    torch._dynamo.reset()
    loss_of = {"eager": model.loss, "compiled": torch.compile(model.loss, backend="aot_eager", fullgraph=True, dynamic=False),
               "checkpointed": functools.partial(checkpoint, model.loss, use_reentrant=False)}[how]
    for (loss, grads), (expected, expected_grads) in zip(training_losses(model, loss_of), plain_losses(residual)):
        assert abs(loss - expected) < 1e-5
        for found, wanted in zip(grads, expected_grads):
            assert_close(found, wanted, rtol=1e-3, atol=1e-4 * wanted.abs().max().item() + 1e-7)


def test_counts_of_kept_rows_may_be_symbols_of_a_compiled_step():
    """As --allocation global wants it, whose counts change with each evaluation."""
    torch._dynamo.reset()
    model, tokens = tiny_model(torch.float32, n_layer=1).to(DEVICE).use_kernels("triton"), tiny_tokens(4, 16).to(DEVICE)
    compiled, found = torch.compile(model.loss, backend="aot_eager", fullgraph=True, dynamic=None), {}
    for rate in (0.25, 0.3, 0.5):
        depth = TopShare([rate, rate + 0.1], tokens.numel())
        for name, loss_of in (("compiled", compiled), ("eager", model.loss)):
            model.zero_grad()
            loss_of(tokens, tokens, depth).backward()
            found[name] = model.embedding.weight.grad.clone()
        assert_close(found["compiled"], found["eager"])


@pytest.mark.parametrize("residual", ["nag", "prenorm"])
def test_a_model_under_autocast_computes_the_same_with_kernels(residual):
    model, tokens = tiny_model(torch.float32, residual=residual, n_layer=2).to(DEVICE), tiny_tokens().to(DEVICE)
    found = []
    for name in ("torch", "triton"):
        with torch.autocast(DEVICE, torch.bfloat16):
            found.append(model.use_kernels(name).loss(tokens, tokens))
        found[-1].backward()
        found.append(model.layers[0].branch.query.weight.grad.clone())
        model.zero_grad()
    assert_close(found[2], found[0], rtol=5e-3, atol=0)
    assert_close(found[3], found[1], rtol=0, atol=0.05 * found[1].abs().max().item())


def test_decoding_with_kernels_writes_the_same_text():
    model = tiny_model(torch.float32, n_layer=2).to(DEVICE)
    model.measure_table(tiny_tokens(64, 16, seed=9).to(DEVICE))
    prompts, depth = tiny_tokens(3, 5).tolist(), model.cuts_for(0.5)
    plain, with_kernels = (model.use_kernels(name).generate(prompts, 8, temperature=0, depth=depth) for name in ("torch", "triton"))
    assert [x.tolist() for x in plain] == [x.tolist() for x in with_kernels]


def test_who_computes_is_chosen_in_one_place(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert operations("auto", cpu) is PLAIN and operations("torch", gpu) is PLAIN
    assert operations("auto", gpu).nag_update is kernels.nag_update
    with pytest.raises(ModelError, match="--kernels cuda: expected auto, torch or triton"):
        operations("cuda", gpu)
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    with pytest.raises(ModelError, match="--kernels triton: runs on NVIDIA and AMD GPUs, found the device cpu"):
        operations("triton", cpu)


def test_training_with_kernels_where_they_cannot_run_is_refused(tmp_path, python_text, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    flags = ["--data", python_text, "--out_dir", tmp_path / "out", "--kernels", "triton", "--device", "cpu"]
    assert "--kernels triton: runs on NVIDIA and AMD GPUs" in fails(train.main, flags, capsys)


def test_kernels_are_imported_without_a_gpu_and_the_model_without_triton(tmp_path):
    def start(code, **environment):
        return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True,
                                env={"PATH": "", "CUDA_VISIBLE_DEVICES": ""} | environment)

    (tmp_path / "triton.py").write_text("raise ImportError('hidden')")
    hidden = {"PYTHONPATH": str(tmp_path)}
    started = [start("import kernels; assert not kernels.INTERPRETED"), start("import kernels", **hidden),
               start("import torch, model; assert model.operations('auto', torch.device('cuda')) is model.PLAIN", **hidden),
               start("import torch, model; model.operations('triton', torch.device('cuda'))", **hidden)]      # side by side
    errors = [process.communicate()[1] for process in started]
    assert [process.returncode for process in started] == [0, 1, 0, 1], errors
    message = "ImportError: kernels.py needs Triton, which model.py does without: pip install triton (Linux)"
    assert errors[1].splitlines()[-1] == message
    assert "ModelError: --kernels triton: kernels.py needs Triton" in errors[3]
