"""Promises of model.py: the method's identities in float64, then the whole model, generation and checkpoints."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import model as nag
from conftest import tiny_config, tiny_model, tiny_tokens
from model import (Config, Context, KVCache, ModelError, NAGTransformer, angle_between, load_checkpoint, modulator,
                   nag_update, read_checkpoint, rotary, sample, save_checkpoint)

warnings.filterwarnings("ignore", message=".*lr_scheduler.*")
EPS = 1e-6


def random_case(n=7, d=24, seed=0, dtype=torch.float64):
    """direction, out, gain, log_norm; out has a mean and a part along the direction, which the update must remove."""
    torch.manual_seed(seed)
    direction = torch.randn(n, d, dtype=dtype)
    direction = direction - direction.mean(-1, keepdim=True)
    direction = F.normalize(direction, dim=-1) * math.sqrt(d)
    out = 0.7 * torch.randn(n, d, dtype=dtype) + 0.4 + 0.5 * direction
    return direction, out, torch.rand(n, dtype=dtype) * 2, torch.randn(n, dtype=dtype)


def turned_towards(direction, out):
    """(p, ν): METHOD's centred and orthogonalised output, and the RMS that u keeps of it. Written out, one token at a time."""
    c = out - out.mean(-1, keepdim=True)
    p = c - (c * direction).sum(-1, keepdim=True) / direction.size(-1) * direction
    square = p.square().mean(-1)
    return p, (square / (square + EPS)).sqrt()


# ---- the update -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, d", [(1, 8), (7, 24), (33, 100)])
def test_update_turns_by_atan_of_the_realised_gain_and_multiplies_the_norm(n, d):
    direction, out, gain, log_norm = random_case(n, d)
    turned, grown = nag_update(direction, out, gain, log_norm)
    realised = gain * turned_towards(direction, out)[1]
    assert_close(angle_between(direction, turned), realised.atan(), atol=1e-9, rtol=0)
    assert_close((grown - log_norm).exp(), (1 + realised**2).sqrt(), atol=1e-13, rtol=0)


def test_update_moves_along_a_centred_unit_vector_orthogonal_to_the_direction():
    direction, out, gain, log_norm = random_case()
    turned, grown = nag_update(direction, out, gain, log_norm)
    u = (turned * (grown - log_norm).exp()[:, None] - direction) / gain[:, None]
    p, nu = turned_towards(direction, out)
    assert_close((u * direction).sum(-1), torch.zeros(7).double(), atol=1e-9, rtol=0)
    assert_close(u.mean(-1), torch.zeros(7).double(), atol=1e-11, rtol=0)
    assert_close(u.square().mean(-1).sqrt(), nu, atol=1e-11, rtol=0)
    assert_close(F.cosine_similarity(u, p), torch.ones(7).double())
    assert_close(turned.norm(dim=-1), torch.full((7,), math.sqrt(24)).double())


def test_update_is_blind_to_the_norm():
    direction, out, gain, log_norm = random_case()
    one, other = nag_update(direction, out, gain, log_norm), nag_update(direction, out, gain, log_norm + 5)
    assert torch.equal(one.direction, other.direction)
    assert_close(other.log_norm, one.log_norm + 5)


def test_update_passes_gradcheck_also_off_the_unit_sphere_and_with_a_large_eps():
    direction, out, gain, log_norm = (x.requires_grad_() for x in random_case(5, 12))
    for scale, eps in ((1.0, EPS), (1.7, EPS), (1.0, 0.3)):
        inputs = ((scale * direction).detach().requires_grad_(), out, gain, log_norm)
        assert torch.autograd.gradcheck(lambda *args: tuple(nag_update(*args, eps=eps)), inputs)


@pytest.mark.parametrize("d", [64, 100])
def test_update_has_the_gradients_of_its_plainly_written_formula(d):
    inputs = [x.requires_grad_() for x in random_case(9, d)]
    direction, out, gain, log_norm = inputs
    c = out - out.mean(-1, keepdim=True)
    p = c - (c * direction).mean(-1, keepdim=True) * direction
    square = p.square().mean(-1, keepdim=True)
    y = direction + gain[:, None] * p / (square + EPS).sqrt()
    expected = (y / (y.square().mean(-1, keepdim=True) + 1e-12).sqrt(),
                log_norm + 0.5 * torch.log1p(gain**2 * (square / (square + EPS))[:, 0]))
    grads = torch.randn_like(direction), torch.randn_like(log_norm)
    found = nag_update(*inputs)
    assert_close(tuple(found), expected)
    assert_close(torch.autograd.grad(tuple(found), inputs, grads), torch.autograd.grad(expected, inputs, grads))


@pytest.mark.parametrize("out", ["constant", "along", "zero"])
def test_update_has_finite_gradients_where_nothing_is_left_of_the_output(out):
    direction, _, gain, log_norm = random_case()
    out = {"constant": torch.full_like(direction, 3.0), "along": 2 * direction + 1, "zero": torch.zeros_like(direction)}[out]
    inputs = [x.requires_grad_() for x in (direction, out, gain, log_norm)]
    turned, grown = nag_update(*inputs)
    assert_close(turned, direction, atol=1e-6, rtol=0)
    for grad in torch.autograd.grad((turned, grown), inputs, (torch.randn_like(turned), torch.randn_like(grown))):
        assert grad.isfinite().all()


def test_update_with_no_gain_leaves_a_token_where_it_is():
    direction, out, gain, log_norm = random_case()
    turned, grown = nag_update(direction, out, torch.zeros_like(gain), log_norm)
    assert_close(turned, direction, atol=1e-11, rtol=0)       # the 1e-12 inside the measured RMS
    assert torch.equal(grown, log_norm)


def test_update_leaves_its_inputs_alone_and_takes_expanded_gradients():
    inputs = [x.requires_grad_() for x in random_case()]
    before = [x.detach().clone() for x in inputs]
    turned, grown = nag_update(*inputs)
    weight = torch.randn(24, dtype=torch.float64)
    expected = torch.autograd.grad((turned, grown), inputs, (weight.repeat(7, 1), torch.ones(7).double()), retain_graph=True)
    found = torch.autograd.grad((turned, grown), inputs, (weight.expand(7, 24), torch.ones(()).double().expand(7)))
    assert_close(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs))


def test_modulator_is_the_mixture_of_sigmoids_to_the_power_beta():
    torch.manual_seed(0)
    direction, preferred, bias, mix = (torch.randn(*shape).double() for shape in ((6, 10), (3, 10), (3,), (3,)))
    beta = torch.tensor([1.7]).double()
    weights = mix.exp() / mix.exp().sum()
    for row, m in zip(direction, modulator(direction, preferred, bias, mix, beta)):
        total = sum(weights[i] / (1 + math.exp(-(row @ preferred[i] + bias[i]))) for i in range(3))
        assert_close(m, total**1.7)


@pytest.mark.parametrize("beta", [0.5, 1.0, 4.0])
def test_modulator_passes_gradcheck(beta):
    torch.manual_seed(1)
    shapes = ((6, 10), (3, 10), (3,), (3,))
    inputs = [torch.randn(*shape).double().requires_grad_() for shape in shapes]
    assert torch.autograd.gradcheck(modulator, (*inputs, torch.tensor([beta]).double().requires_grad_()))


def test_modulator_has_finite_gradients_where_it_is_shut():
    direction = torch.randn(4, 10).double().requires_grad_()
    bias = torch.full((3,), -60.0).double().requires_grad_()
    beta = torch.tensor([0.5]).double().requires_grad_()
    m = modulator(direction, torch.randn(3, 10).double(), bias, torch.zeros(3).double(), beta)
    grads = torch.autograd.grad(m, (direction, bias, beta), torch.randn(4).double())
    assert all(grad.isfinite().all() for grad in grads)


# ---- the whole model ------------------------------------------------------------------------------------------------


def path_of(model, tokens):
    """The stream before and after every layer, with the layer's gain and output: one entry a layer."""
    stream = model.embed(tokens)
    cos, sin = rotary(torch.arange(tokens.size(1))[None, None], model.config.n_embd // model.config.n_head, torch.float64)
    context = Context(cos, sin, None)
    for layer in model.layers:
        gain = layer.alpha * layer.modulate(stream.direction)
        out = layer.branch(stream.direction, stream.direction, None, context)
        after, _ = layer(stream, None, context)
        yield stream, gain, out, after
        stream = after


def test_every_layer_keeps_the_invariants_of_the_stream():
    model, d = tiny_model(n_layer=6), 24
    for before, gain, out, after in path_of(model, tiny_tokens()):
        realised = gain * turned_towards(before.direction, out)[1]
        assert_close(after.direction.norm(dim=-1), torch.full((2, 16), math.sqrt(d)).double())
        assert_close(after.direction.mean(-1), torch.zeros(2, 16).double(), atol=1e-12, rtol=0)
        assert_close(angle_between(before.direction, after.direction), realised.atan(), atol=1e-9, rtol=0)
        assert_close(after.log_norm - before.log_norm, 0.5 * torch.log1p(realised**2), atol=1e-12, rtol=0)
        moved = after.direction * (1 + realised**2).sqrt()[..., None] - before.direction        # g̃ · u
        assert_close((moved * before.direction).sum(-1), torch.zeros(2, 16).double(), atol=1e-6, rtol=0)
        assert realised.mean() > 0.01


def test_log_norm_is_the_norm_of_an_explicitly_accumulated_residual_over_48_layers():
    model, residual = tiny_model(n_layer=24), None
    for before, gain, out, after in path_of(model, tiny_tokens()):
        if residual is None:
            residual = before.log_norm.exp()[..., None] * before.direction
        p, nu = turned_towards(before.direction, out)
        rho = residual.norm(dim=-1, keepdim=True) / math.sqrt(24)
        residual = residual + rho * gain[..., None] * nu[..., None] * F.normalize(p, dim=-1) * math.sqrt(24)     # eq 14
        assert_close(after.log_norm.exp(), residual.norm(dim=-1) / math.sqrt(24))
        assert_close(after.direction, F.normalize(residual, dim=-1) * math.sqrt(24))
    assert after.log_norm.mean() > before.log_norm.mean() > -1.0


def test_scaling_the_residual_changes_no_direction_and_scales_the_logits():
    model, tokens = tiny_model(), tiny_tokens()
    logits, directions = model(tokens), [after.direction for *_, after in path_of(model, tokens)]
    with torch.no_grad():
        model.log_norm_start += math.log(3.0)
    assert all(torch.equal(a, after.direction) for a, (*_, after) in zip(directions, path_of(model, tokens)))
    assert_close(model(tokens), 3 * logits)


def plain_transformer(weights, tokens, n_layer, n_head):
    """A pre-norm Transformer in the plainest PyTorch: one function, explicit attention weights."""
    d = weights["embedding.weight"].size(1)
    rms_norm = lambda x, w: x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w
    T, hd = tokens.size(1), d // n_head
    angle = torch.arange(T)[:, None].double() / 10_000 ** (torch.arange(hd // 2).double() * 2 / hd)
    turn = torch.polar(torch.ones_like(angle), angle)                   # a pair of features as a complex number
    rope = lambda x: torch.view_as_real(torch.complex(x[..., :hd // 2], x[..., hd // 2:]) * turn).transpose(-1, -2).flatten(-2)
    heads = lambda x: x.view(*tokens.shape, n_head, hd).transpose(1, 2)
    x = weights["embedding.weight"][tokens]
    for i in range(2 * n_layer):
        w = {key.removeprefix(f"layers.{i}."): value for key, value in weights.items() if key.startswith(f"layers.{i}.")}
        y = rms_norm(x, w["norm.weight"])
        if i % 2 == 0:
            k, v = (y @ w["branch.key_value.weight"].T).chunk(2, dim=-1)
            q, k, v = rope(heads(y @ w["branch.query.weight"].T)), rope(heads(k)), heads(v)
            scores = (q @ k.transpose(-1, -2) / hd**0.5).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
            y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(*tokens.shape, d)
        else:
            h = y @ w["branch.up.weight"].T
            y = 0.5 * h * (1 + torch.erf(h / 2**0.5))
        x = x + y @ w["branch.output.weight"].T
    return rms_norm(x, weights["final_norm.weight"]) @ weights["unembedding.weight"].T


def test_prenorm_baseline_equals_a_plain_transformer():
    model, tokens = tiny_model(residual="prenorm"), tiny_tokens()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    expected = plain_transformer(model.state_dict(), tokens, n_layer=3, n_head=2)[..., :61]
    assert_close(model(tokens), expected)


@pytest.mark.parametrize("residual", ["nag", "prenorm"])
def test_a_late_token_changes_nothing_before_it(residual):
    model, tokens = tiny_model(dtype=torch.float32, residual=residual), tiny_tokens()
    changed = tokens.clone()
    changed[:, 11] = (changed[:, 11] + 1) % 61
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :11], after[:, :11])
    assert not torch.equal(before[:, 11], after[:, 11])


@pytest.mark.parametrize("residual", ["nag", "prenorm"])
def test_first_loss_is_that_of_logits_without_knowledge(residual):
    torch.manual_seed(0)
    model = NAGTransformer(Config(n_layer=8, residual=residual))
    tokens = torch.randint(257, (4, 257))
    spread = 0 if residual == "nag" else 0.5        # the baseline's logits start with variance 1, which costs half of it
    assert abs(model.loss(tokens[:, :-1], tokens[:, 1:]).item() - math.log(257) - spread) < 0.1


@pytest.mark.parametrize("residual", ["nag", "prenorm"])
def test_every_parameter_has_its_documented_initial_spread(residual):
    torch.manual_seed(0)
    model = NAGTransformer(Config(n_embd=128, n_layer=2, residual=residual))
    stds = {name: parameter.std().item() for name, parameter in model.named_parameters() if parameter.ndim == 2}
    shrink = 0.125 if residual == "prenorm" else 1.0        # 1/(4√L) with four layers
    assert stds["layers.0.branch.query.weight"] == pytest.approx(128**-0.5, rel=0.05)
    assert stds["layers.0.branch.output.weight"] == pytest.approx(shrink * 128**-0.5, rel=0.05)
    assert stds["layers.3.branch.output.weight"] == pytest.approx(shrink * 512**-0.5, rel=0.05)
    assert stds["embedding.weight"] == pytest.approx(0.02 if residual == "nag" else 1, rel=0.05)
    assert stds["unembedding.weight"] == pytest.approx(128**-0.5, rel=0.05)
    if residual == "nag":
        assert [round(layer.alpha.item(), 4) for layer in model.layers] == [1.0, 0.7071, 0.5774, 0.5]
        assert all(F.softplus(layer.beta_raw).item() == pytest.approx(1) for layer in model.layers)


@pytest.mark.parametrize("residual", ["nag", "prenorm"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_optimizer_groups_hold_every_parameter_once(residual, optimizer):
    model = tiny_model(residual=residual)
    groups = [group for each in model.configure_optimizers(optimizer) for group in each.param_groups]
    held = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())
    decaying = {id(parameter) for group in groups if group["weight_decay"] for parameter in group["params"]}
    assert decaying == {id(p) for name, p in model.named_parameters() if ".branch." in name}
    assert all(group["initial_lr"] == group["lr"] for group in groups)


@pytest.mark.parametrize("residual", ["nag", "prenorm"])
def test_flops_are_those_that_an_outside_counter_sees(residual):
    model, tokens = tiny_model(dtype=torch.float32, residual=residual, n_embd=32, vocab_size=100), tiny_tokens()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens)
    assert counter.get_total_flops() == model.flops_per_token(context=16) * tokens.numel()


def test_autocast_keeps_statistics_log_norm_m_and_logits_in_float32():
    model, tokens = tiny_model(dtype=torch.float32), tiny_tokens()
    exact = model(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        stream = model.embed(tokens)
        m = model.layers[0].modulate(stream.direction)
        after = nag_update(stream.direction, torch.randn(2, 16, 24).bfloat16(), m, stream.log_norm)
        logits = model(tokens)
    assert stream.direction.dtype == after.direction.dtype == torch.bfloat16
    assert m.dtype == stream.log_norm.dtype == after.log_norm.dtype == logits.dtype == torch.float32
    assert_close(logits, exact, atol=0.15, rtol=0.05)


def test_bfloat16_directions_keep_their_norm_over_200_updates():
    direction, _, _, log_norm = random_case(64, 96, dtype=torch.float32)
    stream = nag.Stream(direction.bfloat16(), log_norm)
    for l in range(1, 201):
        stream = nag_update(stream.direction, torch.randn(64, 96).bfloat16(), torch.full((64,), l**-0.5), stream.log_norm)
    rms = stream.direction.float().square().mean(-1).sqrt()
    assert (rms - 1).abs().max() < 2e-3
    assert stream.direction.float().mean(-1).abs().max() < 1e-2


def test_dropout_acts_in_training_only():
    model, tokens = tiny_model(dropout=0.5), tiny_tokens()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("changes, named", [
    ({"n_embd": 30, "n_head": 4}, "n_embd 30"), ({"residual": "post"}, "post"), ({"n_layer": 0}, "n_layer 0"),
    ({"n_layer": 2.5}, "n_layer 2.5"), ({"dropout": 1.0}, "dropout"), ({"dropout": float("nan")}, "dropout"),
    ({"vocab_size": "61"}, "vocab_size '61'"), ({"n_head": True}, "n_head True")])
def test_config_refuses_impossible_values(changes, named):
    with pytest.raises(ModelError, match=named):
        tiny_config(**changes)


# ---- generation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("residual", ["nag", "prenorm"])
@pytest.mark.parametrize("prompt_length", [1, 5, 16, 17, 40])
def test_decoding_equals_the_full_forward_pass_at_every_position_past_the_context_too(residual, prompt_length):
    model = tiny_model(residual=residual)
    text = tiny_tokens(1, 50)[0]
    full = model(text[None])[0]                     # 50 tokens through a band of 16
    logits, cache = model.prefill(text[:prompt_length])
    for position in range(prompt_length, 50):
        assert_close(logits[0], full[position - 1], atol=1e-5, rtol=0)
        logits = model.decode_one_token(text[position:position + 1], cache)
    assert_close(logits[0], full[-1], atol=1e-5, rtol=0)
    assert cache.keys.shape[3] == 16


def test_cache_takes_several_tokens_at_a_time_at_any_moment():
    model, text = tiny_model(), tiny_tokens(1, 60)
    full, cache = model(text), KVCache(model.config, 1, "cpu", torch.float64)
    found = [model(piece, cache=cache) for piece in text.split([3, 1, 9, 16, 1, 1, 20, 9], dim=1)]
    assert_close(torch.cat(found, dim=1), full, atol=1e-10, rtol=0)


def test_the_band_forgets_what_lies_more_than_a_context_back():
    model = tiny_model(n_layer=1)
    text = tiny_tokens(1, 40)
    changed = text.clone()
    changed[0, 3] += 1
    before, after = model(text)[0], model(changed)[0]
    assert not torch.equal(before[18], after[18])           # 15 back: inside the window of 16
    assert torch.equal(before[19:], after[19:])


def test_prompts_of_different_lengths_together_get_what_each_gets_alone():
    model = tiny_model()
    prompts = [tiny_tokens(1, length, seed=length)[0] for length in (1, 3, 9, 15, 16, 17, 30, 2)]
    alone = [model.generate([prompt], 30, temperature=0)[0] for prompt in prompts]
    together = model.generate(prompts, 30, temperature=0)
    assert all(torch.equal(a, b) for a, b in zip(alone, together))


def test_a_sequence_draws_from_its_own_generator():
    model, prompts = tiny_model(), [[1], [2, 3], [4]]
    together = model.generate(prompts, 20, seed=5)
    for i, prompt in enumerate(prompts):
        assert torch.equal(model.generate([prompt], 20, seed=5 + i)[0], together[i])
    assert not torch.equal(model.generate([[1]], 20, seed=6)[0], together[0])


def test_greedy_top_1_tiny_top_p_and_tiny_temperature_agree():
    model = tiny_model()
    greedy = model.generate([[1, 2]], 20, temperature=0)[0]
    tokens = torch.tensor([[1, 2]])
    for _ in range(14):                             # the plainest loop there is, within the context
        tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(tokens[0], greedy[:16])
    for choice in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-8}, {"temperature": 0, "top_k": 5, "seed": 9}):
        assert torch.equal(model.generate([[1, 2]], 20, **choice)[0], greedy)


def test_draws_follow_the_probabilities_within_top_k_and_top_p():
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    logits = probabilities.log().repeat(1, 1)
    generator = torch.Generator().manual_seed(0)

    def shares(**choice):
        draws = [sample(logits, 1.0, choice.get("top_k"), choice.get("top_p"), [generator]).item() for _ in range(4000)]
        return torch.bincount(torch.tensor(draws), minlength=4) / 4000

    assert_close(shares(), probabilities, atol=0.03, rtol=0)
    assert_close(shares(top_k=2), torch.tensor([4 / 7, 3 / 7, 0, 0]), atol=0.03, rtol=0)
    assert_close(shares(top_p=0.65), torch.tensor([4 / 7, 3 / 7, 0, 0]), atol=0.03, rtol=0)
    assert_close(shares(top_p=0.75, top_k=4), torch.tensor([4 / 9, 3 / 9, 2 / 9, 0]), atol=0.03, rtol=0)


def test_padded_ids_are_never_sampled():
    model = tiny_model()                            # 61 ids in a table of 64
    assert model.unembedding.weight.size(0) == 64 and model(tiny_tokens()).size(-1) == 61
    assert max(model.generate([[0]], 200, temperature=100.0)[0]) < 61


def test_generating_nothing_returns_the_prompt_and_an_empty_prompt_is_refused():
    model = tiny_model()
    assert model.generate([[1, 2, 3]], 0)[0].tolist() == [1, 2, 3]
    with pytest.raises(ModelError, match="end-of-text"):
        model.generate([[]], 3)


# ---- checkpoints ----------------------------------------------------------------------------------------------------

META = {"encoding": "bytes", "vocab_size": 61, "end_of_text": 60}


def test_a_checkpoint_gives_back_the_same_model(tmp_path):
    model = tiny_model(dtype=torch.float32)
    save_checkpoint(tmp_path / "ckpt.pt", model, META, step=3)
    loaded, meta = load_checkpoint(tmp_path / "ckpt.pt")
    assert meta == META and loaded.config == model.config and not loaded.training
    assert torch.equal(loaded(tiny_tokens()), model(tiny_tokens()))
    assert read_checkpoint(tmp_path / "ckpt.pt")["step"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt.pt"]


def test_a_failed_write_leaves_the_old_checkpoint_and_no_temporary_file(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "ckpt.pt", tiny_model(dtype=torch.float32), META)
    before = (tmp_path / "ckpt.pt").read_bytes()

    def full_disk(checkpoint, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError):
        save_checkpoint(tmp_path / "ckpt.pt", tiny_model(seed=1), META)
    assert (tmp_path / "ckpt.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt.pt"]


def test_a_full_disk_is_an_oserror_and_leaves_the_old_checkpoint(tmp_path):
    resource = pytest.importorskip("resource", reason="file size limits are POSIX")
    import signal
    path = tmp_path / "ckpt.pt"
    save_checkpoint(path, tiny_model(dtype=torch.float32), META)
    before = path.read_bytes()
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        with pytest.raises(OSError):
            save_checkpoint(path, tiny_model(dtype=torch.float32, seed=1), META)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before and len(before) > 20_000
    assert [found.name for found in tmp_path.iterdir()] == ["ckpt.pt"]


def test_a_changed_weight_or_value_is_noticed(tmp_path):
    path = tmp_path / "ckpt.pt"
    for change in (lambda c: c["model"]["embedding.weight"][3, 4].add_(1e-3), lambda c: c["meta"].update(end_of_text=5)):
        save_checkpoint(path, tiny_model(dtype=torch.float32), META)
        content = torch.load(path, weights_only=True)
        change(content)
        torch.save(content, path)
        with pytest.raises(ModelError, match="damaged"):
            load_checkpoint(path)


class RunsCode:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize("content", [b"", b"\x00" * 300, "folder", "missing", "tensor", "pickle", "no config", "cut"])
def test_what_is_no_checkpoint_is_refused_in_one_line(content, tmp_path, capsys):
    path = tmp_path / "ckpt.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "folder":
        path.mkdir()
    elif content == "tensor":
        torch.save(torch.ones(3), path)
    elif content == "pickle":
        torch.save({"format": 1, "config": RunsCode()}, path)
    elif content != "missing":
        save_checkpoint(path, tiny_model(dtype=torch.float32), META)
        whole = path.read_bytes()
        if content == "cut":
            path.write_bytes(whole[:len(whole) // 2])
        else:
            entries = torch.load(path, weights_only=True)
            del entries["config"]
            torch.save(entries, path)
    with pytest.raises(ModelError) as error:
        load_checkpoint(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert "executed" not in capsys.readouterr().out
