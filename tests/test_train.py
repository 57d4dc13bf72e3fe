"""Promises of train.py: batches, schedule, learning, resuming, and its answers to mistakes."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import sample
import train
from conftest import ROOT, fails
from model import read_checkpoint
from prepare_data import Shards, find_shards, write_shard

TINY = ["--n_layer", 2, "--n_head", 2, "--n_embd", 32, "--block_size", 32, "--micro_batch", 4, "--batch_tokens", 256,
        "--n_directions", 4, "--eval_blocks", 8, "--threads", 1, "--device", "cpu"]


def run(*flags):
    """Train a tiny model. The sample at the end is short: at its usual length it takes longer than many of these runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "main", lambda argv, main=sample.main: main([*argv, "--max_new_tokens", "20"]))
        train.main([str(flag) for flag in (*TINY, *flags)])


def log_of(out_dir, key):
    lines = [json.loads(line) for line in (out_dir / "log.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line and "command" not in line]


# ---- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 1000])
def test_each_block_comes_once_an_epoch_in_an_order_of_its_own(n):
    epochs = train.shuffled(np.arange(3 * n), n, seed=5).reshape(3, n)
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs.tolist())
    if n >= 64:
        orders = [*epochs.tolist(), train.shuffled(np.arange(n), n, seed=6).tolist(), list(range(n))]
        assert len({tuple(order) for order in orders}) == 5
        assert abs(np.corrcoef(epochs[0], np.arange(n))[0, 1]) < 0.3


def test_where_a_block_stands_depends_on_its_index_alone():
    whole = train.shuffled(np.arange(500), 123, seed=1)
    parts = [train.shuffled(np.arange(first, first + 50), 123, seed=1) for first in range(0, 500, 50)]
    assert np.array_equal(whole, np.concatenate(parts))
    assert train.shuffled(np.array([10**12]), 10**7, seed=1).item() < 10**7     # no table of ten million positions


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_that_share_the_micro_batches_of_a_step_see_the_same_blocks(ranks, tmp_path):
    write_shard(tmp_path / "train.bin", np.arange(40 * 8 + 1, dtype=np.uint16))
    blocks = train.Blocks(Shards([tmp_path / "train.bin"]), 8, 60_000, "--data")
    seen = []
    for step in range(10):                      # 8 micro-batches of 2 sequences a step; rank r takes r, r + ranks, …
        micro_batches = {micro: blocks.micro_batch(3, (step * 8 + micro) * 2, 2, "cpu")[0]
                         for rank in range(ranks) for micro in range(rank, 8, ranks)}
        seen.append(torch.cat([micro_batches[micro] for micro in range(8)]))
    assert torch.equal(torch.cat(seen), blocks.micro_batch(3, 0, 160, "cpu")[0])
    starts = torch.cat(seen)[:, 0] // 8
    assert all(sorted(epoch.tolist()) == list(range(40)) for epoch in starts.split(40))


def test_targets_are_the_tokens_that_follow(tmp_path):
    write_shard(tmp_path / "train.bin", np.arange(33, dtype=np.uint16))
    tokens, targets = train.Blocks(Shards([tmp_path / "train.bin"]), 8, 60_000, "--data").read(np.array([3, 0]), "cpu")
    assert tokens.tolist() == [list(range(24, 32)), list(range(8))]
    assert targets.tolist() == [list(range(25, 33)), list(range(1, 9))]


# ---- schedules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps, warmup", [(1, 0), (1, 1), (20, 5), (20, 20), (1000, 50)])
def test_the_rate_starts_above_zero_rises_falls_and_ends_near_its_minimum(steps, warmup):
    rates = [train.learning_rate_factor(step, step / steps, warmup, 0.1) for step in range(steps)]
    assert all(0 < rate <= 1 for rate in rates)
    peak = rates.index(max(rates))
    assert rates[:peak] == sorted(rates[:peak]) and rates[peak:] == sorted(rates[peak:], reverse=True)
    if steps == 1000:
        assert rates[0] == pytest.approx(1 / 50) and max(rates) > 0.99 and rates[-1] == pytest.approx(0.1, abs=1e-4)


def rates_of(steps, *flags):
    args = train.parse_args(["--n_layer", "2", *flags])
    return [train.rates_at(step, args) for step in range(steps)]


def test_skip_rates_follow_the_flag():
    assert rates_of(2, "--skip_rate", "0.25") == [[0.25] * 4] * 2
    assert rates_of(1, "--skip_rate", "0,0.1,0.2,0.3") == [[0, 0.1, 0.2, 0.3]]


def test_skip_warmup_begins_at_full_depth_and_rises_in_eight_stairs():
    rates = [rates[0] for rates in rates_of(200, "--skip_rate", "0.4", "--skip_warmup_steps", "80")]
    assert rates[:10] == [0] * 10 and rates[80:] == [0.4] * 120 and rates == sorted(rates) and len(set(rates)) == 9
    drawn = [rates[0] for rates in rates_of(800, "--skip_rate", "random:0.5", "--skip_warmup_steps", "400")]
    assert max(drawn[:80]) == 0 and max(drawn[:240]) == pytest.approx(0.2) and max(drawn[400:]) == 0.5
    assert len(set(drawn)) == 6


def test_random_skip_rates_take_each_value_of_their_grid_equally_often_and_depend_on_seed_and_step_alone():
    drawn = [rates[0] for rates in rates_of(600, "--skip_rate", "random:0.5")]
    values, counts = np.unique(np.round(drawn, 9), return_counts=True)
    assert values.tolist() == [0, 0.1, 0.2, 0.3, 0.4, 0.5] and set(counts) == {100}
    assert drawn == [rates[0] for rates in rates_of(600, "--skip_rate", "random:0.5")]
    assert drawn[:12] != [rates[0] for rates in rates_of(12, "--skip_rate", "random:0.5", "--seed", "2")]


# ---- learning -------------------------------------------------------------------------------------------------------


def entropies(data: bytes):
    """Unigram and bigram entropy of a text's own bytes, in nats: what predictors with no more context can reach at best."""
    def entropy(symbols):
        shares = np.unique(symbols, return_counts=True)[1] / len(symbols)
        return -(shares * np.log(shares)).sum()
    text = np.frombuffer(data, np.uint8).astype(np.int64)
    return entropy(text), entropy(text[:-1] * 256 + text[1:]) - entropy(text[:-1])


@pytest.mark.parametrize("residual", ["nag", "prenorm"])
def test_a_small_run_learns_what_takes_attention_over_a_line(residual, tmp_path):
    """Lines of a small grammar: each repeats its opening word at the end, which takes attention over a whole line."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghijklmnop"), 5)) for _ in range(30)]
    text = "\n".join(f"{a} {b} {a}" for a, b in rng.choice(words, (6000, 2))).encode()
    import prepare_data
    (tmp_path / "text.txt").write_bytes(text)
    prepare_data.main([str(tmp_path / "text.txt"), "--out_dir", str(tmp_path / "data")])
    run("--data", tmp_path / "data", "--out_dir", tmp_path / "out", "--steps", 200, "--residual", residual,
        "--n_embd", 48, "--batch_tokens", 512, "--micro_batch", 16, "--eval_every", 200)
    unigram, bigram = entropies(text)
    bound = 0.9
    assert log_of(tmp_path / "out", "val_loss")[-1] < bound < bigram < unigram


def test_a_small_run_learns_more_than_letter_pairs_of_real_text(python_text, tmp_path):
    """Source code as bytes: the validation loss ends below the bigram entropy of the training text."""
    data = Shards(find_shards(python_text, "train")).read(0, 300_000).astype(np.uint8).tobytes()
    unigram, bigram = entropies(data)
    run("--data", python_text, "--out_dir", tmp_path, "--steps", 300, "--n_layer", 1, "--n_embd", 64, "--batch_tokens", 512,
        "--micro_batch", 16, "--eval_every", 300, "--eval_blocks", 128, "--skip_rate", 0)
    loss, = log_of(tmp_path, "val_loss")
    assert loss < bigram - 0.05 < unigram
    assert log_of(tmp_path, "bits_per_byte") == [pytest.approx(loss / math.log(2), rel=1e-3)]


@pytest.mark.parametrize("optimizer, tolerance", [("adamw", 1e-6), ("muon", 3e-4)])
def test_gradient_accumulation_changes_nothing(optimizer, tolerance, short_text, tmp_path):
    """Muon orthogonalises in bfloat16, where a last bit that differs can round the other way: hence its tolerance."""
    logs = []
    for size in (8, 2, 1):
        out = tmp_path / str(size)
        run("--data", short_text, "--out_dir", out, "--steps", 10, "--micro_batch", size, "--optimizer", optimizer,
            "--skip_rate", 0)               # a top share is one of the micro-batch, so skipping does depend on its size
        logs.append(log_of(out, "loss") + log_of(out, "grad_norm"))
    assert np.allclose(logs[0], logs[1], rtol=tolerance, atol=0) and np.allclose(logs[0], logs[2], rtol=tolerance, atol=0)


def test_training_goes_through_more_epochs_than_one_on_a_text_of_three_blocks(tmp_path):
    text = "".join(chr(97 + i % 23) for i in range(3 * 32 + 40))
    import prepare_data
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "data").mkdir()
    ids = prepare_data.get_encoding("bytes").encode(text.encode())
    write_shard(tmp_path / "data" / "train.bin", ids[:97])
    write_shard(tmp_path / "data" / "val.bin", ids[-33:])
    (tmp_path / "data" / "meta.json").write_text(json.dumps({"encoding": "bytes", "vocab_size": 257, "end_of_text": 256}))
    run("--data", tmp_path / "data", "--out_dir", tmp_path / "out", "--steps", 60)
    losses = log_of(tmp_path / "out", "loss")
    assert len(losses) == 60 and losses[-1] < 1.0


def test_the_log_begins_with_all_that_is_needed_to_run_again(short_text, tmp_path):
    run("--data", short_text, "--out_dir", tmp_path, "--steps", 2, "--optimizer", "adamw", "--skip_rate", 0)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {"command", "versions", "config", "train", "device", "parameters"} <= set(lines[0])
    assert lines[0]["config"]["alpha_scale"] == 0.7 and lines[0]["train"]["steps"] == 2
    model = train.model_from(read_checkpoint(tmp_path / "ckpt.pt"))
    assert lines[2]["flops"] == 2 * 256 * 3 * model.flops_per_token() and lines[2]["tokens"] == 512
    assert lines[2]["mfu"] is None and lines[2]["tokens_per_s"] > 0 and "val_loss" in lines[2]


def test_resuming_takes_learning_rates_and_weight_decay_from_the_flags(short_text, tmp_path):
    run("--data", short_text, "--out_dir", tmp_path, "--steps", 1)
    run("--resume", "--out_dir", tmp_path, "--steps", 2, "--weight_decay", 0.7, "--matrix_learning_rate", 0.05)
    matrices = read_checkpoint(tmp_path / "ckpt.pt")["optimizer"][0]["param_groups"][0]
    assert matrices["weight_decay"] == 0.7 and matrices["initial_lr"] == 0.05


@pytest.mark.parametrize("flag", ["--matrix_learning_rate", "--learning_rate", "--gate_learning_rate", "--weight_decay"])
def test_a_rate_that_ruins_the_weights_in_the_last_step_is_named(flag, short_text, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run("--data", short_text, "--out_dir", tmp_path, "--steps", 1, flag, 1e300)
    error = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and flag in error and "step" in error
    assert read_checkpoint(tmp_path / "ckpt.pt")["step"] == 0


def test_a_run_that_diverges_says_so_and_leaves_its_last_checkpoint(short_text, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run("--data", short_text, "--out_dir", tmp_path, "--learning_rate", 1e38, "--gate_learning_rate", 1e30, "--steps", 20)
    error = capsys.readouterr().err.splitlines()[-1]            # after the bar
    assert stop.value.code == 2 and "loss is" in error and "--learning_rate" in error
    assert read_checkpoint(tmp_path / "ckpt.pt")["step"] == 0


def test_ids_beyond_the_vocabulary_are_named(tmp_path, capsys):
    for name in ("train", "val"):
        write_shard(tmp_path / f"{name}.bin", np.full(200, 300, np.uint16))
    (tmp_path / "meta.json").write_text(json.dumps({"encoding": "bytes", "vocab_size": 257, "end_of_text": 256}))
    assert "token 300" in fails(train.main, [*TINY, "--data", tmp_path, "--out_dir", tmp_path / "out"], capsys)


def test_a_run_killed_before_its_first_evaluation_goes_on_as_itself(short_text, tmp_path):
    run("--data", short_text, "--out_dir", tmp_path / "base", "--steps", 3)
    process = start("--data", short_text, "--out_dir", tmp_path / "tuned", "--init_from", tmp_path / "base" / "ckpt.pt",
                    "--steps", 100_000, "--eval_every", 100_000)
    wait_for_step(tmp_path / "tuned", 2, process)
    process.kill()
    process.communicate()
    train.main(["--resume", "--out_dir", str(tmp_path / "tuned"), "--steps", "1"])
    base, tuned = (read_checkpoint(tmp_path / name / "ckpt.pt") for name in ("base", "tuned"))
    assert tuned["config"] == base["config"] and tuned["step"] == 1


needs_compiler = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="torch.compile needs a C++ compiler "
                                    "on a CPU")


@needs_compiler
def test_compiled_runs_go_on_uncompiled_and_the_other_way_round_with_few_graphs_for_all_global_rates(short_text, tmp_path, capfd,
                                                                                                               monkeypatch):
    """Global allocation has other counts of kept tokens after each evaluation, here after each step: one graph has them all."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(train, "rates_at", lambda step, args: [0.1 + 0.06 * step, 0.55 - 0.06 * step])
    flags = ["--data", short_text, "--n_layer", 1, "--skip_rate", 0.3, "--allocation", "global", "--eval_blocks", 4]
    run(*flags, "--out_dir", tmp_path / "eager", "--steps", 6, "--no-compile")
    run(*flags, "--out_dir", tmp_path / "a", "--steps", 6, "--compile")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3     # full depth; the first counts; all that follow
    assert "recompile_limit" not in capfd.readouterr().err
    assert np.allclose(log_of(tmp_path / "a", "loss"), log_of(tmp_path / "eager", "loss"), rtol=1e-3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    run(*flags, "--out_dir", tmp_path / "a", "--steps", 8, "--resume", "--no-compile")
    run(*flags, "--out_dir", tmp_path / "b", "--steps", 8, "--resume", "--compile")
    assert np.allclose(log_of(tmp_path / "a", "loss"), log_of(tmp_path / "b", "loss"), rtol=1e-3)
    run(*flags, "--out_dir", tmp_path / "a", "--steps", 9, "--resume", "--compile")
    for out in (tmp_path / "a", tmp_path / "b"):
        assert not [name for name in read_checkpoint(out / "ckpt.pt")["model"] if "_orig_mod" in name]


@pytest.mark.parametrize("asked, used", [("auto", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")])
def test_the_type_of_the_products_is_what_was_asked_for_and_logged(asked, used, short_text, tmp_path, monkeypatch):
    types = set()
    monkeypatch.setattr(torch.nn.functional, "gelu", lambda x, gelu=torch.nn.functional.gelu: (types.add(x.dtype), gelu(x))[1])
    run("--data", short_text, "--out_dir", tmp_path, "--steps", 1, "--dtype", asked, "--sample_every", 100)
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])["dtype"] == used
    assert getattr(torch, used) in types


@pytest.mark.parametrize("rate", [0, 0.5])
def test_the_share_of_the_peak_counts_what_was_executed_and_is_null_where_no_peak_is_known(rate, short_text, tmp_path, monkeypatch):
    run("--data", short_text, "--out_dir", tmp_path / "cpu", "--steps", 3, "--skip_rate", rate)
    assert log_of(tmp_path / "cpu", "mfu") == [None] * 3
    monkeypatch.setattr(train, "peak_flops", lambda device: 1e6)        # so that the rounding does not show
    run("--data", short_text, "--out_dir", tmp_path / "known", "--steps", 3, "--skip_rate", rate)
    flops, speed, mfu = (log_of(tmp_path / "known", key) for key in ("flops", "tokens_per_s", "mfu"))
    assert np.allclose(np.diff([0, *flops]) * np.array(speed) / 256 / 1e6, mfu, rtol=1e-3)
    model = train.model_from(read_checkpoint(tmp_path / "known" / "ckpt.pt"))
    assert flops[0] == 3 * 256 * model.flops_per_token([1 - rate] * 4)


def test_a_step_may_be_a_single_sequence(short_text, tmp_path):
    run("--data", short_text, "--out_dir", tmp_path, "--steps", 2, "--micro_batch", 1, "--batch_tokens", 32)
    assert log_of(tmp_path, "tokens") == [32, 64]


@pytest.mark.parametrize("flags, factors", [
    (["--steps", 3, "--warmup_steps", 3], (1 / 3, 1)), (["--steps", 3, "--warmup_steps", 0], (1, 1)), (["--steps", 1], (1, 1)),
    (["--flop_budget", 1e-300], (1, 1)), (["--steps", 2, "--learning_rate", 0], (1, 1))])
def test_the_edges_of_the_schedule_train_from_a_rate_above_zero(flags, factors, short_text, tmp_path):
    run("--data", short_text, "--out_dir", tmp_path, *flags)
    logged = log_of(tmp_path, "lr_factor")
    assert logged[0] == pytest.approx(factors[0]) and 0 < max(logged) <= factors[1]


def test_a_run_ends_with_its_figures_a_sample_and_the_next_commands(short_text, tmp_path, capsys):
    flags = [*TINY, "--data", short_text, "--out_dir", tmp_path, "--steps", 3, "--sample_every", 2]
    train.main([str(flag) for flag in flags])
    printed = capsys.readouterr()
    for text in ("parameters", "FLOPs a token", "validation loss", "bits per byte", "python sample.py", "--resume --steps 6"):
        assert text in printed.out
    assert "loss" in printed.err and "tokens/s" in printed.err          # the bar


# ---- depth ----------------------------------------------------------------------------------------------------------

SMALL = ["--n_layer", 4, "--n_embd", 48, "--block_size", 64, "--batch_tokens", 1024, "--micro_batch", 16, "--eval_every", 10**6,
         "--eval_blocks", 64]


def dial_of(out_dir):
    return log_of(out_dir, "dial")


@pytest.fixture(scope="module")
def quarter(python_text, tmp_path_factory):
    """A run that skips a quarter, and its control that skips a random quarter, at equal FLOPs."""
    folder = tmp_path_factory.mktemp("quarter")
    flags = ["--data", python_text, *SMALL, "--skip_rate", 0.25, "--flop_budget", 1.7e11, "--skip_rates", "0,0.25,0.5"]
    control = start(*flags, "--out_dir", folder / "random", "--choose", "random")       # side by side
    run(*flags, "--out_dir", folder / "modulator", "--choose", "modulator")
    _, error = control.communicate()
    assert control.returncode == 0, error
    return folder


def test_choosing_by_the_modulator_beats_random_choice_at_equal_flops(quarter):
    by_modulator, at_random = (log_of(quarter / choose, "val_loss")[-1] for choose in ("modulator", "random"))
    assert by_modulator < at_random - 0.05


def test_a_flop_budget_is_spent_and_no_more_than_a_step_beyond(quarter):
    flops = log_of(quarter / "modulator", "flops")
    assert flops[-2] < 1.7e11 <= flops[-1] and len(flops) > 200
    model = train.model_from(read_checkpoint(quarter / "modulator" / "ckpt.pt"))
    assert flops[0] == pytest.approx(3 * 1024 * model.flops_per_token([0.75] * 8))
    factors = log_of(quarter / "modulator", "lr_factor")
    assert max(factors) > 0.85 and factors[-1] < 0.12


def test_thresholds_lose_at_most_a_hundredth_of_a_nat_against_the_choice_of_training(quarter):
    found = evaluator_of(quarter / "modulator")
    by_cuts, by_top = found(found.depth([0.25] * 8)), found(train.TopShare([0.25] * 8))
    print(f"loss by thresholds {by_cuts['val_loss']:.4f}, by top share {by_top['val_loss']:.4f}")
    assert abs(by_cuts["val_loss"] - by_top["val_loss"]) < 0.01
    unequal = [0.0, 0.5, 0.1, 0.4, 0.25, 0.25, 0.1, 0.4]
    by_cuts, by_top = found(found.depth(unequal)), found(train.TopShare(unequal))
    assert abs(by_cuts["val_loss"] - by_top["val_loss"]) < 0.01
    assert np.mean(by_cuts["kept_share"]) == pytest.approx(1 - np.mean(unequal), abs=0.03)


def evaluator_of(out_dir):
    """The evaluator of a finished run, as --eval_only makes it."""
    args = train.parse_args(["--eval_only", "--out_dir", str(out_dir)])
    origin = train.settle_flags(args)
    blocks = train.open_data(args, origin["meta"])[:2]
    import contextlib
    return train.Evaluator(train.model_from(origin), args, *blocks, None, contextlib.nullcontext)


def test_held_out_text_keeps_the_share_that_was_asked_for(quarter):
    for row in dial_of(quarter / "modulator"):
        assert row["layers_run"] == pytest.approx(1 - row["skip_rate"], abs=0.03)
    assert [row["skip_rate"] for row in dial_of(quarter / "modulator")] == [0, 0.25, 0.5]


@pytest.mark.parametrize("rates", [[0.25] * 8, [0.5] * 8, [0.0, 0.5, 0.1, 0.4, 0.25, 0.25, 0.1, 0.4]])
def test_each_layer_keeps_its_share_of_text_like_that_of_the_thresholds(rates, quarter, python_text):
    """Blocks of the training text that the thresholds have not seen. (On unlike text the single layers drift apart.)"""
    found = evaluator_of(quarter / "modulator")
    blocks = train.Blocks(Shards(find_shards(python_text, "train")), 64, 257, "--data")
    others = np.setdiff1d(np.arange(blocks.n_blocks), blocks.spread(8192 // 64))
    found.val_blocks, found.numbers = blocks, np.random.default_rng(0).choice(others, 512, replace=False)
    assert np.allclose(found(found.depth(rates))["kept_share"], 1 - np.array(rates), atol=0.03)


def test_eval_only_prints_and_logs_a_table_and_changes_no_weight(quarter, capsys):
    out_dir, rows = quarter / "modulator", len(dial_of(quarter / "modulator"))
    before = (out_dir / "ckpt.pt").read_bytes()
    for flags in ([], ["--choose", "random"], ["--choose", "static"], ["--allocation", "global"]):
        train.main(["--eval_only", "--out_dir", str(out_dir), "--skip_rates", "0,0.25", *flags])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12 and "validation loss" in lines[0]
    added = dial_of(out_dir)[rows:]
    assert [row["choose"] for row in added] == ["modulator"] * 2 + ["random"] * 2 + ["static"] * 2 + ["modulator"] * 2
    assert len({row["val_loss"] for row in added if row["skip_rate"] == 0}) == 1
    modulator, at_random, static = (added[i]["val_loss"] for i in (1, 3, 5))
    assert modulator < at_random and modulator < static
    assert added[5]["kept_share"].count(None) == 2 and added[3]["layers_run"] == 0.75
    assert added[1]["flops_share"] == pytest.approx(added[3]["flops_share"], abs=0.02) and added[5]["flops_share"] < 0.8
    assert (out_dir / "ckpt.pt").read_bytes() == before


def test_a_depth_budget_is_a_skip_rate_said_in_layers(quarter, capsys):
    out_dir = quarter / "modulator"
    for flags in (["--depth_budget", "4"], ["--skip_rates", "0.5"]):
        train.main(["--eval_only", "--out_dir", str(out_dir), *flags])
    by_layers, by_rate = dial_of(out_dir)[-2:]
    assert by_layers == by_rate and by_layers["layers_run"] == pytest.approx(0.5, abs=0.1)
    for flags, named in ((["--depth_budget", 8.5], "at most 8"), (["--depth_budget", 4, "--skip_rates", "0"], "--skip_rates")):
        assert named in fails(train.main, ["--eval_only", "--out_dir", out_dir, *flags], capsys)


def test_a_prenorm_checkpoint_can_drop_whole_layers_only(short_text, tmp_path, capsys):
    run("--data", short_text, "--out_dir", tmp_path, "--steps", 2, "--residual", "prenorm")
    train.main(["--eval_only", "--out_dir", str(tmp_path), "--choose", "static", "--skip_rates", "0,0.25"])
    assert dial_of(tmp_path)[-1]["kept_share"].count(None) == 1
    assert "--choose static" in fails(train.main, ["--eval_only", "--out_dir", tmp_path, "--skip_rates", "0.25"], capsys)


def test_evaluations_log_share_gain_and_angle_of_each_layer(quarter):
    for key in ("kept_share", "gain", "angle"):
        layers = log_of(quarter / "modulator", key)[-1]
        assert len(layers) == 8 and all(0 < value < 2 for value in layers)
    found, gains, angles = evaluator_of(quarter / "modulator"), {}, {}
    model = found.model

    def watch(layer, before, after, rows):      # measured anew: gain as α·m, angle between the streams
        module, kept = model.layers[layer], slice(None) if rows is None else rows.kept
        gains[layer] = (module.alpha * module.modulate(before.direction)).flatten()[kept].mean().item()
        angles[layer] = train.angle_between(before.direction, after.direction).flatten()[kept].mean().item()
    with torch.no_grad():
        model(found.val_blocks.read(found.numbers, "cpu")[0], model.cuts_for(), watch=watch)
    assert np.allclose(list(gains.values()), log_of(quarter / "modulator", "gain")[-1], rtol=1e-3)
    assert np.allclose(list(angles.values()), log_of(quarter / "modulator", "angle")[-1], rtol=1e-3)


def test_the_default_depth_of_a_checkpoint_is_what_it_was_trained_at(quarter, short_text, tmp_path):
    model = train.model_from(read_checkpoint(quarter / "modulator" / "ckpt.pt"))
    assert model.default_rates.tolist() == [0.25] * 8 and model.cuts_for().cuts == model.cuts_for(0.25).cuts
    for flags, rates in (([], [0.25] * 4), (["--skip_rate", "0,0.5,0.125,0"], [0, 0.5, 0.125, 0]), (["--skip_rate", 0], [0] * 4)):
        out = tmp_path / str(rates)
        run("--data", short_text, "--out_dir", out, "--steps", 1, *flags)
        assert train.model_from(read_checkpoint(out / "ckpt.pt")).default_rates.tolist() == rates


def test_static_choice_drops_the_layers_that_turn_the_stream_least(quarter):
    found = evaluator_of(quarter / "modulator")
    found.args.choose = "static"
    angles = found.layer_angles()
    assert sorted(found.depth([0.25] * 8).layers) == sorted(np.argsort(angles)[:2].tolist())


def test_a_layer_that_hardly_runs_is_named(python_text, tmp_path, capsys):
    run("--data", python_text, "--out_dir", tmp_path, "--steps", 2, "--skip_rate", "0,0.995,0,0")
    assert "layer 1 runs for" in capsys.readouterr().out


def test_global_allocation_gives_layers_their_own_rates_and_resumes_with_them(python_text, tmp_path):
    flags = ["--data", python_text, "--skip_rate", 0.3, "--allocation", "global", "--eval_every", 4]
    run(*flags, "--out_dir", tmp_path / "whole", "--steps", 12)
    kept = log_of(tmp_path / "whole", "kept_share")[-1]
    rates = train.model_from(read_checkpoint(tmp_path / "whole" / "ckpt.pt")).default_rates
    assert max(rates) - min(rates) > 0.02 and rates.mean().item() == pytest.approx(0.3, abs=1e-3)
    assert np.allclose(kept, 1 - rates.numpy(), atol=0.06)          # 8 validation blocks of 32 tokens are few
    interrupted_after(8, *flags, "--out_dir", tmp_path / "parts", "--steps", 12)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def interrupted_after(steps, *flags):
    """A run whose process is asked to stop after some steps, and its continuation."""
    real, count = train.learning_rate_factor, []

    def counting(*args):
        count.append(1)
        if len(count) == steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)
    train.learning_rate_factor = counting
    try:
        run(*flags)
    finally:
        train.learning_rate_factor = real
    run(*flags, "--resume")


@pytest.mark.parametrize("flags", [["--skip_rate", 0.5, "--skip_warmup_steps", 16], ["--skip_rate", "random:0.5"],
                                   ["--choose", "random", "--skip_rate", 0.25], ["--flop_budget", 1.4e9]])
def test_a_run_interrupted_while_it_skips_goes_on_to_the_last_bit(flags, short_text, tmp_path):
    flags = ["--data", short_text, *flags] + ([] if "--flop_budget" in flags else ["--steps", 20])
    run(*flags, "--out_dir", tmp_path / "whole")
    interrupted_after(7, *flags, "--out_dir", tmp_path / "parts")
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    assert len(log_of(tmp_path / "whole", "step")) > 15


# ---- interruptions --------------------------------------------------------------------------------------------------


def start(*flags):
    command = [sys.executable, str(ROOT / "train.py"), *map(str, (*TINY, *flags))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_step(out_dir, step, process):
    for _ in range(600):
        if (out_dir / "log.jsonl").exists() and f'"step": {step},' in (out_dir / "log.jsonl").read_text():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("the run does not get on")


def assert_same_run(one, other):
    """Weights, optimizer and logged losses of two runs, bit for bit."""
    a, b = read_checkpoint(one / "ckpt.pt"), read_checkpoint(other / "ckpt.pt")
    tensors = [dict(train_leaves(c)) for c in (a, b)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    assert a["step"] == b["step"] and a["flops"] == b["flops"]
    assert log_of(one, "loss") == log_of(other, "loss") and log_of(one, "val_loss") == log_of(other, "val_loss")


def train_leaves(checkpoint):
    from model import leaves
    return [(name, leaf) for name, leaf in leaves(checkpoint) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_run_killed_by_sigkill_goes_on_to_the_last_bit(optimizer, short_text, tmp_path):
    flags = ["--data", short_text, "--steps", 60, "--eval_every", 10, "--dropout", 0.1, "--optimizer", optimizer]
    process = start(*flags, "--out_dir", tmp_path / "killed")
    wait_for_step(tmp_path / "killed", 15, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    killed_at = read_checkpoint(tmp_path / "killed" / "ckpt.pt")["step"]
    assert 10 <= killed_at < 60
    train.main(["--resume", "--out_dir", str(tmp_path / "killed")])             # every other flag is the run's own
    run(*flags, "--out_dir", tmp_path / "whole")
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_and_ends_cleanly(number, short_text, tmp_path):
    process = start("--data", short_text, "--steps", 100_000, "--eval_every", 100_000, "--out_dir", tmp_path)
    wait_for_step(tmp_path, 5, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in err
    step = read_checkpoint(tmp_path / "ckpt.pt")["step"]
    assert step >= 5 and f"stopped after step {step}" in out and "--resume" in out
    assert log_of(tmp_path, "step")[-1] == step


def test_a_checkpoint_is_there_at_the_end_of_a_run_too_short_for_an_evaluation(short_text, tmp_path):
    run("--data", short_text, "--out_dir", tmp_path, "--steps", 7, "--eval_every", 2000)
    assert read_checkpoint(tmp_path / "ckpt.pt")["step"] == 7


def test_resume_starts_where_there_is_nothing_ends_where_all_is_done_and_goes_on_with_more_steps(short_text, tmp_path, capsys):
    flags = ["--data", short_text, "--out_dir", tmp_path, "--resume"]
    run(*flags, "--steps", 3)
    assert read_checkpoint(tmp_path / "ckpt.pt")["step"] == 3
    run(*flags)
    assert "all of the run's 3 steps are done" in capsys.readouterr().out
    run(*flags, "--steps", 5)
    assert read_checkpoint(tmp_path / "ckpt.pt")["step"] == 5
    assert log_of(tmp_path, "step") == [1, 2, 3, 4, 5]


def test_fine_tuning_starts_from_the_weights_with_a_new_optimizer(short_text, tmp_path):
    run("--data", short_text, "--out_dir", tmp_path / "a", "--steps", 2)
    train.main([str(x) for x in ("--data", short_text, "--init_from", tmp_path / "a" / "ckpt.pt", "--out_dir",
                                 tmp_path / "b", "--steps", 1, "--learning_rate", 0, "--matrix_learning_rate", 0,
                                 "--gate_learning_rate", 0, "--batch_tokens", 256, "--micro_batch", 4, "--eval_blocks", 8)])
    a, b = read_checkpoint(tmp_path / "a" / "ckpt.pt"), read_checkpoint(tmp_path / "b" / "ckpt.pt")
    assert b["step"] == 1 and b["config"] == a["config"]
    assert all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])


def test_a_second_run_into_the_same_folder_is_refused_and_harms_nothing(short_text, tmp_path, capsys):
    run("--data", short_text, "--out_dir", tmp_path, "--steps", 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    error = fails(train.main, [*TINY, "--data", short_text, "--out_dir", tmp_path], capsys)
    assert str(tmp_path) in error and "--resume" in error and "ckpt.pt" in error
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags, named", [
    (["--data", "/nonexistent"], "prepare_data.py"), (["--batchsize", 4], "--batchsize"), (["batch_size=4"], "batch_size=4"),
    (["--micro_batch", "four"], "'four'"), (["--micro_batch", 0], "'0'"), (["--micro_batch", -1], "--micro_batch"),
    (["--n_head", 3, "--n_embd", 64], "--n_embd 64"), (["--learning_rate", "nan"], "nan"), (["--steps", 0], "--steps"),
    (["--warmup_steps", 9, "--steps", 5], "--warmup_steps 9"), (["--batch_tokens", 100], "128"), (["--dropout", 1], "--dropout"),
    (["--min_lr", 2], "--min_lr"), (["--device", "gpu"], "cpu"), (["--device", "cuda:99"], "--device cuda:99"),
    (["--dtype", "float16"], "float16"), (["--dtype", "fp16"], "bfloat16"),
    (["--device", "mps:7"], "--device mps:7"), (["--grad_accum", 3], "--grad_accum"), (["--depth_budget", 2], "--eval_only"),
    (["--micro_batc", 4], "--micro_batc"), (["--data", ""], "--data"), (["--out_dir", "/proc/x"], "/proc/x"), (["--init_from", "/nonexistent.pt"], "/nonexistent.pt"),
    (["--init_from", "x", "--resume"], "--init_from"), (["--skip_rate", 1], "'1'"), (["--skip_rate", -0.1], "-0.1"),
    (["--skip_rate", "0.1,0.2"], "2 numbers"), (["--skip_rate", "0.1,,0.2,0.3"], "''"), (["--skip_rate", "random:"], "''"),
    (["--skip_rate", "random:0.1,0.2"], "random:"), (["--skip_rate", 0.25, "--residual", "prenorm"], "--skip_rate 0.25"),
    (["--choose", "static"], "--choose static"), (["--choose", "random", "--residual", "prenorm"], "--choose random"),
    (["--flop_budget", 1e9], "--steps"), (["--eval_only"], "ckpt.pt"), (["--seed", 10**20], "--seed"),
    (["--eval_only", "--skip_rates", "0,1"], "'1'"), (["--residual", "post"], "post"), (["--block_size", 10**7,
     "--micro_batch", 1, "--batch_tokens", 10**7], "--block_size")])
def test_a_mistake_is_answered_in_one_line(flags, named, short_text, tmp_path, capsys):
    base = [*TINY, "--data", short_text, "--out_dir", tmp_path / "out", "--steps", 1]
    assert named in fails(train.main, [*base, *flags], capsys)
    assert not (tmp_path / "out" / "ckpt.pt").exists()


def test_a_file_in_place_of_the_out_dir_is_named(short_text, tmp_path, capsys):
    (tmp_path / "file").write_text("precious")
    assert "file" in fails(train.main, [*TINY, "--data", short_text, "--out_dir", tmp_path / "file"], capsys)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("flags, named", [
    (["--n_layer", 3], "--n_layer 2 there, 3 asked for"), (["--seed", 7], "--seed"), (["--residual", "prenorm"], "--residual nag there, prenorm asked for"),
    (["--n_embd", 64], "--n_embd 32 there, 64 asked for"), (["--n_head", 1], "--n_head"), (["--block_size", 16], "--block_size 32 there, 16"),
    (["--batch_tokens", 128], "--batch_tokens"), (["--block_size", 64, "--batch_tokens", 256], "--block_size")])
def test_resuming_with_another_model_or_other_batches_is_refused(flags, named, short_text, tmp_path, capsys):
    run("--data", short_text, "--out_dir", tmp_path, "--steps", 1)
    assert named in fails(train.main, ["--resume", "--out_dir", tmp_path, "--steps", 2, *flags], capsys)


def test_resuming_on_data_of_another_encoding_is_refused(short_text, tmp_path, capsys):
    run("--data", short_text, "--out_dir", tmp_path / "out", "--steps", 1)
    other = tmp_path / "other"
    other.mkdir()
    for name in ("train", "val"):
        write_shard(other / f"{name}.bin", np.arange(200, dtype=np.uint16))
    error = fails(train.main, ["--resume", "--out_dir", tmp_path / "out", "--steps", 2, "--data", other], capsys)
    assert "gpt2" in error and "bytes" in error


@pytest.mark.skipif(sys.platform == "win32", reason="needs a program that always fails")
def test_compile_without_a_compiler_is_answered_in_one_line(short_text, tmp_path):
    environment = {**os.environ, "CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, str(ROOT / "train.py"), *map(str, TINY), "--data", str(short_text), "--out_dir", str(tmp_path / "out"),
               "--steps", "1", "--n_layer", "1", "--compile"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("train.py: error: --compile")
    assert "Traceback" not in done.stderr


def test_help_comes_within_three_tenths_of_a_second():
    for script in ("train.py", "sample.py", "prepare_data.py"):
        times = []
        for _ in range(4):
            began = time.perf_counter()
            done = subprocess.run([sys.executable, str(ROOT / script), "--help"], capture_output=True, text=True)
            times.append(time.perf_counter() - began)
            assert done.returncode == 0 and "usage" in done.stdout
        assert min(times) < 0.3, script
