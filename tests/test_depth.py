"""Promises of Mixture-of-Depths: what is skipped is untouched and not computed, and one checkpoint serves every depth."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from conftest import tiny_model, tiny_tokens
from model import (AboveCut, Context, KVCache, ModelError, RandomShare, StaticDrop, TopShare, kept_count,
                   load_checkpoint, nag_update, rotary, save_checkpoint, tie_break)

L = 6           # layers of the tiny model: 3 blocks


def measured_model(**changes):
    """A tiny model with its threshold table."""
    model = tiny_model(**changes)
    model.measure_table(tiny_tokens(64, 16, seed=9))
    return model


def kept_masks(model, tokens, depth, cache=None):
    """Logits, and which layers each token ran: (L, B, T) bool."""
    ran = torch.zeros(len(model.layers), *tokens.shape, dtype=torch.bool)

    def watch(layer, before, after, rows):
        ran[layer].view(-1)[slice(None) if rows is None else rows] = True
    return model(tokens, depth, cache, watch), ran


# ---- skipping in one layer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_skipped_tokens_pass_both_lanes_to_the_last_bit(dtype):
    model, tokens = tiny_model(dtype=torch.float32 if dtype == torch.bfloat16 else dtype), tiny_tokens()
    skipped = []

    def watch(layer, before, after, rows):
        out = torch.ones(tokens.numel(), dtype=torch.bool)
        out[rows] = False
        for a, b in ((before.direction, after.direction), (before.log_norm, after.log_norm)):
            assert torch.equal(a.flatten(0, 1)[out], b.flatten(0, 1)[out])
            assert not torch.equal(a.flatten(0, 1)[~out], b.flatten(0, 1)[~out])
        skipped.append(out.sum().item())
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        model(tokens, TopShare([0.5] * L), watch=watch)
    assert skipped == [16] * L


@pytest.mark.parametrize("k", [0, 1, 4, 7])
def test_update_of_some_rows_equals_a_masked_update_of_all(k):
    torch.manual_seed(0)
    direction = F.normalize(torch.randn(7, 24).double(), dim=-1) * math.sqrt(24)
    out, gain, log_norm = torch.randn(7, 24).double() + 0.3, torch.rand(7).double(), torch.randn(7).double()
    inputs = [x.requires_grad_() for x in (direction, out, gain, log_norm)]
    rows = torch.randperm(7)[:k].sort().values
    mask = torch.zeros(7, dtype=torch.bool)
    mask[rows] = True
    found = nag_update(direction, out[rows], gain, log_norm, rows)
    dense = nag_update(direction, out, gain, log_norm)
    expected = (torch.where(mask[:, None], dense.direction, direction), torch.where(mask, dense.log_norm, log_norm))
    grads = torch.randn(7, 24).double(), torch.randn(7).double()
    assert_close(tuple(found), expected, atol=0, rtol=0)
    assert_close(torch.autograd.grad(tuple(found), inputs, grads), torch.autograd.grad(expected, inputs, grads))


def masked_forward(model, tokens, rates):
    """The dense reference: every branch runs for every token, and a mask decides which updates count."""
    stream = model.embed(tokens)
    positions = torch.arange(tokens.size(1))[None]
    cos, sin = rotary(positions[:, None], model.config.n_embd // model.config.n_head, torch.float64)
    ties = 1e-4 * tie_break(positions, L)
    for l, layer in enumerate(model.layers):
        m = layer.modulate(stream.direction)
        score = (m.detach() + ties[l]).flatten()
        kept = sorted(range(len(score)), key=lambda i: (-score[i].item(), i))[:kept_count(rates[l], len(score))]
        mask = torch.zeros(len(score), dtype=torch.bool)
        mask[kept] = True
        mask = mask.view(tokens.shape)
        after = nag_update(stream.direction, layer.branch(stream.direction, None, Context(cos, sin, None)), layer.alpha * m, stream.log_norm)
        stream = type(stream)(torch.where(mask[..., None], after.direction, stream.direction),
                              torch.where(mask, after.log_norm, stream.log_norm))
    return model.head(stream)


ONE_ROW = 1 - 1 / 32            # of 2 × 16 tokens


@pytest.mark.parametrize("rates", [[0.0] * L, [0.25] * L, [0.5] * L, [ONE_ROW] * L, [0.0, 0.9, 0.1, 0.5, 0.25, 0.75]])
@pytest.mark.parametrize("ties", [False, True])
def test_gathered_computation_equals_the_dense_masked_reference_in_values_and_gradients(rates, ties):
    model, tokens = tiny_model(), tiny_tokens()
    if ties:
        tokens[:, 3:12] = 5             # runs of one token: equal m in the first layer, told apart by the tie-break
    weight = torch.randn(2, 16, 61, generator=torch.Generator().manual_seed(1)).double()
    found, expected = model(tokens, TopShare(rates)), masked_forward(model, tokens, rates)
    assert_close(found, expected)
    parameters = list(model.parameters())
    grads = torch.autograd.grad(found, parameters, weight), torch.autograd.grad(expected, parameters, weight)
    assert_close(*grads)


def test_no_kept_row_gives_zero_gradients_not_none_or_nan():
    model, tokens = tiny_model(), tiny_tokens()
    model.loss(tokens, tokens, AboveCut([math.inf] * L)).backward()
    for name, parameter in model.named_parameters():
        if name.startswith("layers."):
            assert parameter.grad is not None and parameter.grad.abs().max() == 0, name
    assert model.embedding.weight.grad.abs().max() > 0


def test_kept_count_is_exact():
    assert [kept_count(rate, 40) for rate in (0, 0.1, 0.25, 0.3, 0.5, 0.7, 0.999)] == [40, 36, 30, 28, 20, 12, 1]
    assert kept_count(0.1, 10) == 9 and kept_count(0.3, 10) == 7        # 0.3 · 10 is 2.9999… in floating point


def test_the_tie_break_is_fixed_even_and_of_no_pattern():
    ties = tie_break(torch.arange(4096)[None], L)
    assert ties.shape == (L, 1, 4096) and 0 <= ties.min() and ties.max() < 1
    assert torch.equal(ties[:, :, 100:200], tie_break(torch.arange(100, 200)[None], L))
    assert (ties.mean(-1) - 0.5).abs().max() < 0.02 and len(ties.unique()) > 0.99 * ties.numel()
    series = ties[:, 0] - 0.5
    assert (series[:, 1:] * series[:, :-1]).mean(-1).abs().max() < 0.01 and (series[0] * series[1]).mean().abs() < 0.01


def test_random_choice_keeps_the_same_shares_of_other_tokens():
    model, tokens = tiny_model(), tiny_tokens()
    _, top = kept_masks(model, tokens, TopShare([0.25] * L))
    torch.manual_seed(3)
    _, drawn = kept_masks(model, tokens, RandomShare([0.25] * L))
    assert torch.equal(top.sum((1, 2)), drawn.sum((1, 2))) and not torch.equal(top, drawn)


@pytest.mark.parametrize("residual", ["nag", "prenorm"])
def test_a_dropped_layer_is_as_if_it_were_not_there(residual):
    model, tokens = tiny_model(residual=residual), tiny_tokens()
    dropped = model(tokens, StaticDrop([1, 4]))
    del model.layers[4], model.layers[1]
    assert torch.equal(dropped, model(tokens))


# ---- FLOPs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [[0.25] * L, [0.5] * L, [0.0, 0.9, 0.1, 0.5, 0.25, 0.75]])
def test_flops_with_skipping_are_those_that_an_outside_counter_sees(rates):
    model, tokens = tiny_model(dtype=torch.float32, n_embd=32), tiny_tokens()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, TopShare(rates))
    kept = [kept_count(rate, 32) / 32 for rate in rates]
    assert counter.get_total_flops() == round(model.flops_per_token(kept, context=16) * 32)
    assert model.flops_per_token(kept) < model.flops_per_token()


def counted_flops(run) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def test_a_dropped_layer_costs_nothing():
    model, text = tiny_model(), tiny_tokens(1, 16)
    found = counted_flops(lambda: model(text, StaticDrop([0, 3])))
    assert found == model.flops_per_token([None, 1, 1, None, 1, 1], context=16) * 16


def test_a_token_that_skips_all_layers_costs_keys_values_modulators_and_the_head():
    model, text = tiny_model(), tiny_tokens(1, 16)
    cache = KVCache(model.config, 1, "cpu", torch.float64)
    model(text, cache=cache)
    found = counted_flops(lambda: model(text[:, :1], AboveCut([2.0] * L), cache))       # no score reaches 2
    assert found == 3 * 4 * 24**2 + L * 2 * 5 * 24 + 2 * 24 * 64


# ---- causality, cuts and decoding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.25, 0.5])
def test_under_thresholds_a_late_token_changes_nothing_before_it(rate):
    model, tokens = measured_model(), tiny_tokens()
    changed = tokens.clone()
    changed[:, 11:] = (changed[:, 11:] + 7) % 61
    cuts = model.cuts_for(rate)
    (before, kept), (after, kept_after) = kept_masks(model, tokens, cuts), kept_masks(model, changed, cuts)
    assert torch.equal(kept[:, :, :11], kept_after[:, :, :11])
    assert_close(before[:, :11], after[:, :11], atol=1e-9, rtol=0)
    assert 0 < kept.sum() < kept.numel()


def test_the_choice_of_training_looks_ahead_by_design():
    model, tokens = tiny_model(), tiny_tokens()
    kept = []
    for last in range(61):
        tokens[:, 11:] = last
        kept.append(kept_masks(model, tokens, TopShare([0.5] * L))[1][:, :, :11])
    assert any(not torch.equal(kept[0], other) for other in kept)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.25, 0.5, 0.9, [0.0, 0.9, 0.1, 0.5, 0.25, 0.75]])
@pytest.mark.parametrize("prompt_length", [1, 16, 37])
def test_decoding_equals_the_full_forward_pass_at_every_rate_and_position(rate, prompt_length):
    model, text = measured_model(), tiny_tokens(1, 45, seed=3)
    cuts = model.cuts_for(rate)
    full, kept = kept_masks(model, text, cuts)
    ran = []

    def watch(layer, before, after, rows):
        T = before.direction.size(1)
        if layer == 0:
            ran.extend([[False] * L for _ in range(T)])
        for row in range(T) if rows is None else rows.tolist():
            ran[row - T][layer] = True
    logits, cache = model.prefill(text[0, :prompt_length], cuts, watch)
    for position in range(prompt_length, 45):
        assert_close(logits[0], full[0, position - 1], atol=1e-5, rtol=0)
        logits = model.decode_one_token(text[0, position:position + 1], cache, cuts, watch)
    assert_close(logits[0], full[0, -1], atol=1e-5, rtol=0)
    assert torch.equal(torch.tensor(ran).T, kept[:, 0])


def test_in_float32_flips_at_a_cut_are_rare():
    """A token within rounding of its cut may fall on the other side when it is decoded: counted, not hidden."""
    model, text = measured_model(dtype=torch.float32), tiny_tokens(1, 200, seed=4)
    cuts = model.cuts_for(0.5)
    _, kept = kept_masks(model, text, cuts)
    _, cache = model.prefill(text[0, :1], cuts)
    flips = 0
    for position in range(1, 200):
        def watch(layer, before, after, rows):
            nonlocal flips
            flips += bool(rows is None or len(rows)) != bool(kept[layer, 0, position])
        model.decode_one_token(text[0, position:position + 1], cache, cuts, watch)
    print(f"{flips} of {199 * L} choices flipped")
    assert flips <= 2


def test_prompts_decoded_together_at_half_depth_get_what_each_gets_alone():
    model = measured_model()
    cuts = model.cuts_for(0.5)
    prompts = [tiny_tokens(1, length, seed=length)[0] for length in (1, 3, 9, 15, 16, 17, 30, 2)]
    together = model.generate(prompts, 25, temperature=0, depth=cuts)
    for prompt, expected in zip(prompts, together):
        assert torch.equal(model.generate([prompt], 25, temperature=0, depth=cuts)[0], expected)
    assert not torch.equal(model.generate(prompts[:1], 25, temperature=0)[0], together[0])


def test_rate_0_is_the_full_model_and_the_default_is_the_rate_of_training():
    model = measured_model()
    assert model.cuts_for(0) is None and model.cuts_for([0.0] * L) is None and model.cuts_for() is None
    model.set_default_depth(tiny_tokens(64, 16, seed=9), [0.25] * L)
    assert model.cuts_for().cuts == model.cuts_for(0.25).cuts == model.cuts_for(depth_budget=4.5).cuts
    assert model.cuts_for(depth_budget=6) is None
    from_the_table = model.cuts_for(0.25).cuts
    model.default_cuts.fill_(math.nan)                  # as in a checkpoint that lacks this entry
    assert model.cuts_for(0.25).cuts == pytest.approx(from_the_table)


def test_unequal_rates_of_training_have_thresholds_of_their_own():
    model, rates = measured_model(), [0.0, 0.75, 0.25, 0.5, 0.1, 0.6]
    model.set_default_depth(tiny_tokens(256, 16, seed=9), rates)
    _, kept = kept_masks(model, tiny_tokens(256, 16, seed=10), model.cuts_for())
    assert_close(kept.float().mean((1, 2)), 1 - torch.tensor(rates), atol=0.03, rtol=0)


@pytest.mark.parametrize("rate", [0.03, 0.1, 0.25, 0.33, 0.5, 0.75, 0.95, 0.98])
def test_thresholds_realise_the_rate_on_text_like_that_of_the_table(rate):
    model = tiny_model()
    model.measure_table(tiny_tokens(256, 16, seed=9))
    _, kept = kept_masks(model, tiny_tokens(256, 16, seed=10), model.cuts_for(rate))
    assert_close(kept.float().mean((1, 2)), torch.full((L,), 1 - rate), atol=0.03, rtol=0)


def test_the_table_holds_the_cuts_of_passes_at_each_rate():
    model = tiny_model()
    tokens = (torch.arange(8)[:, None] * 7 + torch.arange(16) * 3) % 61        # no token twice at one position: no ties
    model.measure_table(tokens)
    for i in (1, 5, 10, 19):
        rate = model.RATES[i]
        top, above = kept_masks(model, tokens, TopShare([rate] * L)), kept_masks(model, tokens, AboveCut(model.quantiles[i].tolist()))
        assert torch.equal(top[1], above[1])
        assert_close(top[0], above[0])


def test_global_allocation_cuts_all_layers_at_one_gain():
    model = measured_model()
    rates = model.global_rates(0.4)
    assert sum(rates) / L == pytest.approx(0.4, abs=1e-3) and max(rates) <= 0.9 and len(set(rates)) > 2
    gains = [gain * model.cuts_for(rates).cuts[l] for l, gain in enumerate(model.gains.tolist())]
    inner = [gain for gain, rate in zip(gains, rates) if 0 < rate < 0.9]
    assert max(inner) - min(inner) < 0.02 < max(model.gains.tolist()) - min(model.gains.tolist())
    _, kept = kept_masks(model, tiny_tokens(64, 16, seed=10), model.cuts_for(0.4, allocation="global"))
    assert kept.float().mean().item() == pytest.approx(0.6, abs=0.05)


def test_the_table_travels_in_the_checkpoint(tmp_path):
    model = measured_model(dtype=torch.float32)
    save_checkpoint(tmp_path / "ckpt.pt", model, {"encoding": "bytes", "vocab_size": 61, "end_of_text": 60})
    loaded, _ = load_checkpoint(tmp_path / "ckpt.pt")
    assert loaded.cuts_for(0.37).cuts == model.cuts_for(0.37).cuts
    assert torch.equal(loaded(tiny_tokens(), loaded.cuts_for(0.37)), model(tiny_tokens(), model.cuts_for(0.37)))


@pytest.mark.parametrize("arguments, named", [
    ({"skip_rate": 1.0}, "below 1"), ({"skip_rate": -0.1}, "skip_rate -0.1"), ({"skip_rate": math.nan}, "nan"),
    ({"skip_rate": [0.1] * 5}, "5 numbers"), ({"depth_budget": 7}, "at most 6"), ({"depth_budget": 0}, "depth_budget 0"),
    ({"skip_rate": 0.1, "depth_budget": 3}, "twice"), ({"allocation": "nonsense"}, "nonsense")])
def test_a_depth_that_cannot_be_is_refused(arguments, named):
    with pytest.raises(ModelError, match=named):
        measured_model().cuts_for(**arguments)


def test_a_model_that_cannot_skip_says_why():
    with pytest.raises(ModelError, match="no threshold table"):
        tiny_model().cuts_for(0.25)
    with pytest.raises(ModelError, match="pre-norm"):
        tiny_model(residual="prenorm").cuts_for(0.25)
    assert tiny_model(residual="prenorm").cuts_for() is None and tiny_model().cuts_for(0) is None


# ---- compiled -------------------------------------------------------------------------------------------------------


def test_training_with_skipping_compiles_as_one_graph():
    import torch._dynamo
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward
    model, tokens = tiny_model(), tiny_tokens()
    compiled = torch.compile(model.loss, backend=backend, fullgraph=True, dynamic=False)
    for rate in (0.25, 0.5, 0.25, 0.5):
        assert_close(compiled(tokens, tokens, TopShare([rate] * L)), model.loss(tokens, tokens, TopShare([rate] * L)))
    assert len(graphs) == 2             # one for each rate: a new object of an old rate compiles nothing
