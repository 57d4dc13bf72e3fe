"""Text to token shards: what train.py reads, written once, byte for byte the same each time.

    python prepare_data.py                                      Python's own library as bytes, into data/stdlib
    python prepare_data.py book.txt                             one text as bytes, into data/book
    python prepare_data.py notes/ more.txt --encoding gpt2      a folder and a file as GPT-2 tokens, into data/notes
    python prepare_data.py https://host/chat.jsonl.gz           a document a line, fetched once, into data/chat
    zcat dump.gz | python prepare_data.py - --out_dir data/dump

A folder of data holds train_000000.bin, val_000000.bin, ... and meta.json. A shard is little-endian:

    bytes        what                                vocabulary up to 65,536      larger
    0 - 1023     256 int32: magic, version, count    20240520, 1, count, 0 ...    20240801, 7, count, 0 ...
    1024 - end   count tokens                        uint16                       uint32

A text file is a document, as is a line of .jsonl and .jsonl.gz and a row of .parquet; an end-of-text token stands
before each. Validation gets the documents whose SHA-256 is a multiple of 50; where there are fewer than 50 documents,
or one side would get no text, it gets the last 5 % of the text instead. A byte-order mark at the start of a document
is left out, but for the encoding bytes, which keeps every byte; line ends stay as they are.

Texts are read twice, once to check and count them and once to encode them, and never held as a whole; with --max_tokens
they are read once, and the split goes by the hash alone.
"""

import argparse
import base64
import binascii
import codecs
import collections
import contextlib
import errno
import functools
import glob
import gzip
import hashlib
import http.client
import io
import itertools
import json
import math
import mmap
import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NoAnswer  # Python 3.10 has it apart from the built-in one
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

SHARD_KINDS = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}  # magic: (version, type of token)
HEADER_BYTES = 1024
SHARD_TOKENS = 10**8
FORMAT_VERSION = 1  # of meta.json
DOWNLOADS = Path("data/downloads")
RECORDS = (".jsonl", ".jsonl.gz", ".parquet")  # endings of files of many documents
SPOOL = "standard input"  # the file that holds it while it is being read twice
ANSWER_SECONDS = 8  # how long a server may take to answer, or to send the next bytes
SOURCES = {
    "stdlib": [],
    "tinyshakespeare": ["https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"],
    "fineweb-edu": ["https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu/resolve/main/sample/10BT/"
                    f"{number:03d}_00000.parquet" for number in range(14)],
}
STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

# tiktoken 0.14 takes 0.2 s for a million equal letters, but a million spaces overflow the stack of its regex engine
# with the patterns of cl100k_base and o200k_base (700,000 still pass). Pieces of 128 KiB stay well below that.
PIECE_BYTES = 2**17

# tiktoken 0.9 merges a word in time that grows with the square of its length: no word is longer than two of these.
RUN = 2**13

# How GPT-2 cuts a text before it merges: also for ranks files, which do not say how their texts were cut.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LARGEST_RANK = 2**22


# ---- command lines: what the scripts share --------------------------------------------------------------------------

class UserError(ValueError):
    """A user's mistake. The message is one line: the flag or file, what was found, what to do."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the default of each flag that has one, and the description as it was written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, where a mistake is one line on standard error and exit status 2."""

    def __init__(self, **settings: Any):
        super().__init__(**{"formatter_class": HelpFormatter, "allow_abbrev": False, **settings})

    def error(self, message: str):
        let_the_first_process_speak()
        self.exit(2, f"{self.prog}: error: {one_line(message)}\n")


def escaped(text: str, keep: str = "") -> str:
    """The text with each control character that is not in `keep` as Python writes it: \\x1b, \\r, \\x00.

    Printed as it is, what stands in a file or comes from a server could command a terminal or add lines.
    """
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda found: found[0] if found[0] in keep else repr(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """A message as one line that a person can read, whatever it repeats from a file."""
    line = escaped(" ".join(text.split()))
    return line if len(line) < 2000 else f"{line[:1000]} [...] {line[-500:]}"


def exit_on_user_error(function: Callable, *args: Any, errors: tuple[type[Exception], ...] = (UserError,)) -> Any:
    """The function's result; one of `errors` becomes one line on standard error and exit status 2.

    So does a full disk under standard output. A reader of it that has gone (| head) ends the program without a word.
    """
    try:
        result = function(*args)
        sys.stdout.flush()  # while a failure can still be answered
        return result
    except errors as error:
        message = one_line(str(error))
    except BrokenPipeError:
        abandon_output()
        raise SystemExit(130) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG) or error.filename:
            raise
        message = f"standard output: cannot be written ({error.strerror}); make room or send it elsewhere"
        abandon_output()
    let_the_first_process_speak()
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def let_the_first_process_speak():
    """Under torchrun, wait in all processes but the first: if it meets the same mistake, torchrun ends us meanwhile."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(5)


def abandon_output():
    """Send what is still to be printed nowhere, so that Python does not stumble over it on its way out."""
    with contextlib.suppress(OSError):  # not every standard output is a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def number_type(convert: Callable, allowed: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    """A type for argparse: converts the text and refuses what is not allowed."""
    def parse(text: str):
        try:
            value = convert(text)
        except ValueError:
            value = math.nan  # which no comparison allows
        if not allowed(value):
            raise argparse.ArgumentTypeError(f"found {text!r:.60}, expected {expected}")
        return value
    return parse


# A count of 2^31 or more is a slip of the finger, which would end in a machine that swaps or a run that never ends.
positive_int = number_type(int, lambda value: 1 <= value < 2**31, "a whole number of at least 1 and below 2^31")
non_negative_int = number_type(int, lambda value: 0 <= value < 2**31, "a whole number of at least 0 and below 2^31")
positive_float = number_type(float, lambda value: 0 < value < math.inf, "a finite number above 0")
non_negative_float = number_type(float, lambda value: 0 <= value < math.inf, "a finite number of at least 0")
worker_count = number_type(int, lambda value: 0 <= value <= 256, "a whole number from 0 to 256")
seed_number = number_type(int, lambda value: 0 <= value < 2**63, "a whole number of at least 0 and below 2^63")
skip_rate = number_type(float, lambda value: 0 <= value < 1, "a skip rate of at least 0 and below 1; try 0.25")


def skip_rates(text: str) -> list[float]:
    """A type for argparse: skip rates with commas between them."""
    return [skip_rate(part) for part in text.split(",")]


def path_text(text: str) -> str:
    """A type for argparse: the name of a file or folder, which "" is not, though Path takes it for this folder."""
    try:
        os.lstat(text)
        possible = True
    except OSError as error:
        possible = text != "" and error.errno != errno.ENAMETOOLONG
    except ValueError:  # a null character
        possible = False
    if not possible:
        raise argparse.ArgumentTypeError(f"found {text!r:.60}, expected the name of a file or folder")
    return text


def path_type(text: str) -> Path:
    """The same as a Path."""
    return Path(path_text(text))


def forgive_output():
    """Let a terminal or file whose encoding lacks a character show a sign in its place, rather than end the program.

    Where standard output was closed (>&-), what is printed goes nowhere.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def say(text: str):
    """Print a line, also where the terminal's encoding lacks a character or a file name is no valid text."""
    encoding = sys.stdout.encoding or "utf-8"
    print(escaped(text).encode(encoding, "backslashreplace").decode(encoding))


# ---- encodings ------------------------------------------------------------------------------------------------------

def token_dtype(vocab_size: int) -> np.dtype:
    """The type in which shards hold the tokens of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def character_border(data: bytes, at: int) -> int:
    """The last place at or before `at` where no UTF-8 character is cut; in what is not UTF-8, up to 3 bytes earlier."""
    border = at
    while max(0, at - 3) < border < len(data) and data[border] & 0xC0 == 0x80:  # 10xxxxxx continues a character
        border -= 1
    return border


def pieces(file: BinaryIO, size: int = sys.maxsize, limit: int = PIECE_BYTES) -> Iterator[bytes]:
    """The next `size` bytes of a file in pieces of at most `limit`, cut after a line where possible.

    Where they are cut depends on the text alone.
    """
    held = b""
    while True:
        more = file.read(min(limit + 1 - len(held), size))  # a byte beyond the piece tells that it is not the last
        held, size = held + more, size - len(more)
        if len(held) <= limit:
            yield held
            return
        end = held.rfind(b"\n", 0, limit) + 1 or character_border(held, limit)
        yield held[:end]
        held = held[end:]


def runs_cut(text: str) -> list[str]:
    """The text, cut every RUN characters within longer stretches of letters, digits, spaces or other signs alone."""
    parts = [""]
    for start in range(0, len(text), RUN):
        part = text[start:start + RUN]
        alike = part.isalpha() or part.isnumeric() or part.isspace() or not re.search(r"[^\W_]|\s", part)
        if alike and len(part) == RUN:
            parts += [part, ""]
        else:
            parts[-1] += part
    return [part for part in parts if part] or [""]


class ByteEncoding:
    """Bytes as they are, 0 to 255, and end-of-text as 256. Needs no download and knows no invalid input."""

    name, vocab_size, end_of_text = "bytes", 257, 256

    def encode(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, np.uint8).astype(token_dtype(self.vocab_size))

    def decode(self, ids: Iterable[int]) -> bytes:
        return b"".join(b"<|endoftext|>" if i == self.end_of_text else bytes([i]) for i in ids)

    def token_bytes(self) -> np.ndarray:
        """(vocab_size,) int64: the bytes of text that each token stands for; 0 for end-of-text."""
        return np.array([1] * 256 + [0])


class TiktokenEncoding:
    """An encoding that tiktoken runs. The spelling of a special token inside a text is ordinary text.

    ranks: the text of the ranks file that it comes from; None for those that tiktoken knows by name.
    """

    def __init__(self, encoding: Any, ranks: str | None = None):
        self.encoding, self.ranks = encoding, ranks
        self.name, self.vocab_size, self.end_of_text = encoding.name, encoding.n_vocab, encoding.eot_token

    @functools.cached_property
    def spellings(self) -> list[bytes]:
        """The bytes of each id below vocab_size; none for the ids that cl100k_base and others leave unused."""
        spellings = [b""] * self.vocab_size
        for i in range(self.vocab_size):
            with contextlib.suppress(KeyError):
                spellings[i] = self.encoding.decode_single_token_bytes(i)
        return spellings

    def encode(self, data: bytes) -> np.ndarray:
        """(tokens,) uint16 or uint32. Raises UnicodeDecodeError where the data is not UTF-8."""
        parts = []
        runs = (runs_cut(piece.decode("utf-8")) for piece in pieces(io.BytesIO(data)))
        for text in itertools.chain.from_iterable(runs):
            if any(special in text for special in self.encoding.special_tokens_set):
                parts.append(self.encoding.encode_ordinary(text))
            else:  # faster, but tiktoken 0.9 would take the spelling of a special token for the token
                parts.append(self.encoding.encode_to_numpy(text, disallowed_special=()))
        return np.concatenate(parts).astype(token_dtype(self.vocab_size))

    def decode(self, ids: Iterable[int]) -> bytes:
        return b"".join(self.spellings[i] for i in ids)

    def token_bytes(self) -> np.ndarray:
        """(vocab_size,) int64: the bytes of text that each token stands for; 0 for special and unused ids."""
        lengths = np.array([len(spelling) for spelling in self.spellings])
        lengths[[self.encoding.encode_single_token(special) for special in self.encoding.special_tokens_set]] = 0
        return lengths


Encoding = ByteEncoding | TiktokenEncoding


class NoRanks(UserError):
    """An encoding's ranks can be had neither from the cache nor from the network."""


def get_encoding(name: str) -> Encoding:
    """The encoding of that name: "bytes", one that tiktoken knows and can load, or the path of a ranks file."""
    if name == "bytes":
        return ByteEncoding()
    if name.endswith(".tiktoken"):
        return encoding_of_ranks(Path(name).name, read_text(Path(name)), name)
    import tiktoken.load
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise UserError(f"encoding {name:.60}: unknown, expected one of bytes, {', '.join(sorted(known))}, or a ranks "
                        "file whose name ends in .tiktoken")
    original = tiktoken.load.read_file_cached
    tiktoken.load.read_file_cached = read_ranks
    try:
        return TiktokenEncoding(tiktoken.get_encoding(name))
    except UserError as error:
        raise NoRanks(f"encoding {name}: tiktoken cannot fetch its ranks ({error}); go online, set TIKTOKEN_CACHE_DIR "
                      "to a folder that holds them, or use --encoding bytes") from error
    finally:
        tiktoken.load.read_file_cached = original


def read_ranks(url: str, checksum: str | None = None) -> bytes:
    """What tiktoken.load.read_file_cached does, from the same cache.

    But it does not wait forever for an answer, and a file with a wrong checksum is named, not deleted.
    """
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    path = Path(folder or Path(tempfile.gettempdir()) / "data-gym-cache") / hashlib.sha1(url.encode()).hexdigest()
    if not path.exists():
        download(url, path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if checksum and hashlib.sha256(content).hexdigest() != checksum:
        raise UserError(f"{path}: {len(content):,} bytes with a wrong checksum; delete the file to fetch it anew")
    return content


def read_text(path: Path) -> str:
    """The text of a small file of ours or of a ranks file; UserError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}, expected a file; check the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not text, byte 0x{error.object[error.start]:02x} at offset {error.start}; check the "
                        "path") from error
    except ValueError as error:  # a name with a null character or half of a surrogate pair
        raise UserError(f"{path}: {error}, expected a file; check the path") from error


def encoding_of_ranks(name: str, text: str, where: str) -> TiktokenEncoding:
    """The encoding of a ranks file: on each line a token in base64 and its rank, which becomes its id.

    The id after the last rank is end-of-text. Texts are cut by GPT-2's pattern before they are merged.
    UserError with the line if a line is no such pair or repeats one, or if one of the 256 single bytes is missing.
    """
    ranks, lines = {}, {}
    for number, line in enumerate(text.splitlines(), 1):
        def refuse(found: str):
            raise UserError(f"{where}, line {number}: {found}; a line is a token in base64, a space and its rank")
        fields = line.split()
        if len(fields) != 2 or not (fields[1].isascii() and fields[1].isdigit()):
            refuse(f"found {line!r:.60}")
        try:
            token = base64.b64decode(fields[0], validate=True)
        except (binascii.Error, ValueError):
            refuse(f"{fields[0]!r:.60} is not base64")
        rank = int(fields[1][:20])
        if not token:
            refuse("the token is empty")
        if rank >= LARGEST_RANK:
            refuse(f"found rank {rank}, expected one below {LARGEST_RANK:,}")
        if token in ranks or rank in lines:
            refuse(f"repeats the {'token' if token in ranks else 'rank'} of line {lines[ranks.get(token, rank)]}")
        ranks[token], lines[rank] = rank, number
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise UserError(f"{where}: {len(lines)} lines without the single byte 0x{missing[0]:02x}, expected all 256; "
                        "complete it")
    import tiktoken
    return TiktokenEncoding(tiktoken.Encoding(name, pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                                              special_tokens={"<|endoftext|>": max(lines) + 1}), text)


def encoding_from_meta(meta: dict) -> Encoding:
    """The encoding that a meta.json, or the copy of it in a checkpoint, names; refused if its sizes differ."""
    check_meta(meta, "meta of the data")
    name = meta["encoding"]
    if name.endswith(".tiktoken") and "ranks" not in meta:  # a path, and what a file names is not opened for it
        raise UserError(f"meta of the data: encoding {name:.60} comes without its ranks; prepare the data again")
    encoding = encoding_of_ranks(name, meta["ranks"], f"ranks of {name}") if "ranks" in meta else get_encoding(name)
    found, expected = (meta["vocab_size"], meta["end_of_text"]), (encoding.vocab_size, encoding.end_of_text)
    if found != expected:
        raise UserError(f"meta of the data: vocab_size and end_of_text are {found}, expected {expected} with the "
                        f"encoding {encoding.name}; prepare the data again")
    return encoding


# ---- shards and meta.json -------------------------------------------------------------------------------------------

def write_shard(path: Path, ids: np.ndarray) -> str:
    """Write one shard of uint16 or uint32 tokens; returns the SHA-256 of the file."""
    magic, version = next((magic, version) for magic, (version, dtype) in SHARD_KINDS.items() if dtype == ids.dtype)
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = magic, version, len(ids)
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for part in (header, ids):
            file.write(part)
            digest.update(part)
    return digest.hexdigest()


GPT2_META = {"encoding": "gpt2", "vocab_size": 50257, "end_of_text": 50256}


class ShardWriter:
    """Collects the tokens of one split and writes each `size` of them as a shard; `sums` has the SHA-256 of each."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, size: int):
        self.folder, self.split, self.sums, self.tokens = folder, split, {}, 0
        self.buffer, self.used = np.empty(size, dtype), 0

    def write(self, ids: np.ndarray):
        self.tokens += len(ids)
        while len(ids):
            taken = ids[:len(self.buffer) - self.used]
            self.buffer[self.used:self.used + len(taken)] = taken
            self.used, ids = self.used + len(taken), ids[len(taken):]
            if self.used == len(self.buffer):
                self.flush()

    def flush(self):
        """Write what has been collected, if anything."""
        if self.used:
            name = f"{self.split}_{len(self.sums):06d}.bin"
            self.sums[name] = write_shard(self.folder / name, self.buffer[:self.used])
            self.used = 0


class Header(NamedTuple):
    count: int
    dtype: np.dtype
    offset: int  # bytes before the first token


def headerless(path: Path, size: int, start: bytes) -> bool:
    """Whether a file is nanoGPT's train.bin or val.bin: GPT-2 ids as uint16 and nothing else, without a meta.json.

    A shard whose magic number is damaged still has a header that is nearly all zeros, which no text begins with.
    """
    ids = np.frombuffer(start[:len(start) // 2 * 2], "<u2")
    return (path.name in ("train.bin", "val.bin") and not (path.parent / "meta.json").exists() and size % 2 == 0
            and len(ids) > 0 and ids.max() < GPT2_META["vocab_size"] and np.count_nonzero(ids) > len(ids) / 2)


def read_header(path: Path) -> Header:
    """How many tokens a shard has, their type and place. UserError if its header or size is not that of a shard."""
    def refuse(found_and_expected: str):
        raise UserError(f"{path}: {found_and_expected}; prepare or download it again")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(HEADER_BYTES)
    except OSError as error:
        refuse(f"{error.strerror}, expected a token shard")
    if headerless(path, size, start):
        return Header(size // 2, np.dtype("<u2"), 0)
    if len(start) < HEADER_BYTES:
        refuse(f"{size:,} bytes, expected a token shard, which has a header of {HEADER_BYTES:,}")
    magic, version, count = (int(word) for word in np.frombuffer(start, "<i4")[:3])
    if magic not in SHARD_KINDS:
        refuse(f"begins with {magic}, expected the magic number of a token shard, 20240520 or 20240801")
    expected_version, dtype = SHARD_KINDS[magic]
    if version != expected_version:
        refuse(f"version {version}, expected {expected_version} after {magic}")
    expected_size = HEADER_BYTES + count * dtype.itemsize
    if count < 0 or size != expected_size:
        refuse(f"{size:,} bytes, expected {expected_size:,}, as the header says {count:,} tokens of {dtype.itemsize}")
    return Header(count, dtype, HEADER_BYTES)


class Shards:
    """The tokens of several shards as one long row: len() is their number, `dtype` their type on disk.

    All headers are checked at once; a file is memory-mapped when it is first read.
    """

    def __init__(self, paths: Iterable[str | Path]):
        self.paths = [Path(path) for path in paths]
        if not self.paths:
            raise UserError("no shards, expected at least one; make some with: python prepare_data.py")
        counts, dtypes, self.offsets = zip(*map(read_header, self.paths))
        self.dtype = dtypes[0]
        for path, dtype in zip(self.paths, dtypes):
            if dtype != self.dtype:
                raise UserError(f"{path}: {dtype} tokens, expected {self.dtype} as in {self.paths[0]}; keep them apart")
        self.starts = np.cumsum((0, *counts))  # (shards + 1,), where each shard begins in the row
        self.maps: list[np.ndarray | None] = [None] * len(self.paths)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """(count,) int64: the tokens from `start` on. IndexError if the row does not hold them."""
        if not 0 <= start <= start + count <= len(self):
            raise IndexError(f"tokens {start} to {start + count} of {len(self)}")
        ids, filled = np.empty(count, np.int64), 0
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        while filled < count:
            if self.maps[shard] is None:
                self.maps[shard] = np.memmap(self.paths[shard], self.dtype, "r", self.offsets[shard])
                if hasattr(mmap, "MADV_RANDOM"):  # rows are read here and there: what stands behind one is not wanted
                    self.maps[shard].base.madvise(mmap.MADV_RANDOM)
            begin = start + filled - int(self.starts[shard])
            part = self.maps[shard][begin:begin + count - filled]
            ids[filled:filled + len(part)] = part
            filled, shard = filled + len(part), shard + 1
        return ids

    def place(self, position: int) -> str:
        """Where a token of the row stands, for a message."""
        shard = int(np.searchsorted(self.starts, position, side="right")) - 1
        return f"position {position - int(self.starts[shard]):,} of {self.paths[shard]}"


def find_shards(data: str | Path, split: str) -> list[Path]:
    """The shards of a split ("train" or "val") in a folder, or among the files that a glob matches, sorted."""
    found = Path(data).glob("*") if Path(data).is_dir() else map(Path, glob.glob(str(data)))
    shards = sorted(path for path in found if path.match(f"*{split}*.bin") and path.is_file())
    if not shards:
        out_dir = "DIR" if glob.has_magic(str(data)) else shlex.quote(str(data))
        raise UserError(f"{data}: no shards found, expected *{split}*.bin; make them with: python prepare_data.py "
                        f"--out_dir {out_dir}")
    return shards


def read_meta(folder: str | Path) -> dict:
    """meta.json of a folder of shards, with the text of its ranks file under "ranks".

    Without one the shards are taken to be GPT-2's, as the published ones are.
    """
    path = Path(folder) / "meta.json"
    try:
        meta = json.loads(path.read_bytes())
    except FileNotFoundError:
        if (path.parent / "meta.pkl").exists():
            raise UserError(f"{path.with_name('meta.pkl')}: a vocabulary of nanoGPT's, which is not read, as pickles "
                            "can run programs; prepare the text itself: python prepare_data.py input.txt") from None
        return dict(GPT2_META)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}, expected a file; prepare the data again") from error
    except (ValueError, RecursionError) as error:  # not JSON, or not even text
        raise UserError(f"{path}: not JSON ({error}); prepare the data again") from error
    check_meta(meta, str(path))
    if "ranks_file" in meta:
        meta["ranks"] = read_text(path.parent / Path(str(meta["ranks_file"])).name)
    return meta


def check_complete(shards: Shards, folder: Path, split: str, meta: dict):
    """UserError if a folder has fewer or more tokens of a split than its meta.json says, where it says so."""
    splits = meta.get("splits")
    stated = splits[split].get("tokens") if isinstance(splits, dict) and isinstance(splits.get(split), dict) else None
    if stated not in (None, len(shards)):
        raise UserError(f"{folder}: {len(shards):,} tokens in its *{split}*.bin, but its meta.json says {stated}; a "
                        "shard is missing or does not belong there; prepare the data again, or give a glob of shards")


def check_meta(meta: Any, where: str):
    """UserError unless meta says what is needed to read the tokens."""
    found = meta if isinstance(meta, dict) else {}
    for key, kind in (("encoding", str), ("vocab_size", int), ("end_of_text", int), ("ranks", str)):
        if type(found.get(key)) is not kind and (key != "ranks" or key in found):
            raise UserError(f"{where}: {key} is {found.get(key)!r:.60}, expected {kind.__name__}; prepare the data "
                            "again")
    if not found.get("ranks", "").isascii():
        raise UserError(f"{where}: ranks have other signs than base64 and digits; prepare the data again")
    if not 0 <= found["end_of_text"] < found["vocab_size"]:
        raise UserError(f"{where}: end_of_text is {found['end_of_text']}, expected an id below vocab_size, which is "
                        f"{found['vocab_size']}; prepare the data again")


# ---- downloads ------------------------------------------------------------------------------------------------------

THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def is_safe(url: str) -> bool:
    """Whether nobody on the way can change what a URL brings. ValueError where it is no URL."""
    parts = urllib.parse.urlsplit(url)
    return parts.scheme == "https" or parts.scheme == "http" and parts.hostname in THIS_MACHINE


def downloaded(url: str) -> Path:
    """The file that holds what a URL stands for, fetched when it is first asked for."""
    try:
        safe, address = is_safe(url), urllib.parse.unquote(urllib.parse.urlsplit(url).path)
    except ValueError as error:
        raise UserError(f"{url}: no URL ({error}); check the address") from error
    if not safe:
        raise UserError(f"{url}: by http anybody on the way could change the text; use https, or download it yourself "
                        "and give the file")
    name = re.sub(r"[^\w.-]", "_", address.rstrip("/").rpartition("/")[2], flags=re.ASCII)  # none that leads elsewhere
    path = DOWNLOADS / f"{hashlib.sha1(url.encode(errors='replace')).hexdigest()[:12]}-{name[-100:]}"
    if not path.exists():
        try:
            download(url, path)
        except UserError as error:
            raise UserError(f"{error}; check the address and the network, or give a file that is on this machine, or "
                            "--source stdlib, which needs no network") from error
    return path


def download(url: str, path: Path):
    """Fetch a URL into a file, which has its name only when all of it is there. UserError if it cannot be had."""
    from tqdm import tqdm
    partial = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        with answer(url) as response:
            path.parent.mkdir(parents=True, exist_ok=True)
            length = response.headers.get("Content-Length")
            bar = tqdm(desc=path.name[-30:], total=length and int(length), unit="B", unit_scale=True, disable=None)
            with bar, partial.open("wb") as file:
                while chunk := response.read(2**20):
                    file.write(chunk)
                    bar.update(len(chunk))
                if length and file.tell() != int(length):
                    raise OSError(f"{file.tell():,} of {int(length):,} bytes came")
        partial.replace(path)
    except (NoAnswer, TimeoutError) as error:  # for its first bytes, or its next
        raise UserError(f"{url}: no answer within {ANSWER_SECONDS} s") from error
    except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
        raise UserError(f"{url}: cannot be downloaded to {path} ({type(error).__name__}: {error})") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


class SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows a server to another address, but never from https to http, nor from this machine to http elsewhere."""

    def redirect_request(self, request, file, code, message, headers, url):
        if not is_safe(url) or request.full_url.startswith("https:") and not url.startswith("https:"):
            raise ConnectionError(f"it leads on to {url}, expected https there, too")
        return super().redirect_request(request, file, code, message, headers, url)


def answer(url: str) -> BinaryIO:
    """An opened URL. A thread opens it, since finding the address of a host has no time limit of its own."""
    future: Future = Future()

    def ask():
        try:
            opener = urllib.request.build_opener(SafeRedirects)
            future.set_result(opener.open(url, timeout=ANSWER_SECONDS))
        except Exception as error:
            future.set_exception(error)
    threading.Thread(target=ask, daemon=True).start()
    return future.result(ANSWER_SECONDS)


# ---- documents ------------------------------------------------------------------------------------------------------

class Notes:
    """What the summary tells of the texts: files passed over, byte-order marks left out, bytes replaced."""

    def __init__(self):
        self.skipped, self.skipped_names, self.marks, self.replaced = 0, [], 0, 0

    def skip(self, name: str):
        self.skipped += 1
        self.skipped_names += [name] if len(self.skipped_names) < 5 else []


class Reading(NamedTuple):
    """How texts are read."""
    utf8: bool  # refuse what is not UTF-8
    marks: bool  # keep byte-order marks
    replace: bool = False  # put U+FFFD, the replacement character, where it is not UTF-8
    text_key: str = "text"  # what holds the text in JSON lines and Parquet
    progress: Callable[[int], Any] = lambda size: None  # is told the bytes that have been read since its last call


class Document(NamedTuple):
    """A text that has been checked and counted, to be read once more from a file or from memory."""
    name: str
    opened: Callable[[], BinaryIO]
    begin: int  # bytes of the byte-order mark that is left out
    size: int
    for_validation: bool
    replaced: int  # bytes that are not UTF-8

    def pieces(self, start: int, size: int) -> Iterator[bytes]:
        with self.opened() as file:
            file.seek(self.begin + start)
            yield from pieces(file, size)

    def border(self, at: int) -> int:
        """The last place at or before `at` where no character is cut."""
        before = max(0, at - 3)
        with self.opened() as file:
            file.seek(self.begin + before)
            return before + character_border(file.read(at + 1 - before), at - before)


def checked(name: str, opened: Callable[[], BinaryIO], reading: Reading) -> Document:
    """Read a text through to check and count it. UserError if it cannot be read or is not UTF-8 but should be."""
    digest, size, replaced = hashlib.sha256(), 0, 0
    try:
        with opened() as file:
            begin = 0 if reading.marks or file.read(3) != codecs.BOM_UTF8 else 3
            file.seek(begin)
            for piece in pieces(file):
                try:
                    reading.utf8 and piece.decode("utf-8")
                except UnicodeDecodeError as error:
                    if not reading.replace:
                        found = f"byte 0x{piece[error.start]:02x} at offset {begin + size + error.start}"
                        raise UserError(f"{name}: {found} is not UTF-8; convert it (iconv -f LATIN1 -t UTF-8), or use "
                                        "--errors replace or --encoding bytes") from error
                    replaced += sum("\udc80" <= sign <= "\udcff" for sign in piece.decode("utf-8", "surrogateescape"))
                digest.update(piece)
                size += len(piece)
                reading.progress(len(piece))
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}, expected a file or folder that can be read; check the path"
                        ) from error
    return Document(name, opened, begin, size, int.from_bytes(digest.digest(), "big") % 50 == 0, replaced)


class Input(NamedTuple):
    """A file to read, its name for the user, and whether the user has named it, not only a folder that it is in."""
    path: Path
    name: str
    named: bool


def files_under(folder: Path, pattern: str, left_out: Callable[[str], bool]) -> Iterator[Input]:
    """The files of a folder and its sub-folders, sorted by path, but for paths with a part that is left out."""
    found = (path for path in folder.rglob(pattern) if not any(map(left_out, path.relative_to(folder).parts)))
    files = (path for path in found if path.is_file())
    for path in sorted(files, key=lambda path: path.relative_to(folder).as_posix()):
        yield Input(path, str(path), named=False)


def inputs(paths: Sequence[str | Path]) -> Iterator[Input]:
    """The files that paths and URLs stand for; those of Python's library if there are none."""
    for path in paths:
        if is_url(str(path)):
            yield Input(downloaded(str(path)), str(path), named=True)
        elif Path(path).is_dir():
            yield from files_under(Path(path), "*", lambda part: part.startswith("."))
        elif Path(path).exists() and not Path(path).is_file():
            raise UserError(f"{path}: a pipe or a device, expected a file, as texts are read twice; what a pipe brings "
                            "is kept if it comes through standard input, PATH -")
        else:
            yield Input(Path(path), "standard input" if Path(path).name == SPOOL else str(path), named=True)
    if not paths:
        yield from files_under(Path(sysconfig.get_paths()["stdlib"]), "*.py", STDLIB_LEFT_OUT.__contains__)


def read_documents(paths: Sequence[str | Path], reading: Reading, notes: Notes) -> Iterator[Document]:
    """The documents of files, folders and URLs, or of Python's library if there are none.

    A file that is not a text is passed over in a folder, but refused where the user has named it.
    """
    for path, name, named in inputs(paths):
        if path.name.endswith(RECORDS):
            found: Iterable[Document] = (checked(where, functools.partial(io.BytesIO, content), reading)
                                         for where, content in records(path, name, reading.text_key))
        else:
            try:
                found = [checked(name, functools.partial(open, path, "rb"),
                                 reading if named else reading._replace(utf8=True, replace=False))]
            except UserError:
                if named:
                    raise
                notes.skip(name)
                continue
            if named and not found[0].size:
                raise UserError(f"{name}: 0 bytes, expected text; leave it out")
        for document in found:
            notes.marks += document.begin > 0
            notes.replaced += document.replaced
            yield document


def records(path: Path, name: str, key: str) -> Iterator[tuple[str, bytes]]:
    """Place and text of each record of a file of JSON lines or a Parquet file. UserError if it is not one."""
    try:
        for where, text in (parquet_texts if path.suffix == ".parquet" else json_texts)(path, key):
            if not isinstance(text, str):
                raise UserError(f"{name}, {where}: no text under {key!r}, expected one; name its key by --text_key")
            yield f"{name}, {where}", bytes_of(text)
    except UserError:
        raise
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:  # pyarrow's own are ValueErrors, too
        raise UserError(f"{name}: cannot be read as {path.name.partition('.')[2]} ({type(error).__name__}: {error}); "
                        "check it, or fetch it again") from error


def bytes_of(text: str) -> bytes:
    """The bytes of a text from JSON, also where they are not UTF-8."""
    try:
        return text.encode("utf-8", "surrogateescape")  # the bytes that stood in the file
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")  # JSON can spell half a character


def json_texts(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line.decode("utf-8-sig", "surrogateescape"))
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"line {number:,}: {error}") from error
                yield f"line {number:,}", row.get(key) if isinstance(row, dict) else None


def parquet_texts(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    number, file = 0, parquet_module().ParquetFile(path)
    if key not in file.schema_arrow.names:
        yield f"columns {', '.join(file.schema_arrow.names)}", None
    for batch in file.iter_batches(batch_size=1000, columns=[key]):
        for text in batch.column(0):
            number += 1
            yield f"row {number:,}", text.as_py()


def parquet_module():
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("reading .parquet: needs pyarrow; pip install pyarrow") from error
    return pyarrow.parquet


# ---- the split and the tokens ---------------------------------------------------------------------------------------

def find_cut(documents: Iterable[Document]) -> tuple[float | None, int]:
    """Where in the text as a whole validation begins, None if the documents are split by their hash; and its size."""
    count, sizes = 0, [0, 0]
    for document in documents:
        count += 1
        sizes[document.for_validation] += document.size
    total = sum(sizes)
    return None if count >= 50 and all(sizes) else total - max(1, total // 20), total


def sides(document: Document, cut: float | None) -> Iterator[tuple[str, int, int]]:
    """Split, start and size of the parts of a document. cut: counted from its start.

    A cut falls before a character, and makes two documents of one.
    """
    if cut is None:
        yield "val" if document.for_validation else "train", 0, document.size
        return
    here = document.border(min(max(cut, 0), document.size))
    if here:
        yield "train", 0, here
    if here < document.size:
        yield "val", here, document.size - here


class Piece(NamedTuple):
    split: str
    name: str  # of the document
    offset: int  # in the document
    content: bytes
    first: bool  # so that end-of-text stands before it


def split_pieces(documents: Iterable[Document], cut: float | None) -> Iterator[Piece]:
    """The documents in pieces, each for one split."""
    for document in documents:
        for split, start, size in sides(document, cut):
            offset = start
            for content in document.pieces(start, size):
                yield Piece(split, document.name, offset, content, offset == start)
                offset += len(content)
            if offset != start + size:
                raise UserError(f"{document.name}: has become shorter while it was being read; run this again")
        cut = None if cut is None else cut - document.size


def groups(all_pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces of one split that follow each other, together: small ones are not worth a thread's while."""
    group, size = [], 0
    for piece in all_pieces:
        if group and (size >= PIECE_BYTES or piece.split != group[0].split):
            yield group
            group, size = [], 0
        group.append(piece)
        size += len(piece.content)
    if group:
        yield group


def encode_group(encoding: Encoding, replace: bool, group: list[Piece]) -> tuple[list[Piece], np.ndarray]:
    """The pieces and their tokens."""
    parts = []
    for _, name, offset, content, first in group:
        parts += [np.array([encoding.end_of_text], token_dtype(encoding.vocab_size))] if first else []
        try:
            parts.append(encoding.encode(content.decode("utf-8", "replace").encode() if replace else content))
        except UnicodeDecodeError as error:
            raise UserError(f"{name}: has changed while it was being read; run this again") from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # how tiktoken's Rust side fails, and not an Exception
                raise
            raise UserError(f"{name}: tiktoken fails within {len(content):,} bytes from offset {offset}; break up "
                            "long runs of one character there, or use --encoding bytes") from None
    return group, np.concatenate(parts)


def in_order(function: Callable, items: Iterable, workers: int) -> Iterator:
    """The function of each item, in order, by so many threads (0: none), which are never far ahead."""
    if not workers:
        yield from map(function, items)
        return
    waiting: collections.deque[Future] = collections.deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


# ---- the script -----------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` at the end, or vanishes if anything fails, Ctrl-C included."""
    final = folder.resolve()
    temporary = final.with_name(f".{final.name}.tmp-{os.getpid()}")
    new_parents = [parent for parent in temporary.parents if not parent.exists()]
    try:
        try:
            temporary.mkdir(parents=True)
            yield temporary
            if final.exists():
                final.rmdir()  # it is empty; not every system renames onto a folder
            temporary.rename(final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            for parent in new_parents:
                with contextlib.suppress(OSError):  # the data set is in it
                    parent.rmdir()
    except OSError as error:
        free = shutil.disk_usage(next(path for path in final.parents if path.is_dir())).free
        raise UserError(f"--out_dir {folder}: cannot be written ({error.strerror or error}; {free:,} bytes are free "
                        "there); check disk and permissions, or choose another --out_dir") from error


def spooled(paths: Sequence[str | Path], folder: Path) -> list[str | Path]:
    """The paths, with - replaced by a file in the folder that holds what has come from standard input."""
    if "-" not in paths:
        return list(paths)
    if list(paths).count("-") > 1:
        raise UserError("PATH -: given twice, but standard input can be read once; give it once")
    if sys.stdin is None:
        raise UserError("PATH -: standard input is closed, expected a text; send it one: python prepare_data.py - "
                        "< FILE")
    with (folder / SPOOL).open("xb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file, 2**20)
    return [folder / SPOOL if path == "-" else path for path in paths]


def prepare(paths: Sequence[str | Path], encoding_name: str, out_dir: str | Path, *, source: str = "stdlib",
            workers: int = 2, errors: str = "strict", text_key: str = "text", max_tokens: int | None = None,
            shard_tokens: int = SHARD_TOKENS) -> tuple[dict, Notes]:
    """Write the data set of files, folders and URLs, or of a source if there are none.

    Returns what meta.json holds, and what is to be said of the texts. The workers change nothing but the time it takes.
    """
    out_dir = Path(out_dir)
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise UserError(f"--out_dir {out_dir}: already exists, expected a new or an empty folder; delete it or choose "
                        "another --out_dir")
    encoding = get_encoding(encoding_name)
    meta = {"format_version": FORMAT_VERSION, "encoding": encoding.name, "vocab_size": encoding.vocab_size,
            "end_of_text": encoding.end_of_text, "source": [str(path) for path in paths] or source}
    meta |= {"python_version": platform.python_version()} if meta["source"] == "stdlib" else {}
    paths = paths or SOURCES[source]
    if any(str(path).endswith(".parquet") for path in paths):
        parquet_module()  # now, not after a download
    reading = Reading(utf8=encoding.name != "bytes", marks=encoding.name == "bytes", replace=errors == "replace",
                      text_key=text_key)
    with written_whole(out_dir) as folder:
        sources = spooled(paths, folder)
        splits, notes = write_splits(sources, encoding, folder, reading, workers, max_tokens, shard_tokens)
        if not all(counts["tokens"] for counts in splits.values()):
            size = sum(counts["bytes"] for counts in splits.values())
            expected = (f"more than --max_tokens {max_tokens}; give a larger one" if max_tokens else
                        "2 characters at least; name more files")
            raise UserError(f"{', '.join(map(str, paths[:3]))}: {size} bytes of text leave nothing to train or to "
                            f"validate on, expected {expected}")
        meta |= {"splits": {split: {unit: counts[unit] for unit in ("documents", "bytes", "tokens")}
                            for split, counts in splits.items()}}
        meta |= {"sha256": splits["train"]["sums"] | splits["val"]["sums"]}
        if getattr(encoding, "ranks", None):
            meta["ranks_file"] = encoding.name
            (folder / encoding.name).write_text(encoding.ranks, encoding="utf-8", newline="")
        with contextlib.suppress(FileNotFoundError):
            (folder / SPOOL).unlink()
        (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="ascii")
    return meta, notes


def write_splits(paths: Sequence[str | Path], encoding: Encoding, folder: Path, reading: Reading, workers: int,
                 max_tokens: int | None, shard_tokens: int) -> tuple[dict, Notes]:
    """Write the shards of both splits: for each, its documents, bytes, tokens and the sums of its shards."""
    from tqdm import tqdm
    bar = functools.partial(tqdm, unit="B", unit_scale=True, disable=None)  # None: not unless it is seen on a terminal
    cut = total = None
    if not max_tokens:
        with bar(desc="checking") as progress:
            cut, total = find_cut(read_documents(paths, reading._replace(progress=progress.update), Notes()))
    dtype = token_dtype(encoding.vocab_size)
    writers = {split: ShardWriter(folder, split, dtype, shard_tokens) for split in ("train", "val")}
    counts = {split: {"documents": 0, "bytes": 0} for split in writers}
    notes, left = Notes(), max_tokens or math.inf
    encode = functools.partial(encode_group, encoding, reading.replace)
    with bar(desc="encoding", total=total) as progress:
        # With --max_tokens one path after the other, so that no URL is fetched for nothing.
        for part in [[path] for path in paths] if max_tokens and paths else [paths]:
            all_groups = groups(split_pieces(read_documents(part, reading, notes), cut))
            with contextlib.closing(in_order(encode, all_groups, workers)) as encoded:
                for group, ids in encoded:
                    split, size = group[0].split, sum(len(piece.content) for piece in group)
                    if len(ids) > left:
                        ids = ids[:int(left)]
                        size = int(encoding.token_bytes()[ids].sum())
                    writers[split].write(ids)
                    counts[split]["documents"] += int((ids == encoding.end_of_text).sum())
                    counts[split]["bytes"] += size
                    progress.update(size)
                    left -= len(ids)
                    if not left:
                        break
            if not left:
                break
    for split, writer in writers.items():
        writer.flush()
        counts[split] |= {"tokens": writer.tokens, "sums": writer.sums}
    if not any(count["documents"] for count in counts.values()):
        raise UserError(f"{', '.join(map(str, paths[:3])) or '--source stdlib'}: no text found ({notes.skipped} other "
                        "files passed over), expected files in UTF-8; name others")
    return counts, notes


def default_out_dir(path: str) -> str:
    """The folder of data named after a file, a folder or a URL."""
    if path == "-":
        return "data/stdin"
    name = path.split("?")[0].rstrip("/") if is_url(path) else os.path.abspath(path)
    return f"data/{Path(name.removesuffix('.gz')).stem}"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    source = parser.add_argument_group("what to read")
    source.add_argument("paths", nargs="*", type=path_text, metavar="PATH", help="text files, .jsonl, .jsonl.gz and "
                        ".parquet files, URLs of such, - for standard input, and folders, from which all files are "
                        "taken that are UTF-8 text and not hidden (default: --source stdlib)")
    source.add_argument("--source", choices=list(SOURCES),
                        help="stdlib: the *.py files of Python's own library, without its tests; no download. "
                             "tinyshakespeare: 1 MB. fineweb-edu: 10^10 tokens of web pages in 14 files of some 2 GB, "
                             "of which only those are fetched that --max_tokens needs")
    source.add_argument("--text_key", default="text", metavar="KEY",
                        help="what holds the text of a JSON line or a Parquet row")
    source.add_argument("--errors", choices=["strict", "replace"], default="strict",
                        help="what to do with named files that are not UTF-8: refuse them, or replace what is not")
    source.add_argument("--max_tokens", type=positive_int, metavar="N", help="stop after so many tokens")
    target = parser.add_argument_group("what to write")
    target.add_argument("--encoding", default="bytes", metavar="NAME",
                        help="bytes, or an encoding of tiktoken's, downloaded once: gpt2, cl100k_base, o200k_base, "
                             "..., or a ranks file, FILE.tiktoken: on each line a token in base64 and its rank; texts "
                             "are cut by GPT-2's pattern")
    target.add_argument("--out_dir", type=path_text, metavar="DIR", help="a new folder for the shards and meta.json "
                        "(default: data/ and the name of the source, or of the first PATH without its ending)")
    target.add_argument("--workers", type=worker_count, default=min(256, os.cpu_count() or 1), metavar="N",
                        help="threads that encode; 0: none but the one that reads")
    args = parser.parse_args(argv)
    if args.paths and args.source:
        parser.error(f"--source {args.source}: found PATH {args.paths[0]} as well; give one of the two")
    args.source = args.source or "stdlib"
    args.out_dir = args.out_dir or (default_out_dir(args.paths[0]) if args.paths else f"data/{args.source}")
    return args


def run(args: argparse.Namespace):
    meta, notes = prepare(args.paths, args.encoding, args.out_dir, source=args.source, workers=args.workers,
                          errors=args.errors, text_key=args.text_key, max_tokens=args.max_tokens)
    for split, counts in meta["splits"].items():
        say(f"{split + ':':6} " + ", ".join(f"{count:,} {unit}" for unit, count in counts.items()))
    if notes.skipped:
        say(f"passed over {notes.skipped:,} files that are not UTF-8 text: {', '.join(notes.skipped_names)}"
            + (", ..." if notes.skipped > len(notes.skipped_names) else ""))
    if notes.marks:
        say(f"left out {notes.marks:,} byte-order marks")
    if notes.replaced:
        say(f"replaced {notes.replaced:,} bytes that are not UTF-8")
    say(f"{args.out_dir}: {len(meta['sha256'])} shards and meta.json, encoding {meta['encoding']}")
    say(f"next: python train.py --data {shlex.quote(args.out_dir)}")


def main(argv: Sequence[str] | None = None):
    forgive_output()
    args = parse_args(argv)
    try:
        exit_on_user_error(run, args)
    except KeyboardInterrupt:
        print(f"prepare_data.py: interrupted, {escaped(args.out_dir)} has not been written", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
