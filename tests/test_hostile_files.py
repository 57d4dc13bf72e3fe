"""Promises about files that lie: shards, meta.json and checkpoints, damaged at random or made to do harm.

Each is read as what it says, or refused in one line; nothing else happens. The cases are random, but the same each time.
"""

import contextlib
import functools
import io
import json
import math
import os
import pickle
import random
import shutil
import struct
import sys
import unicodedata
import zipfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

import prepare_data
import sample
import train
from conftest import fails
from model import ModelError, digests, model_from, read_checkpoint
from prepare_data import UserError, encoding_from_meta, exit_on_user_error
from test_mistakes import resealed


def outcome(function, *args):
    """What a function returns, and ""; or None, and the one line without control characters that told a user's mistake."""
    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        try:
            return function(*args), ""
        except SystemExit as stop:
            line = error.getvalue()
            assert stop.code == 2 and line.endswith("\n"), line
            assert not [sign for sign in line[:-1] if unicodedata.category(sign) == "Cc"], line
            return None, line


def answered(function, *args):
    """What a function returns; None where it ends with a user's mistake."""
    return outcome(functools.partial(exit_on_user_error, errors=(UserError, ModelError)), function, *args)[0]


# Values that no file of ours holds where they are put, or only by an odd chance.
HOSTILE = [None, True, False, "", "1", "\x1b[2J\n", "\0.tiktoken", "\ud800", "é" * 10_000, -1, 0, 1, 3, 10**9, 2**31, 2**40, 2**63,
           10**400, -10**400, 1.5, -0.0, 1e-320, 1e308, math.nan, math.inf, -math.inf, [], [1], [[[[]]]], {}, {"a": {"b": [0]}}]


# ---- shards and meta.json -------------------------------------------------------------------------------------------

BLOCK, SPLITS = 16, ("train", "val")


def tokens_in(path: Path) -> list[int] | None:
    """What a shard holds by the table at the top of prepare_data.py, read without its help; None if it is no shard."""
    data = path.read_bytes()
    if len(data) < 1024:
        return None
    magic, version, count = struct.unpack("<3i", data[:12])
    letter = {(20240520, 1): "H", (20240801, 7): "I"}.get((magic, version))
    if letter is None or count < 0 or len(data) != 1024 + count * struct.calcsize(f"<{letter}"):
        return None
    return list(struct.unpack(f"<{count}{letter}", data[1024:]))


def damaged_shard(data: bytearray, draw: random.Random) -> bytearray:
    width, kind = 2 if data[:4] == struct.pack("<i", 20240520) else 4, draw.randrange(8)
    if kind == 0:                                           # the words of the header that mean something
        values = (-1, 0, 1, 7, -2**31, 2**31 - 1, len(data), 20240520, 20240801, (len(data) - 1024) // width - 1)
        struct.pack_into("<i", data, 4 * draw.randrange(3), draw.choice((*values, draw.randrange(-2**31, 2**31))))
    elif kind == 1:                                         # magic and version of the other kind
        struct.pack_into("<2i", data, 0, *((20240801, 7) if width == 2 else (20240520, 1)))
    elif kind == 2:
        del data[draw.choice((draw.randrange(len(data)), len(data) - draw.randrange(1, 9))):]
    elif kind == 3:
        data += draw.randbytes(draw.choice((1, 2, 4, 1000)))
    elif kind == 4:                                         # bits anywhere
        for _ in range(draw.randrange(1, 9)):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == 5:                                         # ids beyond the vocabulary
        place = 1024 + width * draw.randrange((len(data) - 1024) // width)
        struct.pack_into("<H" if width == 2 else "<I", data, place, draw.choice((257, 258, 2**(8 * width) - 1)))
    elif kind == 6:                                         # words of the header that mean nothing
        struct.pack_into("<i", data, 4 * draw.randrange(3, 256), draw.randrange(-2**31, 2**31))
    else:                                                   # another count, with as many tokens
        count = draw.randrange(60)
        struct.pack_into("<i", data, 8, count)
        del data[1024 + count * width:]
    return data


def damaged_meta(text: bytes, draw: random.Random) -> bytes:
    kind, meta = draw.randrange(4), json.loads(text)
    if kind == 0:
        data = bytearray(text)
        for _ in range(draw.randrange(1, 5)):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        return bytes(data)
    if kind == 1:
        return draw.choice((text[:draw.randrange(len(text))], b"[" * 50_000, b'{"a":' * 50_000, b"\xff\xfe", b"1" * 5000,
                            json.dumps(draw.choice(HOSTILE)).encode()))
    if kind == 2:
        del meta[draw.choice(sorted(meta.keys() - {"encoding"}))]
    else:
        place = draw.choice((meta, meta, meta["splits"], meta["splits"]["train"]))
        place[draw.choice([*place, "ranks", "ranks_file"])] = draw.choice((*HOSTILE, "../meta.json", "train_000000.bin", "..", "/"))
    return json.dumps(meta).encode()


def whole_data(folder: Path) -> tuple[dict, list[list[int]]]:
    """meta, and the tokens of both splits, by the way that train.py reads them."""
    *both, meta = train.open_data(Namespace(data=str(folder), val_data=None, block_size=BLOCK, resume=False))
    encoding_from_meta(meta)
    rows = [blocks.read(np.arange(blocks.n_blocks), "cpu") for blocks in both]
    return meta, [[*tokens.flatten().tolist(), targets[-1, -1].item()] for tokens, targets in rows]


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_damaged_data_is_refused_or_read_as_what_its_files_say(dtype, tmp_path):
    draw, read = random.Random(dtype), 0
    splits = {"train": np.arange(200, dtype=dtype), "val": np.arange(50, dtype=dtype)}
    meta = {"encoding": "bytes", "vocab_size": 257, "end_of_text": 256,
            "splits": {split: {"tokens": len(ids)} for split, ids in splits.items()}}
    for split, ids in splits.items():
        prepare_data.write_shard(tmp_path / f"{split}_000000.bin", ids)
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert answered(whole_data, tmp_path)[1] == [list(range(193)), list(range(49))]
    for case in range(260):
        path = draw.choice(sorted(files))
        damaged = damaged_meta if path.suffix == ".json" else lambda data, draw: damaged_shard(bytearray(data), draw)
        path.write_bytes(damaged(files[path], draw))
        found = answered(whole_data, tmp_path)
        if found:
            read += 1
            written = [tokens_in(tmp_path / f"{split}_000000.bin") for split in SPLITS]
            assert found[1] == [ids[:(len(ids) - 1) // BLOCK * BLOCK + 1] for ids in written], case
            assert max(map(max, found[1])) < found[0]["vocab_size"] == 257, case
        path.write_bytes(files[path])
    print(f"{read} of 260 read")
    assert 30 < read < 200


@pytest.mark.parametrize("name", ["\0", "\ud800", "..", "/", "", "a" * 5000, "../meta.json", "/etc/hostname", "train_000000.bin", "missing"])
def test_meta_names_no_file_but_one_beside_it(name, python_text, tmp_path):
    shutil.copytree(python_text, tmp_path / "data")
    meta = json.loads((tmp_path / "data" / "meta.json").read_text())
    (tmp_path / "data" / "meta.json").write_text(json.dumps(meta | {"ranks_file": name}))
    (tmp_path / "meta.json").write_text("not beside it")
    assert answered(whole_data, tmp_path / "data") is None
    if name == "../meta.json":
        assert prepare_data.read_meta(tmp_path / "data")["ranks"] == (tmp_path / "data" / "meta.json").read_text()


@pytest.mark.skipif(os.name != "posix", reason="file names as POSIX has them")
def test_the_names_of_files_command_no_terminal(tmp_path, capsys):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some text\n" * 99)
    (tmp_path / "text" / "\x1b[2J\n.bin").write_bytes(b"\xff")
    prepare_data.main([str(tmp_path / "text"), "--out_dir", str(tmp_path / "\x1b[3J")])
    out = capsys.readouterr().out
    assert "\\x1b[2J\\n.bin" in out and "\\x1b[3J" in out and "\x1b" not in out and out.count("\n") == 5


# ---- checkpoints, damaged at random ---------------------------------------------------------------------------------

SMALL = ["--n_layer", 1, "--n_head", 1, "--n_embd", 8, "--block_size", 16, "--n_directions", 2, "--micro_batch", 2, "--batch_tokens", 32,
         "--eval_blocks", 2, "--threads", 1, "--device", "cpu", "--skip_rates", 0.5, "--keep", 1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, python_text):
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        train.main([str(flag) for flag in (*SMALL, "--data", python_text, "--out_dir", folder, "--steps", 2)])
    return folder


@pytest.fixture
def place(finished, python_text, tmp_path, monkeypatch):
    """A copy of the run and its data, which a test may spoil, as the current folder."""
    shutil.copytree(finished, tmp_path / "place" / "run")
    shutil.copytree(python_text, tmp_path / "place" / "data")
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


def with_part(path: Path, name: str, change, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A checkpoint with one part of its archive changed, whose checksum fits."""
    held = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(held, "w", compression) as new:
        for part in old.infolist():
            content = old.read(part)
            new.writestr(part.filename, bytes(change(bytearray(content))) if part.filename.endswith(name) else content)
    return held.getvalue()


def edited(data: bytearray, draw: random.Random) -> bytearray:
    """A few bytes changed, put in, taken out or doubled."""
    for _ in range(draw.randrange(1, 4)):
        place, length, kind = draw.randrange(len(data) + 1), draw.randrange(1, 9), draw.randrange(4)
        if kind == 0:
            data[place:place + 1] = draw.randbytes(1)
        elif kind == 1:
            data[place:place] = draw.randbytes(length)
        elif kind == 2:
            del data[place:place + length]
        else:
            data[place:place] = data[place:place + 8 * length]
    return data


def damaged_checkpoint(path: Path, draw: random.Random) -> bytes:
    data, kind = bytearray(path.read_bytes()), draw.randrange(8)
    begin, length = draw.randrange(len(data)), draw.choice((1, 8, 64, 1000, 10_000))
    if kind == 0:
        for _ in range(draw.choice((1, 1, 10))):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del data[begin:]
    elif kind == 2:
        data[begin:begin + length] = bytes(len(data[begin:begin + length]))
    elif kind == 3:
        other = draw.randrange(len(data))
        one, two = data[begin:begin + length], data[other:other + length]
        data[begin:begin + length], data[other:other + length] = two, one
    elif kind == 4:
        data += draw.choice((b"\0", draw.randbytes(length), bytes(data), data[-200:]))
    else:
        return with_part(path, draw.choice(("data.pkl", "data.pkl", "data.pkl", "byteorder", "version", "/0")),
                         functools.partial(edited, draw=draw))
    return bytes(data)


def test_a_damaged_checkpoint_is_refused_or_what_it_was(finished, tmp_path):
    draw, read, path = random.Random(1), 0, tmp_path / "ckpt.pt"
    original = read_checkpoint(finished / "ckpt.pt")
    sums, weights = digests(original), model_from(original).state_dict()
    for case in range(500):
        path.write_bytes(damaged_checkpoint(finished / "ckpt.pt", draw))
        try:
            found = read_checkpoint(path)
            model = model_from(found)
        except ModelError as error:
            assert str(path) in str(error) and "\n" not in str(error), case
            continue
        read += 1
        assert digests(found) == sums, case
        assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items()), case
    print(f"{read} of 500 read")
    assert 10 < read < 200


# ---- checkpoints that were made to do harm, with digests that fit ---------------------------------------------------

NEW_RUN = "--data data --out_dir new --steps 1 --batch_tokens 32 --micro_batch 2 --eval_blocks 2"
READERS = {"sample": (sample.main, "--checkpoint run/ckpt.pt --max_new_tokens 1"),
           "resume": (train.main, "--resume --out_dir run --steps 2 --data data"),         # which is done already
           "eval_only": (train.main, "--eval_only --out_dir run --skip_rates 0.5 --data data"),
           "init_from": (train.main, f"--init_from run/ckpt.pt {NEW_RUN}")}
HARMLESS = {"dropout", "alpha_scale", "alpha_power"}        # most numbers will do, and then a run takes its time


def peak() -> int:
    """The most bytes of memory that this process has had."""
    resource = pytest.importorskip("resource", reason="memory as POSIX counts it")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def works(reader: str) -> bool:
    """Whether a reader takes the checkpoint; AssertionError unless it does or answers in one line."""
    main, argv = READERS[reader]
    _, line = outcome(main, argv.split())
    assert len(line) < 2000, (reader, line)
    assert not line or any(named in line for named in ("ckpt.pt", "checkpoint", "encoding", "meta", "ranks", "block_size")), (reader, line)
    return not line


def test_no_value_in_a_config_does_harm_whoever_reads_it(place):
    """Single values of a wrong type or size; and sizes that only together would need more memory than there is."""
    draw, path, accepted = random.Random(1), place / "run" / "ckpt.pt", 0
    whole, before = path.read_bytes(), peak()
    config = torch.load(path, weights_only=True)["config"]
    changes = [{field: value} for field in config for value in [*HOSTILE, torch.ones(3)]]
    changes += [dict(zip(draw.sample(sorted(config), 2), draw.choices((10**9, 2**31 - 1, 2**30), k=2))) for _ in range(40)]
    certain = [{"block_size": 10**9}, {"block_size": 10**400}, {"n_layer": 10**9}, {"n_embd": 10**9}, {"alpha_power": 10**400}]
    for change in certain + draw.sample(changes, 65):
        resealed(path, lambda checkpoint: checkpoint["config"].update(change))
        for reader in READERS.keys() - ({"init_from"} if change.keys() & HARMLESS else set()):
            accepted += works(reader)
            shutil.rmtree("new", ignore_errors=True)
        path.write_bytes(whole)
    print(f"{accepted} accepted")
    assert accepted < 40 and peak() - before < 300e6


def test_a_context_that_exceeds_the_memory_is_refused_before_it_is_allocated(place, monkeypatch):
    monkeypatch.setattr(sample, "memory_of", lambda device: 10**7)
    assert works("sample")
    resealed(place / "run" / "ckpt.pt", lambda checkpoint: checkpoint["config"].update(block_size=2 * 10**5))
    assert not works("sample")


def test_no_size_of_a_vocabulary_does_harm_where_meta_agrees_with_it(place):
    path, before = place / "run" / "ckpt.pt", peak()
    whole = path.read_bytes()
    for size in (-1, 0, 1, 10**9, 2**31, 2**40, 2**63, 10**400, math.nan, math.inf, 257.0, "257", None):
        resealed(path, lambda checkpoint: [checkpoint[entry].update(vocab_size=size) for entry in ("config", "meta")])
        assert not any(map(works, READERS)), size
        path.write_bytes(whole)
    assert peak() - before < 300e6


@pytest.mark.parametrize("key", ["encoding", "end_of_text", "ranks", "vocab_size"])
def test_no_value_in_the_meta_of_a_checkpoint_does_harm(key, place):
    path = place / "run" / "ckpt.pt"
    whole = path.read_bytes()
    for value in ["", "\ud800", *HOSTILE[::2]] if key != "encoding" else ["", "\x1b[2J\n", "\0.tiktoken", "../a.tiktoken", "\ud800", 1]:
        resealed(path, lambda checkpoint: checkpoint["meta"].update({key: value}))
        assert not any(map(works, READERS)), value
        path.write_bytes(whole)


def test_a_long_text_in_a_checkpoint_makes_no_long_line(place):
    resealed(place / "run" / "ckpt.pt", lambda checkpoint: checkpoint["train"].update(residual="é" * 10_000))
    assert not works("resume") and not works("eval_only")


def repeated(checkpoint: dict):
    """2^40 lists in a few bytes."""
    lists = []
    for _ in range(40):
        lists = [lists, lists]
    checkpoint["meta"]["lists"] = lists


BOMBS = {"a weight that repeats one number": lambda c: c["model"].update(more=torch.zeros(1).expand(2**27)),
         "weights that share their numbers": lambda c: c["model"].update({str(i): torch.zeros(10**6)[:10**5] for i in range(2)} | {
             f"{i}.": shared for shared in [torch.zeros(10**6)] for i in range(10**4)}),
         "lists within lists": repeated,
         "a name that is no text": lambda c: c["meta"].update({"\ud800": 1}), "a long name": lambda c: c["config"].update({"n" * 10**5: 1})}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_checkpoint_larger_inside_than_outside_is_refused_before_it_unfolds(bomb, place):
    path, before = place / "run" / "ckpt.pt", peak()
    checkpoint = torch.load(path, weights_only=True)
    BOMBS[bomb](checkpoint)
    torch.save(checkpoint, path)
    assert not any(map(works, READERS)) and peak() - before < 300e6


def test_a_compressed_checkpoint_is_refused_before_it_is_unpacked(place, capsys):
    path = place / "run" / "ckpt.pt"
    resealed(path, lambda checkpoint: checkpoint["meta"].update(more="a" * 10**6))
    path.write_bytes(with_part(path, "data.pkl", bytes))
    assert works("sample")
    path.write_bytes(with_part(path, "data.pkl", bytes, zipfile.ZIP_DEFLATED))
    for main, argv in READERS.values():
        assert "on reading it" in fails(main, argv.split(), capsys)


def test_a_stream_that_pytorch_wonders_at_adds_no_line_of_its_own(place, recwarn):
    path = place / "run" / "ckpt.pt"
    path.write_bytes(with_part(path, "data.pkl", lambda data: data[:1] + b"\x04" + data[2:]))      # another version of pickle
    assert works("sample") and not recwarn.list


# ---- checkpoints that would run programs ----------------------------------------------------------------------------


class WritesFile:
    def __reduce__(self):
        return Path.write_text, (Path("written"), "by a checkpoint")


class OpensFile:
    def __reduce__(self):
        return open, ("written", "w")


class Evaluates:
    def __reduce__(self):
        return eval, ("open('written', 'w')",)


class Attribute:
    """What an object does when its state is set, by a name that torch.load allows."""

    def __reduce__(self):
        return torch.nn.Parameter, (torch.ones(1),), {"__setstate__": OpensFile()}


@pytest.mark.parametrize("program", [WritesFile, OpensFile, Evaluates, Attribute])
@pytest.mark.parametrize("form", ["archive", "legacy", "pickle"])
@pytest.mark.parametrize("name", ["ckpt.pt", "ckpt.safetensors"])
def test_a_checkpoint_that_would_run_a_program_is_refused_in_one_line(program, form, name, place, capsys):
    if name.endswith("safetensors"):
        pytest.importorskip("safetensors", reason="safetensors is optional")
    checkpoint = torch.load("run/ckpt.pt", weights_only=True) | {"program": program()}
    if form == "pickle":
        Path(name).write_bytes(pickle.dumps(checkpoint))
    else:
        torch.save(checkpoint, name, _use_new_zipfile_serialization=form == "archive")
    Path("own").mkdir()
    shutil.copy(name, "own/ckpt.pt")
    for main, argv in ((sample.main, f"--checkpoint {name}"), (train.main, f"--init_from {name} {NEW_RUN}"),
                       (train.main, "--resume --out_dir own"), (train.main, "--eval_only --out_dir own")):
        assert "ckpt." in fails(main, argv.split(), capsys)
        assert not Path("written").exists() and not Path("new").exists()
