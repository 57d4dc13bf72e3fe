"""Promises about mistakes: whatever is given to a flag or stands in a file, it works or is answered in one line.

The cases come from the scripts' own parsers, so that a new flag is covered by itself.
"""

import argparse
import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import prepare_data
import sample
import train
from conftest import ROOT, fails
from model import digests, read_checkpoint
from prepare_data import Parser

SCRIPTS = {"train.py": train, "sample.py": sample, "prepare_data.py": prepare_data}
NUMBERS = ["", " ", "x", "0", "-1", "-0.5", "nan", "inf", "-inf", "1e400", "1e-400", "1.5", "0x10", "1,2", "1000000000", str(2**31),
           str(2**62), str(10**30), "9" * 5000]
NEVER = {"", " ", "x", "-1", "-0.5", "nan", "inf", "-inf", "1e400"}                 # what no number of ours can be
NAMES = ["", "x", "gpt", "cuda:99", "cpu ", "None"]
ENDLESS = {"--num_samples", "--max_new_tokens"}             # a billion of these is allowed, and takes its time
FILES = ["missing", "empty", "folder", "zeros", "text", "cut", "list", "json", "under a file", "a" * 5000, ""]


@pytest.fixture(scope="module")
def place(tmp_path_factory, short_text):
    """A folder with a data set, a run of one step, a prompt, and files of every wrong kind."""
    place = tmp_path_factory.mktemp("mistakes")
    shutil.copytree(short_text, place / "data")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        train.main([*small(place), "--out_dir", str(place / "run")])
    (place / "prompt.txt").write_text("def ")
    whole = (place / "run" / "ckpt.pt").read_bytes()
    (place / "empty").touch()
    (place / "folder").mkdir()
    (place / "zeros").write_bytes(bytes(2000))
    (place / "text").write_text("a\ntext\n")
    (place / "cut").write_bytes(whole[:len(whole) // 2])
    torch.save([torch.ones(3)], place / "list")
    (place / "json").write_text("{}")
    return place


def small(place) -> list[str]:
    flags = ["--data", place / "data", "--n_layer", 1, "--n_head", 1, "--n_embd", 8, "--block_size", 16, "--micro_batch", 2,
             "--batch_tokens", 32, "--n_directions", 2, "--eval_blocks", 2, "--steps", 1, "--threads", 1, "--device", "cpu",
             "--skip_rates", 0.5, "--keep", 1]
    return [str(flag) for flag in flags]


def flags_of(script) -> list[argparse.Action]:
    """The flags that a script's parser knows."""
    class Asked(Exception):
        pass

    def tell(parser, argv=None):
        raise Asked(parser)
    original, Parser.parse_args = Parser.parse_args, tell
    try:
        script.parse_args([])
    except Asked as asked:
        return [action for action in asked.args[0]._actions if action.dest != "help"]
    finally:
        Parser.parse_args = original


def values_for(action, place) -> list[str]:
    """What a user might give to a flag by mistake."""
    if action.nargs == 0:
        return []
    if action.type in (prepare_data.path_type, prepare_data.path_text):
        return [str(place / "text" / "x") if name == "under a file" else str(place / name) if 0 < len(name) < 99 else name
                for name in FILES]
    return NAMES if action.choices or action.type is None else NUMBERS


def cases(place) -> list[tuple[str, list[str], str]]:
    """(script, its arguments, what an answer must name), in an order of its own."""
    cases = []
    for name, script in SCRIPTS.items():
        for action in flags_of(script):
            flag = action.option_strings[0] if action.option_strings else ""
            for value in values_for(action, place):
                if flag in ENDLESS and value == "1000000000":
                    continue
                cases.append((name, [f"{flag}={value}"] if flag else [value], flag or action.metavar))
                if name == "train.py" and flag in ("--out_dir", "--init_from"):         # there are two readers of these
                    cases.append((name, [f"{flag}={value}", "--resume" if flag == "--out_dir" else "--eval_only"], flag))
            if flag:
                cases.append((name, [flag[:-1]], flag[:-1]))                        # no abbreviations
                cases.append((name, [f"{flag}x", "1"], f"{flag}x"))
                cases.append((name, [flag] if action.nargs != 0 else [f"{flag}=yes"], flag))
    random.Random(1).shuffle(cases)
    return cases


def given(name: str, extra: list[str], place) -> list[str]:
    """The arguments of a run that would work, with a mistake added to them."""
    has = {argument.partition("=")[0] for argument in extra}
    if name == "train.py":
        out = [] if "--out_dir" in has else ["--out_dir", str(place / "new")]
        return small(place) + out + extra
    if name == "sample.py":
        return ["--checkpoint", str(place / "run" / "ckpt.pt"), "--prompt_file", str(place / "prompt.txt"), "--max_new_tokens", "2",
                *extra] if not has & {"--prompt", "--interactive"} else ["--checkpoint", str(place / "run" / "ckpt.pt"), *extra]
    paths = [] if extra and not extra[0].startswith("-") or "--source" in has else [str(place / "text")]
    return [*paths, *([] if "--out_dir" in has else ["--out_dir", str(place / "new")]), *extra]


def contents(folder: Path) -> dict:
    """Every file under a folder, byte for byte."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def restore(folder: Path, before: dict):
    """Undo what an accepted case has written."""
    for path in contents(folder).keys() - before.keys():
        (folder / path).unlink()
    for path, content in before.items():
        (folder / path).unlink(missing_ok=True)         # best.pt may be a second name of ckpt.pt
        (folder / path).write_bytes(content)
    shutil.rmtree(folder / "new", ignore_errors=True)


def answer(script, argv: list[str]) -> tuple[int, str]:
    """Run a script's main: exit status, and what it wrote to standard error besides the bar."""
    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        try:
            script.main(argv)
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
    lines = error.getvalue().replace("\r", "\n").splitlines()
    bar = ("it/s", "step/s", "s/step", "FLOP/s", "B/s", "?step")
    return status, "\n".join(line for line in lines if line.strip() and not any(unit in line for unit in bar))


def works_or_is_answered(name: str, extra: list[str], named: str, place: Path, before: dict) -> bool:
    """Whether a case was accepted; AssertionError where it is not answered as it should be, or harms what is there."""
    argv, value = given(name, extra, place), extra[0].rpartition("=")[2]
    try:
        status, error = answer(SCRIPTS[name], argv)
    except Exception as problem:
        raise AssertionError(f"{name} {argv}") from problem
    after = contents(place)
    for path in {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}:
        output = path.parts[0] == "new" or status == 0 and (path not in before or named in ("--depth_json", "--depth_png"))
        assert output and path.parts[0] not in ("data", "run"), (name, argv, path)
        (place / path).unlink()                         # what it was asked to write
        if path in before:
            (place / path).write_bytes(before[path])
    shutil.rmtree(place / "new", ignore_errors=True)
    if status != 0:
        assert status == 2 and error and "\n" not in error, (name, argv, status, error)
        assert any(word and word in error for word in (named, named.strip("-"), value[:40])), (name, argv, error)
    return status == 0


def test_every_flag_and_every_file_works_or_is_answered_in_one_line(place, monkeypatch):
    """Hundreds of cases, those that are accepted included: these may take one step."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\n")))
    rate, threads = train.learning_rate_factor, torch.get_num_threads()

    def rate_then_stop(*args):          # so that a run of a billion steps ends after one
        os.kill(os.getpid(), signal.SIGTERM)
        return rate(*args)
    monkeypatch.setattr(train, "learning_rate_factor", rate_then_stop)
    before, accepted, all_cases = contents(place), 0, cases(place)
    numeric = {action.option_strings[0] for script in SCRIPTS.values() for action in flags_of(script)
               if values_for(action, place) is NUMBERS}
    for name, extra, named in all_cases:
        works = works_or_is_answered(name, extra, named, place, before)
        assert not (works and named in numeric and extra[0].partition("=")[2] in NEVER), (name, extra)
        accepted += works
        torch.set_num_threads(threads)
    print(f"{len(all_cases)} cases, {accepted} of them accepted")
    assert len(all_cases) - accepted > 300 and accepted > 20


# ---- files ----------------------------------------------------------------------------------------------------------

READERS = {"sample": ["sample.py", "--checkpoint", "run/ckpt.pt", "--max_new_tokens", "2"],
           "resume": ["train.py", "--resume", "--out_dir", "run", "--steps", "2"],
           "eval_only": ["train.py", "--eval_only", "--out_dir", "run", "--skip_rates", "0.5"],
           "init_from": ["train.py", "--init_from", "run/ckpt.pt", "--data", "data", "--out_dir", "new", "--steps", "1",
                         "--batch_tokens", "32", "--micro_batch", "2", "--eval_blocks", "2"]}


@pytest.fixture
def copy(place, tmp_path, monkeypatch):
    """The place anew, which a test may spoil, as the current folder."""
    shutil.copytree(place, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("file", ["run/ckpt.pt", "run/log.jsonl", "data/train_000000.bin", "data/val_000000.bin", "data/meta.json"])
@pytest.mark.parametrize("kind", ["missing", "empty", "folder", "zeros", "text", "half", "list", "json"])
def test_a_file_of_a_wrong_kind_is_named(file, kind, copy):
    """Whoever reads it. Where the file does not matter to the reader, the reader works."""
    target, whole = copy / file, (copy / file).read_bytes()
    target.unlink()
    if kind == "folder":
        target.mkdir()
    elif kind != "missing":
        target.write_bytes(whole[:len(whole) // 2] if kind == "half" else (copy / kind).read_bytes())
    spoilt = contents(copy)
    for reader, (script, *argv) in READERS.items():
        if (reader, kind) == ("resume", "missing"):         # which starts a run: a small one
            argv = [*small(copy), *argv]
        status, error = answer(SCRIPTS[script], [*argv, *(["--data", str(copy / "data")] if script == "train.py" else [])])
        if status == 0:
            assert "data" not in file or reader == "sample" or kind == "missing", (reader, error)
        else:
            assert status == 2 and "\n" not in error and (file in error or file.partition("/")[0] in error), (reader, error)
            assert all(contents(copy)[path] == content for path, content in spoilt.items()), reader
        restore(copy, spoilt)


def resealed(path: Path, change):
    """Change a checkpoint as its writer might have: with digests that fit."""
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["sha256"]
    change(checkpoint)
    checkpoint["sha256"] = digests(checkpoint)
    torch.save(checkpoint, path)


def without(*keys):
    def change(entries):
        for key in keys[:-1]:
            entries = entries[key]
        del entries[keys[-1]]
    return change


def with_value(value, *keys):
    def change(entries):
        for key in keys[:-1]:
            entries = entries[key]
        entries[keys[-1]] = value
    return change


ALL, RESUME = set(READERS), {"resume"}
CHANGES = {                     # what is changed: (how, who refuses it, what the answer names)
    "no config": (without("config"), ALL, "'config'"), "no model": (without("model"), ALL, "'model'"),
    "no meta": (without("meta"), ALL, "'meta'"), "no train": (without("train"), {"resume", "eval_only"}, "'train'"),
    "no optimizer": (without("optimizer"), RESUME, "'optimizer'"), "no step": (without("step"), RESUME, "'step'"),
    "no flops": (without("flops"), RESUME, "'flops'"), "no table": (without("model", "quantiles"), {"sample", "eval_only"}, "no threshold table"),
    "no weight": (without("model", "embedding.weight"), ALL, "weights"),
    "no alpha": (without("model", "layers.0.alpha"), ALL, "layers.0.alpha"),
    "empty train": (with_value({}, "train"), {"resume", "eval_only"}, "n_layer"),
    "train is a list": (with_value([1], "train"), {"resume", "eval_only"}, "'train'"),
    "a flag is a text": (with_value("many", "train", "micro_batch"), {"resume", "eval_only"}, "--micro_batch"),
    "a flag is negative": (with_value(-1.0, "train", "weight_decay"), {"resume", "eval_only"}, "--weight_decay"),
    "a flag contradicts": (with_value(3, "train", "n_layer"), {"resume", "eval_only"}, "n_layer"),
    "one optimizer": (lambda c: c["optimizer"].pop(), RESUME, "'optimizer'"),
    "optimizer is a number": (with_value(3, "optimizer"), RESUME, "'optimizer'"),
    "optimizer of texts": (with_value(["a", "b"], "optimizer"), RESUME, "'optimizer'"),
    "optimizer without state": (with_value({}, "optimizer", 0, "state"), RESUME, "momentum_buffer"),
    "optimizer of another shape": (with_value(torch.ones(3), "optimizer", 0, "state", 0, "momentum_buffer"), RESUME,
                                   "momentum_buffer"),
    "optimizer without groups": (without("optimizer", 0, "param_groups"), set(), ""),
    "step is a text": (with_value("1", "step"), RESUME, "'step'"), "step is negative": (with_value(-1, "step"), RESUME, "'step'"),
    "flops are no number": (with_value(float("nan"), "flops"), RESUME, "'flops'"),
    "config is a list": (with_value([1], "config"), ALL, "'config'"),
    "config with another entry": (with_value(1, "config", "n_wheels"), ALL, "n_wheels"),
    "config of a wrong type": (with_value("1", "config", "n_layer"), ALL, "n_layer"),
    "config of another width": (with_value(16, "config", "n_embd"), ALL, "config"),
    "config of a billion layers": (with_value(10**9, "config", "n_layer"), ALL, "config"),
    "model is a list": (with_value([torch.ones(3)], "model"), ALL, "'model'"),
    "a weight is a number": (with_value(1.0, "model", "layers.0.alpha"), ALL, "layers.0.alpha"),
    "a weight without a name": (with_value(torch.ones(3), "model", 7), ALL, "config and weights"),
    "meta of another vocabulary": (with_value(300, "meta", "vocab_size"), ALL, "vocab_size"),
    "meta without an encoding": (without("meta", "encoding"), ALL, "encoding"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_with_an_entry_missing_or_wrong_says_which(change, copy, capsys):
    how, refused_by, named = CHANGES[change]
    resealed(copy / "run" / "ckpt.pt", how)
    before = contents(copy)
    for reader, (script, *argv) in READERS.items():
        if reader in refused_by:
            error = fails(SCRIPTS[script].main, argv, capsys)
            assert named in error and ("ckpt.pt" in error or "skip_rate" in error), reader
            assert contents(copy) == before, reader
        else:
            status, error = answer(SCRIPTS[script], argv)
            assert status == 0, (reader, error)
            restore(copy, before)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
@pytest.mark.parametrize("sealed", [True, False])
def test_a_checkpoint_whose_weights_carry_a_wrappers_prefix_is_refused_by_naming_it(prefix, sealed, copy, capsys):
    def change(checkpoint):
        checkpoint["model"] = {prefix + name: weight for name, weight in checkpoint["model"].items()}
    if sealed:
        resealed(copy / "run" / "ckpt.pt", change)
    else:
        checkpoint = torch.load(copy / "run" / "ckpt.pt", weights_only=True)
        change(checkpoint)
        torch.save(checkpoint, copy / "run" / "ckpt.pt")
    for script, *argv in READERS.values():
        assert prefix in fails(SCRIPTS[script].main, argv, capsys)


def test_no_checkpoint_has_a_wrappers_prefix(place):
    assert not [name for name in read_checkpoint(place / "run" / "ckpt.pt")["model"] if name.startswith(("_orig_mod.", "module."))]


# ---- what surrounds the scripts -------------------------------------------------------------------------------------


def shell(command: str, limit: tuple[str, int] | None = None, **environment) -> subprocess.CompletedProcess:
    """A command line in a shell, with the scripts as $TRAIN, $SAMPLE and $PREPARE, each after this Python.

    limit: a resource of the `resource` module and its most.
    """
    def set_limit():
        import resource
        resource.setrlimit(getattr(resource, limit[0]), (limit[1], limit[1]))
    names = {"TRAIN": "train.py", "SAMPLE": "sample.py", "PREPARE": "prepare_data.py"}
    scripts = {name: f"{sys.executable} {ROOT / script}" for name, script in names.items()}
    return subprocess.run(["sh", "-c", command], capture_output=True, env={**os.environ, **scripts, **environment}, timeout=120,
                          preexec_fn=set_limit if limit else None)


posix = pytest.mark.skipif(sys.platform == "win32", reason="takes a POSIX shell")
SAMPLE = "$SAMPLE --checkpoint run/ckpt.pt --max_new_tokens 3"


@posix
@pytest.mark.parametrize("flag", ["--interactive", "--prompt_file -"])
def test_a_closed_standard_input_is_named(flag, copy):
    done = shell(f"{SAMPLE} {flag} <&-")
    assert done.returncode == 2 and done.stderr.startswith(b"sample.py: error: standard input: closed")
    assert done.stderr.count(b"\n") == 1


@posix
@pytest.mark.parametrize("command", [f"{SAMPLE} --show_depth", "$PREPARE text --out_dir new", "$TRAIN --eval_only --out_dir run",
                                     "$TRAIN --help"])
def test_a_closed_standard_output_harms_nothing(command, copy):
    before = contents(copy)
    done = shell(f"{command} >&-")
    assert done.returncode == 0 and b"Traceback" not in done.stderr
    after = contents(copy)
    assert all(after[path] == content for path, content in before.items() if path.name != "log.jsonl")


@posix
@pytest.mark.parametrize("command", [SAMPLE, "$PREPARE text --out_dir new", "$TRAIN --eval_only --out_dir run"])
def test_a_full_disk_under_standard_output_is_named(command, copy):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    done = shell(f"{command} >/dev/full")
    assert done.returncode == 2, done.stderr
    assert b": error: standard output: cannot be written" in done.stderr.splitlines()[-1] and b"Traceback" not in done.stderr


@posix
@pytest.mark.parametrize("script", ["$TRAIN", "$SAMPLE", "$PREPARE"])
@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_help_comes_whole_on_a_console_that_lacks_its_characters(script, encoding):
    done = shell(f"{script} --help", PYTHONIOENCODING=f"{encoding}:strict")
    assert done.returncode == 0 and done.stderr == b"" and b"--out_dir" in done.stdout or b"--device" in done.stdout


@posix
def test_a_disk_that_fills_up_under_checkpoint_or_log_leaves_the_run_as_it_was(copy):
    """A limit on the size of files stands for the full disk; a line that did not fit is cut by the next --resume."""
    checkpoint, log = copy / "run" / "ckpt.pt", copy / "run" / "log.jsonl"
    resume = "$TRAIN --resume --out_dir run --data data --save_every 100000 --eval_every 100000 --steps"
    before, log_before, its_name = contents(copy), log.read_bytes(), log.relative_to(copy)
    for limit, steps, file, said in ((checkpoint.stat().st_size - 2000, 4, "(best|ckpt).pt", "bytes needed"),
                                     (len(log_before) + 3000, 400, "log.jsonl", "")):
        done = shell(f"{resume} {steps}", limit=("RLIMIT_FSIZE", limit))
        last = done.stderr.decode().splitlines()[-1]
        assert done.returncode == 2 and b"Traceback" not in done.stderr
        assert re.search(f"run/{file}: cannot be written", last) and said in last and "--resume" in last
        assert log.read_bytes().startswith(log_before)
        assert {**contents(copy), its_name: b""} == {**before, its_name: b""}
    assert shell(f"{resume} 6").returncode == 0 and read_checkpoint(checkpoint)["step"] == 6
    assert [json.loads(line)["step"] for line in log.read_text().splitlines() if '"loss"' in line] == [1, 2, 3, 4, 5, 6]


@posix
def test_memory_that_runs_out_is_answered_by_naming_the_flags(copy):
    """A limit on the address space stands for a small machine, which the bound from below does not know of."""
    done = shell("$TRAIN --data data --out_dir new --n_embd 8 --n_layer 1 --n_directions 400000 --block_size 64 "
                 "--micro_batch 64 --batch_tokens 4096 --steps 1", limit=("RLIMIT_AS", 6 * 10**9))     # 6.6e9 bytes at once
    assert done.returncode == 2, done.stderr
    assert b"--micro_batch 64 --block_size 64 --n_embd 8 --n_layer 1: there is not enough memory; lower --micro_batch, add" in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("flags, named", [
    (["--n_embd", 10**9], "--n_embd 1000000000"), (["--n_layer", 10**9], "--n_layer 1000000000"),
    (["--n_directions", 10**9], "--n_directions 1000000000"), (["--micro_batch", 10**9, "--batch_tokens", 16 * 10**9], "--batch_tokens"),
    (["--micro_batch", 10**8, "--batch_tokens", 16 * 10**8], "--micro_batch 100000000"), (["--block_size", 10**9, "--batch_tokens",
     2 * 10**9], "--block_size 1000000000"), (["--batch_tokens", 2**62], "--batch_tokens"), (["--batch_tokens", 2**30], "--batch_tokens"),
    (["--threads", 10**5], "--threads"), (["--steps", 10**12], "--steps")])
def test_an_impossible_size_is_answered_before_anything_is_allocated(flags, named, copy, capsys):
    error = fails(train.main, [*small(copy), "--out_dir", "new", *flags], capsys)
    assert named in error and not (copy / "new" / "ckpt.pt").exists()


@pytest.mark.parametrize("flag", ["--depth_json", "--depth_png"])
@pytest.mark.parametrize("target, named", [("run/ckpt.pt", "--checkpoint"), ("prompt.txt", "--prompt_file"),
                                           ("folder/../run/ckpt.pt", "--checkpoint"), ("text/x", "text/x"), ("folder", "folder")])
def test_a_depth_file_harms_nothing_and_is_refused_before_the_writing(flag, target, named, copy, capsys):
    before = contents(copy)
    argv = ["--checkpoint", "run/ckpt.pt", "--prompt_file", "prompt.txt", flag, target]
    error = fails(sample.main, argv, capsys)
    assert flag in error and named in error and contents(copy) == before
    assert capsys.readouterr().out == ""
