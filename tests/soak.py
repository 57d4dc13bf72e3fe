"""Kill a training run again and again, at any moment; what it leaves must end in the weights of a run that was let be.

    python tests/soak.py                some minutes for 100 kills
    python tests/soak.py --kills 9      as the test suite does
"""

import argparse
import contextlib
import json
import os
import random
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
from tqdm import tqdm

from conftest import train_process      # which puts the project on the import path
import prepare_data
import train
from model import read_checkpoint

SHAPE = ["--n_layer", "2", "--n_head", "2", "--n_embd", "96", "--block_size", "32", "--batch_tokens", "256", "--micro_batch",
         "4", "--dropout", "0.1", "--eval_blocks", "4", "--eval_every", "24", "--save_every", "2", "--device", "cpu", "--threads", "1"]


def being_written(out_dir: Path) -> set[str]:
    """The temporary names in a folder."""
    return {name for name in os.listdir(out_dir) if ".tmp-" in name} if out_dir.exists() else set()


def steps_logged(out_dir: Path) -> int:
    log = out_dir / "log.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def wait_for_a_moment(process, out_dir: Path, dice: random.Random):
    """Let a run go on until a moment drawn at random: one in six while it starts, two between steps, three in a writing."""
    kind = dice.choice(["starting", "running", "running", "writing", "writing", "writing"])
    if kind == "starting":
        return time.sleep(dice.uniform(0, 0.5))
    until = steps_logged(out_dir) + dice.randint(1, 8)
    while process.is_alive() and steps_logged(out_dir) < until:
        time.sleep(0.001)
    if kind == "running":
        return time.sleep(dice.uniform(0, 0.05))
    while process.is_alive() and not being_written(out_dir):
        pass
    time.sleep(dice.choice([0, dice.uniform(0, 0.01)]))


def soak(folder: Path, kills: int, seed: int) -> dict:
    """Kill a run so many times and let it end. Returns how many kills fell into a writing, and steps; raises where wrong."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    with contextlib.redirect_stdout(None):
        prepare_data.main([str(stdlib / "json"), str(stdlib / "email"), "--out_dir", str(folder / "data")])
    dice = random.Random(seed)
    flags = [*SHAPE, "--data", str(folder / "data"), "--steps", str(20 + 10 * kills), "--resume"]

    def start(name: str):
        return train_process([*flags, "--out_dir", folder / name], folder / f"{name}.txt")

    whole, out_dir, within, done = start("whole"), folder / "killed", 0, 0      # side by side
    bar = tqdm(total=kills, unit="kill", disable=None)
    while done < kills or 3 * within < kills and done < 2 * kills:      # some more where too few fell into a writing
        process = start("killed")
        wait_for_a_moment(process, out_dir, dice)
        if not process.is_alive():
            process.join()
            raise SystemExit(f"a run ended by itself, with status {process.exitcode}, before kill {done + 1}: "
                             f"{(folder / 'killed.txt').read_text()[-2000:]}")
        process.kill()
        process.join()
        done, within = done + 1, within + bool(being_written(out_dir))
        bar.update()
        bar.set_postfix_str(f"{within} while a checkpoint was written")
        for path in [*train.checkpoints(out_dir), *out_dir.glob("best.pt")] if out_dir.exists() else ():
            read_checkpoint(path)           # each whole, whenever the kill came
    bar.close()
    last = start("killed")
    last.join()
    whole.join()
    found, expected = read_checkpoint(out_dir / "ckpt.pt"), read_checkpoint(folder / "whole" / "ckpt.pt")
    if found["step"] != expected["step"]:
        raise SystemExit(f"ended at step {found['step']} of {expected['step']}: {(folder / 'killed.txt').read_text()[-2000:]}")
    for name, weight in expected["model"].items():
        if not torch.equal(weight, found["model"][name]):
            raise SystemExit(f"{name}: not the weights of the run that was let be")
    losses = [[json.loads(line).get("loss") for line in (folder / name / "log.jsonl").read_text().splitlines()
               if '"loss"' in line] for name in ("killed", "whole")]
    if losses[0] != losses[1]:
        raise SystemExit("the log does not hold each step's loss once, in order")
    return {"kills": done, "while_a_checkpoint_was_written": within, "steps": found["step"],
            "left_over": sorted(being_written(out_dir))}


def main(argv=None) -> dict:
    parser = argparse.ArgumentParser(description="Kill a training run at random moments and compare what comes of it.")
    parser.add_argument("--kills", type=int, default=100, help="times to send SIGKILL")
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = soak(Path(folder), args.kills, args.seed)
    if 3 * found["while_a_checkpoint_was_written"] < args.kills or found["left_over"]:
        raise SystemExit(f"not what was meant to be tried: {found}")
    print(f"{found['kills']} kills, {found['while_a_checkpoint_was_written']} of them while a checkpoint was written: "
          f"{found['steps']} steps later the weights are equal to the last bit")
    return found


if __name__ == "__main__":
    main()
