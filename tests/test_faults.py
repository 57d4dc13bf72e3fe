"""Promises about what a run survives: kills, damaged checkpoints, full folders, steps and memory that go wrong."""

import json
import math
import os

import numpy as np
import pytest
import torch

from conftest import fails
from model import NAGTransformer, read_checkpoint
import soak
import train

SHAPE = ["--n_layer", "2", "--n_head", "2", "--n_embd", "32", "--block_size", "32", "--batch_tokens", "512",
         "--micro_batch", "8", "--eval_blocks", "8", "--eval_every", "8", "--save_every", "4", "--device", "cpu"]


def run(*flags):
    train.main([str(flag) for flag in flags])


def entries(out_dir) -> list[dict]:
    return [json.loads(line) for line in (out_dir / "log.jsonl").read_text().splitlines()]


def weights(path) -> dict:
    return read_checkpoint(path)["model"]


def equal(found: dict, expected: dict) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def kept(tmp_path_factory, python_text):
    """A run of 32 steps that keeps three checkpoints."""
    out_dir = tmp_path_factory.mktemp("kept") / "out"
    run(*SHAPE, "--data", python_text, "--out_dir", out_dir, "--steps", 32, "--keep", 3, "--skip_rate", 0.25)
    return out_dir


def test_a_run_killed_again_and_again_ends_in_the_weights_of_one_that_was_let_be(capsys):
    found = soak.main(["--kills", "9"])
    assert found["kills"] >= 9 and found["while_a_checkpoint_was_written"] >= 3


def test_the_last_checkpoints_are_kept_and_the_best_besides(kept):
    assert sorted(path.name for path in kept.iterdir()) == ["best.pt", "ckpt-0000024.pt", "ckpt-0000028.pt", "ckpt.pt", "log.jsonl"]
    assert [read_checkpoint(path)["step"] for path in train.checkpoints(kept)] == [32, 28, 24]
    losses = {entry["step"]: entry["val_loss"] for entry in entries(kept) if "val_loss" in entry}
    best = read_checkpoint(kept / "best.pt")
    assert best["step"] == min(losses, key=losses.get) and best["best_val_loss"] == min(losses.values())


def test_the_best_checkpoint_stays_where_later_ones_are_worse(python_text, tmp_path, capsys):
    base = ["--data", python_text, "--out_dir", tmp_path / "out", "--skip_rate", 0]
    run(*SHAPE, *base, "--steps", 16)
    run(*base, "--resume", "--steps", 24, "--gate_learning_rate", 2, "--learning_rate", 2, "--min_lr", 1)
    losses = {entry["step"]: entry["val_loss"] for entry in entries(tmp_path / "out") if "val_loss" in entry}
    best = min(losses, key=losses.get)
    assert best == 16 and read_checkpoint(tmp_path / "out" / "best.pt")["step"] == best
    assert f"best.pt holds the lowest validation loss on the way, {losses[best]:.4f}" in capsys.readouterr().out


def copied(kept, tmp_path):
    for path in kept.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
        os.utime(tmp_path / path.name, ns=(path.stat().st_mtime_ns,) * 2)
    return tmp_path


def test_resuming_passes_over_damaged_checkpoints_says_so_and_ends_in_the_same_weights(kept, python_text, tmp_path, capsys):
    out = copied(kept, tmp_path)
    whole = (out / "ckpt-0000028.pt").read_bytes()
    (out / "ckpt.pt").write_bytes(b"x" * 100)
    at = whole.index(weights(out / "ckpt-0000028.pt")["embedding.weight"].numpy().tobytes()) + 100
    (out / "ckpt-0000028.pt").write_bytes(whole[:at] + bytes([whole[at] ^ 0xff]) + whole[at + 1:])
    (out / ".ckpt.pt.tmp-77").write_bytes(b"left by a killed process")
    run("--data", python_text, "--out_dir", out, "--resume")
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert len(notes) == 3 and "/ckpt.pt" in notes[0] and "ckpt-0000028.pt" in notes[1]
    assert notes[2] == f"note: going on from {out / 'ckpt-0000024.pt'}, which holds step 24"
    assert (out / "ckpt.pt.damaged").read_bytes() == b"x" * 100 and not list(out.glob(".*"))
    assert equal(weights(out / "ckpt.pt"), weights(kept / "ckpt.pt"))
    losses = [[entry["loss"] for entry in entries(folder) if "loss" in entry] for folder in (out, kept)]
    assert losses[0] == losses[1] and len(losses[0]) == 32


def test_where_all_checkpoints_are_damaged_one_line_says_so_and_nothing_is_lost(kept, tmp_path, capsys):
    out = copied(kept, tmp_path)
    for path in out.glob("ckpt*.pt"):
        path.write_bytes(b"x")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(SystemExit) as stop:
        run("--out_dir", out, "--resume")
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and len(lines) == 3 and "error: " in lines[2]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_lost_newest_checkpoint_is_replaced_by_the_one_before(kept, python_text, tmp_path, capsys):
    out = copied(kept, tmp_path)
    (out / "ckpt.pt").unlink()
    run("--data", python_text, "--out_dir", out, "--resume")
    assert "ckpt-0000028.pt, which holds step 28" in capsys.readouterr().err
    assert equal(weights(out / "ckpt.pt"), weights(kept / "ckpt.pt"))


def test_folders_without_hard_links_keep_copies(kept, python_text, tmp_path, monkeypatch):
    def link(*names):
        raise OSError(1, "Operation not permitted")
    monkeypatch.setattr(os, "link", link)
    run(*SHAPE, "--data", python_text, "--out_dir", tmp_path / "out", "--steps", 8, "--skip_rate", 0.25)
    assert [read_checkpoint(path)["step"] for path in train.checkpoints(tmp_path / "out")] == [8, 4]
    assert read_checkpoint(tmp_path / "out" / "best.pt")["step"] == 8


def test_a_step_that_is_not_finite_is_left_out_and_ten_in_a_row_end_the_run(python_text, tmp_path, capsys):
    base = [*SHAPE, "--data", python_text, "--out_dir", tmp_path / "out", "--steps", 40, "--skip_rate", 0, "--residual", "prenorm",
            "--eval_every", 100]
    with pytest.raises(SystemExit) as stop:
        run(*base, "--learning_rate", "1e25", "--optimizer", "adamw")
    message = capsys.readouterr().err.splitlines()[-1]          # after the bar
    assert stop.value.code == 2 and "tenth step in a row" in message and "learning rate" in message
    assert sum(entry.get("left_out", False) for entry in entries(tmp_path / "out")) == 9    # the tenth ended it unlogged
    assert "ckpt.pt holds step 8" in message and all(weight.isfinite().all() for weight in weights(tmp_path / "out" / "ckpt.pt").values()
                                                     if weight.is_floating_point())


def test_one_step_that_is_not_finite_leaves_the_weights_as_they_were(python_text, tmp_path, monkeypatch):
    loss, seen = NAGTransformer.loss, []

    def spoilt(self, *args):        # two calls time the machine, then there are two a step: the last call of the third step
        seen.append({name: weight.detach().clone() for name, weight in self.named_parameters()})
        return loss(self, *args) * (math.nan if len(seen) == 2 + 2 * 3 else 1)

    monkeypatch.setattr(NAGTransformer, "loss", spoilt)
    run(*SHAPE, "--data", python_text, "--out_dir", tmp_path / "out", "--steps", 6, "--skip_rate", 0)
    assert [entry["step"] for entry in entries(tmp_path / "out") if entry.get("left_out")] == [3]
    assert equal(seen[8], seen[7]) and not equal(seen[10], seen[8])


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_id_beyond_the_vocabulary_anywhere_is_found_before_the_first_step(split, tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train", "val"):
        tokens = np.arange(20000) % 257
        if name == split:
            tokens[19_900] = 300
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, len(tokens)
        (data / f"{name}_000000.bin").write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    (data / "meta.json").write_text(json.dumps({"encoding": "bytes", "vocab_size": 257, "end_of_text": 256}))
    error = fails(train.main, [*SHAPE, "--block_size", 128, "--batch_tokens", 1024, "--data", data, "--out_dir", tmp_path / "out"],
                  capsys)
    assert "token 300" in error and split in error and "19,900" in error.replace("19900", "19,900")
    assert not (tmp_path / "out" / "ckpt.pt").exists()


def test_a_gpu_that_is_too_small_is_answered_by_naming_the_flags_that_help(python_text, tmp_path, capsys, monkeypatch):
    def too_large(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    monkeypatch.setattr(NAGTransformer, "loss", too_large)
    error = fails(train.main, [*SHAPE, "--data", python_text, "--out_dir", tmp_path / "out"], capsys)
    assert all(flag in error for flag in ("--micro_batch", "--activation_checkpointing", "--block_size"))
