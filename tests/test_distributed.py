"""Promises of training by several processes: the same run, whoever shares it, started as a user would start it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from conftest import ROOT, fails
from model import read_checkpoint
import train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="starts processes that talk by gloo")
SHAPE = ["--n_layer", "2", "--n_head", "2", "--n_embd", "32", "--block_size", "32", "--batch_tokens", "1024",
         "--micro_batch", "8", "--eval_blocks", "20", "--eval_every", "25", "--optimizer", "adamw", "--device", "cpu"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(processes: int) -> list[str]:
    """train.py by itself, or by torchrun."""
    if not processes:
        return [sys.executable, "train.py"]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), "train.py"]


def run(processes: int, *flags, status=0) -> str:
    """What a run prints."""
    done = subprocess.run([*command(processes), *map(str, flags)], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def logged(out_dir, key) -> list[float]:
    lines = [json.loads(line) for line in (out_dir / "log.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def close_to(found: list[float], expected: list[float]) -> bool:
    return len(found) == len(expected) and max(abs(a - b) for a, b in zip(found, expected)) < 1e-4


@pytest.fixture(scope="module")
def alone(tmp_path_factory, python_text):
    """50 steps at full depth by one process."""
    out_dir = tmp_path_factory.mktemp("alone") / "out"
    run(0, *SHAPE, "--data", python_text, "--out_dir", out_dir, "--skip_rate", 0, "--steps", 50)
    return out_dir


@pytest.mark.parametrize("processes, flags", [(2, []), (4, []), (2, ["--fsdp"])])
def test_several_processes_have_the_losses_of_one(processes, flags, alone, python_text, tmp_path):
    out = tmp_path / "out"
    printed = run(processes, *SHAPE, "--data", python_text, "--out_dir", out, "--skip_rate", 0, "--steps", 50, *flags)
    assert printed.count("parameters (nag") == 1 and f"{processes} × cpu" in printed
    for key in ("loss", "val_loss", "bits_per_byte", "grad_norm"):
        assert close_to(logged(out, key), logged(alone, key)), key
    assert logged(out, "flops") == logged(alone, "flops")
    found, expected = read_checkpoint(out / "ckpt.pt"), read_checkpoint(alone / "ckpt.pt")
    assert list(found["model"]) == list(expected["model"])
    for name, weight in expected["model"].items():
        assert type(found["model"][name]) is torch.Tensor and found["model"][name].shape == weight.shape
    assert (found["model"]["embedding.weight"] - expected["model"]["embedding.weight"]).abs().max() < 1e-3


def test_the_rows_of_the_first_step_and_the_tables_are_those_of_one_process(python_text, tmp_path):
    for processes in (0, 2):
        run(processes, *SHAPE, "--data", python_text, "--out_dir", tmp_path / str(processes), "--skip_rate", 0.25, "--steps", 1)
    assert close_to(logged(tmp_path / "2", "loss"), logged(tmp_path / "0", "loss"))         # other rows would show
    tables = [read_checkpoint(tmp_path / processes / "ckpt.pt")["model"]["quantiles"] for processes in ("0", "2")]
    assert (tables[0] - tables[1]).abs().max() < 1e-4


def test_a_run_goes_on_with_another_number_of_processes_and_other_engines(alone, python_text, tmp_path):
    out = tmp_path / "out"
    flags = ["--data", python_text, "--out_dir", out]
    first = [*SHAPE, *flags, "--skip_rate", "0", "--steps", "50", "--save_every", "10"]
    for processes, until, more in ((0, 10, []), (2, 20, []), (4, 30, []), (2, 40, ["--fsdp"]), (0, 50, [])):
        stop_at(until, processes, first if not out.exists() else [*flags, "--resume", *more], out)
    assert close_to(logged(out, "loss"), logged(alone, "loss"))


def stop_at(step: int, processes: int, flags, out):
    """Let a run go on until a step is in its log, then ask its first process to stop, as a cluster would."""
    process = subprocess.Popen([*command(processes), *map(str, flags)], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    try:
        while process.poll() is None and (not (out / "log.jsonl").exists() or (logged(out, "step") or [0])[-1] < step):
            time.sleep(0.05)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_saves_and_ends_with_status_0_and_the_run_goes_on(name, alone, python_text, tmp_path):
    out = tmp_path / "out"
    flags = [*SHAPE, "--data", python_text, "--out_dir", out, "--skip_rate", 0, "--steps", 50]
    process = subprocess.Popen([*command(0), *map(str, flags)], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    while not (out / "log.jsonl").exists() or len(logged(out, "loss")) < 5:
        time.sleep(0.02)
    process.send_signal(getattr(signal, name))
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and f"{name}: stopped after step" in printed
    assert read_checkpoint(out / "ckpt.pt")["step"] == logged(out, "step")[-1] < 50
    run(0, "--out_dir", out, "--resume")
    assert logged(out, "loss") == logged(alone, "loss")             # to the last bit


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_torchrun_forwards_a_signal_and_all_processes_stop_after_the_same_step(name, python_text, tmp_path):
    out, starter = tmp_path / "out", command(2)
    if name == "SIGUSR1":
        if "--signals-to-handle" not in subprocess.run([*command(2)[:-1], "--help"], capture_output=True, text=True).stdout:
            pytest.skip("this torchrun forwards SIGTERM and SIGINT only")
        starter[-1:-1] = ["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]
    flags = [*SHAPE, "--data", python_text, "--out_dir", out, "--skip_rate", 0, "--steps", 5000]
    process = subprocess.Popen([*starter, *map(str, flags)], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    while not (out / "log.jsonl").exists() or len(logged(out, "loss")) < 5:
        time.sleep(0.02)
    process.send_signal(getattr(signal, name))
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and f"{name}: stopped after step" in printed
    assert read_checkpoint(out / "ckpt.pt")["step"] == logged(out, "step")[-1] < 5000


def test_a_killed_worker_is_restarted_and_the_run_goes_on_without_help(alone, python_text, tmp_path):
    out = tmp_path / "out"
    flags = [*SHAPE, "--data", python_text, "--out_dir", out, "--skip_rate", 0, "--steps", 50, "--save_every", 5, "--resume"]
    starter = command(2)
    starter[-1:-1] = ["--max_restarts", "3"]
    process = subprocess.Popen([*starter, *map(str, flags)], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    while not (out / "log.jsonl").exists() or len(logged(out, "loss")) < 12:
        time.sleep(0.02)
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    assert process.wait(timeout=120) == 0
    assert close_to(logged(out, "loss"), logged(alone, "loss"))


def test_a_mistake_is_told_once_and_a_failing_process_ends_the_others(python_text, tmp_path):
    started = time.monotonic()
    printed = run(2, *SHAPE, "--data", tmp_path / "nothing", "--out_dir", tmp_path / "out", status=1)
    assert printed.count("train.py: error: ") == 1 and time.monotonic() - started < 30
    printed = run(2, *SHAPE, "--data", python_text, "--out_dir", tmp_path / "out", "--batch_tokens", 256, status=1)
    assert printed.count("train.py: error: ") == 1 and "2 processes = 512; try 512" in printed


def test_what_only_one_process_meets_is_told_and_ends_all(python_text, tmp_path):
    """A shard that is cut short for the second process only."""
    code = ("import os, sys, train, prepare_data\n"
            "if os.environ['RANK'] == '1':\n"
            "    def refuse(path): raise prepare_data.UserError(f'{path}: cut short')\n"
            "    prepare_data.read_header = refuse\n"
            "train.main(sys.argv[1:])\n")
    (tmp_path / "one.py").write_text(code)
    started = time.monotonic()
    done = subprocess.run([*command(2)[:-1], str(tmp_path / "one.py"), *SHAPE, "--data", str(python_text), "--out_dir",
                           str(tmp_path / "out")], cwd=ROOT, env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)}, capture_output=True,
                          text=True, timeout=100)
    assert done.returncode == 1 and time.monotonic() - started < 30
    assert done.stderr.count("error: ") == 1 and "cut short" in done.stderr


def test_validation_of_fewer_batches_than_processes_gives_the_loss_of_one(alone, python_text, tmp_path):
    """And no process waits for another that has nothing to do."""
    printed = []
    for processes in (0, 2, 3):
        out = tmp_path / str(processes)
        shutil.copytree(alone, out)
        text = run(processes, "--out_dir", out, "--eval_only", "--eval_blocks", 9, "--micro_batch", 8, "--skip_rates", "0,0.5")
        printed.append([line for line in text.splitlines() if line.strip().startswith(("0  ", "0.5"))])
    assert len(printed[0]) == 2 and printed[0] == printed[1] == printed[2]


@pytest.mark.parametrize("residual", ["nag", "prenorm"])
@pytest.mark.parametrize("flags", [[], ["--dropout", "0.2"]])
def test_activation_checkpointing_changes_no_bit(residual, flags, python_text, tmp_path):
    rate = ["--skip_rate", "0.25"] if residual == "nag" else []
    for name, more in (("kept", []), ("again", ["--activation_checkpointing"])):
        train.main([*SHAPE, "--data", str(python_text), "--out_dir", str(tmp_path / name), "--steps", "3", "--residual", residual,
                    *rate, *flags, *more])
    assert logged(tmp_path / "kept", "loss") == logged(tmp_path / "again", "loss")
    assert logged(tmp_path / "kept", "grad_norm") == logged(tmp_path / "again", "grad_norm")


@pytest.mark.parametrize("flags, named", [(["--fsdp"], "torchrun"), (["--fsdp", "--optimizer", "muon"], "Muon")])
def test_sharding_needs_torchrun_and_adamw(flags, named, python_text, tmp_path, capsys):
    base = [*SHAPE, "--data", python_text, "--out_dir", tmp_path / "out"]
    assert named in fails(train.main, [*base, *flags], capsys)


def test_a_step_that_is_not_finite_is_left_out_and_ten_in_a_row_end_the_run(python_text, tmp_path, capsys):
    base = ["--data", python_text, "--out_dir", tmp_path / "out", "--steps", 20, "--skip_rate", 0, "--residual", "prenorm"]
    with pytest.raises(SystemExit) as stop:
        train.main([str(flag) for flag in (*SHAPE, *base, "--learning_rate", "1e25")])
    message = capsys.readouterr().err.splitlines()[-1]          # after the bar
    assert stop.value.code == 2 and "tenth step in a row" in message and "learning rate" in message
    entries = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert sum(entry.get("left_out", False) for entry in entries) == 9      # the tenth ended it before it was logged
    assert all(weight.isfinite().all() for weight in read_checkpoint(tmp_path / "out" / "ckpt.pt")["model"].values()
               if weight.dtype.is_floating_point and weight.dim() == 2)
