"""Promises of sample.py: whole characters, every source of a prompt, and its answers to mistakes."""

import io
import os
import subprocess
import sys

import pytest
import torch

import sample
from conftest import ROOT, fails, tiny_model
from model import NAGTransformer, save_checkpoint

META = {"encoding": "bytes", "vocab_size": 257, "end_of_text": 256}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "ckpt.pt"
    save_checkpoint(path, tiny_model(dtype=torch.float32, vocab_size=257, block_size=32), META)
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
    assert prints == ["", "a", "", "", "", "🐈", "", "é", ""]


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


@pytest.mark.parametrize("prompt, n", [("", 0), ("", 5), (" ", 5), ("hello", 0), ("x" * 31, 40), ("x" * 32, 1), ("x" * 33, 1),
                                       ("x" * 1000, 40), ("\0", 1)])
def test_any_prompt_works_whatever_its_length(prompt, n, checkpoint, capsys):
    out = written(capsys, checkpoint, "--prompt", prompt, "--max_new_tokens", n)
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


@pytest.mark.parametrize("flags, named", [
    (["--checkpoint", "/nonexistent.pt"], "/nonexistent.pt"), (["--checkpoint", "/"], "a folder"), (["--temperature", "-1"], "'-1'"),
    (["--temperature", "nan"], "nan"), (["--temperature", "inf"], "inf"), (["--top_k", "0"], "--top_k"), (["--top_p", "0"], "--top_p"),
    (["--top_p", "1.5"], "--top_p"), (["--num_samples", "0"], "--num_samples"), (["--max_new_tokens", "-3"], "--max_new_tokens"),
    (["--prompt_file", "/nonexistent.txt"], "/nonexistent.txt"), (["--prompt", "a", "--interactive"], "--interactive"),
    (["--device", "gpu"], "--device gpu"), (["--seed", "x"], "--seed"), (["--tempreature", "1"], "--tempreature")])
def test_a_mistake_is_answered_in_one_line(flags, named, checkpoint, capsys):
    assert named in fails(sample.main, ["--checkpoint", checkpoint, *flags], capsys)


def test_a_reader_that_has_seen_enough_ends_the_program_quietly(checkpoint):
    command = [sys.executable, str(ROOT / "sample.py"), "--checkpoint", str(checkpoint), "--max_new_tokens", "2000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(20)
    process.stdout.close()
    assert process.wait(timeout=60) != 0 and process.stderr.read() == b""
