"""Text to token shards: what train.py reads, written once, byte for byte the same each time.

    python prepare_data.py                                      Python's own library as bytes, into data/stdlib
    python prepare_data.py book.txt                             one text as bytes, into data/book
    python prepare_data.py notes/ more.txt --encoding gpt2      a folder and a file as GPT-2 tokens, into data/notes

A folder of data holds train_000000.bin, val_000000.bin, ... and meta.json. A shard is little-endian:

    bytes        what                                vocabulary up to 65,536      larger
    0 - 1023     256 int32: magic, version, count    20240520, 1, count, 0 ...    20240801, 7, count, 0 ...
    1024 - end   count tokens                        uint16                       uint32

Each file is a document, and an end-of-text token stands before each document. Validation gets the documents whose
SHA-256 is a multiple of 50; where there are fewer than 50 documents, it gets the last 5 % of the text instead.
"""

import argparse
import contextlib
import errno
import functools
import glob
import hashlib
import json
import math
import os
import platform
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SHARD_KINDS = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}  # magic: (version, type of token)
HEADER_BYTES = 1024
SHARD_TOKENS = 10**8
FORMAT_VERSION = 1  # of meta.json
STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

# tiktoken 0.14 takes 0.2 s for a million equal letters, but a million spaces overflow the stack of its regex engine
# with the patterns of cl100k_base and o200k_base (700,000 still pass). Pieces of 128 KiB stay well below that.
PIECE_BYTES = 2**17


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
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def exit_on_user_error(function: Callable, *args: Any, errors: tuple[type[Exception], ...] = (UserError,)) -> Any:
    """The function's result; one of `errors` becomes one line on standard error and exit status 2.

    So does a full disk under standard output. A reader of it that has gone (| head) ends the program without a word.
    """
    try:
        result = function(*args)
        sys.stdout.flush()  # while a failure can still be answered
        return result
    except errors as error:
        message = " ".join(str(error).split())
    except BrokenPipeError:
        abandon_output()
        raise SystemExit(130) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG) or error.filename:
            raise
        message = f"standard output: cannot be written ({error.strerror}); make room or send it elsewhere"
        abandon_output()
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    raise SystemExit(2)


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
seed_number = number_type(int, lambda value: 0 <= value < 2**63, "a whole number of at least 0 and below 2^63")
skip_rate = number_type(float, lambda value: 0 <= value < 1, "a skip rate of at least 0 and below 1; try 0.25")


def skip_rates(text: str) -> list[float]:
    """A type for argparse: skip rates with commas between them."""
    return [skip_rate(part) for part in text.split(",")]


def path_text(text: str) -> str:
    """A type for argparse: the name of a file or folder, which "" is not, though Path takes it for the current folder."""
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
    """Print, also where the terminal's encoding lacks a character or a file name is no valid text."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


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


def pieces(data: bytes, limit: int = PIECE_BYTES) -> Iterator[bytes]:
    """The data in pieces of at most `limit` bytes, cut after a line where possible, at places set by the data alone."""
    start = 0
    while len(data) - start > limit:
        end = data.rfind(b"\n", start, start + limit) + 1 or character_border(data, start + limit)
        yield data[start:end]
        start = end
    yield data[start:]


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
    """One of tiktoken's encodings. The spelling of a special token inside a text is ordinary text."""

    def __init__(self, encoding: Any):
        self.encoding = encoding
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
        ids = [i for piece in pieces(data) for i in self.encoding.encode_ordinary(piece.decode("utf-8"))]
        return np.array(ids, token_dtype(self.vocab_size))

    def decode(self, ids: Iterable[int]) -> bytes:
        return b"".join(self.spellings[i] for i in ids)

    def token_bytes(self) -> np.ndarray:
        """(vocab_size,) int64: the bytes of text that each token stands for; 0 for special and unused ids."""
        lengths = np.array([len(spelling) for spelling in self.spellings])
        lengths[[self.encoding.encode_single_token(special) for special in self.encoding.special_tokens_set]] = 0
        return lengths


Encoding = ByteEncoding | TiktokenEncoding


def get_encoding(name: str) -> Encoding:
    """The encoding of that name: "bytes", or one that tiktoken knows and can load."""
    if name == "bytes":
        return ByteEncoding()
    import tiktoken
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise UserError(f"encoding {name}: unknown, expected one of bytes, {', '.join(sorted(known))}")
    cache = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or os.devnull)
    before = set(cache.glob("*"))
    try:
        return TiktokenEncoding(tiktoken.get_encoding(name))
    except Exception as error:  # no network, a proxy's error page, a full disk: tiktoken has no error of its own
        lost = ", ".join(sorted(path.name for path in before - set(cache.glob("*"))))
        lost = f"; it deleted {lost} in {cache}, whose checksum was wrong" if lost else ""
        raise UserError(f"encoding {name}: tiktoken cannot fetch its ranks ({type(error).__name__}){lost}; go online, "
                        "set TIKTOKEN_CACHE_DIR to a folder that holds them, or use --encoding bytes") from error


def encoding_from_meta(meta: dict) -> Encoding:
    """The encoding that a meta.json, or the copy of it in a checkpoint, names; refused if its sizes differ."""
    check_meta(meta, "meta of the data")
    encoding = get_encoding(meta["encoding"])
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


def regroup(parts: Iterable[np.ndarray], size: int, dtype: np.dtype) -> Iterator[np.ndarray]:
    """The same tokens in arrays of `size`, the last one shorter. Each is overwritten by the next."""
    buffer, used = np.empty(size, dtype), 0
    for ids in parts:
        while len(ids):
            taken = ids[:size - used]
            buffer[used:used + len(taken)] = taken
            used, ids = used + len(taken), ids[len(taken):]
            if used == size:
                yield buffer
                used = 0
    if used:
        yield buffer[:used]


def read_header(path: Path) -> tuple[int, np.dtype]:
    """Number and type of a shard's tokens. UserError if the header or the size of the file is not that of a shard."""
    def refuse(found_and_expected: str):
        raise UserError(f"{path}: {found_and_expected}; prepare or download it again")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
    except OSError as error:
        refuse(f"{error.strerror}, expected a token shard")
    if len(header) < HEADER_BYTES:
        refuse(f"{size:,} bytes, expected a token shard, which has a header of {HEADER_BYTES:,}")
    magic, version, count = (int(word) for word in np.frombuffer(header, "<i4")[:3])
    if magic not in SHARD_KINDS:
        refuse(f"begins with {magic}, expected the magic number of a token shard, 20240520 or 20240801")
    expected_version, dtype = SHARD_KINDS[magic]
    if version != expected_version:
        refuse(f"version {version}, expected {expected_version} after {magic}")
    expected_size = HEADER_BYTES + count * dtype.itemsize
    if count < 0 or size != expected_size:
        refuse(f"{size:,} bytes, expected {expected_size:,}, as the header says {count:,} tokens of {dtype.itemsize}")
    return count, dtype


class Shards:
    """The tokens of several shards as one long row: len() is their number, `dtype` their type on disk.

    All headers are checked at once; a file is memory-mapped when it is first read.
    """

    def __init__(self, paths: Iterable[str | Path]):
        self.paths = [Path(path) for path in paths]
        if not self.paths:
            raise UserError("no shards, expected at least one; make some with: python prepare_data.py")
        counts, dtypes = zip(*map(read_header, self.paths))
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
                self.maps[shard] = np.memmap(self.paths[shard], self.dtype, "r", HEADER_BYTES)
            begin = start + filled - int(self.starts[shard])
            part = self.maps[shard][begin:begin + count - filled]
            ids[filled:filled + len(part)] = part
            filled, shard = filled + len(part), shard + 1
        return ids


def find_shards(data: str | Path, split: str) -> list[Path]:
    """The shards of a split ("train" or "val") in a folder, or among the files that a glob matches, sorted."""
    found = Path(data).glob("*") if Path(data).is_dir() else map(Path, glob.glob(str(data)))
    shards = sorted(path for path in found if path.match(f"*{split}*.bin"))
    if not shards:
        out_dir = "DIR" if glob.has_magic(str(data)) else shlex.quote(str(data))
        raise UserError(f"{data}: no shards found, expected *{split}*.bin; make them with: python prepare_data.py "
                        f"--out_dir {out_dir}")
    return shards


def read_meta(folder: str | Path) -> dict:
    """meta.json of a folder of shards; without one they are taken to be GPT-2's, as the published ones are."""
    path = Path(folder) / "meta.json"
    try:
        meta = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {"encoding": "gpt2", "vocab_size": 50257, "end_of_text": 50256}
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}, expected a file; prepare the data again") from error
    except ValueError as error:  # not JSON, or not even text
        raise UserError(f"{path}: not JSON ({error}); prepare the data again") from error
    check_meta(meta, str(path))
    return meta


def check_meta(meta: Any, where: str):
    """UserError unless meta says what is needed to read the tokens."""
    found = meta if isinstance(meta, dict) else {}
    for key, kind in (("encoding", str), ("vocab_size", int), ("end_of_text", int)):
        if type(found.get(key)) is not kind:
            raise UserError(f"{where}: {key} is {found.get(key)!r}, expected {kind.__name__}; prepare the data again")
    if not 0 <= found["end_of_text"] < found["vocab_size"]:
        raise UserError(f"{where}: end_of_text is {found['end_of_text']}, expected an id below vocab_size, which is "
                        f"{found['vocab_size']}; prepare the data again")


# ---- documents ------------------------------------------------------------------------------------------------------

class Document(NamedTuple):
    name: str
    content: bytes


def files_under(folder: Path, pattern: str, left_out: Callable[[str], bool]) -> list[Path]:
    """The files of a folder and its sub-folders, sorted by path, but for paths with a part that is left out."""
    found = (path for path in folder.rglob(pattern) if not any(map(left_out, path.relative_to(folder).parts)))
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(folder).as_posix())


def read_file(path: Path, text_only: bool) -> tuple[bytes, str]:
    """The content of a file, and what is wrong with it ("" if nothing)."""
    try:
        content = path.read_bytes()
        if text_only:
            content.decode("utf-8")
    except OSError as error:
        return b"", f"{error.strerror}, expected a file or folder that can be read; check the path"
    except UnicodeDecodeError as error:
        return b"", (f"byte 0x{content[error.start]:02x} at offset {error.start} is not UTF-8; convert the file "
                     "(iconv -f LATIN1 -t UTF-8) or use --encoding bytes")
    return content, ""


def read_documents(paths: Sequence[Path], encoding: Encoding) -> tuple[list[Document], list[str]]:
    """All documents of files and folders, or of Python's library if no path is given, and the files passed over.

    What cannot be used is passed over in a folder, but refused where the user has named the file.
    """
    documents, skipped = [], []
    for path in paths or [Path(sysconfig.get_paths()["stdlib"])]:
        named = False
        if not paths:
            files = files_under(path, "*.py", STDLIB_LEFT_OUT.__contains__)
        elif path.is_dir():
            files = files_under(path, "*", lambda part: part.startswith("."))
        else:
            files, named = [path], True
        for file in files:
            content, problem = read_file(file, text_only=not named or encoding.name != "bytes")
            if named and not content:
                raise UserError(f"{file}: {problem or '0 bytes, expected text; leave it out'}")
            if problem:
                skipped.append(str(file))
            else:
                documents.append(Document(str(file), content))
    if not documents:
        raise UserError(f"{', '.join(map(str, paths)) or '--source stdlib'}: no text found ({len(skipped)} other files "
                        "passed over), expected files in UTF-8; name others")
    return documents, skipped


def split_documents(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Training and validation documents, by the rule at the top of this file.

    The last 5 % begin at a character; a document cut there becomes two, one on each side. They also serve where
    the rule of 50 would leave one side without text. UserError if there is too little for two sides.
    """
    train, val = [], []
    for document in documents:
        chosen = int.from_bytes(hashlib.sha256(document.content).digest(), "big") % 50 == 0
        (val if chosen else train).append(document)
    if len(documents) >= 50 and all(any(content for _, content in side) for side in (train, val)):
        return train, val

    train, val = [], []
    total = sum(len(content) for _, content in documents)
    cut = total - max(1, total // 20)  # counted from the start of the document at hand
    for name, content in documents:
        here = character_border(content, min(max(cut, 0), len(content)))
        train += [Document(name, content[:here])] if here else []
        val += [Document(name, content[here:])] if here < len(content) else []
        cut -= len(content)
    if not train or not val:
        names = ", ".join(document.name for document in documents[:3])
        raise UserError(f"{names}: {total} bytes of text, expected 2 characters at least, one to train on and one to "
                        "validate on; name more files")
    return train, val


def encode_documents(documents: Iterable[Document], encoding: Encoding,
                     progress: Callable[[int], Any]) -> Iterator[np.ndarray]:
    """The tokens of the documents in parts; calls `progress` with the bytes done since its last call."""
    for name, content in documents:
        yield np.array([encoding.end_of_text])
        offset = 0
        for piece in pieces(content):
            try:
                yield encoding.encode(piece)
            except BaseException as error:
                if type(error).__name__ != "PanicException":  # how tiktoken's Rust side fails, and not an Exception
                    raise
                raise UserError(f"{name}: tiktoken fails within {len(piece):,} bytes from offset {offset}; break up "
                                "long runs of one character there, or use --encoding bytes") from None
            offset += len(piece)
            progress(len(piece))


# ---- the script -----------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` at the end, or vanishes if anything fails, Ctrl-C included."""
    final = folder.resolve()
    temporary = final.with_name(f".{final.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        try:
            yield temporary
            if final.exists():
                final.rmdir()  # it is empty; not every system renames onto a folder
            temporary.rename(final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise UserError(f"--out_dir {folder}: cannot be written ({error.strerror or error}); check disk and "
                        "permissions, or choose another --out_dir") from error


def prepare(paths: Sequence[str | Path], encoding_name: str, out_dir: str | Path,
            shard_tokens: int = SHARD_TOKENS) -> tuple[dict, list[str]]:
    """Write the data set of files and folders, or of Python's library if no path is given.

    Returns what meta.json holds, and the files in folders that were passed over. All text is held in memory.
    """
    from tqdm import tqdm
    out_dir = Path(out_dir)
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise UserError(f"--out_dir {out_dir}: already exists, expected a new or an empty folder; delete it or choose "
                        "another --out_dir")
    encoding = get_encoding(encoding_name)
    documents, skipped = read_documents([Path(path) for path in paths], encoding)
    train, val = split_documents(documents)
    meta = {"format_version": FORMAT_VERSION, "encoding": encoding.name, "vocab_size": encoding.vocab_size,
            "end_of_text": encoding.end_of_text, "source": [str(path) for path in paths] or "stdlib"}
    meta |= {} if paths else {"python_version": platform.python_version()}
    meta |= {"splits": {}, "sha256": {}}
    dtype = token_dtype(encoding.vocab_size)
    total = sum(len(content) for _, content in documents)
    # disable=None: no bar where standard error is not a terminal
    with written_whole(out_dir) as folder, tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        for split, side in (("train", train), ("val", val)):
            sums = {}
            for ids in regroup(encode_documents(side, encoding, bar.update), shard_tokens, dtype):
                name = f"{split}_{len(sums):06d}.bin"
                sums[name] = write_shard(folder / name, ids)
            meta["splits"][split] = {"documents": len(side), "bytes": sum(len(content) for _, content in side),
                                     "tokens": len(Shards(folder / name for name in sums))}
            meta["sha256"] |= sums
        (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="ascii")
    return meta, skipped


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    source = parser.add_argument_group("what to read")
    source.add_argument("paths", nargs="*", type=path_text, metavar="PATH", help="files, each a document, and folders, from which all "
                        "files are taken that are UTF-8 text and not hidden (default: --source stdlib)")
    source.add_argument("--source", choices=["stdlib"],
                        help="stdlib: the *.py files of Python's own library, without its tests; no download")
    target = parser.add_argument_group("what to write")
    target.add_argument("--encoding", default="bytes", metavar="NAME",
                        help="bytes, or an encoding of tiktoken's, downloaded once: gpt2, cl100k_base, ...")
    target.add_argument("--out_dir", type=path_text, metavar="DIR", help="a new folder for the shards and meta.json "
                        "(default: data/stdlib, or data/ and the name of the first PATH without its ending)")
    args = parser.parse_args(argv)
    if args.paths and args.source:
        parser.error(f"--source {args.source}: found PATH {args.paths[0]} as well; give one of the two")
    args.out_dir = args.out_dir or f"data/{Path(os.path.abspath(args.paths[0])).stem if args.paths else 'stdlib'}"
    return args


def run(args: argparse.Namespace):
    meta, skipped = prepare(args.paths, args.encoding, args.out_dir)
    for split, counts in meta["splits"].items():
        say(f"{split + ':':6} " + ", ".join(f"{count:,} {unit}" for unit, count in counts.items()))
    if skipped:
        say(f"passed over {len(skipped):,} files that are not UTF-8 text: {', '.join(skipped[:5])}"
            + (", ..." if len(skipped) > 5 else ""))
    say(f"{args.out_dir}: {len(meta['sha256'])} shards and meta.json, encoding {meta['encoding']}")
    say(f"next: python train.py --data {shlex.quote(args.out_dir)}")


def main(argv: Sequence[str] | None = None):
    forgive_output()
    exit_on_user_error(run, parse_args(argv))


if __name__ == "__main__":
    main()
