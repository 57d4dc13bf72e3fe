"""Promises of training by several processes: the same run, whoever shares it.

What torchrun does is tried with torchrun; the figures of a run with processes that are started as it starts them.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from conftest import ROOT, fails, tiny_model, tiny_tokens, train_process
from model import read_checkpoint
import train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="starts processes that talk by gloo")
SHAPE = ["--n_layer", "2", "--n_head", "2", "--n_embd", "32", "--block_size", "32", "--batch_tokens", "1024",
         "--micro_batch", "8", "--eval_blocks", "20", "--eval_every", "25", "--optimizer", "adamw", "--device", "cpu"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def torchrun(processes: int, *options) -> list[str]:
    """The command of train.py by torchrun."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), *options, "train.py"]


def refused(processes: int, *flags) -> str:
    """What torchrun prints where it ends with an error, which must be within 30 s."""
    started = time.monotonic()
    done = subprocess.run([*torchrun(processes), *map(str, flags)], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True,
                          timeout=100)
    assert done.returncode == 1 and time.monotonic() - started < 30
    return done.stdout + done.stderr


def started(processes: int, *flags, folder, before=None) -> list:
    """Processes of train.py with the environment that torchrun gives them (one: without any); what they print is in printed()."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    folder.mkdir(exist_ok=True)
    common = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [train_process(["--threads", 1, *flags], folder / f"printed-{rank}.txt", before,
                          **({} if processes == 1 else {"RANK": str(rank), "LOCAL_RANK": str(rank), **common}))
            for rank in range(processes)]


def run(processes: int, *flags, folder, before=None) -> str:
    """What a run prints, which must end well within two minutes."""
    ranks = started(processes, *flags, folder=folder, before=before)
    for rank in ranks:
        rank.join(120)
    printed = "".join(path.read_text() for path in sorted(folder.glob("printed-*.txt")))
    assert [rank.exitcode for rank in ranks] == [0] * processes, printed
    return printed


def logged(out_dir, key) -> list[float]:
    lines = [json.loads(line) for line in (out_dir / "log.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def close_to(found: list[float], expected: list[float]) -> bool:
    return len(found) == len(expected) and max(abs(a - b) for a, b in zip(found, expected)) < 1e-4


@pytest.fixture(scope="module")
def alone(tmp_path_factory, python_text):
    """50 steps at full depth by one process."""
    folder = tmp_path_factory.mktemp("alone")
    run(1, *SHAPE, "--data", python_text, "--out_dir", folder / "out", "--skip_rate", 0, "--steps", 50, folder=folder)
    return folder / "out"


@pytest.mark.parametrize("processes, flags", [(2, []), (4, []), (2, ["--fsdp"])])
def test_several_processes_have_the_losses_of_one(processes, flags, alone, python_text, tmp_path):
    out = tmp_path / "out"
    printed = run(processes, *SHAPE, "--data", python_text, "--out_dir", out, "--skip_rate", 0, "--steps", 50, *flags,
                  folder=tmp_path)
    assert printed.count("parameters (nag") == 1 and f"{processes} × cpu" in printed
    for key in ("loss", "val_loss", "bits_per_byte", "grad_norm"):
        assert close_to(logged(out, key), logged(alone, key)), key
    assert logged(out, "flops") == logged(alone, "flops")
    found, expected = read_checkpoint(out / "ckpt.pt"), read_checkpoint(alone / "ckpt.pt")
    assert list(found["model"]) == list(expected["model"])
    for name, weight in expected["model"].items():
        assert type(found["model"][name]) is torch.Tensor and found["model"][name].shape == weight.shape
    assert (found["model"]["embedding.weight"] - expected["model"]["embedding.weight"]).abs().max() < 1e-3


@pytest.mark.parametrize("flags", [[], ["--fsdp"], ["--dropout", "0.5"]])
def test_the_rows_of_the_first_step_and_the_tables_are_those_of_one_process(flags, python_text, tmp_path):
    """And so are the batches and the dropout masks: other ones would give other losses."""
    outs = [tmp_path / "1", tmp_path / "2"]
    for processes, out in enumerate(outs, 1):
        its_flags = flags if processes > 1 else [flag for flag in flags if flag != "--fsdp"]
        run(processes, *SHAPE, "--data", python_text, "--out_dir", out, "--skip_rate", 0.25, "--steps", 2, *its_flags, folder=out)
    assert close_to(logged(outs[1], "loss"), logged(outs[0], "loss"))
    tables = [read_checkpoint(out / "ckpt.pt")["model"]["quantiles"] for out in outs]
    assert (tables[0] - tables[1]).abs().max() < 1e-4


def test_a_run_goes_on_with_another_number_of_processes_and_other_engines(alone, python_text, tmp_path):
    out = tmp_path / "out"
    flags = ["--data", python_text, "--out_dir", out]
    first = [*SHAPE, *flags, "--skip_rate", "0", "--steps", "50", "--save_every", "10"]
    for processes, until, more in ((1, 10, []), (2, 20, []), (4, 30, []), (2, 40, ["--fsdp"]), (1, 50, [])):
        ranks = started(processes, *(first if not out.exists() else [*flags, "--resume", *more]), folder=tmp_path)
        wait_for_steps(out, until, ranks[0].is_alive)
        if ranks[0].is_alive():
            os.kill(ranks[0].pid, signal.SIGTERM)       # one process is told; all stop
        for rank in ranks:
            rank.join(60)
            assert rank.exitcode == 0
    assert close_to(logged(out, "loss"), logged(alone, "loss"))


def print_each_synchronisation():
    """Let DDP print a line whenever it has averaged all gradients."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    class Printing(train.DistributedDataParallel):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.register_comm_hook(None, self.noted)

        @staticmethod
        def noted(state, bucket):
            if bucket.is_last():
                print("gradients averaged")
            return allreduce_hook(None, bucket)
    train.DistributedDataParallel = Printing


def test_gradients_are_averaged_once_a_step(python_text, tmp_path):
    printed = run(2, *SHAPE, "--data", python_text, "--out_dir", tmp_path / "out", "--skip_rate", 0, "--steps", 3, "--batch_tokens",
                  2048, folder=tmp_path, before=print_each_synchronisation)
    timing, steps = 2, 3            # each process has 4 micro-batches a step
    assert printed.count("gradients averaged") == 2 * (timing + steps)


def wait_for_steps(out, count: int, alive):
    while alive() and (not (out / "log.jsonl").exists() or len(logged(out, "loss")) < count):
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_saves_and_ends_with_status_0_and_the_run_goes_on(name, alone, python_text, tmp_path):
    out = tmp_path / "out"
    flags = [*SHAPE, "--data", python_text, "--out_dir", out]
    process, = started(1, *flags, "--skip_rate", 0, "--steps", 50, folder=tmp_path)
    wait_for_steps(out, 5, process.is_alive)
    os.kill(process.pid, getattr(signal, name))
    process.join(30)
    assert process.exitcode == 0 and f"{name}: stopped after step" in (tmp_path / "printed-0.txt").read_text()
    assert read_checkpoint(out / "ckpt.pt")["step"] == logged(out, "step")[-1] < 50
    run(1, *flags[:2], "--out_dir", out, "--resume", folder=tmp_path)
    assert logged(out, "loss") == logged(alone, "loss")             # to the last bit


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_torchrun_forwards_a_signal_and_all_processes_stop_after_the_same_step(name, python_text, tmp_path):
    out, options = tmp_path / "out", []
    if name == "SIGUSR1":
        if "--signals-to-handle" not in subprocess.run([*torchrun(2)[:-1], "--help"], capture_output=True, text=True).stdout:
            pytest.skip("this torchrun forwards SIGTERM and SIGINT only")
        options = ["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]
    flags = [*SHAPE, "--data", python_text, "--out_dir", out, "--skip_rate", 0, "--steps", 5000]
    process = subprocess.Popen([*torchrun(2, *options), *map(str, flags)], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    wait_for_steps(out, 5, lambda: process.poll() is None)
    process.send_signal(getattr(signal, name))
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and f"{name}: stopped after step" in printed
    assert read_checkpoint(out / "ckpt.pt")["step"] == logged(out, "step")[-1] < 5000


def test_a_killed_worker_is_restarted_and_the_run_goes_on_without_help(alone, python_text, tmp_path):
    out = tmp_path / "out"
    flags = [*SHAPE, "--data", python_text, "--out_dir", out, "--skip_rate", 0, "--steps", 50, "--save_every", 5, "--resume"]
    process = subprocess.Popen([*torchrun(2, "--max_restarts", "3"), *map(str, flags)], cwd=ROOT, env=ENVIRONMENT,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_steps(out, 12, lambda: process.poll() is None)
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    assert process.wait(timeout=120) == 0
    assert close_to(logged(out, "loss"), logged(alone, "loss"))


def test_a_mistake_is_told_once_and_ends_all(python_text, tmp_path):
    printed = refused(2, *SHAPE, "--data", tmp_path / "nothing", "--out_dir", tmp_path / "out")
    assert printed.count("train.py: error: ") == 1
    printed = refused(2, *SHAPE, "--data", python_text, "--out_dir", tmp_path / "out", "--batch_tokens", 256)
    assert printed.count("train.py: error: ") == 1 and "2 processes = 512; try 512" in printed


def test_bare_flags_share_the_default_batch_and_the_first_process_prepares_the_default_data(tmp_path):
    done = subprocess.run([*torchrun(2)[:-1], str(ROOT / "train.py"), "--steps", "1", "--n_layer", "1", "--n_embd", "32",
                           "--eval_blocks", "2", "--skip_rates", "0"], cwd=tmp_path,
                          env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("preparing it from this Python's standard library") == 1 and "2 × cpu" in done.stdout
    assert read_checkpoint(tmp_path / "out" / "ckpt.pt")["train"]["micro_batch"] == 8
    assert not any(word in done.stderr for word in ("destroy_process_group", "Traceback", "WARNING: process group"))


def test_what_only_one_process_meets_is_told_and_ends_all(python_text, tmp_path):
    """A shard that is cut short for the second process only."""
    code = ("import os, sys, train, prepare_data\n"
            "if os.environ['RANK'] == '1':\n"
            "    def refuse(path): raise prepare_data.UserError(f'{path}: cut short')\n"
            "    prepare_data.read_header = refuse\n"
            "train.main(sys.argv[1:])\n")
    (tmp_path / "one.py").write_text(code)
    started = time.monotonic()
    done = subprocess.run([*torchrun(2)[:-1], str(tmp_path / "one.py"), *SHAPE, "--data", str(python_text), "--out_dir",
                           str(tmp_path / "out")], cwd=ROOT, env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)}, capture_output=True,
                          text=True, timeout=100)
    assert done.returncode == 1 and time.monotonic() - started < 30
    assert done.stderr.count("error: ") == 1 and "cut short" in done.stderr


def test_validation_of_fewer_batches_than_processes_gives_the_loss_of_one(alone, python_text, tmp_path):
    """And no process waits for another that has nothing to do."""
    printed = []
    for processes in (1, 2, 3):
        out = tmp_path / str(processes)
        shutil.copytree(alone, out)
        text = run(processes, "--out_dir", out, "--eval_only", "--eval_blocks", 9, "--micro_batch", 8, "--skip_rates", "0,0.5",
                   folder=tmp_path / f"printed by {processes}")
        printed.append([line for line in text.splitlines() if line.strip().startswith(("0  ", "0.5"))])
    assert len(printed[0]) == 2 and printed[0] == printed[1] == printed[2]


@pytest.mark.parametrize("flags", [["--skip_rate", "0.25", "--dropout", "0.2"], ["--residual", "prenorm"]])
def test_activation_checkpointing_changes_no_bit(flags, python_text, tmp_path):
    """With skipping, the same rows are chosen again; with dropout, the same masks drawn."""
    for name, more in (("kept", []), ("again", ["--activation_checkpointing"])):
        train.main([*SHAPE, "--data", str(python_text), "--out_dir", str(tmp_path / name), "--steps", "3", "--skip_rates", "0",
                    *flags, *more])
    assert logged(tmp_path / "kept", "loss") == logged(tmp_path / "again", "loss")
    assert logged(tmp_path / "kept", "grad_norm") == logged(tmp_path / "again", "grad_norm")


@pytest.mark.parametrize("residual", ["nag", "prenorm"])
def test_activation_checkpointing_holds_less_than_a_quarter_between_the_passes(residual):
    held = []
    for checkpointing in (False, True):
        model = tiny_model(n_layer=8, n_embd=64, block_size=64, residual=residual)
        model.activation_checkpointing = checkpointing
        sizes = {}

        def note(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model.loss(tiny_tokens(4, 64), tiny_tokens(4, 64, seed=1))
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        held.append(sum(size for place, size in sizes.items() if place not in own))
        assert loss.isfinite()
    assert held[1] < held[0] / 4


@pytest.mark.parametrize("flags, named", [(["--fsdp"], "torchrun"), (["--fsdp", "--optimizer", "muon"], "Muon")])
def test_sharding_needs_torchrun_and_adamw(flags, named, python_text, tmp_path, capsys):
    base = [*SHAPE, "--data", python_text, "--out_dir", tmp_path / "out"]
    assert named in fails(train.main, [*base, *flags], capsys)
