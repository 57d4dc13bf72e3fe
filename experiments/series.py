"""What the experiments share: series of runs of train.py that may be killed and started again, their logs and tables.

A run is in the making in runs/EXPERIMENT/NAME; when it is finished a short form of its log goes to
experiments/logs/EXPERIMENT/NAME.jsonl. From these all tables and plots in experiments/results are drawn.

A log's first line is as train.py wrote it, with the command. Its last line has the commands that make the run: only while they are
the job's is it finished. What they do not say they cannot tell: remove the logs that lean on a default before you change it, and all
logs if yours is another text. (Where a default was changed later, the last line names what it had been, by flags and by
variant.py's changes: the same run, in today's words.)
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

import prepare_data  # noqa: E402  (after the path is set)
from model import replaced  # noqa: E402

# The flags of every run at each size. At laptop size a run takes some minutes on one core.
SCALES = {
    "smoke": "--n_layer 2 --n_head 2 --n_embd 16 --block_size 32 --micro_batch 4 --batch_tokens 256 --eval_blocks 8 --steps 3",
    "laptop": "--n_layer 8 --n_head 3 --n_embd 96 --block_size 128 --micro_batch 16 --batch_tokens 2048 --eval_blocks 256 --steps 700",
    "124m": "--n_layer 12 --n_head 12 --n_embd 768 --block_size 1024 --n_directions 32 --micro_batch 16 --batch_tokens 524288 "
            "--eval_blocks 2048 --steps 9500 --warmup_steps 250",
    "350m": "--n_layer 24 --n_head 16 --n_embd 1024 --block_size 1024 --n_directions 32 --micro_batch 8 --batch_tokens 524288 "
            "--eval_blocks 2048 --steps 13500 --warmup_steps 350",
}
ON_GPUS = "torchrun --standalone --nproc_per_node 8"
TEXT_ON_GPUS = "fineweb-edu"
GPU_SCALES = ("124m", "350m")
NOT_YET, NOT_SEEN = "too few runs", "not seen at this size"
SEEDS = (1, 2, 3)                       # of what is reported
OPTIMIZERS = {"muon": "Muon", "adamw": "AdamW"}


class Job(NamedTuple):
    """A run."""

    name: str
    flags: str = ""                         # of train.py; they win over those of the scale
    text: str = "stdlib"                    # a --source of prepare_data.py
    changes: str = ""                       # of variant.py
    evaluations: tuple[str, ...] = ()       # when it is done, one each: flags of train.py --eval_only, or another program

    def commands(self, scale: str, data: str, out_dir: str) -> list[list[str]]:
        """What to run, one after the other, as arguments of python."""
        flags = {}
        for word in f"{SCALES[scale]} {self.flags}".split():
            if word.startswith("--"):
                flags[name := word] = []
            else:
                flags[name].append(word)
        if "--flop_budget" in flags:
            del flags["--steps"]
        words = [word for name, values in flags.items() for word in (name, *values)]
        program = ["experiments/variant.py", *self.changes.split(), "--"] if self.changes else ["train.py"]
        place = ["--data", f"{data}/{self.text}", "--out_dir", out_dir]
        others = [[each, *place] if each.endswith(".py") else [*program, *place, "--eval_only", *each.split()]
                  for each in self.evaluations]
        return [[*program, *place, *words], *others]


def parse_args(description: str, argv=None, runs: bool = True) -> argparse.Namespace:
    """The flags of an experiment; without `runs` of what has none, and only draws."""
    parser = prepare_data.Parser(description=description)
    parser.add_argument("--scale", choices=SCALES, default="laptop",
                        help="smoke: seconds, to see that all works; 124m, 350m: only with --draw and --print_commands")
    parser.add_argument("--runs", type=prepare_data.path_type, default=ROOT / "runs", help="folder for runs in the making")
    parser.add_argument("--out_dir", type=prepare_data.path_type, default=None,
                        help="folder for logs/ and results/; None: experiments/, but runs/SCALE/ where the scale is not laptop")
    if runs:
        parser.add_argument("--data", type=prepare_data.path_type, default=ROOT / "data", help="folder with a folder for each text")
        parser.add_argument("--at_once", type=prepare_data.positive_int, default=2, help="runs side by side, a thread each")
        parser.add_argument("--seconds", type=prepare_data.positive_int, default=None, help="begin no run after so many")
        parser.add_argument("--draw", action="store_true", help="run nothing: tables and plots from the logs that are there")
        parser.add_argument("--print_commands", action="store_true", help="print what to run on 8 GPUs, for 124M and 350M parameters")
    args = parser.parse_args(argv)
    for flag in ("runs", "out_dir"):
        if path := getattr(args, flag):
            there = next(each for each in (path, *path.parents) if each.exists())
            if not there.is_dir():
                parser.error(f"--{flag} {path}: {there} is a file; name a folder")
    if runs and args.scale in GPU_SCALES and not (args.draw or args.print_commands):
        parser.error(f"--scale {args.scale}: runs of this size are made by what --print_commands prints; then add --draw")
    args.runs = args.runs / args.scale
    out_dir = args.out_dir or (HERE if args.scale == "laptop" else args.runs)
    args.logs, args.results = out_dir / "logs", out_dir / "results"
    return args


def guarded(name: str, function, *args):
    """Call it; a user's mistake ends with one line and status 2, Ctrl-C with one line and status 130."""
    try:
        prepare_data.exit_on_user_error(function, *args)
    except KeyboardInterrupt:
        print(f"{name}: stopped; the same command goes on", file=sys.stderr)
        raise SystemExit(130) from None


def main(experiment: str, description: str, jobs, draw, argv=None):
    """The command line of an experiment: its runs, then `draw(logs, args)`.

    jobs: function of the scale, the list of runs.  draw: is given the logs by name.
    """
    args = parse_args(description, argv)
    if args.print_commands:
        guarded(experiment, print_commands, experiment, jobs)
    else:
        guarded(experiment, run_and_draw, experiment, jobs_at(args.scale, jobs), draw, args)


def run_and_draw(experiment: str, jobs: list[Job], draw, args):
    if args.scale in GPU_SCALES:
        collect(experiment, jobs, args)
    elif not args.draw:
        run_all(experiment, jobs, args)
    draw(finished_logs(experiment, jobs, args), args)


def print_commands(experiment: str, jobs):
    for scale in GPU_SCALES:
        print(f"# {scale}; the text: python prepare_data.py --source {TEXT_ON_GPUS} --encoding gpt2 --out_dir data/{TEXT_ON_GPUS}")
        for job in jobs_at(scale, jobs):
            training, *evaluations = job.commands(scale, "data", f"runs/{scale}/{experiment}/{job.name}")
            print(ON_GPUS, *training, "--resume")
            for words in evaluations:
                print("python" if words[0] in job.evaluations else ON_GPUS, *words)
        print(f"# tables and plots of what is finished: python experiments/{experiment}.py --scale {scale} --draw")


def jobs_at(scale: str, jobs) -> list[Job]:
    """jobs(scale); on GPUs they read another text."""
    return [job._replace(text=TEXT_ON_GPUS) if scale in GPU_SCALES else job for job in jobs(scale)]


def collect(experiment: str, jobs: list[Job], args):
    """Leave the logs of the runs that the printed commands have made."""
    for job in jobs:
        out_dir = args.runs / experiment / job.name
        entries = read_log(out_dir / "log.jsonl")
        due = {"val_loss", *("stream" for program in job.evaluations if program.endswith(".py"))}
        if all(any(key in entry for entry in entries) for key in due):
            write_log(job, entries, experiment, args)


class Children:
    """The programs that are running. To stop ends them, and lets no other begin; train.py saves before it ends."""

    def __init__(self):
        self.running, self.lock, self.stopped = set(), threading.Lock(), False

    def run(self, words: list[str]):
        """Run a program of this project to its end. UserError with its last line where it fails."""
        with self.lock:
            if self.stopped:
                raise KeyboardInterrupt
            child = subprocess.Popen([sys.executable, *words, "--threads", "1"], cwd=ROOT, stdout=subprocess.DEVNULL,
                                     stderr=subprocess.PIPE, text=True)
            self.running.add(child)
        error = child.communicate()[1]
        with self.lock:
            self.running.discard(child)
        if self.stopped:
            raise KeyboardInterrupt
        if child.returncode:
            raise prepare_data.UserError(f"{' '.join(words)}: ended with status {child.returncode}: "
                                         f"{(error.splitlines() or ['without a word'])[-1]}")

    def stop(self):
        with self.lock:
            self.stopped = True
            for child in self.running:
                child.terminate()


def run_all(experiment: str, jobs: list[Job], args):
    """Do what is not done: a finished run has its log, an unfinished one goes on from its checkpoint.

    A run that fails does not keep the others from running. UserError at the end, with what each had to say.
    """
    begun, children, failures = time.monotonic(), Children(), []
    done = finished_logs(experiment, jobs, args)
    to_do = [job for job in jobs if job.name not in done]
    for text in sorted({job.text for job in to_do}):
        if not (args.data / text).exists():
            prepare_data.main(["--source", text, "--out_dir", str(args.data / text)])
    bar = tqdm(total=len(jobs), initial=len(done), unit="run", desc=experiment, dynamic_ncols=True)

    def run(job: Job):
        if args.seconds is None or time.monotonic() - begun < args.seconds:
            try:
                loss = run_one(job, args, children, experiment)
            except prepare_data.UserError as error:
                failures.append(str(error))
                return
            bar.set_postfix_str(f"{job.name}: {loss:.4f}")
            bar.update()

    def interrupt(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    with bar, ThreadPoolExecutor(args.at_once) as pool:
        try:
            for waited in [pool.submit(run, job) for job in to_do]:
                waited.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            children.stop()
            raise
    if failures:
        raise prepare_data.UserError(f"{len(failures)} of {len(to_do)} runs failed: {'; '.join(failures)}")


def run_one(job: Job, args, children: Children, experiment: str) -> float:
    """Train, evaluate, and leave the log. Returns the validation loss. UserError where its folder has another run, or an unfinished one."""
    out_dir = args.runs / experiment / job.name
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    training, *evaluations = job.commands(args.scale, os.path.relpath(args.data, ROOT), os.path.relpath(out_dir, ROOT))
    training += ["--resume"]
    path = out_dir / "log.jsonl"
    for entry in read_log(path)[:1]:        # --resume would go on with the flags it began with
        if entry["command"][:len(training)] != training:
            raise prepare_data.UserError(f"{out_dir}: holds a run with other flags; remove it")
    children.run(training)
    if not any("val_loss" in entry for entry in read_log(path)):
        raise prepare_data.UserError(f"{job.name}: was stopped before its end; the same command goes on")
    for words in evaluations:
        children.run(words)
    entries = read_log(path)
    write_log(job, entries, experiment, args)
    return last(entries, "val_loss")


def write_log(job: Job, entries: list[dict], experiment: str, args):
    """The short form of a finished run's log: a step in 20, floats rounded."""
    path, last_step = log_path(experiment, job, args), max(entry.get("step", 0) for entry in entries)
    kept = [entry for entry in entries if "loss" not in entry or entry["step"] % 20 == 0 or entry["step"] == last_step]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(rounded(entry)) for entry in (*kept, {"finished": job.commands(args.scale, "data", "runs")})]
    with replaced(path) as whole:
        whole.write_text("\n".join(lines) + "\n")


def read_log(path: Path) -> list[dict]:
    """The entries of a file of JSON lines, none where there is no file. UserError where it is damaged."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except FileNotFoundError:
        return []
    except ValueError:
        raise prepare_data.UserError(f"{path}: not whole lines of JSON; remove it, and its run is made again") from None


def rounded(value):
    """Its floats to six digits, which is more than a seed leaves unchanged."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def log_path(experiment: str, job: Job, args) -> Path:
    return args.logs / experiment / f"{job.name}.jsonl"


def finished_logs(experiment: str, jobs: list[Job], args) -> dict[str, list[dict]]:
    """By name the entries of each log of a run that is finished, and was run as the job says now."""
    logs = {}
    for job in jobs:
        entries = read_log(log_path(experiment, job, args))
        if entries and entries[-1].get("finished") == job.commands(args.scale, "data", "runs"):
            logs[job.name] = entries
    return logs


def last(log: list[dict], key: str):
    """The last value of a key."""
    return next(entry[key] for entry in reversed(log) if key in entry)


def by_seed(logs: dict, name: str, value) -> list[float]:
    """value(log) of each seed's run, up to the first that is not finished; runs are named NAME-seedN."""
    finished = itertools.takewhile(logs.__contains__, (f"{name}-seed{seed}" for seed in SEEDS))
    return [value(logs[each]) for each in finished]


def subtract(these: list[float], those: list[float]) -> list[float]:
    """Seed by seed."""
    return [this - that for this, that in zip(these, those)]


def spread(values: list[float], digits: int = 4) -> str:
    """Mean and half the range over seeds: 1.2345 ± 0.0050."""
    if not values:
        return "–"
    half = (max(values) - min(values)) / 2
    return f"{statistics.mean(values):.{digits}f}" + (f" ± {half:.{digits}f}" if len(values) > 1 else "")


def by(differences: list[float], above: str, below: str) -> str:
    """In words: `above` 0.0123 ± 0.0045, or `below` where the mean is negative."""
    negative = bool(differences) and statistics.mean(differences) < 0
    return f"{below if negative else above} {spread([-each if negative else each for each in differences])}"


def verdict(*conditions: list[float]) -> str:
    """What is to be said of a claim that these numbers, under each condition one a seed, are above 0.

    It is seen only where under each condition their mean is larger than their whole range, three seeds at least; opposite where it is
    below 0 by as much. Of three draws around 0 that is so for one in 25 on either side; of three around one standard deviation
    only for a quarter, around two for two thirds: what is not seen may be there.
    """
    if min(map(len, conditions)) < 3:
        return NOT_YET

    def alone(differences):
        mean, width = statistics.mean(differences), max(differences) - min(differences)
        return "seen" if mean > width else "opposite" if mean < -width else NOT_SEEN

    said = set(map(alone, conditions))
    return said.pop() if len(said) == 1 else NOT_SEEN


def table(path: Path, head: list[str], rows: list[list]) -> str:
    """Write a Markdown table, and return it."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return "\n".join(lines)


def plot(path: Path, lines: dict[str, tuple[list, list[list[float]]]], x: str, y: str, log_x: bool = False):
    """Draw lines, each of x values and for each of them the values of all seeds: their mean, and their range as a band."""
    lines = {label: there for label, (xs, values) in lines.items() if (there := [pair for pair in zip(xs, values) if pair[1]])}
    if not lines:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{path.name}: not drawn, needs matplotlib; pip install matplotlib", file=sys.stderr)
        return
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for label, there in lines.items():
        xs, values = zip(*there)
        line, = axes.plot(xs, [statistics.mean(each) for each in values], marker="o", markersize=3, label=label)
        axes.fill_between(xs, list(map(min, values)), list(map(max, values)), alpha=0.2, color=line.get_color(), linewidth=0)
    axes.set(xlabel=x, ylabel=y)
    if log_x:
        axes.set_xscale("log")
        axes.set_xticks(xs, xs)             # the values themselves, in place of powers of ten
        axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png", metadata={"Software": None})
