"""Promises of train.py about the data it is given: shards of others, other encodings, too little, too much."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import prepare_data
import sample
import train
from conftest import ROOT, fails
from model import load_checkpoint
from prepare_data import write_shard
from test_prepare_data import RANKS, TEXT, ranks_text
from test_train import TINY, log_of, run

IDS = np.random.default_rng(1).integers(0, 50257, 3000)


def write_meta(folder, **changes):
    meta = {"encoding": "bytes", "vocab_size": 257, "end_of_text": 256} | changes
    (folder / "meta.json").write_text(json.dumps(meta))


@pytest.fixture
def no_ranks(monkeypatch, tmp_path):
    """A machine where GPT-2's ranks cannot be had."""
    import tiktoken.registry

    def fail(url):
        raise ConnectionError("no network")
    monkeypatch.setattr(prepare_data, "answer", fail)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("names", ["fineweb_{}_000001.bin", "{}.bin"])
@pytest.mark.parametrize("kind", ["<u2", "<u4", "without a header"])
def test_shards_of_others_train_without_meta_json_network_or_ranks(names, kind, no_ranks, tmp_path, capsys):
    if kind == "without a header" and names != "{}.bin":
        pytest.skip("nanoGPT calls them train.bin and val.bin")
    (tmp_path / "data").mkdir()
    for split in ("train", "val"):
        path = tmp_path / "data" / names.format(split)
        if kind == "without a header":
            IDS.astype("<u2").tofile(path)
        else:
            write_shard(path, IDS.astype(kind))
    run("--data", tmp_path / "data", "--out_dir", tmp_path / "out", "--steps", 2, "--sample_every", 1)
    output = capsys.readouterr()
    notes = [line for line in output.err.splitlines() if "note:" in line]
    assert len(notes) == 1 and "gpt2" in notes[0] and "TIKTOKEN_CACHE_DIR" in notes[0] and "bits per byte" in notes[0]
    assert log_of(tmp_path / "out", "bits_per_byte")[-1] is None and len(log_of(tmp_path / "out", "loss")) == 2
    assert "Next:" in output.out and "A sample" not in output.out
    assert load_checkpoint(tmp_path / "out" / "ckpt.pt")[1] == prepare_data.GPT2_META
    error = fails(sample.main, ["--checkpoint", tmp_path / "out" / "ckpt.pt"], capsys)
    assert "gpt2" in error and "TIKTOKEN_CACHE_DIR" in error


def test_a_checkpoint_holds_the_ranks_file_and_samples_without_it_and_the_data(tmp_path, capsys):
    (tmp_path / "own.tiktoken").write_text(ranks_text(RANKS))
    (tmp_path / "book.txt").write_bytes(TEXT)
    prepare_data.main([str(tmp_path / name) if "." in name else name for name in
                       ("book.txt", "--encoding", "own.tiktoken", "--out_dir")] + [str(tmp_path / "data")])
    run("--data", tmp_path / "data", "--out_dir", tmp_path / "out", "--steps", 2)
    model, meta = load_checkpoint(tmp_path / "out" / "ckpt.pt")
    assert model.config.vocab_size == meta["vocab_size"] == 301 and meta["ranks"] == ranks_text(RANKS)
    assert log_of(tmp_path / "out", "bits_per_byte")[-1] > 0
    for path in [tmp_path / "own.tiktoken", tmp_path / "book.txt", *(tmp_path / "data").iterdir()]:
        path.unlink()
    capsys.readouterr()
    sample.main(["--checkpoint", str(tmp_path / "out" / "ckpt.pt"), "--prompt", "in the", "--max_new_tokens", "5"])
    assert capsys.readouterr().out.startswith("in the")


# ---- going on with other data ---------------------------------------------------------------------------------------

@pytest.fixture
def finished(tmp_path, capsys):
    """A run of one step on bytes, and its data."""
    (tmp_path / "book.txt").write_bytes(b"".join(TEXT.splitlines(keepends=True)[:50]))
    prepare_data.prepare([tmp_path / "book.txt"], "bytes", tmp_path / "data")
    run("--data", tmp_path / "data", "--out_dir", tmp_path / "out", "--steps", 1)
    capsys.readouterr()
    return tmp_path


@pytest.mark.parametrize("meta, found", [
    ({"vocab_size": 300, "end_of_text": 299, "encoding": "other"}, "encoding other with 300 ids"),      # another size
    ({"encoding": "other"}, "encoding other with 257 ids"),                                             # same size
    (None, "encoding gpt2 with 50257 ids (assumed, as there is no meta.json)")])
def test_going_on_with_data_of_another_encoding_is_refused_with_both_names(meta, found, finished, capsys):
    other = finished / "other"
    other.mkdir()
    for split in ("train", "val"):
        write_shard(other / f"{split}.bin", np.arange(200, dtype="<u2"))
    if meta:
        write_meta(other, **meta)
    for flags in (["--resume", "--out_dir", finished / "out", "--steps", 2],
                  ["--init_from", finished / "out" / "ckpt.pt", "--out_dir", finished / "out2", "--steps", 2]):
        error = fails(train.main, [*flags, "--data", other, "--batch_tokens", 256, "--micro_batch", 4], capsys)
        assert found in error and "encoding bytes with 257 ids" in error, error


def test_going_on_with_other_ranks_of_the_same_name_and_size_is_refused(tmp_path, capsys):
    (tmp_path / "book.txt").write_bytes(TEXT)
    for name, tokens in (("one", RANKS), ("two", [*RANKS[:-1], b"other"])):
        (tmp_path / "own.tiktoken").write_text(ranks_text(tokens))
        prepare_data.prepare([tmp_path / "book.txt"], str(tmp_path / "own.tiktoken"), tmp_path / name)
    run("--data", tmp_path / "one", "--out_dir", tmp_path / "out", "--steps", 1)
    error = fails(train.main, ["--resume", "--out_dir", tmp_path / "out", "--steps", 2, "--data", tmp_path / "two"], capsys)
    assert error.count("own.tiktoken with 301 ids (ranks ") == 2


def test_going_on_with_other_shards_of_the_same_encoding_is_noted(finished, capsys):
    (finished / "more.txt").write_bytes(TEXT[::-1])
    prepare_data.prepare([finished / "more.txt"], "bytes", finished / "other")
    train.main(["--resume", "--out_dir", str(finished / "out"), "--steps", "2", "--data", str(finished / "other")])
    assert f"note: the shards of --data {finished / 'other'} are not those" in capsys.readouterr().out
    train.main(["--resume", "--out_dir", str(finished / "out"), "--steps", "3"])
    assert "note:" not in capsys.readouterr().out


# ---- what does not fit ----------------------------------------------------------------------------------------------

def test_an_id_beyond_the_vocabulary_is_named_with_shard_and_position(tmp_path, capsys):
    for name, ids in (("train_0", np.arange(100)), ("train_1", np.array([1] * 70 + [257] + [1] * 90)), ("val", np.arange(100))):
        write_shard(tmp_path / f"{name}.bin", ids.astype("<u2"))
    write_meta(tmp_path)
    error = fails(train.main, [*TINY, "--data", tmp_path, "--out_dir", tmp_path / "out", "--steps", 9], capsys)
    assert f"token 257 at position 70 of {tmp_path / 'train_1.bin'}" in error and "257 ids" in error


def test_shards_too_narrow_for_the_vocabulary_are_refused_with_both_sizes(tmp_path, capsys):
    for split in ("train", "val"):
        write_shard(tmp_path / f"{split}.bin", np.arange(200, dtype="<u2"))
    write_meta(tmp_path, encoding="other", vocab_size=100_000, end_of_text=99_999)
    error = fails(train.main, [*TINY, "--data", tmp_path, "--out_dir", tmp_path / "out"], capsys)
    assert "65,536" in error and "100,000" in error and "train.bin" in error


def test_a_shard_that_is_missing_is_noticed_and_a_glob_may_leave_it_out(tmp_path, capsys):
    (tmp_path / "text").write_bytes(TEXT)
    prepare_data.prepare([tmp_path / "text"], "bytes", tmp_path / "data", shard_tokens=2000)
    stated = prepare_data.read_meta(tmp_path / "data")["splits"]["train"]["tokens"]
    (tmp_path / "data" / "train_000001.bin").unlink()
    flags = [*TINY, "--out_dir", tmp_path / "out", "--steps", 1, "--data"]
    error = fails(train.main, [*flags, tmp_path / "data"], capsys)
    assert str(stated) in error and f"{stated - 2000:,}" in error and "train" in error
    assert not (tmp_path / "out" / "ckpt.pt").exists()
    train.main([str(flag) for flag in [*flags, tmp_path / "data" / "*.bin"]])


def test_validation_data_of_another_encoding_is_refused(finished, capsys):
    other = finished / "other"
    other.mkdir()
    write_shard(other / "val.bin", np.arange(200, dtype="<u2"))
    error = fails(train.main, [*TINY, "--data", finished / "data", "--val_data", other, "--out_dir", finished / "new"], capsys)
    assert "--val_data" in error and "gpt2" in error and "bytes" in error


@pytest.mark.parametrize("tokens, trains", [(20, False), (32, False), (33, True), (34, True)])
def test_a_text_of_one_block_and_a_token_trains_and_less_is_refused(tokens, trains, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    for split in ("train", "val"):
        write_shard(tmp_path / "data" / f"{split}.bin", np.arange(tokens, dtype="<u2"))
    write_meta(tmp_path / "data")
    flags = [*TINY, "--data", tmp_path / "data", "--out_dir", tmp_path / "out", "--steps", 1]
    if trains:
        train.main([str(flag) for flag in flags])
        return
    error = fails(train.main, flags, capsys)
    assert f"{tokens} tokens" in error and "33" in error and "--block_size" in error


def test_a_characters_vocabulary_of_nanogpts_is_named_and_not_opened(tmp_path, capsys):
    for split in ("train", "val"):
        (IDS % 65 + 1).astype("<u2").tofile(tmp_path / f"{split}.bin")
    (tmp_path / "meta.pkl").write_bytes(b"cos\nsystem\n(S'touch harm'\ntR.")
    error = fails(train.main, [*TINY, "--data", tmp_path, "--out_dir", tmp_path / "out"], capsys)
    assert "meta.pkl" in error and "python prepare_data.py" in error


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory as Linux shows it")
def test_training_on_four_billion_tokens_starts_soon_and_its_memory_stays_flat(tmp_path):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 10**9
    for name in ("train_0", "train_1", "train_2", "train_3", "val_0"):
        with (tmp_path / f"{name}.bin").open("wb") as file:
            file.write(header)
            file.truncate(1024 + 2 * 10**9)         # sparse: takes no room
    write_meta(tmp_path)
    flags = [str(flag) for flag in (*TINY, "--data", tmp_path, "--out_dir", tmp_path / "out", "--steps", 120, "--skip_rate", 0,
                                 "--block_size", 128, "--micro_batch", 2)]      # few places, each of which is a page to fetch
    started = time.monotonic()
    training = subprocess.Popen([sys.executable, ROOT / "train.py", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    log, anonymous, begun = tmp_path / "out" / "log.jsonl", [], None
    while training.poll() is None:
        steps = log.read_text().count('"loss"') if log.exists() else 0
        begun = begun or (steps and time.monotonic() - started)
        status = Path(f"/proc/{training.pid}/status").read_text() if 20 <= steps < 119 else ""
        anonymous += [int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("RssAnon")]
        time.sleep(0.05)
    assert training.returncode == 0, training.stderr.read()
    assert begun < 10 and len(anonymous) > 3 and max(anonymous) - anonymous[0] < 20, (begun, anonymous)
