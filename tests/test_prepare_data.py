"""Promises of prepare_data.py: exact round trips, shards that cannot lie, and mistakes that cost one line."""

import base64
import functools
import gzip
import hashlib
import http.server
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import prepare_data
from prepare_data import Reading, Shards, UserError, main, prepare

SCRIPT = Path(prepare_data.__file__)
ANY_BYTES = np.random.default_rng(1).integers(0, 256, 5000, np.uint8).tobytes()
TEXT = "".join(f"line {n}: naïve 你好 👩‍👩‍👧\r\n" for n in range(200)).encode("utf-8")


def tiny_encoding(end_of_text: int = 300):
    """All bytes and three merges under hand-made ranks; the ids between 258 and end-of-text do not exist."""
    import tiktoken
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257, b"in": 258}
    return prepare_data.TiktokenEncoding(tiktoken.Encoding(
        "tiny", pat_str=r"\s+|\w+|[^\s\w]+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": end_of_text}))


def read_split(folder: Path, split: str) -> np.ndarray:
    shards = Shards(prepare_data.find_shards(folder, split))
    return shards.read(0, len(shards))


def refused(capsys, *argv) -> str:
    """The one line on standard error with which main ends."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in argv])
    output = capsys.readouterr()
    assert stop.value.code == 2 and output.out == ""
    assert output.err.count("\n") == 1 and output.err.endswith("\n")
    return output.err


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No network and no ranks; the list returned grows with the addresses that are asked for."""
    import tiktoken.registry
    asked = []

    def fail(url):
        asked.append(url)
        raise ConnectionError("a long story\nof sockets, no network")
    monkeypatch.setattr(prepare_data, "answer", fail)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    return asked


# ---- encodings ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("data", [b"", b"ab\0cd\n", bytes(range(256)), ANY_BYTES, b"<|endoftext|>"])
def test_bytes_encode_and_decode_any_bytes_exactly(data):
    encoding = prepare_data.get_encoding("bytes")
    ids = encoding.encode(data)
    assert ids.dtype == np.uint16 and len(ids) == len(data) and encoding.decode(ids) == data
    assert encoding.token_bytes()[ids].sum() == len(data)


def test_end_of_text_of_bytes_decodes_to_its_usual_spelling():
    encoding = prepare_data.get_encoding("bytes")
    assert encoding.decode([65, encoding.end_of_text]) == b"A<|endoftext|>"
    assert encoding.token_bytes().shape == (encoding.vocab_size,) and encoding.token_bytes()[encoding.end_of_text] == 0


@pytest.mark.parametrize("end_of_text, dtype", [(300, np.uint16), (65_535, np.uint16), (65_536, np.uint32)])
def test_a_tiktoken_encoding_of_hand_made_ranks_round_trips_offline(end_of_text, dtype):
    encoding = tiny_encoding(end_of_text)
    data = b"the thin end in there\n" + TEXT
    ids = encoding.encode(data)
    assert ids.dtype == dtype and encoding.vocab_size == end_of_text + 1
    assert list(ids[:4]) == [257, 32, 256, 258]
    assert encoding.decode(ids) == data and encoding.token_bytes()[ids].sum() == len(data)
    with pytest.raises(UnicodeDecodeError):
        encoding.encode(b"\xff")


def test_ids_that_an_encoding_leaves_unused_decode_to_nothing():
    encoding = tiny_encoding()
    assert encoding.decode([257, 270, 300]) == b"the<|endoftext|>"
    assert list(encoding.token_bytes()[[257, 270, 300]]) == [3, 0, 0]


@pytest.mark.parametrize("encoding", [prepare_data.ByteEncoding(), tiny_encoding()], ids=["bytes", "tiny"])
def test_the_spelling_of_end_of_text_inside_a_text_is_ordinary_text(encoding):
    ids = encoding.encode(b"a<|endoftext|>b")
    assert encoding.end_of_text not in ids and len(ids) > 3


@pytest.mark.parametrize("unit", ["a", "^", " ", "你", "\n", "word ", "line of text\n"])
def test_long_runs_are_cut_into_whole_characters_and_encode_quickly(unit):
    data = (unit * (600_000 // len(unit.encode("utf-8")))).encode("utf-8")
    parts = list(prepare_data.pieces(io.BytesIO(data)))
    assert b"".join(parts) == data and max(map(len, parts)) <= prepare_data.PIECE_BYTES and all(parts)
    for part in parts:
        part.decode("utf-8")
        assert list(prepare_data.pieces(io.BytesIO(part))) == [part]
    if "\n" in unit:
        assert all(part.endswith(b"\n") for part in parts)
    encoding = tiny_encoding()
    assert encoding.decode(encoding.encode(data)) == data


@pytest.mark.parametrize("unit", ["a", "7", "^", " ", "你", "\n"])
def test_long_words_are_cut_short_for_tiktoken_and_texts_are_left_alone(unit):
    text = "Before. " + unit * 100_000 + " After."
    parts = prepare_data.runs_cut(text)
    assert "".join(parts) == text and max(map(len, parts)) <= 2 * prepare_data.RUN
    text = "".join(f"some words, 你好。{n}^^" for n in range(20_000))
    assert prepare_data.runs_cut(text) == [text] and prepare_data.runs_cut("") == [""]


def test_bytes_that_are_no_characters_are_cut_into_pieces_too():
    parts = list(prepare_data.pieces(io.BytesIO(b"\x80" * 100), limit=10))
    assert b"".join(parts) == b"\x80" * 100 and max(map(len, parts)) <= 10


def test_gpt2_tokens_are_those_of_gpt2(monkeypatch):
    monkeypatch.setattr(prepare_data, "download", lambda url, path: pytest.skip("no GPT-2 ranks in TIKTOKEN_CACHE_DIR"))
    encoding = prepare_data.get_encoding("gpt2")
    assert list(encoding.encode(b"hello world")) == [31373, 995]
    assert (encoding.vocab_size, encoding.end_of_text, encoding.token_bytes()[995]) == (50257, 50256, 6)


def test_missing_ranks_cost_one_line_that_names_the_ways_out(capsys, offline, book):
    line = refused(capsys, book, "--encoding", "gpt2", "--out_dir", book.parent / "out")
    assert offline
    assert all(word in line for word in ("gpt2", "ConnectionError", "TIKTOKEN_CACHE_DIR", "--encoding bytes"))
    assert not (book.parent / "out").exists()


def test_damaged_ranks_in_the_cache_are_named_and_kept(capsys, offline, book):
    refused(capsys, book, "--encoding", "gpt2", "--out_dir", book.parent / "out")
    cache = book.parent / "cache"
    cache.mkdir()
    damaged = cache / hashlib.sha1(offline[0].encode()).hexdigest()
    damaged.write_bytes(b"damaged")
    line = refused(capsys, book, "--encoding", "gpt2", "--out_dir", book.parent / "out")
    assert damaged.name in line and "wrong checksum" in line and "7 bytes" in line
    assert damaged.read_bytes() == b"damaged" and len(offline) == 1


def test_a_failure_inside_tiktoken_names_file_and_offset(capsys, monkeypatch, book):
    class PanicException(BaseException):
        pass

    class Panics(prepare_data.ByteEncoding):
        def encode(self, data):
            if data == b"bad":
                raise PanicException("stack overflow")
            return super().encode(data)
    monkeypatch.setattr(prepare_data, "get_encoding", lambda name: Panics())
    monkeypatch.setattr(prepare_data, "pieces", lambda file, size=None: iter([b"good", b"fine", b"bad"]))
    monkeypatch.setattr(prepare_data, "sides", lambda document, cut: iter([("train", 0, 11)]))
    line = refused(capsys, book, "--out_dir", book.parent / "out")
    assert str(book) in line and "3 bytes from offset 8;" in line and not (book.parent / "out").exists()


def test_meta_names_an_encoding_and_must_agree_with_it():
    meta = {"encoding": "bytes", "vocab_size": 257, "end_of_text": 256}
    assert prepare_data.encoding_from_meta(meta).name == "bytes"
    with pytest.raises(UserError, match="300"):
        prepare_data.encoding_from_meta(meta | {"vocab_size": 300})
    with pytest.raises(UserError, match="encoding is None"):
        prepare_data.encoding_from_meta({})


# ---- shards ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype, words, largest", [("<u2", [20240520, 1], 2**16 - 1), ("<u4", [20240801, 7], 2**31)])
def test_both_kinds_of_shard_are_written_to_the_layout_and_read_back(tmp_path, dtype, words, largest):
    ids = np.array([0, 1, largest, 7], dtype)
    path = tmp_path / "train_000000.bin"
    checksum = prepare_data.write_shard(path, ids)
    content = path.read_bytes()
    assert content[:1024] == np.array(words + [4] + [0] * 253, "<i4").tobytes() and content[1024:] == ids.tobytes()
    assert checksum == hashlib.sha256(content).hexdigest()
    shards = Shards([path])
    assert len(shards) == 4 and shards.dtype == np.dtype(dtype)
    assert shards.read(0, 4).dtype == np.int64 and list(shards.read(0, 4)) == [0, 1, largest, 7]


def test_reading_goes_across_shard_borders(tmp_path, book):
    prepare([book], "bytes", tmp_path / "one")
    meta, _ = prepare([book], "bytes", tmp_path / "many", shard_tokens=1000)
    whole = read_split(tmp_path / "one", "train")
    shards = Shards(prepare_data.find_shards(tmp_path / "many", "train"))
    assert len(shards.paths) > 5 and len(shards) == len(whole) == meta["splits"]["train"]["tokens"]
    for start in (0, 1, 998, 999, 1000, 1001, len(whole) - 1):
        for count in (0, 1, 2, 1000, 1001, 3333, len(whole) - 1):
            count = min(count, len(whole) - start)
            assert np.array_equal(shards.read(start, count), whole[start:start + count])


@pytest.mark.parametrize("start, count", [(-1, 1), (0, 6), (5, 1), (3, -1)])
def test_reading_past_the_tokens_is_an_error(tmp_path, start, count):
    prepare_data.write_shard(tmp_path / "train.bin", np.arange(5, dtype="<u2"))
    with pytest.raises(IndexError):
        Shards([tmp_path / "train.bin"]).read(start, count)


@pytest.mark.parametrize("words, tokens, complaint", [
    ((20240521, 1, 5), 5, "begins with 20240521"),
    ((20240520, 7, 5), 5, "version 7, expected 1"),
    ((20240801, 1, 5), 5, "version 1, expected 7"),
    ((20240520, 1, -1), 0, "says -1 tokens"),
    ((20240520, 1, 6), 5, "1,034 bytes, expected 1,036"),
    ((20240520, 1, 4), 5, "1,034 bytes, expected 1,032"),
    ((20240801, 7, 5), 5, "1,034 bytes, expected 1,044"),
])
def test_a_header_that_lies_is_refused_with_the_file(tmp_path, words, tokens, complaint):
    path = tmp_path / "train.bin"
    path.write_bytes(np.array(words + (0,) * 253, "<i4").tobytes() + bytes(2 * tokens))
    with pytest.raises(UserError) as error:
        Shards([path])
    assert str(path) in str(error.value) and complaint in str(error.value) and "again" in str(error.value)


def test_shards_that_are_no_shards_are_refused(tmp_path):
    (tmp_path / "short.bin").write_bytes(b"short")
    prepare_data.write_shard(tmp_path / "2.bin", np.arange(5, dtype="<u2"))
    prepare_data.write_shard(tmp_path / "4.bin", np.arange(5, dtype="<u4"))
    for names, complaint in (([], "no shards"), (["missing.bin"], "No such file"), (["short.bin"], "5 bytes"),
                             (["2.bin", "4.bin"], "uint32 tokens, expected uint16")):
        with pytest.raises(UserError, match=complaint):
            Shards([tmp_path / name for name in names])


def test_shards_are_found_in_a_folder_or_by_a_glob_in_order(tmp_path):
    for name in ("b_train_1.bin", "a_train_2.bin", "val_0.bin", "train.txt"):
        (tmp_path / name).touch()
    names = ["a_train_2.bin", "b_train_1.bin"]
    assert [path.name for path in prepare_data.find_shards(tmp_path, "train")] == names
    assert [path.name for path in prepare_data.find_shards(str(tmp_path / "*.bin"), "train")] == names
    assert [path.name for path in prepare_data.find_shards(tmp_path, "val")] == ["val_0.bin"]
    for data in (tmp_path / "missing", tmp_path / "b_*.txt"):
        with pytest.raises(UserError, match="python prepare_data.py --out_dir"):
            prepare_data.find_shards(data, "train")


def test_without_meta_the_encoding_is_gpt2_and_a_broken_meta_is_refused(tmp_path):
    assert prepare_data.read_meta(tmp_path) == {"encoding": "gpt2", "vocab_size": 50257, "end_of_text": 50256}
    for text in ("", "{", "[]", '{"encoding": "bytes"}', '{"encoding": "bytes", "vocab_size": "257", "end_of_text": 1}',
                 '{"encoding": "bytes", "vocab_size": 257, "end_of_text": 257}', "\xff"):
        (tmp_path / "meta.json").write_text(text, encoding="latin-1")
        with pytest.raises(UserError, match="meta.json"):
            prepare_data.read_meta(tmp_path)


# ---- documents and the split ----------------------------------------------------------------------------------------

def split(texts):
    """Training and validation texts of some documents."""
    reading = Reading(utf8=False, marks=True)
    documents = [prepare_data.checked("a text", functools.partial(io.BytesIO, text), reading) for text in texts]
    parts = prepare_data.split_pieces(documents, prepare_data.find_cut(documents)[0])
    sides = {"train": [], "val": []}
    for piece in parts:
        sides[piece.split].append(piece.content)
    return sides["train"], sides["val"]


@pytest.mark.parametrize("count", [50, 500])
def test_validation_is_the_documents_whose_hash_is_a_multiple_of_fifty(count):
    texts = [f"text {n}".encode() for n in range(300, 300 + count)]
    train, val = split(texts)
    assert val == [text for text in texts if int(hashlib.sha256(text).hexdigest(), 16) % 50 == 0]
    assert 0 < len(val) < count / 10 and sorted(train + val) == sorted(texts)


def test_of_forty_nine_documents_the_last_are_validation_whatever_their_hash():
    texts = [f"text {n}".encode() for n in range(300, 349)]
    train, val = split(texts)
    assert b"".join(train + val) == b"".join(texts)


def test_of_few_documents_the_last_twentieth_of_the_text_is_validation():
    train, val = split([b"a" * 60, b"b" * 136, b"c" * 4])
    assert train == [b"a" * 60, b"b" * 130] and val == [b"b" * 6, b"c" * 4]


@pytest.mark.parametrize("text", ["é" * 30, "你" * 21, "👩" * 11, "a" + "👩" * 11, "Hi"])
def test_the_cut_for_validation_keeps_characters_whole(text):
    (train,), (val,) = split([text.encode("utf-8")])
    assert train.decode("utf-8") + val.decode("utf-8") == text


def test_validation_is_never_empty_where_no_hash_is_a_multiple_of_fifty():
    train, val = split([b"the same text"] * 60)
    assert sum(map(len, val)) == 60 * 13 // 20 and len(train) + len(val) == 60


def test_each_document_begins_with_end_of_text(tmp_path):
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 20)
    prepare([tmp_path / name for name in "abc"], "bytes", tmp_path / "out")
    decode = prepare_data.ByteEncoding().decode
    mark = b"<|endoftext|>"
    assert decode(read_split(tmp_path / "out", "train")) == mark + b"a" * 20 + mark + b"b" * 20 + mark + b"c" * 17
    assert decode(read_split(tmp_path / "out", "val")) == mark + b"ccc"


def test_folders_are_walked_in_order_without_hidden_files_and_what_is_not_text_is_named(tmp_path, capsys):
    folder = tmp_path / "my texts"
    for name, content in (("b/2.txt", b"2" * 50), ("b.txt", b"1" * 50), ("c.png", b"\xff\xd8"), ("z.txt", b"3" * 50),
                          (".hidden", b"h"), (".git/config", b"h")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    main([str(folder), "--out_dir", str(tmp_path / "my data")])
    out = capsys.readouterr().out
    assert "1 files" in out and "c.png" in out and f"python train.py --data '{tmp_path / 'my data'}'" in out
    digits = [i for i in read_split(tmp_path / "my data", "train") if i != 256]
    assert bytes(dict.fromkeys(digits)) == b"123"


# ---- the script -----------------------------------------------------------------------------------------------------

def test_any_bytes_come_back_from_the_shards(tmp_path):
    (tmp_path / "any").write_bytes(ANY_BYTES)
    main([str(tmp_path / "any"), "--out_dir", str(tmp_path / "out")])
    train, val = (read_split(tmp_path / "out", split) for split in ("train", "val"))
    assert train[0] == val[0] == 256
    assert bytes(train[1:].tolist()) + bytes(val[1:].tolist()) == ANY_BYTES


@pytest.mark.parametrize("end_of_text", [300, 70_000])
def test_tokens_come_back_from_the_shards_in_both_kinds(tmp_path, monkeypatch, book, end_of_text):
    encoding = tiny_encoding(end_of_text)
    monkeypatch.setattr(prepare_data, "get_encoding", lambda name: encoding)
    meta, _ = prepare([book], "tiny", tmp_path / "out", shard_tokens=999)
    train, val = (read_split(tmp_path / "out", split) for split in ("train", "val"))
    assert train[0] == val[0] == end_of_text and encoding.decode(train[1:]) + encoding.decode(val[1:]) == TEXT
    assert prepare_data.encoding_from_meta(prepare_data.read_meta(tmp_path / "out")) is encoding
    assert (meta["vocab_size"], meta["end_of_text"]) == (end_of_text + 1, end_of_text)


def test_the_standard_library_becomes_a_data_set_whose_meta_is_true(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main([])
    folder = tmp_path / "data" / "stdlib"
    meta = prepare_data.read_meta(folder)
    assert meta["encoding"] == "bytes" and meta["source"] == "stdlib"
    assert meta["python_version"] == ".".join(map(str, sys.version_info[:3]))
    assert sorted(path.name for path in folder.iterdir()) == sorted([*meta["sha256"], "meta.json"])
    for name, checksum in meta["sha256"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == checksum
    documents = list(prepare_data.read_documents([], Reading(utf8=True, marks=True), prepare_data.Notes()))
    names = {Path(document.name).name for document in documents}
    assert {"argparse.py", "decoder.py"} <= names and not {"test_argparse.py", "numpy"} & names
    for split in ("train", "val"):
        ids = read_split(folder, split)
        counts = meta["splits"][split]
        assert len(ids) == counts["tokens"] == counts["bytes"] + counts["documents"]
        assert (ids == 256).sum() == counts["documents"] > 5
    assert sum(counts["bytes"] for counts in meta["splits"].values()) == sum(d.size for d in documents)
    assert "python train.py --data data/stdlib" in capsys.readouterr().out
    assert [path.name for path in folder.parent.iterdir()] == ["stdlib"]


def test_two_runs_write_the_same_bytes(tmp_path, monkeypatch, book):
    for name in ("one", "two"):
        prepare([book, SCRIPT], "bytes", tmp_path / name, shard_tokens=5000)
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two and len(one) > 5


@pytest.mark.parametrize("failure", [RuntimeError("a bug"), KeyboardInterrupt(), OSError(28, "No space left")])
def test_nothing_is_left_behind_when_writing_fails_midway(tmp_path, monkeypatch, book, failure):
    write_shard = prepare_data.write_shard

    def fail_at_third(path, ids):
        if path.name == "train_000002.bin":
            path.write_bytes(b"half")
            raise failure
        return write_shard(path, ids)
    monkeypatch.setattr(prepare_data, "write_shard", fail_at_third)
    expected = UserError if isinstance(failure, OSError) else type(failure)
    with pytest.raises(expected) as error:
        prepare([book], "bytes", tmp_path / "out", shard_tokens=1000)
    assert list(tmp_path.iterdir()) == [book]
    assert not isinstance(failure, OSError) or "No space left" in str(error.value)


def test_an_empty_out_dir_is_filled_and_a_full_one_is_left_alone(tmp_path, capsys, book):
    out = tmp_path / "out"
    out.mkdir()
    main([str(book), "--out_dir", str(out)])
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    capsys.readouterr()
    line = refused(capsys, book, "--out_dir", out)
    assert "--out_dir" in line and str(out) in line and "delete it" in line
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize("argv, complaints", [
    (["missing.txt"], ["missing.txt", "No such file"]),
    (["empty.txt"], ["empty.txt", "0 bytes"]),
    (["newline.txt"], ["newline.txt", "1 bytes"]),
    (["hollow"], ["hollow: no text found"]),
    (["book.txt", "--out_dir", "book.txt"], ["--out_dir book.txt", "already exists"]),
    (["book.txt", "--out_dir", "book.txt/out"], ["--out_dir book.txt/out", "cannot be written"]),
    (["book.txt", "--encoding", "gpt3"], ["encoding gpt3", "bytes", "gpt2"]),
    (["book.txt", "--source", "stdlib"], ["--source", "book.txt"]),
    (["--source", "web"], ["--source", "'web'", "stdlib"]),
    (["book.txt", "--out", "x"], ["--out"]),
    (["book.txt", "--no\nsuch"], ["--no such"]),
])
def test_a_mistake_costs_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys, book, argv, complaints):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "newline.txt").write_bytes(b"\n")
    (tmp_path / "hollow").mkdir()
    before = sorted(tmp_path.rglob("*"))
    line = refused(capsys, *argv)
    assert all(complaint in line for complaint in complaints), line
    assert sorted(tmp_path.rglob("*")) == before and book.read_bytes() == TEXT


@pytest.mark.parametrize("content, offset", [
    (b"good text\n\x92 bad\nmore\n", 10), ("text".encode("utf-16"), 0), ("smile 🙂".encode("utf-8")[:-1], 6)])
def test_a_named_file_that_is_not_utf8_is_refused_with_its_offset(tmp_path, monkeypatch, capsys, content, offset):
    monkeypatch.setattr(prepare_data, "get_encoding", lambda name: tiny_encoding())
    (tmp_path / "b.txt").write_bytes(content)
    line = refused(capsys, tmp_path / "b.txt", "--encoding", "tiny", "--out_dir", tmp_path / "out")
    assert "b.txt" in line and f"offset {offset} " in line and "iconv" in line
    assert not (tmp_path / "out").exists()


def test_flag_types_accept_numbers_in_range_and_explain_the_rest(capsys):
    parser = prepare_data.Parser(prog="script")
    for name in ("positive_int", "non_negative_int", "positive_float", "non_negative_float"):
        parser.add_argument(f"--{name}", type=getattr(prepare_data, name))
    good = parser.parse_args(["--positive_int=1", "--non_negative_int=0", "--positive_float=1e-9",
                              "--non_negative_float=0"])
    assert (good.positive_int, good.non_negative_int, good.positive_float, good.non_negative_float) == (1, 0, 1e-9, 0)
    for flag, texts in (("positive_int", ["four", "0", "-1", "1.5", "nan", ""]),
                        ("non_negative_int", ["-1", "inf"]),
                        ("positive_float", ["0", "nan", "inf", "-1"]),
                        ("non_negative_float", ["-1e-9", "nan", "inf", "x"])):
        for text in texts:
            with pytest.raises(SystemExit) as stop:
                parser.parse_args([f"--{flag}={text}"])
            line = capsys.readouterr().err
            assert stop.value.code == 2 and line.count("\n") == 1
            assert line.startswith(f"script: error: argument --{flag}: found {text!r}, expected a ")


def test_abbreviations_are_refused_and_help_shows_defaults(capsys):
    parser = prepare_data.Parser()
    parser.add_argument("--micro_batch", type=prepare_data.positive_int, default=8, help="sequences")
    parser.add_argument("--resume", default=None, help="a checkpoint")
    assert "(default: 8)" in parser.format_help() and "None" not in parser.format_help()
    with pytest.raises(SystemExit):
        parser.parse_args(["--micro", "4"])


def test_named_errors_end_a_script_and_bugs_show_themselves(capsys):
    class ModelError(ValueError):
        pass

    def fail(error):
        raise error
    with pytest.raises(SystemExit) as stop:
        prepare_data.exit_on_user_error(fail, ModelError("two\nlines"), errors=(UserError, ModelError))
    assert stop.value.code == 2 and capsys.readouterr().err.endswith("error: two lines\n")
    with pytest.raises(ModelError):
        prepare_data.exit_on_user_error(fail, ModelError("a bug here"))


def test_run_as_a_script_in_a_plain_locale(tmp_path):
    name = tmp_path / "naïve.txt"
    name.write_bytes(TEXT)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "é.bin").write_bytes(b"\xff")
    sums = []
    for number, locale in enumerate(("C", "C.UTF-8")):
        environment = {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0",
                       "PYTHONIOENCODING": "ascii:strict"}
        done = subprocess.run([sys.executable, SCRIPT, name, "more", "--out_dir", str(number)], cwd=tmp_path,
                              env=environment, capture_output=True)
        assert done.returncode == 0 and done.stderr == b""
        sums.append(json.loads((tmp_path / str(number) / "meta.json").read_bytes())["sha256"])
    assert sums[0] == sums[1]
    done = subprocess.run([sys.executable, SCRIPT, "missing"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 2 and done.stderr.startswith(b"prepare_data.py: error: missing: No such file")


def test_importing_it_loads_neither_torch_nor_a_tokenizer():
    check = "import prepare_data, sys; sys.exit(bool({'torch', 'tiktoken', 'tqdm', 'requests'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], cwd=SCRIPT.parent).returncode == 0


# ---- sources --------------------------------------------------------------------------------------------------------

LINES = [f"document {n}, naïve 你好\n" for n in range(60)]


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A folder that a real server on this machine offers, its address, and the paths it has been asked for."""
    monkeypatch.chdir(tmp_path)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    folder, asked = tmp_path / "served", []
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if self.path.endswith("cut.txt"):
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b"only this")
            elif self.path.endswith("silence.txt"):
                time.sleep(1)
            elif self.path.endswith("command.txt"):
                self.send_error(500, "\x1b[2J")
            elif self.path.startswith("/on/"):
                self.send_response(302)
                self.send_header("Location", self.path.removeprefix("/on/"))
                self.end_headers()
            elif "%" in self.path:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(TEXT)
            else:
                super().do_GET()

        def log_message(self, *arguments):
            pass
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{running.server_port}", asked
        running.shutdown()


def test_a_url_is_downloaded_once(server, capsys):
    folder, address, asked = server
    (folder / "book.txt").write_bytes(TEXT)
    for name in ("one", "two"):
        main([f"{address}/book.txt", "--out_dir", name])
    main([str(folder / "book.txt"), "--out_dir", "three"])
    assert asked == ["/book.txt"]
    assert Path("one/meta.json").read_bytes() == Path("two/meta.json").read_bytes()
    for split in ("train", "val"):
        assert np.array_equal(read_split(Path("one"), split), read_split(Path("three"), split))
    main([f"{address}/book.txt?version=2"])
    assert len(asked) == 2 and Path("data/book/meta.json").exists()


@pytest.mark.parametrize("name, complaint", [
    ("cut.txt", "9 of 1,000 bytes"), ("missing.txt", "404"), ("silence.txt", "no answer"),
    ("command.txt", "500: \\x1b[2J"), ("on/http://127.0.0.1.invalid/book.txt", "127.0.0.1.invalid/book.txt, expected https"),
    ("on/ftp://127.0.0.1/book.txt", "expected https"), ("on/file:///etc/passwd", "not allowed")])
def test_a_download_that_fails_costs_one_line_and_leaves_nothing(server, monkeypatch, capsys, name, complaint):
    monkeypatch.setattr(prepare_data, "ANSWER_SECONDS", 0.5)
    line = refused(capsys, f"{server[1]}/{name}", "--out_dir", "out")
    assert f"{server[1]}/{name}" in line and complaint in line and "--source stdlib" in line
    assert not Path("out").exists() and not [path for path in Path("data").rglob("*") if path.is_file()]


@pytest.mark.parametrize("url", ["http://example.org/book.txt", "http://example.org:80/127.0.0.1", "http://localhost.org/a",
                                 "http://localhost@example.org/a", "http://127.0.0.2/a", "http:///a", "http://", "http://[::1"])
def test_what_would_come_by_http_is_refused_before_anybody_is_asked(tmp_path, monkeypatch, capsys, offline, url):
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, url, "--out_dir", "out")
    assert url in line and ("use https" in line or "no URL" in line) and not offline and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["https://example.org/book.txt", "http://localhost/a", "http://127.0.0.1:8000/a", "http://[::1]:80/a"])
def test_https_and_this_machine_are_asked(tmp_path, monkeypatch, capsys, offline, url):
    monkeypatch.chdir(tmp_path)
    assert "no network" in refused(capsys, url, "--out_dir", "out") and offline == [url]


@pytest.mark.parametrize("here, there, followed", [
    ("https://a.org/x", "https://b.org/y", True), ("https://a.org/x", "http://a.org/x", False), ("https://a.org/x", "http://localhost/x",
     False), ("https://a.org/x", "ftp://a.org/x", False), ("http://localhost/x", "http://127.0.0.1/y", True),
    ("http://localhost/x", "https://a.org/x", True), ("http://localhost/x", "http://a.org/x", False)])
def test_a_server_may_not_lead_on_to_http(here, there, followed):
    def asked():
        return prepare_data.SafeRedirects().redirect_request(prepare_data.urllib.request.Request(here), None, 302, "Found", {}, there)
    if followed:
        assert asked().full_url == there
    else:
        with pytest.raises(OSError, match="expected https"):
            asked()


def test_a_server_on_this_machine_may_lead_on_within_it(server):
    folder, address, asked = server
    (folder / "book.txt").write_bytes(TEXT)
    main([f"{address}/on/{address}/book.txt", "--out_dir", "out"])
    assert asked[1:] == ["/book.txt"] and len(read_split(Path("out"), "train"))


@pytest.mark.parametrize("path", ["..%2f..%2f..%2fup.txt", "a/..%2f..", "a/%2e%2e/%2e%2e/", "%2fetc%2fpasswd", "..%5c..%5cup.txt",
                                  "C:%5cup.txt", "x%00y.txt", "%1b[2J%0a.txt", "%E4%BD%A0" * 100, "a%20b.txt", "~%", "%2fup.jsonl%23"])
def test_whatever_the_path_of_a_url_its_file_is_kept_among_the_downloads(path, server, tmp_path, capsys):
    before = sorted(tmp_path.parent.iterdir())
    main([f"{server[1]}/{path}", "--out_dir", "out"])
    kept, = (found for found in Path("data").rglob("*") if found.is_file())
    assert kept.read_bytes() == TEXT and kept.parent == prepare_data.DOWNLOADS and kept.name.isprintable()
    assert sorted(tmp_path.parent.iterdir()) == before
    assert sorted(found.name for found in tmp_path.iterdir()) == ["data", "out", "served"]


@pytest.mark.parametrize("source", ["tinyshakespeare", "fineweb-edu"])
def test_a_source_without_network_costs_one_line(tmp_path, monkeypatch, capsys, offline, source):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare_data, "parquet_module", lambda: None)
    line = refused(capsys, "--source", source)
    assert offline == prepare_data.SOURCES[source][:1] and offline[0] in line and "--source stdlib" in line
    assert list(tmp_path.iterdir()) == []


def test_no_more_files_are_fetched_than_the_tokens_need(server, capsys, monkeypatch):
    folder, address, asked = server
    texts = {shard: [f"{shard}.{copy} {line}" for copy in range(5) for line in LINES] for shard in range(4)}
    for shard, lines in texts.items():
        (folder / f"{shard}.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines), encoding="utf-8")
    wanted = sum(len(line.encode("utf-8")) + 1 for line in texts[0] + texts[1])     # what two files hold, and no token more
    urls = [f"{address}/{shard}.jsonl" for shard in range(4)]
    monkeypatch.setitem(prepare_data.SOURCES, "fineweb-edu", urls)
    main(["--source", "fineweb-edu", "--max_tokens", str(wanted)])
    assert asked == ["/0.jsonl", "/1.jsonl"]
    meta = prepare_data.read_meta("data/fineweb-edu")
    assert sum(counts["tokens"] for counts in meta["splits"].values()) == wanted
    for split in ("train", "val"):
        ids, counts = read_split(Path("data/fineweb-edu"), split), meta["splits"][split]
        assert counts["tokens"] == len(ids) == counts["bytes"] + counts["documents"] and ids[0] == 256
    assert meta["source"] == "fineweb-edu"


@pytest.mark.parametrize("name, key", [("a.jsonl", "text"), ("a.jsonl.gz", "text"), ("a.jsonl", "words")])
def test_each_json_line_is_a_document(tmp_path, name, key):
    for n, line in enumerate(LINES):
        (tmp_path / "files" / f"{n:02d}").parent.mkdir(exist_ok=True)
        (tmp_path / "files" / f"{n:02d}").write_text(line, encoding="utf-8", newline="")
    rows = "\n\n".join(json.dumps({"id": 7, key: line}) for line in LINES).encode("utf-8")
    (tmp_path / name).write_bytes(gzip.compress(rows) if name.endswith("gz") else rows)
    one, _ = prepare([tmp_path / name], "bytes", tmp_path / "one", text_key=key)
    two, _ = prepare([tmp_path / "files"], "bytes", tmp_path / "two")
    assert one["sha256"] == two["sha256"] and one["splits"]["val"]["documents"] > 0


def test_each_row_of_a_parquet_file_is_a_document(tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet
    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(60)), "text": LINES}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in LINES), encoding="utf-8")
    one, _ = prepare([tmp_path / "a.parquet"], "bytes", tmp_path / "one")
    two, _ = prepare([tmp_path / "a.jsonl"], "bytes", tmp_path / "two")
    assert one["sha256"] == two["sha256"]
    line = refused(capsys, tmp_path / "a.parquet", "--text_key", "body", "--out_dir", tmp_path / "out")
    assert "a.parquet" in line and "id, text" in line and "--text_key" in line


def test_parquet_without_pyarrow_names_the_package(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert "pip install pyarrow" in refused(capsys, tmp_path / "a.parquet", "--out_dir", tmp_path / "out")
    assert "pip install pyarrow" in refused(capsys, "--source", "fineweb-edu", "--out_dir", tmp_path / "out")


@pytest.mark.parametrize("name, content, complaint", [
    ("a.jsonl", b'{"text": "a"}\n{"text": ', "line 2"), ("a.jsonl", b'{"body": "a"}', "line 1: no text under 'text'"),
    ("a.jsonl", b'{"text": 1}', "no text"), ("a.jsonl", b"[]", "no text"), ("a.jsonl", b"\xff\xfe{", "line 1"),
    ("a.jsonl", b"[" * 100_000, "line 1"), ("a.jsonl", b"", "no text found"),
    ("a.jsonl.gz", b"plain", "gzip"), ("a.jsonl.gz", gzip.compress(ANY_BYTES)[:-50], "a.jsonl.gz"), ("a.jsonl.gz", b"", "no text")])
def test_a_file_of_records_that_is_none_costs_one_line(tmp_path, capsys, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    line = refused(capsys, tmp_path / name, "--out_dir", tmp_path / "out")
    assert name in line and complaint in line and not (tmp_path / "out").exists()


def test_half_a_character_in_json_is_refused_or_replaced_but_kept_as_bytes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare_data, "get_encoding", lambda name: tiny_encoding())
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good \\ud800 bad"}')
    assert "line 1: byte 0xed at offset 5" in refused(capsys, tmp_path / "a.jsonl", "--out_dir", tmp_path / "out")
    main([str(tmp_path / "a.jsonl"), "--errors", "replace", "--out_dir", str(tmp_path / "out")])
    assert "replaced 3 bytes" in capsys.readouterr().out


@pytest.mark.parametrize("workers", ["0", "2"])
def test_standard_input_is_a_document(tmp_path, book, workers):
    done = subprocess.run([sys.executable, SCRIPT, "-", "--workers", workers], cwd=tmp_path, input=TEXT, capture_output=True)
    assert done.returncode == 0, done.stderr
    prepare([book], "bytes", tmp_path / "out")
    for split in ("train", "val"):
        assert np.array_equal(read_split(tmp_path / "data/stdin", split), read_split(tmp_path / "out", split))
    assert not (tmp_path / "data/stdin" / prepare_data.SPOOL).exists()
    done = subprocess.run([sys.executable, SCRIPT, "-", "-", "--out_dir", "no"], cwd=tmp_path, input=TEXT, capture_output=True)
    assert done.returncode == 2 and b"given twice" in done.stderr
    done = subprocess.run([sys.executable, SCRIPT, "-", "--out_dir", "no"], cwd=tmp_path, input=b"", capture_output=True)
    assert done.returncode == 2 and b"standard input: 0 bytes" in done.stderr and not (tmp_path / "no").exists()


def test_a_record_that_is_not_utf8_is_refused_with_its_offset_or_replaced_and_kept_as_bytes(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good \x92 bad \xff"}\n')
    main([str(tmp_path / "a.jsonl"), "--out_dir", str(tmp_path / "bytes")])
    train, val = (read_split(tmp_path / "bytes", split) for split in ("train", "val"))
    assert bytes(train[1:].tolist()) + bytes(val[1:].tolist()) == b"good \x92 bad \xff"
    capsys.readouterr()
    monkeypatch.setattr(prepare_data, "get_encoding", lambda name: tiny_encoding())
    line = refused(capsys, tmp_path / "a.jsonl", "--out_dir", tmp_path / "out")
    assert "line 1: byte 0x92 at offset 5" in line and "--errors replace" in line
    main([str(tmp_path / "a.jsonl"), "--errors", "replace", "--out_dir", str(tmp_path / "out")])
    assert "replaced 2 bytes" in capsys.readouterr().out


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_that_is_named_and_a_closed_standard_input_cost_one_line(tmp_path, capsys, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    line = refused(capsys, tmp_path / "pipe", "--out_dir", tmp_path / "out")
    assert f"{tmp_path / 'pipe'}: a pipe or a device" in line and "PATH -" in line
    assert "/dev/zero: a pipe or a device" in refused(capsys, "/dev/zero", "--out_dir", tmp_path / "out")
    monkeypatch.setattr(sys, "stdin", None)  # as after <&-
    assert "standard input is closed" in refused(capsys, "-", "--out_dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- texts as they come ---------------------------------------------------------------------------------------------

def test_text_that_spells_end_of_text_makes_no_document(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, "get_encoding", lambda name: tiny_encoding())
    text = b"one<|endoftext|>two\n" * 50
    (tmp_path / "a.txt").write_bytes(text)
    prepare([tmp_path / "a.txt"], "tiny", tmp_path / "out")
    train, val = (read_split(tmp_path / "out", split) for split in ("train", "val"))
    assert (train == 300).sum() == (val == 300).sum() == 1 and train[0] == val[0] == 300
    assert tiny_encoding().decode(train[1:]) + tiny_encoding().decode(val[1:]) == text


def test_a_byte_order_mark_is_left_out_and_counted_but_kept_as_bytes(tmp_path, monkeypatch, capsys):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(b"\xef\xbb\xbf" + TEXT)
    main([str(tmp_path / "texts"), "--out_dir", str(tmp_path / "kept")])
    assert "byte-order" not in capsys.readouterr().out
    assert bytes(read_split(tmp_path / "kept", "train")[1:4].tolist()) == b"\xef\xbb\xbf"
    monkeypatch.setattr(prepare_data, "get_encoding", lambda name: tiny_encoding())
    main([str(tmp_path / "texts"), "--out_dir", str(tmp_path / "out")])
    assert "left out 1 byte-order marks" in capsys.readouterr().out
    train, val = (tiny_encoding().decode(read_split(tmp_path / "out", split)[1:]) for split in ("train", "val"))
    assert train + val == TEXT and b"\r\n" in train         # line ends stay


@pytest.mark.parametrize("content, replaced", [(b"good text\n\x92 bad\nmore\n", 1), ("smile 🙂".encode("utf-8")[:-1], 3)])
def test_errors_replace_says_how_many_bytes_it_has_replaced(tmp_path, monkeypatch, capsys, content, replaced):
    monkeypatch.setattr(prepare_data, "get_encoding", lambda name: tiny_encoding())
    (tmp_path / "b.txt").write_bytes(content)
    main([str(tmp_path / "b.txt"), "--errors", "replace", "--out_dir", str(tmp_path / "out")])
    assert f"replaced {replaced} bytes" in capsys.readouterr().out
    both = [tiny_encoding().decode(read_split(tmp_path / "out", split)[1:]).decode() for split in ("train", "val")]
    assert "".join(both).count("\ufffd") == 1 or replaced == 3


def test_null_bytes_survive_and_noise_is_refused_quickly(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare_data, "get_encoding", lambda name: tiny_encoding())
    for name, content in (("n.txt", b"ab\0cd\n"), ("zeros.txt", bytes(10**6))):
        (tmp_path / name).write_bytes(content)
        main([str(tmp_path / name), "--out_dir", str(tmp_path / f"out-{name}")])
        both = [tiny_encoding().decode(read_split(tmp_path / f"out-{name}", split)[1:]) for split in ("train", "val")]
        assert b"".join(both) == content
    (tmp_path / "noise").write_bytes(ANY_BYTES * 200)
    capsys.readouterr()
    assert "is not UTF-8" in refused(capsys, tmp_path / "noise", "--out_dir", tmp_path / "out")


@pytest.mark.parametrize("unit", ["a", "^", " ", "你"])
def test_a_megabyte_of_one_character_is_no_trouble_to_gpt2(tmp_path, monkeypatch, unit):
    monkeypatch.setattr(prepare_data, "download", lambda url, path: pytest.skip("no GPT-2 ranks in TIKTOKEN_CACHE_DIR"))
    (tmp_path / "l.txt").write_text(unit * 1_000_000, encoding="utf-8")
    meta, _ = prepare([tmp_path / "l.txt"], "gpt2", tmp_path / "out")
    encoding = prepare_data.get_encoding("gpt2")
    both = [encoding.decode(read_split(tmp_path / "out", split)[1:]) for split in ("train", "val")]
    assert b"".join(both).decode("utf-8") == unit * 1_000_000


# ---- workers, memory, interruption ----------------------------------------------------------------------------------

@pytest.mark.parametrize("encoding", ["bytes", "tiny"])
def test_any_number_of_workers_writes_the_same_bytes(tmp_path, monkeypatch, encoding):
    if encoding == "tiny":
        monkeypatch.setattr(prepare_data, "get_encoding", lambda name: tiny_encoding())
    package = Path(json.__file__).parent
    (tmp_path / "long.txt").write_bytes(TEXT * 100)
    for workers in (0, 1, 64):
        prepare([package, tmp_path / "long.txt"], encoding, tmp_path / str(workers), workers=workers, shard_tokens=10**5)
    folders = [{path.name: path.read_bytes() for path in (tmp_path / str(workers)).iterdir()} for workers in (0, 1, 64)]
    assert folders[0] == folders[1] == folders[2] and len(folders[0]) > 5


def test_run_from_a_script_under_the_spawn_start_method_it_writes_the_same(tmp_path, book):
    program = (f"import multiprocessing, runpy, sys; multiprocessing.set_start_method('spawn'); sys.argv = ['prepare_data.py', "
               f"{str(book)!r}, '--out_dir', 'spawned']; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')")
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True)
    meta, _ = prepare([book], "bytes", tmp_path / "out")
    assert prepare_data.read_meta(tmp_path / "spawned")["sha256"] == meta["sha256"]


PEAK_OF_A_RUN = """
import resource, sys, prepare_data
prepare_data.main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measured as Linux counts memory")
def test_memory_does_not_grow_with_the_text(tmp_path):
    (tmp_path / "big.txt").write_bytes(TEXT * 8000)        # 60 MB
    (tmp_path / "small.txt").write_bytes(TEXT * 80)
    peaks = {}
    for name in ("small", "big"):
        done = subprocess.run([sys.executable, "-c", PEAK_OF_A_RUN, tmp_path / f"{name}.txt", "--workers", "2", "--out_dir",
                               tmp_path / name], cwd=SCRIPT.parent, capture_output=True, text=True, check=True)
        peaks[name] = int(done.stdout.split()[-1]) / 1024
    tokens = prepare_data.read_meta(tmp_path / "big")["splits"]["train"]["tokens"]
    assert peaks["big"] - peaks["small"] < 2 * tokens / 2**20 + 20, peaks       # a shard's tokens are collected


def slow_run(tmp_path):
    """A run of prepare_data.py that is encoding and will do so for a long time."""
    program = ("import sys, time, prepare_data; encode = prepare_data.ByteEncoding.encode\n"
               "def slowly(self, data):\n    time.sleep(0.2)\n    return encode(self, data)\n"
               "prepare_data.ByteEncoding.encode = slowly\nprepare_data.main(sys.argv[1:])")
    (tmp_path / "big.txt").write_bytes(TEXT * 8000)
    run = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "big.txt"), "--workers", "2", "--out_dir",
                            str(tmp_path / "data" / "out")], cwd=SCRIPT.parent, stderr=subprocess.PIPE)
    while not list(tmp_path.glob("data/.out.tmp-*")):
        time.sleep(0.02)
    time.sleep(0.5)
    assert run.poll() is None
    return run


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_ctrl_c_ends_with_one_line_and_leaves_nothing(tmp_path):
    run = slow_run(tmp_path)
    run.send_signal(signal.SIGINT)
    error = run.communicate(timeout=10)[1].decode()
    assert run.returncode == 130 and error.count("\n") == 1 and "interrupted" in error, error
    assert [path.name for path in tmp_path.iterdir()] == ["big.txt"]


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_a_killed_run_leaves_nothing_that_passes_for_a_data_set(tmp_path):
    run = slow_run(tmp_path)
    run.kill()
    run.communicate(timeout=10)
    assert not (tmp_path / "data" / "out").exists()
    with pytest.raises(UserError, match="no shards found"):
        prepare_data.find_shards(tmp_path / "data" / "out", "train")


@pytest.mark.skipif(os.name != "posix", reason="a limit on file sizes as POSIX has it")
def test_a_full_disk_costs_one_line_and_leaves_nothing(tmp_path):
    (tmp_path / "big.txt").write_bytes(TEXT * 200)
    for source, given in (("big.txt", None), ("-", TEXT * 200)):
        done = subprocess.run(["bash", "-c", 'ulimit -f 200; exec "$@"', "bash", sys.executable, "-B", str(SCRIPT), source,
                               "--out_dir", "data/out"], cwd=tmp_path, input=given, capture_output=True)
        error = done.stderr.decode()
        assert done.returncode == 2 and error.count("\n") == 1 and "--out_dir data/out" in error, error
        assert "File too large" in error and "bytes are free" in error
        assert [path.name for path in tmp_path.iterdir()] == ["big.txt"]


@pytest.mark.parametrize("out_dir", ["f", "f/x", "/proc/x"])
def test_an_out_dir_that_cannot_be_written_is_named_before_the_work(tmp_path, monkeypatch, capsys, book, out_dir):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").touch()
    monkeypatch.setattr(prepare_data, "write_splits", None)
    if out_dir.startswith("/proc") and not Path("/proc").is_dir():
        pytest.skip("no /proc")
    assert f"--out_dir {out_dir}" in refused(capsys, book, "--out_dir", out_dir)


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path, monkeypatch, capsys, book):
    find_cut = prepare_data.find_cut

    def then_shorten(documents):
        found = find_cut(documents)
        book.write_bytes(TEXT[:100])
        return found
    monkeypatch.setattr(prepare_data, "find_cut", then_shorten)
    monkeypatch.setattr(prepare_data, "checked", functools.lru_cache(prepare_data.checked))
    line = refused(capsys, book, "--out_dir", tmp_path / "out")
    assert str(book) in line and not (tmp_path / "out").exists()


# ---- ranks files ----------------------------------------------------------------------------------------------------

def ranks_text(tokens) -> str:
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))


RANKS = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b"in", b" t", b" the"] + [b"a" * n for n in range(2, 41)]


def test_a_ranks_file_travels_with_data_and_meta(tmp_path, capsys, book):
    original = tmp_path / "own" / "small.tiktoken"
    original.parent.mkdir()
    original.write_text(ranks_text(RANKS))
    main([str(book), "--encoding", str(original), "--out_dir", str(tmp_path / "out")])
    text = original.read_bytes()
    original.unlink()
    meta = prepare_data.read_meta(tmp_path / "out")
    assert (meta["encoding"], meta["vocab_size"], meta["end_of_text"]) == ("small.tiktoken", 301, 300)
    assert (tmp_path / "out" / meta["ranks_file"]).read_bytes() == text == meta["ranks"].encode()
    assert "ranks" not in json.loads((tmp_path / "out" / "meta.json").read_text())
    encoding = prepare_data.encoding_from_meta(json.loads(json.dumps(meta)))
    train, val = (read_split(tmp_path / "out", split) for split in ("train", "val"))
    assert train[0] == val[0] == 300 and encoding.decode(train[1:]) + encoding.decode(val[1:]) == TEXT
    assert list(encoding.encode(b"in the")) == [258, 260]
    (tmp_path / "out" / "small.tiktoken").unlink()
    with pytest.raises(UserError, match="small.tiktoken"):
        prepare_data.read_meta(tmp_path / "out")


def test_a_large_ranks_file_makes_shards_of_four_bytes_a_token(tmp_path, book):
    tokens = [bytes([byte]) for byte in range(256)] + [f"{n:06d}".encode() for n in range(69_744)]
    (tmp_path / "large.tiktoken").write_text(ranks_text(tokens))
    prepare([book], str(tmp_path / "large.tiktoken"), tmp_path / "out")
    assert Shards(prepare_data.find_shards(tmp_path / "out", "train")).dtype == np.uint32
    assert read_split(tmp_path / "out", "train")[0] == 70_000


@pytest.mark.parametrize("damage, complaint", [
    (lambda lines: lines[:300] + [lines[7]], "line 301: repeats the token of line 8"),
    (lambda lines: lines[:299] + ["enp6 12"], "line 300: repeats the rank of line 13"),
    (lambda lines: lines[:65] + lines[66:], "without the single byte 0x41"),
    (lambda lines: lines[:9] + ["?? 9"] + lines[10:], "line 10: '??' is not base64"),
    (lambda lines: lines[:9] + ["CQ=="] + lines[10:], "line 10: found 'CQ=='"),
    (lambda lines: lines[:9] + ["CQ== nine"] + lines[10:], "line 10: found"),
    (lambda lines: lines[:9] + ["CQ== -9"] + lines[10:], "line 10: found"),
    (lambda lines: lines[:9] + [""] + lines[9:], "line 10: found ''"),
    (lambda lines: lines + ["enp6 " + "9" * 5000], "line 301: found rank 9999"),
    (lambda lines: [], "0 lines"),
])
def test_a_broken_ranks_file_is_named_with_its_line(tmp_path, capsys, book, damage, complaint):
    (tmp_path / "own.tiktoken").write_text("\n".join(damage(ranks_text(RANKS).splitlines())))
    line = refused(capsys, book, "--encoding", tmp_path / "own.tiktoken", "--out_dir", tmp_path / "out")
    assert "own.tiktoken" in line and complaint in line and not (tmp_path / "out").exists()


def test_a_ranks_file_that_cannot_be_read_costs_one_line(tmp_path, capsys, book):
    (tmp_path / "folder.tiktoken").mkdir()
    (tmp_path / "binary.tiktoken").write_bytes(ANY_BYTES)
    for name, complaint in (("missing", "No such file"), ("folder", "Is a directory"), ("binary", "not text")):
        line = refused(capsys, book, "--encoding", tmp_path / f"{name}.tiktoken", "--out_dir", tmp_path / "out")
        assert f"{name}.tiktoken" in line and complaint in line


def test_a_network_that_hangs_costs_one_line_soon(tmp_path, monkeypatch, capsys, book):
    import tiktoken.registry
    monkeypatch.setattr(prepare_data, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(prepare_data.urllib.request.OpenerDirector, "open", lambda self, url, timeout: time.sleep(2))
    started = time.monotonic()
    line = refused(capsys, book, "--encoding", "gpt2", "--out_dir", tmp_path / "out")
    assert time.monotonic() - started < 1.5 and "no answer within 0.3 s" in line
    assert "TIKTOKEN_CACHE_DIR" in line and "--encoding bytes" in line and not (tmp_path / "cache").exists()


# ---- shards of others -----------------------------------------------------------------------------------------------

def test_nanogpts_headerless_files_are_read(tmp_path):
    ids = np.random.default_rng(1).integers(0, 50257, 3000).astype("<u2")
    for name in ("train", "val"):
        ids.tofile(tmp_path / f"{name}.bin")
    assert np.array_equal(read_split(tmp_path, "train"), ids)
    (tmp_path / "meta.pkl").write_bytes(b"never opened")
    with pytest.raises(UserError, match="meta.pkl.*python prepare_data.py input.txt"):
        prepare_data.read_meta(tmp_path)


def test_a_damaged_shard_is_not_taken_for_a_headerless_one(tmp_path):
    ids = np.random.default_rng(1).integers(0, 50257, 3000).astype("<u2")
    path = tmp_path / "train.bin"
    prepare_data.write_shard(path, ids)
    whole = path.read_bytes()
    for content in (b"\0\0\0\0" + whole[4:], b"abcd" + whole[4:], whole[:-2], whole[:1000], whole + b"\0\0"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="train.bin"):
            Shards([path])
    for name, content in (("train.bin", ids.tobytes() + b"\0"), ("train.bin", b""), ("train_0.bin", ids.tobytes()),
                          ("train.bin", np.full(3000, 60_000, "<u2").tobytes())):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=name):
            Shards([tmp_path / name])
    ids.tofile(path)
    (tmp_path / "meta.json").write_text('{"encoding": "gpt2", "vocab_size": 50257, "end_of_text": 50256}')
    with pytest.raises(UserError, match="train.bin"):
        Shards([path])


def test_folders_are_no_shards(tmp_path):
    (tmp_path / "train_0.bin").mkdir()
    with pytest.raises(UserError, match="no shards found"):
        prepare_data.find_shards(tmp_path, "train")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory as Linux shows it")
def test_memory_stays_flat_over_four_billion_tokens(tmp_path):
    program = """
import sys, time, numpy as np
started = time.monotonic()
from prepare_data import Shards, find_shards
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
shards = Shards(find_shards(sys.argv[1], "train"))
assert len(shards) == 4 * 10**9
draw = np.random.default_rng(1)
for step in range(600):
    if step == 100:
        begun, warm = time.monotonic() - started, anonymous()
    shards.read(int(draw.integers(4 * 10**9 - 1025)), 1025)
print(begun, anonymous() - warm)
"""
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 10**9
    for shard in range(4):
        with (tmp_path / f"train_{shard}.bin").open("wb") as file:
            file.write(header)
            file.truncate(1024 + 2 * 10**9)        # sparse: takes no room
    done = subprocess.run([sys.executable, "-c", program, tmp_path], cwd=SCRIPT.parent, capture_output=True, text=True)
    begun, grown = done.stdout.split()
    assert float(begun) < 10 and int(grown) < 2048, done
