"""Promises of sample.py: whole characters, every source of a prompt, and its answers to mistakes."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import sample
import train
from conftest import ROOT, fails, tiny_model, tiny_tokens
from model import ModelError, NAGTransformer, digests, load_checkpoint, read_checkpoint, save_checkpoint
from prepare_data import ByteEncoding, TiktokenEncoding, UserError

META = {"encoding": "bytes", "vocab_size": 257, "end_of_text": 256}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "ckpt.pt"
    model = tiny_model(dtype=torch.float32, vocab_size=257, block_size=32)
    model.measure_table(tiny_tokens(64, 32, vocab_size=257))
    model.set_default_depth(tiny_tokens(64, 32, vocab_size=257), [0.25] * 6)
    save_checkpoint(path, model, META)
    return path


def written(capsys, checkpoint, *flags) -> str:
    capsys.readouterr()
    sample.main(["--checkpoint", str(checkpoint), *map(str, flags)])
    return capsys.readouterr().out


def spell(monkeypatch, text: bytes):
    """Let the model write `text`, whatever it is asked, token by token."""
    monkeypatch.setattr(NAGTransformer, "stream", lambda self, prompts, n, *args: iter(torch.tensor(list(text))[:n, None]))


def test_characters_appear_once_they_are_whole(checkpoint, monkeypatch):
    prints = []
    spell(monkeypatch, "a🐈é".encode())
    monkeypatch.setattr("builtins.print", lambda *text, **how: prints.append("".join(text)))
    sample.main(["--checkpoint", str(checkpoint)])
    assert prints == ["", "a", "", "", "", "🐈", "", "é", "\n"]


@pytest.mark.parametrize("n", range(1, 8))
def test_a_character_cut_by_the_end_leaves_one_replacement_sign(n, checkpoint, monkeypatch, capsys):
    spell(monkeypatch, "é🐈é".encode())
    out = written(capsys, checkpoint, "--max_new_tokens", n)
    assert out == {1: "�", 2: "é", 3: "é�", 4: "é�", 5: "é�", 6: "é🐈", 7: "é🐈�"}[n] + "\n"


def test_a_prompt_comes_from_a_flag_a_file_or_standard_input(checkpoint, tmp_path, capsys, monkeypatch):
    (tmp_path / "prompt.txt").write_text("naïve\n", encoding="utf-8")
    by_flag = written(capsys, checkpoint, "--prompt", "naïve\n")
    assert by_flag.startswith("naïve\n") and len(by_flag) > 100
    assert written(capsys, checkpoint, "--prompt_file", tmp_path / "prompt.txt") == by_flag
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("naïve\n".encode())))
    assert written(capsys, checkpoint, "--prompt_file", "-") == by_flag


def test_interactive_continues_each_line(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\xff\n\n")))
    out = written(capsys, checkpoint, "--interactive", "--max_new_tokens", 0)
    assert out == "one\ntwo�\n\n"


def test_equal_seeds_write_equal_texts_and_samples_differ(checkpoint, capsys):
    three = written(capsys, checkpoint, "--num_samples", 3, "--max_new_tokens", 30, "--seed", 4)
    singles = [written(capsys, checkpoint, "--max_new_tokens", 30, "--seed", 4 + i) for i in range(3)]
    assert three == "".join(singles) and len(set(singles)) == 3
    greedy = {written(capsys, checkpoint, "--temperature", 0, "--seed", seed, "--prompt", "x") for seed in (1, 2)}
    assert len(greedy) == 1


# ---- control characters ---------------------------------------------------------------------------------------------

CONTROLS = [*range(32), *range(127, 160)]


def test_a_model_that_writes_an_escape_character_commands_no_terminal_unless_asked_to(checkpoint, tmp_path, capsys):
    model, seen = load_checkpoint(checkpoint)[0], {}
    model(torch.tensor([list(b"x")]), watch=lambda layer, before, after, rows: seen.update(direction=after.direction[0, -1]))
    with torch.no_grad():
        model.unembedding.weight[27] = seen["direction"]        # so that the escape character is the likeliest after x
    save_checkpoint(tmp_path / "ckpt.pt", model, META)
    flags = ["--prompt", "x", "--temperature", 0, "--max_new_tokens", 1, "--skip_rate", 0]
    assert written(capsys, tmp_path / "ckpt.pt", *flags) == "x\\x1b\n"
    assert written(capsys, tmp_path / "ckpt.pt", *flags, "--raw") == "x\x1b\n"


def test_prompt_and_text_show_each_control_character_but_for_line_ends_and_tabs(checkpoint, monkeypatch, capsys):
    text = "".join(map(chr, CONTROLS)) + "é\n\t🐈"
    shown = "".join(chr(i) if chr(i) in "\n\t" else repr(chr(i))[1:-1] for i in CONTROLS) + "é\n\t🐈"
    spell(monkeypatch, text.encode())
    assert written(capsys, checkpoint, "--prompt", text) == shown + shown + "\n"
    assert written(capsys, checkpoint, "--prompt", text, "--raw") == text + text + "\n"
    pictured = written(capsys, checkpoint, "--prompt", text, "--show_depth", "--raw")
    assert not set(pictured) & {chr(i) for i in CONTROLS} - {"\n"}


@pytest.mark.parametrize("encoding", ["\x1b[2Jevil\nsecond line", "\x9b2J", "a\rb", "\x1b]0;title\x07.tiktoken", "\0.tiktoken"])
def test_the_name_of_an_encoding_neither_commands_a_terminal_nor_adds_a_line(encoding, tmp_path, capsys):
    save_checkpoint(tmp_path / "ckpt.pt", tiny_model(dtype=torch.float32, vocab_size=257), META | {"encoding": encoding})
    error = fails(sample.main, ["--checkpoint", tmp_path / "ckpt.pt"], capsys)
    assert error[:-1].isprintable() and "evil second line" in error or "evil" not in encoding


@pytest.mark.parametrize("flags", [["--checkpoint", "\x1b[2J.pt"], ["--prompt_file", "\x1b[2J"], ["--depth_json", "no/\x1b[2J"],
                                   ["--device", "\x1b[2J"], ["--\x1b[2J"], ["--export", "\x1b[2J"], ["--top_k", "\x1b[2J"]])
def test_what_a_flag_was_given_is_named_without_its_control_characters(flags, checkpoint, capsys):
    error = fails(sample.main, ["--checkpoint", checkpoint, *flags], capsys)
    assert "\\x1b[2J" in error and error[:-1].isprintable()


# ---- prompts --------------------------------------------------------------------------------------------------------

def own_ranks():
    """An encoding of a ranks file of one's own: the 256 bytes and two merges, cut by GPT-2's pattern."""
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([i]): i for i in range(256)} | {b"he": 256, b"hel": 257}
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    return TiktokenEncoding(tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 258}))


@pytest.mark.parametrize("encoding", [ByteEncoding, own_ranks])
def test_no_encoding_lacks_a_character(encoding):
    """Bytes are tokens of their own in each, so that a text of any alphabet comes back whole, whatever the training text held."""
    encoding = encoding()
    for first in range(0, 0x110000, 0x1000):
        text = "".join(chr(c) for c in range(first, min(first + 0x1000, 0x110000), 7) if not 0xD800 <= c < 0xE000)
        assert encoding.decode(sample.prompt_tokens(text.encode(), encoding)) == text.encode()
    assert encoding.decode(sample.prompt_tokens(b"What? <|endoftext|>", encoding)) == b"What? <|endoftext|>"
    assert sample.prompt_tokens(b"", encoding) == [encoding.end_of_text]


@pytest.mark.parametrize("prompt", [b"\xed\xa0\xbd", "🐈".encode()[:2], b"ok \xff"])
def test_half_a_character_is_refused_by_an_encoding_of_text(prompt):
    with pytest.raises(UserError, match="--prompt: byte . is not UTF-8"):
        sample.prompt_tokens(prompt, own_ranks())


def test_half_a_surrogate_pair_is_named(checkpoint, capsys):
    assert "--prompt" in fails(sample.main, ["--checkpoint", checkpoint, "--prompt", "a\ud83d"], capsys)


@pytest.mark.parametrize("flags", [["--temperature", "1e-8"], ["--temperature", "1e-320"], ["--temperature", 0, "--top_k", 5],
                                   ["--top_k", 1], ["--top_p", "1e-9"], ["--temperature", "1e300", "--top_k", 1]])
def test_what_leaves_one_token_to_choose_is_greedy_and_no_temperature_overflows(flags, checkpoint, capsys):
    greedy = written(capsys, checkpoint, "--temperature", 0, "--prompt", "x", "--max_new_tokens", 20)
    assert written(capsys, checkpoint, *flags, "--prompt", "x", "--max_new_tokens", 20, "--seed", 7) == greedy


@pytest.mark.parametrize("length", [31, 32, 33, 500])
@pytest.mark.parametrize("rate", [0, 0.5])
def test_greedy_text_across_the_border_of_the_context_is_that_of_one_banded_pass(length, rate, checkpoint, capsys):
    prompt = (bytes(range(97, 123)) * 20)[:length].decode()
    text = written(capsys, checkpoint, "--prompt", prompt, "--temperature", 0, "--max_new_tokens", 1, "--skip_rate", rate, "--raw")
    model = load_checkpoint(checkpoint)[0]
    tokens = model.generate([list(prompt.encode())], 40, temperature=0, depth=model.cuts_for(rate))[0]
    assert text == prompt + ByteEncoding().decode(tokens[length:length + 1].tolist()).decode(errors="replace") + "\n"
    with torch.no_grad():
        logits = model(tokens[None], model.cuts_for(rate))[0, length - 1:-1]
    chosen = logits.gather(1, tokens[length:, None])[:, 0]
    assert (logits.max(-1).values - chosen).max() < 1e-3        # the same token, but for ties within rounding


@pytest.mark.parametrize("prompt, n", [("", 0), ("", 5), (" ", 5), ("hello", 0), ("x" * 31, 40), ("x" * 32, 1), ("x" * 33, 1),
                                       ("x" * 1000, 40), ("\0", 1)])
def test_any_prompt_works_whatever_its_length(prompt, n, checkpoint, capsys):
    out = written(capsys, checkpoint, "--prompt", prompt, "--max_new_tokens", n, "--raw")
    assert out.startswith(prompt) and out.endswith("\n")
    if n == 0:
        assert out == prompt + "\n"


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_bytes_that_are_no_text_pass_through_a_command_line_in_any_locale(locale, checkpoint):
    environment = {**os.environ, "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, str(ROOT / "sample.py"), "--checkpoint", str(checkpoint), "--prompt", b"a\xed\xa0\xbd\xf0\x9f b",
               "--max_new_tokens", "20"]
    done = subprocess.run(command, capture_output=True, env=environment)
    assert done.returncode == 0 and done.stderr == b""
    assert done.stdout.startswith(b"a") and len(done.stdout) > 20


# ---- export ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def exported(checkpoint, tmp_path, capsys):
    pytest.importorskip("safetensors", reason="safetensors is optional")
    assert written(capsys, checkpoint, "--export", tmp_path / "model.safetensors") == ""
    return tmp_path / "model.safetensors"


def test_an_exported_model_is_the_same_to_the_last_bit_and_writes_the_same(checkpoint, exported, capsys):
    model, meta = load_checkpoint(checkpoint)
    again, its_meta = load_checkpoint(exported)
    tokens = tiny_tokens(2, 40, vocab_size=257)
    assert torch.equal(again(tokens, again.cuts_for(0.5)), model(tokens, model.cuts_for(0.5)))
    assert its_meta == meta and again.config == model.config and set(read_checkpoint(exported)) == {"format", "config", "model", "meta"}
    assert written(capsys, exported, "--prompt", "x", "--show_depth") == written(capsys, checkpoint, "--prompt", "x", "--show_depth")
    assert [path.name for path in exported.parent.iterdir()] == ["model.safetensors"]
    written(capsys, exported, "--export", exported.with_name("again.safetensors"))
    assert read_checkpoint(exported.with_name("again.safetensors"))["model"].keys() == model.state_dict().keys()


def test_other_programs_find_each_weight_under_its_name(checkpoint, exported):
    import safetensors.torch
    weights = safetensors.torch.load_file(exported)
    assert all(torch.equal(weight, weights.pop(name)) for name, weight in load_checkpoint(checkpoint)[0].state_dict().items())
    assert not weights


def test_training_starts_from_an_exported_model_as_from_the_checkpoint(checkpoint, exported, python_text, tmp_path):
    for name, origin in (("a", checkpoint), ("b", exported)):
        train.main(["--init_from", str(origin), "--data", str(python_text), "--out_dir", str(tmp_path / name), "--steps", "1",
                    "--batch_tokens", "64", "--micro_batch", "2", "--eval_blocks", "2", "--threads", "1", "--device", "cpu"])
    first, second = (digests(read_checkpoint(tmp_path / name / "ckpt.pt")["model"]) for name in "ab")
    assert first == second


def test_a_run_needs_more_than_an_exported_model_to_go_on(exported, python_text, capsys):
    error = fails(train.main, ["--eval_only", "--init_from", exported, "--data", python_text], capsys)
    assert "has no 'train' entry" in error and "model.safetensors" in error


@pytest.mark.parametrize("flags", [["--export", "model.safetensors"], ["--checkpoint", "ckpt.safetensors"]])
def test_safetensors_is_named_where_it_is_missing(flags, checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "safetensors.torch", raising=False)
    shutil.copy(checkpoint, "ckpt.safetensors")
    error = fails(sample.main, ["--checkpoint", checkpoint, *flags], capsys)
    assert flags[1] in error and "pip install safetensors" in error and os.listdir() == ["ckpt.safetensors"]


@pytest.mark.parametrize("flags, named", [
    (["--export", "model.pt"], "ends in .safetensors"), (["--export", "no/model.safetensors"], "cannot be written"),
    (["--export", "folder.safetensors"], "cannot be written"), (["--export", "own.safetensors"], "the same file as --checkpoint"),
    (["--export", "m.safetensors", "--prompt", "x"], "--prompt"), (["--export", "m.safetensors", "--interactive"], "--interactive"),
    (["--export", "m.safetensors", "--depth_json", "x"], "--depth_json"), (["--export", ""], "--export")])
def test_a_mistake_about_an_export_is_answered_in_one_line_and_harms_nothing(flags, named, checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder.safetensors").mkdir()
    shutil.copy(checkpoint, "own.safetensors")
    assert named in fails(sample.main, ["--checkpoint", "own.safetensors", *flags], capsys)
    assert sorted(os.listdir()) == ["folder.safetensors", "own.safetensors"]
    assert Path("own.safetensors").read_bytes() == checkpoint.read_bytes()


def test_an_export_that_fails_leaves_what_was_there(checkpoint, exported, capsys, monkeypatch):
    before = exported.read_bytes()

    def full_disk(number):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", full_disk)
    error = fails(sample.main, ["--checkpoint", checkpoint, "--export", exported, "--seed", 2], capsys)
    assert "--export" in error and "No space left" in error and exported.read_bytes() == before
    assert os.listdir(exported.parent) == ["model.safetensors"]


@pytest.mark.skipif(os.name != "posix", reason="where folders can be flushed")
def test_a_file_and_then_its_new_name_are_flushed_to_the_disk(tmp_path, monkeypatch):
    flushed, fsync = [], os.fsync

    def note(number):
        flushed.append((os.path.samestat(os.fstat(number), os.stat(tmp_path)), os.listdir(tmp_path)))
        fsync(number)
    monkeypatch.setattr(os, "fsync", note)
    save_checkpoint(tmp_path / "ckpt.pt", tiny_model(dtype=torch.float32, vocab_size=257), META)
    assert flushed == [(False, [f".ckpt.pt.tmp-{os.getpid()}"]), (True, ["ckpt.pt"])]


def with_header(data: bytes, change) -> bytes:
    """A file of safetensors whose header is changed by a function of the parsed JSON, or is another text."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    text = change(header)
    text = text if isinstance(text, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length:]


def with_entry(entry: str, text):
    return lambda header: header["__metadata__"].update({entry: text})


HEADERS = {"no metadata": lambda header: header.pop("__metadata__") and None, "no JSON": lambda header: b"{" * 80,
           "deep JSON": lambda header: b'{"a":' * 50_000, "empty": lambda header: b"{}", "a list": lambda header: b"[]",
           "another program's": lambda header: header.update(__metadata__={"format": "pt"}),
           "metadata of numbers": with_entry("config", 1), "config no JSON": with_entry("config", "{"),
           "deep config": with_entry("config", "[" * 100_000), "config a list": with_entry("config", "[1]"),
           "digests a list": with_entry("sha256", "[]"), "meta a number": with_entry("meta", "1" * 5000),
           "meta not a number": with_entry("meta", "NaN"), "format null": with_entry("format", "null"),
           "a weight more": lambda header: header.update(more={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
           "a weight too large": lambda header: header["embedding.weight"].update(shape=[10**12, 10**6]),
           "a weight elsewhere": lambda header: header["embedding.weight"].update(data_offsets=[0, 10**15]),
           "another type": lambda header: [entry.update(dtype="I32") for name, entry in header.items() if name != "__metadata__"] and None,
           **{f"no {entry}": lambda header, entry=entry: header["__metadata__"].pop(entry) and None
              for entry in ("format", "config", "meta", "sha256")}}


@pytest.mark.parametrize("change", HEADERS)
def test_a_header_that_lies_is_answered_in_one_line(change, exported, capsys):
    exported.write_bytes(with_header(exported.read_bytes(), HEADERS[change]))
    assert "model.safetensors" in fails(sample.main, ["--checkpoint", exported], capsys)


def test_a_damaged_export_is_refused_or_what_it_was(exported):
    """Bits turned, the file cut, ranges of zeros, in the header and behind it."""
    random, whole, path = np.random.default_rng(1), exported.read_bytes(), exported
    header, original, accepted = 8 + int.from_bytes(whole[:8], "little"), digests(read_checkpoint(exported)), 0
    for case in range(400):
        data, kind = bytearray(whole), case % 4
        place = int(random.integers(header if case % 8 < 6 else len(data)))
        if kind < 2:
            data[place] ^= 1 << int(random.integers(8))
        elif kind == 2:
            del data[place:]
        else:
            data[place:place + 9] = bytes(len(data[place:place + 9]))
        path.write_bytes(data)
        try:
            assert digests(read_checkpoint(path)) == original
            accepted += 1
        except ModelError as error:
            assert "\n" not in str(error) and str(path) in str(error)
    print(f"{accepted} accepted")
    assert accepted < 40


# ---- depth ----------------------------------------------------------------------------------------------------------


def depth_of(checkpoint, tmp_path, *flags) -> dict:
    sample.main(["--checkpoint", str(checkpoint), "--depth_json", str(tmp_path / "depth.json"), *map(str, flags)])
    return json.loads((tmp_path / "depth.json").read_text())["samples"][0]


@pytest.mark.parametrize("flags, share", [([], 0.75), (["--skip_rate", 0], 1), (["--skip_rate", 0.5], 0.5),
                                          (["--depth_budget", 3], 0.5), (["--depth_budget", 1.5], 0.25), (["--depth_budget", 6], 1),
                                          (["--skip_rate", 0.5, "--allocation", "global"], 0.5)])
def test_single_token_decoding_realises_the_rate_that_was_asked_for(flags, share, checkpoint, tmp_path):
    found = depth_of(checkpoint, tmp_path, "--prompt", "x", "--max_new_tokens", 300, "--temperature", 3, *flags)
    assert len(found["tokens"]) == 301 and len(found["layers_run"]) == 300         # the last token was not run
    assert sum(found["layers_run"]) / 300 / 6 == pytest.approx(share, abs=0.06)
    assert found["layers_run"] == [sum(layers) for layers in found["ran"]]
    assert found["share_by_layer"] == [sum(column) / 300 for column in zip(*found["ran"])]
    assert "".join(found["texts"])[0] == "x"


def test_a_list_gives_each_layer_its_rate(checkpoint, tmp_path):
    found = depth_of(checkpoint, tmp_path, "--skip_rate", "0,0,0.9,0,0,0.5", "--max_new_tokens", 200, "--temperature", 3)
    assert found["share_by_layer"][0] == found["share_by_layer"][1] == found["share_by_layer"][3] == 1
    assert found["share_by_layer"][2] < 0.35 and found["share_by_layer"][5] < 0.85


def test_the_picture_has_a_digit_under_each_character_a_legend_and_a_bar_for_each_layer(checkpoint, capsys):
    out = written(capsys, checkpoint, "--prompt", "two\nlines", "--max_new_tokens", 1, "--show_depth", "--skip_rate", 0.5)
    lines = out.splitlines()
    assert lines[0] == "two" and lines[2].startswith("lines") and lines[1].isdigit() and len(lines[1]) == 3
    assert lines[3][:5].isdigit() and "of 6 a token on average" in out and "\x1b" not in out
    assert [line.split()[1] for line in lines[-7:-1]] == ["attention", "MLP"] * 3


def test_a_text_of_nothing_has_an_empty_picture(checkpoint, capsys):
    assert "of 6 a token" in written(capsys, checkpoint, "--max_new_tokens", 0, "--show_depth")


def test_a_terminal_gets_colours_unless_it_asks_not_to(checkpoint, capsys, monkeypatch):
    import _pytest.capture
    monkeypatch.setattr(_pytest.capture.CaptureIO, "isatty", lambda self: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[48;5;" in written(capsys, checkpoint, "--prompt", "ab", "--max_new_tokens", 3, "--show_depth")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in written(capsys, checkpoint, "--prompt", "ab", "--max_new_tokens", 3, "--show_depth")


def test_the_depth_of_the_prompt_is_that_of_the_full_forward_pass(checkpoint, tmp_path):
    from model import load_checkpoint
    model, prompt = load_checkpoint(checkpoint)[0], b"The prompt has been read by then."
    found = depth_of(checkpoint, tmp_path, "--prompt", prompt.decode(), "--max_new_tokens", 1, "--skip_rate", 0.5)
    depth = sample.DepthMap(6)
    model(torch.tensor([list(prompt)]), model.cuts_for(0.5), watch=depth.watch)
    assert found["ran"] == [[int(x) for x in layers] for layers in depth.ran]


def test_a_heat_map_is_drawn_or_the_missing_package_named(checkpoint, tmp_path, capsys, monkeypatch):
    flags = ["--checkpoint", checkpoint, "--max_new_tokens", 5, "--depth_png", tmp_path / "depth.png", "--num_samples", 2]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install matplotlib" in fails(sample.main, flags, capsys)
    monkeypatch.undo()
    pytest.importorskip("matplotlib", reason="matplotlib is optional")
    sample.main([str(flag) for flag in flags])
    assert (tmp_path / "depth.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("change, flags, named", [
    ("no table", ["--skip_rate", 0.5], "no threshold table"), ("no entry", ["--skip_rate", 0.5], "no threshold table"), ("prenorm", ["--skip_rate", 0.5], "pre-norm"),
    ("prenorm", ["--depth_budget", 3], "pre-norm")])
def test_a_checkpoint_that_cannot_skip_says_so(change, flags, named, tmp_path, capsys):
    residual = "prenorm" if change == "prenorm" else "nag"
    model = tiny_model(dtype=torch.float32, vocab_size=257, residual=residual)
    if change == "no entry":                # as if another program had written the weights
        model.state_dict = lambda: {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_checkpoint(tmp_path / "ckpt.pt", model, META)
    assert named in fails(sample.main, ["--checkpoint", tmp_path / "ckpt.pt", *flags], capsys)
    sample.main(["--checkpoint", str(tmp_path / "ckpt.pt"), "--max_new_tokens", "3", "--skip_rate", "0"])


@pytest.mark.parametrize("flags, named", [
    (["--checkpoint", "/nonexistent.pt"], "/nonexistent.pt"), (["--checkpoint", "/"], "a folder"), (["--temperature", "-1"], "'-1'"),
    (["--temperature", "nan"], "nan"), (["--temperature", "inf"], "inf"), (["--top_k", "0"], "--top_k"), (["--top_p", "0"], "--top_p"),
    (["--top_p", "1.5"], "--top_p"), (["--num_samples", "0"], "--num_samples"), (["--max_new_tokens", "-3"], "--max_new_tokens"),
    (["--prompt_file", "/nonexistent.txt"], "/nonexistent.txt"), (["--prompt", "a", "--interactive"], "--interactive"),
    (["--device", "gpu"], "--device gpu"), (["--skip_rate", "1"], "'1'"), (["--skip_rate", "1.1"], "1.1"),
    (["--skip_rate", "-0.1"], "-0.1"), (["--skip_rate", "0.1,0.2"], "2 numbers"), (["--skip_rate", "0.1, ,0.2"], "' '"),
    (["--depth_budget", "0"], "--depth_budget"), (["--depth_budget", "1e-320"], "depth_budget 9.99989e-321"), (["--depth_budget", "6.5"], "at most 6"),
    (["--depth_budget", "3", "--skip_rate", "0.5"], "--skip_rate"), (["--interactive", "--depth_json", "x"], "--interactive"),
    (["--depth_json", "/proc/x/y"], "/proc/x/y"), (["--seed", "x"], "--seed"), (["--tempreature", "1"], "--tempreature")])
def test_a_mistake_is_answered_in_one_line(flags, named, checkpoint, capsys):
    assert named in fails(sample.main, ["--checkpoint", checkpoint, *flags], capsys)


def test_a_reader_that_has_seen_enough_ends_the_program_quietly(checkpoint):
    command = [sys.executable, str(ROOT / "sample.py"), "--checkpoint", str(checkpoint), "--max_new_tokens", "2000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(20)
    process.stdout.close()
    assert process.wait(timeout=60) != 0 and process.stderr.read() == b""
