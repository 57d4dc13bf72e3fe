"""Promises of prepare_data.py: exact round trips, shards that cannot lie, and mistakes that cost one line."""

import base64
import contextlib
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
        raise ConnectionError("a long story\nof sockets")
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
    documents = [prepare_data.checked("a text", functools.partial(io.BytesIO, text), Reading(utf8=False, marks=True)) for text in texts]
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
