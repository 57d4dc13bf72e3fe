"""Train a NAG Transformer, or its pre-norm twin, on token shards.

    python train.py                                          a small model on this Python's own library: some 4 minutes
    python train.py --resume                                 go on with the run in out/, to the last bit
    python train.py --eval_only --skip_rates 0,0.25,0.5      its loss at several depths
    python train.py --residual prenorm --out_dir out-pre     the baseline
    python train.py --skip_rate 0.25 --flop_budget 2e13 --out_dir out-25      every layer skips a quarter of the tokens
    python train.py --init_from out/ckpt.pt --data data/mine --out_dir out-mine --steps 200        fine-tune
    torchrun --standalone --nproc_per_node 8 train.py        the same run, shared by the 8 GPUs of a node

A run is a pure function of its flags: batch, skip rate and random numbers of a step depend on (--seed, step) alone. It
leaves out_dir/ckpt.pt, best.pt (that of the lowest validation loss), and log.jsonl, one JSON object a line.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import prepare_data
from prepare_data import (GPT2_META, NoRanks, Parser, UserError, check_meta, encoding_from_meta, escaped,
                          exit_on_user_error, find_shards, forgive_output, non_negative_float, non_negative_int, number_type,
                          one_line, path_text, path_type, positive_float, positive_int, read_meta, seed_number, skip_rates)

DEFAULT_DATA = "data/stdlib"
LARGEST_STEP = 3600                     # seconds that one step may take; more is a slip of the finger
DEFAULT_SKIP_RATE = "random:0.5"        # one checkpoint for every rate; see the README's table for what it costs
MODEL_FLAGS = ("residual", "n_layer", "n_head", "n_embd", "block_size", "n_directions", "dropout")
RUN_FLAGS = MODEL_FLAGS + ("seed", "batch_tokens", "micro_batch", "optimizer", "choose")     # a run keeps these from start to end
PROGRESS = {"step": int, "flops": float, "best_val_loss": float}        # how far a run has come, in its checkpoint


thread_count = number_type(int, lambda value: 1 <= value <= 1024, "a whole number from 1 to 1024")


def skip_rate_text(text: str) -> str:
    """A checked --skip_rate, as text: `rates_at` reads it."""
    skip_rates(text.removeprefix("random:"))
    if text.startswith("random:") and "," in text:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected one number after random:")
    return text


def flag_parser() -> Parser:
    """All flags."""
    parser = Parser(description="Train a NAG Transformer or its pre-norm baseline.")
    data = parser.add_argument_group("data")
    data.add_argument("--data", type=path_text, default=DEFAULT_DATA,
                      help="folder or glob of token shards; the default is made if missing")
    data.add_argument("--val_data", type=path_text, default=None,
                      help="folder or glob of validation shards; None: the *val* ones of --data")
    data.add_argument("--out_dir", type=path_type, default=Path("out"), help="folder for the checkpoint and the log")
    origin = data.add_mutually_exclusive_group()
    origin.add_argument("--init_from", type=path_type, default=None, metavar="CKPT",
                        help="start from these weights with a new optimizer: fine-tune")
    origin.add_argument("--resume", action="store_true",
                        help="go on with the run in --out_dir, with its flags; start one where there is none")
    model = parser.add_argument_group("model")
    model.add_argument("--residual", choices=("nag", "prenorm"), default="nag", help="residual stream")
    model.add_argument("--n_layer", type=positive_int, default=8, help="blocks; each is an attention and an MLP layer")
    model.add_argument("--n_head", type=positive_int, default=4, help="attention heads")
    model.add_argument("--n_embd", type=positive_int, default=128, help="width")
    model.add_argument("--block_size", type=positive_int, default=256, help="context, tokens")
    model.add_argument("--n_directions", type=positive_int, default=16, help="preferred directions of each modulator")
    model.add_argument("--dropout", type=non_negative_float, default=0.0, help="share dropped, in [0, 1)")
    depth = parser.add_argument_group("depth")
    depth.add_argument("--skip_rate", type=skip_rate_text, default=None, metavar="S|S,S,…|random:S",
                       help="share of the tokens that each layer skips: a number, one a layer, or drawn anew for each step "
                            f"from a grid up to S; None: {DEFAULT_SKIP_RATE}, or 0 with prenorm")
    depth.add_argument("--skip_warmup_steps", type=non_negative_int, default=0,
                       help="steps in which the rate rises from 0, in 8 stairs")
    depth.add_argument("--allocation", choices=("per_layer", "global"), default="per_layer",
                       help="each layer skips at the rate, or layers skip by their gain, at the rate on average")
    depth.add_argument("--choose", choices=("modulator", "random", "static"), default="modulator",
                       help="who skips; random tokens and static, whole layers (--eval_only), are controls")
    training = parser.add_argument_group("training")
    length = training.add_mutually_exclusive_group()
    length.add_argument("--steps", type=positive_int, default=600, help="optimizer steps")
    length.add_argument("--flop_budget", type=positive_float, default=None, metavar="FLOPS",
                        help="train until so many FLOPs are executed, forward and backward, in place of --steps")
    training.add_argument("--batch_tokens", type=positive_int, default=4096, help="tokens of one step")
    training.add_argument("--micro_batch", type=positive_int, default=None,
                          help="sequences in memory at a time; None: what divides a process's share of the batch, at most 16")
    training.add_argument("--optimizer", choices=("muon", "adamw"), default="muon", help="for the branches' matrices")
    training.add_argument("--learning_rate", type=non_negative_float, default=None,
                          help="peak, for embeddings and norms; None: 4e-3, 8e-3 (adamw, prenorm)")
    training.add_argument("--matrix_learning_rate", type=non_negative_float, default=None,
                          help="peak, for the branches' matrices; None: 0.02 (muon), 6e-3 (adamw)")
    training.add_argument("--gate_learning_rate", type=non_negative_float, default=4e-3, help="peak, for modulators and α")
    training.add_argument("--min_lr", type=non_negative_float, default=0.1, help="last learning rate, as a share of the peak")
    training.add_argument("--warmup_steps", type=non_negative_int, default=None,
                          help="steps of linear warm-up; None: 50, or a quarter of a run of under 200 steps")
    training.add_argument("--weight_decay", type=non_negative_float, default=0.1, help="of the branches' matrices")
    training.add_argument("--grad_clip", type=positive_float, default=1.0, help="largest norm of the gradient")
    training.add_argument("--seed", type=seed_number, default=1, help="of weights, batches and dropout")
    checks = parser.add_argument_group("checks")
    checks.add_argument("--eval_every", type=positive_int, default=200, help="steps from one evaluation to the next")
    checks.add_argument("--eval_blocks", type=positive_int, default=128, help="validation blocks, the same each time")
    checks.add_argument("--eval_only", action="store_true",
                        help="train nothing: evaluate --init_from, or the checkpoint in --out_dir, at --skip_rates")
    dial = checks.add_mutually_exclusive_group()
    dial.add_argument("--skip_rates", type=skip_rates, default=[0.0, 0.25, 0.5], metavar="S,S,…",
                      help="rates of --eval_only and of the table at the end of a run")
    dial.add_argument("--depth_budget", type=positive_float, default=None, metavar="LAYERS",
                      help="for --eval_only: one rate, said as layers a token, on average, of 2·n_layer")
    checks.add_argument("--sample_every", type=positive_int, default=None, help="steps between samples; None: at the end")
    checks.add_argument("--save_every", type=positive_int, default=None, help="steps between checkpoints; None: --eval_every")
    checks.add_argument("--keep", type=positive_int, default=2,
                        help="checkpoints to keep, the newest in ckpt.pt; best.pt, by validation loss, is kept besides")
    system = parser.add_argument_group("system")
    system.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    system.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
                        help="of matrix products; auto: bfloat16 where the GPU has it")
    system.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None,
                        help="torch.compile; None: on CUDA only")
    system.add_argument("--kernels", choices=("auto", "torch", "triton"), default="auto",
                        help="of the residual stream; auto: Triton on a GPU that has it, else PyTorch")
    system.add_argument("--fsdp", action=argparse.BooleanOptionalAction, default=False,
                        help="under torchrun, share the model's weights among the processes (FSDP2), for a model that "
                             "outgrows one GPU; with --optimizer adamw")
    system.add_argument("--activation_checkpointing", action=argparse.BooleanOptionalAction, default=False,
                        help="keep only what enters each layer and compute it again backward: less memory, more time")
    system.add_argument("--threads", type=thread_count, default=None, help="CPU threads; None: PyTorch's choice")

    return parser


def parse_args(argv=None) -> argparse.Namespace:
    """All flags; `given` holds those that were written out, which a resumed run tells from its own."""
    parser = flag_parser()
    args = parser.parse_args(argv)
    for action in parser._actions:      # a second pass without defaults sees what was written out
        action.default = argparse.SUPPRESS
    args.given = sorted(set(vars(parser.parse_args(argv))))
    return args


def under_torchrun() -> bool:
    """Whether torchrun has started this process, as one of WORLD_SIZE with their number in RANK."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    return int(os.environ["RANK"]) if under_torchrun() else 0


def n_ranks() -> int:
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else 1


def check_args(args):
    """Refuse flags that contradict one another, and settle the micro-batch."""
    if args.n_embd % (2 * args.n_head):
        raise UserError(f"--n_embd {args.n_embd} --n_head {args.n_head}: the width must be a multiple of twice the heads; "
                        f"try --n_embd {-(-args.n_embd // (2 * args.n_head)) * 2 * args.n_head}")
    if args.dropout >= 1:
        raise UserError(f"--dropout {args.dropout}: expected at least 0 and below 1")
    if args.min_lr > 1:
        raise UserError(f"--min_lr {args.min_lr}: a share of the peak rate, expected at most 1; try --min_lr 0.1")
    if args.warmup_steps is not None and not args.flop_budget and args.warmup_steps > args.steps:
        raise UserError(f"--warmup_steps {args.warmup_steps}: longer than --steps {args.steps}; the rate would never peak")
    n_rates = len(args.skip_rate.split(",")) if args.skip_rate else 1
    if n_rates not in (1, 2 * args.n_layer):
        raise UserError(f"--skip_rate {args.skip_rate}: {n_rates} numbers, expected one, or {2 * args.n_layer} "
                        f"(2·n_layer), one a layer")
    if args.residual == "prenorm" and args.skip_rate and max(skip_rates(args.skip_rate.removeprefix("random:"))):
        raise UserError(f"--skip_rate {args.skip_rate}: the pre-norm baseline has no modulator to skip by; leave it out")
    if args.residual == "prenorm" and args.choose == "random":
        raise UserError("--choose random: the pre-norm baseline skips no tokens; leave it out")
    if args.depth_budget is not None and not args.eval_only:
        raise UserError(f"--depth_budget {args.depth_budget:g}: for --eval_only; in training give --skip_rate")
    if args.choose == "static" and not args.eval_only:
        raise UserError("--choose static: a control for --eval_only; a shallower model is --n_layer")
    if args.fsdp and args.optimizer == "muon":
        raise UserError("--fsdp: Muon orthogonalises whole matrices, which no process has; add --optimizer adamw")
    if args.fsdp and not under_torchrun():
        raise UserError("--fsdp: shares a model among processes, expected torchrun; start with: torchrun --standalone "
                        "--nproc_per_node N train.py …")
    sequences, rest = divmod(args.batch_tokens, args.block_size * n_ranks())
    if args.micro_batch is None and not rest:
        args.micro_batch = max(size for size in range(1, 17) if sequences % size == 0)
    share = (args.micro_batch or 1) * args.block_size * n_ranks()
    if args.batch_tokens % share and not (args.eval_only and args.micro_batch):
        below, above = args.batch_tokens // share * share, -(-args.batch_tokens // share) * share
        factors = ["--micro_batch"] * bool(args.micro_batch) + ["--block_size"] + [f"{n_ranks()} processes"] * (n_ranks() > 1)
        nearest = [str(below)] * bool(below) + [str(above)]
        smaller = "" if below or not args.micro_batch else ", or a smaller --micro_batch"
        raise UserError(f"--batch_tokens {args.batch_tokens}: expected a multiple of {' × '.join(factors)} = {share}; "
                        f"try {' or '.join(nearest)}{smaller}")


if __name__ == "__main__":      # answer --help and mistakes in flags before the seconds that importing torch takes
    forgive_output()
    flags = parse_args()
    if not (flags.resume or flags.init_from or flags.eval_only):        # else the flags are completed from a checkpoint
        exit_on_user_error(check_args, flags)
    # Threads that wait for one another spin, which on a machine with anything else to do makes a step 10 times slower.
    # A short spin costs nothing where the machine is ours alone.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import sample

from model import (AboveCut, Config, ModelError, NAGTransformer, RandomShare, StaticDrop, TopShare, angle_between, choose_device,
                   kept_count, memory_of, model_from, rate_from_depth, read_checkpoint, replaced, save_checkpoint)

# Dense bfloat16 FLOP/s as the makers state them, for the share that is reached (MFU).
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "RTX 3090": 71e12, "RTX 4090": 165e12}


# ---------------------------------------------------------------------------------------------------------------------
# Processes: one, or as many as torchrun has started. Each takes its micro-batches of a step; the first writes and prints


@contextlib.contextmanager
def processes(device: torch.device):
    """Join the other processes, if torchrun has started any."""
    if not under_torchrun():
        yield
        return
    # Processes that torchrun has started anew would find the addresses of the dead in its store: each start has its own part
    # of it. Of several nodes each counts its own starts, so these share one (see the README).
    store, *_ = next(dist.rendezvous("env://"))
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" else "0"
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.PrefixStore(f"start {start}", store),
                            rank=rank(), world_size=n_ranks(), device_id=device if device.type == "cuda" else None)
    try:
        yield
    finally:
        dist.destroy_process_group()


def tell(text: str):
    """Print, once for all processes."""
    if rank() == 0:
        print(text)


def note(text: str):
    """A line on standard error, once for all processes; control characters in what it repeats from a file do nothing."""
    if rank() == 0:
        print(one_line(f"note: {text}"), file=sys.stderr)


def summed(values: list[float], device) -> list[float]:
    """The sum of each value over all processes."""
    if n_ranks() == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


def agreed(value):
    """The first process's value, in all of them."""
    values = [value]
    if n_ranks() > 1:
        dist.broadcast_object_list(values)
    return values[0]


def gathered(value):
    """Nested dicts and lists with whole tensors on the CPU in place of sharded ones; in all processes, one at a time."""
    if isinstance(value, dict):
        return {key: gathered(item) for key, item in value.items()}
    if isinstance(value, list):
        return [gathered(item) for item in value]
    if not isinstance(value, DTensor):
        return value
    whole = value.full_tensor()
    return whole.cpu() if rank() == 0 else None


# ---------------------------------------------------------------------------------------------------------------------
# Data: which blocks make up a step


def shuffled(index, n: int, seed: int):
    """Where the blocks stand: a bijection of 0 … n−1 for each epoch, without a table of positions in memory.

    index: int64 array, counting on over epochs: epoch e holds e·n … e·n + n − 1.  Returns block numbers in [0, n).
    A Feistel network is a bijection of 4^h numbers whatever its round function is; where it leads outside of [0, n) it
    is applied again until it leads inside.
    """
    epoch, position = (np.asarray(index) // n).astype(np.uint64), (np.asarray(index) % n).astype(np.uint64)
    half = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))
    mask = (np.uint64(1) << half) - np.uint64(1)

    def mixed(x):       # the finaliser of SplitMix64: each bit of x moves half the bits of the result
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    key = mixed(mixed(np.uint64([seed]) + np.uint64(0x9E3779B97F4A7C15)) + epoch)
    outside = np.ones(position.shape, bool)
    while outside.any():
        left, right = position >> half, position & mask
        for round_number in range(1, 7):
            left, right = right, left ^ (mixed(right + mixed(key + np.uint64(round_number))) & mask)
        position = np.where(outside, (left << half) | right, position)
        outside = position >= n
    return position.astype(np.int64)


class Blocks:
    """A text as blocks of block_size tokens, each with the token that follows it."""

    def __init__(self, shards, block_size: int, vocab_size: int, flag: str):
        self.shards, self.block_size, self.vocab_size, self.flag = shards, block_size, vocab_size, flag
        self.n_blocks = (len(shards) - 1) // block_size
        if self.n_blocks < 1:
            raise UserError(f"{flag}: {len(shards)} tokens, but one block needs {block_size + 1} (--block_size "
                            f"{block_size} and the token after); lower --block_size or add text")

    def read(self, numbers, device):
        """Blocks by number -> tokens, targets: (len(numbers), block_size) int64 each, the targets one token ahead."""
        rows = np.stack([self.shards.read(number * self.block_size, self.block_size + 1) for number in numbers.tolist()])
        if rows.max() >= self.vocab_size:
            row, column = np.argwhere(rows >= self.vocab_size)[0]
            place = self.shards.place(int(numbers[row]) * self.block_size + int(column))
            raise UserError(f"{self.flag}: token {rows[row, column]} at {place}, but the encoding has {self.vocab_size} ids; "
                            f"prepare the text again, or keep its meta.json beside the shards")
        rows = torch.from_numpy(rows).to(device)
        return rows[:, :-1], rows[:, 1:]

    def micro_batch(self, seed: int, first: int, count: int, device):
        """The sequences first … first + count − 1 of the run: a pure function of the seed, each block once an epoch."""
        return self.read(shuffled(np.arange(first, first + count), self.n_blocks, seed), device)

    def check_ids(self):
        """UserError for an id beyond the vocabulary in 256 blocks from all over the text; the others as they are read."""
        self.read(self.spread(256), "cpu")

    def spread(self, count: int):
        """`count` block numbers evenly over the text, or all of them: what each evaluation reads."""
        count = min(count, self.n_blocks)
        return np.arange(count) * self.n_blocks // count


def encoding_text(meta: dict) -> str:
    """The encoding of a data set or checkpoint, for a message."""
    ranks = f" (ranks {hashlib.sha256(meta['ranks'].encode()).hexdigest()[:8]})" if "ranks" in meta else ""
    return f"encoding {meta['encoding']} with {meta['vocab_size']} ids{ranks}"


def check_alike(flag: str, found: dict, expected: dict, whose: str):
    """UserError if the ids of a data set do not mean what they should."""
    if any(found.get(key) != expected.get(key) for key in ("encoding", "vocab_size", "end_of_text", "ranks")):
        assumed = " (assumed, as there is no meta.json)" if found == GPT2_META else ""
        raise UserError(f"{flag}: {encoding_text(found)}{assumed}, but {whose} {encoding_text(expected)}; prepare the text with "
                        f"--encoding {expected['encoding']}")


def open_blocks(paths, args, meta: dict, flag: str) -> Blocks:
    """The blocks of some shards, whose type must have room for the vocabulary."""
    shards = prepare_data.Shards(paths)
    room = 2 ** (8 * shards.dtype.itemsize)
    if meta["vocab_size"] > room:
        raise UserError(f"{flag}: {shards.paths[0]} holds tokens of {shards.dtype.itemsize} bytes, up to {room:,} ids, but "
                        f"meta.json says {meta['vocab_size']:,} ids; put the meta.json that belongs to the shards beside them")
    blocks = Blocks(shards, args.block_size, meta["vocab_size"], flag)
    blocks.check_ids()
    return blocks


def open_data(args, meta: dict | None = None):
    """The training and validation blocks, and the meta of their encoding; the default data set is made if missing.

    meta: of the checkpoint that the run goes on from or starts from.
    """
    if rank() == 0 and args.data == DEFAULT_DATA and not Path(args.data).exists():
        print(f"{args.data} does not exist: preparing it from this Python's standard library")
        prepare_data.main(["--source", "stdlib", "--out_dir", args.data])
    agreed(None)        # the others wait until it is there
    train_paths = find_shards(args.data, "train")
    val_paths = find_shards(args.val_data or args.data, "val")
    found, val_meta = read_meta(train_paths[0].parent), read_meta(val_paths[0].parent)
    val_flag = f"--val_data {args.val_data or args.data}"
    check_alike(val_flag, val_meta, found, f"--data {args.data} has")
    if meta:
        check_alike(f"--data {args.data}", found, meta, "the checkpoint has")
        if args.resume and found.get("sha256") != meta.get("sha256"):
            tell(f"note: the shards of --data {args.data} are not those that this run has been trained on")
    train, val = open_blocks(train_paths, args, found, f"--data {args.data}"), open_blocks(val_paths, args, found, val_flag)
    for data, split, blocks, its_meta in ((args.data, "train", train, found),
                                          (args.val_data or args.data, "val", val, val_meta)):
        if Path(data).is_dir():         # a glob may choose among the shards
            prepare_data.check_complete(blocks.shards, Path(data), split, its_meta)
    return train, val, found


def encoding_if_there(meta: dict):
    """The encoding of the data; None, and a line that says so, where its ranks cannot be had: training does without."""
    try:
        return encoding_from_meta(meta)
    except NoRanks as error:
        note(f"{error}. Without them there are no bits per byte and no samples.")
        return None


# ---------------------------------------------------------------------------------------------------------------------
# Schedules: pure functions of the step


def learning_rate_factor(step: int, progress: float, warmup: int, min_lr: float) -> float:
    """Learning rate of a step as a share of its peak: a cosine over the run down to min_lr, with a linear warm-up."""
    cosine = min_lr + (1 - min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return cosine * min(1.0, (step + 1) / max(1, warmup))


def rates_at(step: int, args) -> list[float]:
    """Skip rate of each layer in a step, before --allocation.

    A rate moves between few values, since each is a shape to compile: 8 stairs of the warm-up, 6 random rates.
    """
    risen = min(1.0, step * 8 // args.skip_warmup_steps / 8) if args.skip_warmup_steps else 1.0
    if args.skip_rate.startswith("random:"):
        # Each 6 steps in a row have each of the 6 rates once: their mean is exact and the FLOPs even.
        drawn = shuffled(np.array([step]), 6, args.seed).item()
        rates = [float(args.skip_rate.removeprefix("random:")) * min(drawn, math.floor(5 * risen)) / 5]
    else:
        rates = [risen * rate for rate in skip_rates(args.skip_rate)]
    return rates * (2 * args.n_layer) if len(rates) == 1 else rates


def typical_rates(args) -> list[float]:
    """The rates at which a trained model is evaluated and sampled unless another is asked for: of random ones the mean."""
    drawn = args.skip_rate.startswith("random:")
    rates = [float(args.skip_rate.removeprefix("random:")) / 2] if drawn else skip_rates(args.skip_rate)
    return rates * (2 * args.n_layer) if len(rates) == 1 else rates


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


class Evaluator:
    """Measures a model on fixed blocks: the same validation blocks each time, thresholds from the same training blocks."""

    def __init__(self, model, args, train_blocks: Blocks, val_blocks: Blocks, token_bytes, autocast):
        self.model, self.args, self.val_blocks, self.token_bytes = model, args, val_blocks, token_bytes
        self.device, self.autocast = next(model.parameters()).device, autocast
        self.numbers = val_blocks.spread(args.eval_blocks)
        n_calibration = max(1, 8192 // args.block_size)         # enough tokens that a quantile is known to half a percent
        self.calibration, _ = train_blocks.read(train_blocks.spread(n_calibration), self.device)

    @torch.no_grad()
    def refresh_cuts(self):
        """Measure the threshold table of a NAG model anew, and settle the rates that sampling skips at by default."""
        if self.args.residual != "nag":
            return
        self.model.eval()
        with self.autocast():
            self.model.measure_table(self.calibration)
            self.model.set_default_depth(self.calibration, self.allocated(typical_rates(self.args)))
        self.model.train()
        for buffer in self.model.buffers():         # equal already, but for what a GPU may round differently
            buffer.copy_(agreed(buffer.cpu()))

    def allocated(self, rates: list[float]) -> list[float]:
        """The rates as --allocation distributes them."""
        if self.args.allocation == "global" and len(set(rates)) == 1 and any(rates) and self.model.can_skip():
            return self.model.global_rates(rates[0])
        return rates

    def depth(self, rates: list[float]):
        """Who runs at these rates, by --choose."""
        if not any(rates):
            return None
        if self.args.choose == "random":
            return RandomShare(rates)
        if self.args.choose == "static":
            angles = self.layer_angles()
            return StaticDrop(sorted(range(len(angles)), key=angles.__getitem__)[:round(sum(rates))])
        if len(set(rates)) > 1 and self.model.can_skip():       # the table's rows are for equal rates: measure these
            self.model.eval()
            with self.autocast():
                cuts = agreed(self.model.measured_cuts(self.calibration, rates))
            self.model.train()
            return AboveCut([cut if rate else -math.inf for rate, cut in zip(rates, cuts)])
        return self.model.cuts_for(rates)

    @torch.no_grad()
    def layer_angles(self) -> list[float]:
        """Mean angle between the stream before and after each layer at full depth, on the calibration blocks."""
        angles = {}
        def watch(layer, before, after, rows):
            angles[layer] = angle_between(before.direction, after.direction).mean().item()
        self.model.eval()
        with self.autocast():
            self.model.run_layers(self.calibration, watch=watch)
        self.model.train()
        return agreed([angles[layer] for layer in range(len(self.model.layers))])

    @torch.no_grad()
    def __call__(self, depth=None) -> dict:
        """Validation loss in nats a token and bits a byte (None where bytes are unknown), and what each layer did.

        kept_share: of the tokens, for each layer; None for a layer left out.  gain, angle (radians): means over these,
        None in the baseline.  flops_share: executed FLOPs against full depth.
        """
        model, n_tokens = self.model, len(self.numbers) * self.args.block_size
        ran, gain, angle = ([0.0] * len(model.layers) for _ in range(3))
        nats = bytes_scored = 0.0

        def watch(layer, before, after, rows):
            count = before.direction[..., 0].numel() if rows is None else len(rows.kept)
            ran[layer] += count
            if before.log_norm is not None:     # the norm's growth tells the realised gain, and so the angle
                realised = torch.expm1(2 * (after.log_norm - before.log_norm)).clamp_min(0).sqrt()
                gain[layer] += realised.sum().item()
                angle[layer] += realised.atan().sum().item()

        model.eval()
        batches = [self.numbers[start:start + self.args.micro_batch]
                   for start in range(0, len(self.numbers), self.args.micro_batch)]
        for turn in range(-(-len(batches) // n_ranks())):
            batch = turn * n_ranks() + rank()
            counts = batch < len(batches)       # a sharded model needs all processes in each pass, also in the last turn
            torch.manual_seed(hash((self.args.seed, batch)) % 2**63)        # for --choose random
            tokens, targets = self.val_blocks.read(batches[batch % len(batches)], self.device)
            with self.autocast():
                logits = model(tokens, depth, watch=watch if counts else None)
            if not counts:
                continue
            nats += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
            if self.token_bytes is not None:
                bytes_scored += float(self.token_bytes[targets.cpu().numpy()].sum())
        model.train()
        L = len(ran)
        nats, bytes_scored, *each = summed([nats, bytes_scored, *ran, *gain, *angle], self.device)
        ran, gain, angle = each[:L], each[L:2 * L], each[2 * L:]
        kept = [None if depth is not None and depth.drops(l) else ran[l] / n_tokens for l in range(len(ran))]
        means = [[total / count if count else 0.0 for total, count in zip(totals, ran)] if model.config.residual == "nag"
                 else None for totals in (gain, angle)]
        return {"val_loss": nats / n_tokens, "bits_per_byte": nats / math.log(2) / bytes_scored if bytes_scored else None,
                "kept_share": kept, "gain": means[0], "angle": means[1],
                "flops_share": model.flops_per_token(kept) / model.flops_per_token()}

    def dial(self, log) -> str:
        """Evaluate at each of --skip_rates; returns a table, and logs its rows."""
        lines = ["skip rate   layers run    FLOPs   validation loss   bits per byte"]
        for rate in self.args.skip_rates:
            found = self(self.depth(self.allocated([rate] * len(self.model.layers))))
            share = sum(kept or 0.0 for kept in found["kept_share"]) / len(found["kept_share"])
            bpb = f"{found['bits_per_byte']:.4f}" if found["bits_per_byte"] else "unknown"
            lines.append(f"{rate:9g} {share:12.3f} {found['flops_share']:8.3f} {found['val_loss']:17.4f} {bpb:>15}")
            log.write(dial={"skip_rate": rate, "layers_run": share, "choose": self.args.choose,
                            "allocation": self.args.allocation, **found})
        return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# Where and how it runs


def settle_system(args) -> tuple[torch.device, torch.dtype, bool]:
    """Device, type of the matrix products, and whether to compile: what the flags say, or else what suits the device."""
    device = choose_device(args.device)
    on_cuda = device.type == "cuda"
    if on_cuda and under_torchrun():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if on_cuda:
        torch.set_float32_matmul_precision("high")      # TF32 in the few products that autocast leaves in float32
    if args.threads:
        torch.set_num_threads(args.threads)
    name = args.dtype if args.dtype != "auto" else "bfloat16" if on_cuda and torch.cuda.is_bf16_supported() else "float32"
    return device, getattr(torch, name), on_cuda if args.compile is None else args.compile


def peak_flops(device: torch.device) -> float | None:
    """Peak FLOP/s of a known GPU, else None."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def versions() -> dict:
    """What a result depends on besides its flags."""
    git = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        commit = None
    return {"python": sys.version.split()[0], "torch": str(torch.__version__), "numpy": np.__version__, "commit": commit}


def readable(seconds: float) -> str:
    """12 s, 4.2 min, 3.1 h."""
    return (f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min" if seconds < 6000
            else f"{seconds / 3600:.1f} h")


class Log:
    """out_dir/log.jsonl: one JSON object a line. Lines past `step`, that of the checkpoint to go on from, are cut."""

    def __init__(self, path: Path, step: int | None = None):
        self.path, self.file = path, None
        if rank() > 0:
            return
        with self.answered():
            if step is not None and path.exists():
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
                kept = [line for line in lines if step and self.is_up_to(step, line)]
                if kept != lines:               # replaced as a whole, so that a full disk harms no line
                    with replaced(path) as shorter:
                        shorter.write_text("".join(kept), encoding="utf-8")
            self.file = path.open("a", encoding="utf-8")

    @staticmethod
    def is_up_to(step: int, line: str) -> bool:
        try:
            return json.loads(line).get("step", 0) <= step
        except (ValueError, AttributeError, TypeError):     # the last line of a killed run may be cut short
            return False

    @contextlib.contextmanager
    def answered(self):
        """What fails within is answered in one line."""
        try:
            yield
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror}); make room or choose another folder; what "
                            f"stands in the checkpoint beside it is safe, go on from there with --resume") from error

    def write(self, **entry):
        if self.file is None:
            return
        with self.answered():
            self.file.write(json.dumps(entry) + "\n")
            self.file.flush()


def check_out_dir(args):
    """Find out now, not hours later, whether out_dir can be written, and refuse to overwrite a run."""
    try:
        args.out_dir.mkdir(parents=True, exist_ok=True)
        probe = args.out_dir / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--out_dir {args.out_dir}: cannot be written ({error.strerror}); choose another folder") from error
    found = [path.name for path in (*checkpoints(args.out_dir), args.out_dir / "log.jsonl") if os.path.lexists(path)]
    if found and not args.resume:
        raise UserError(f"--out_dir {args.out_dir}: holds a run already ({', '.join(found)}); go on with it by --resume, "
                        f"or choose another --out_dir")
    for leftover in args.out_dir.glob(".*.tmp-*"):      # of a process that was killed while it wrote
        leftover.unlink(missing_ok=True)


def checkpoints(out_dir: Path) -> list[Path]:
    """The checkpoints of a run that are there, the newest first."""
    earlier = [path for path in out_dir.glob("ckpt-*.pt") if path.stem[5:].isdecimal() and path.is_file()]
    earlier.sort(key=lambda path: (path.stat().st_mtime_ns, path.stem), reverse=True)
    return [path for path in (out_dir / "ckpt.pt", *earlier) if os.path.lexists(path)]


def newest_good(out_dir: Path) -> tuple[dict, Path]:
    """The newest checkpoint of a run that is whole, and where it is; a note names each that is not. ModelError if none is."""
    found = checkpoints(out_dir)
    for path in found:
        try:
            return read_checkpoint(path), path
        except ModelError as error:
            if path == found[-1]:
                raise
            note(str(error))


def put_back(path: Path, step: int):
    """Make an earlier checkpoint the newest; what stood there keeps its content, with .damaged at the end of its name."""
    newest = path.with_name("ckpt.pt")
    if os.path.lexists(newest):
        os.replace(newest, f"{newest}.damaged")
    second_name(path, newest)
    note(f"going on from {path}, which holds step {step}")


def second_name(path: Path, other: Path):
    """Give a file another name, too, in place of what has it now; a copy where the file system has no hard links."""
    with replaced(other) as temporary:
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)


def take_flags(args, stored: dict, fixed: tuple, why: str):
    """Take the flags in `stored` over, but for those that were given; refuse another value for those in `fixed`."""
    clashes = [f"--{flag} {stored[flag]} there, {getattr(args, flag)} asked for" for flag in fixed
               if flag in args.given and flag in stored and getattr(args, flag) != stored[flag]]
    if clashes:
        raise UserError(f"{why}: {'; '.join(clashes)}; leave the flag out, or start another run")
    for flag, value in stored.items():
        if flag not in args.given:
            setattr(args, flag, value)


def stored_flags(origin: dict, path: Path) -> dict:
    """The flags in a checkpoint's "train" entry, each as the parser takes it. UserError where it could not have been given."""
    parser, found = flag_parser(), origin["train"] if isinstance(origin["train"], dict) else {}

    def refuse(why):
        raise UserError(f"{path}: its 'train' entry does not fit ({why}), so the run cannot go on; sample from it, or start "
                        f"anew from its weights with --init_from {path} --out_dir another")

    parser.error = refuse
    lacking = [flag for flag in RUN_FLAGS if flag not in found]
    if lacking:
        refuse(f"has no {', '.join(lacking)}")
    flags = {}
    for flag in vars(parser.parse_args([])).keys() & found.keys():
        value = found[flag]
        if isinstance(value, torch.Tensor):
            refuse(f"{flag} is a tensor")
        if flag in MODEL_FLAGS and value != origin["config"].get(flag):
            refuse(f"{flag} is {value!r}, in its config {origin['config'].get(flag)!r}")
        if isinstance(value, bool):
            argv = [f"--{flag}" if value else f"--no-{flag}"]
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            argv = [] if value is None else [f"--{flag}={text}"]
        flags[flag] = getattr(parser.parse_args(argv), flag)
    return flags


def check_progress(origin: dict, path: Path):
    """Refuse a checkpoint that does not say how far its run has come."""
    for entry, kind in PROGRESS.items():
        most = math.inf if entry == "best_val_loss" else sys.float_info.max         # before the first evaluation it is ∞
        if type(origin[entry]) not in (int, kind) or not 0 <= origin[entry] <= most:
            raise UserError(f"{path}: its {entry!r} entry is {origin[entry]!r:.60}, expected a number of at least 0; start "
                            f"anew from its weights with --init_from {path} --out_dir another")


def settle_flags(args) -> dict | None:
    """Complete the flags with those of the checkpoint that the run goes on from or starts from, which is returned."""
    origin, path = None, args.init_from or args.out_dir / "ckpt.pt"
    if args.eval_only or args.resume and checkpoints(args.out_dir):
        origin, path = (read_checkpoint(path), path) if args.eval_only else newest_good(args.out_dir)
        for entry in ("train",) if args.eval_only else ("train", "optimizer", *PROGRESS):
            if entry not in origin:
                raise UserError(f"{path}: has no {entry!r} entry, so the run cannot go on; sample from it, or start anew "
                                f"from its weights with --init_from {path} --out_dir another")
        if not args.eval_only:
            check_progress(origin, path)
        own = ("choose", "allocation", "skip_rates", "depth_budget") if args.eval_only else ()      # may differ
        stored = {flag: value for flag, value in stored_flags(origin, path).items() if flag not in own}
        if "steps" in args.given:
            stored["flop_budget"] = None
        take_flags(args, stored, tuple(flag for flag in RUN_FLAGS if flag not in own), str(path))
    elif args.init_from:
        origin = read_checkpoint(path)
        stored = {flag: value for flag, value in origin["config"].items() if flag in MODEL_FLAGS}
        take_flags(args, stored, MODEL_FLAGS, f"--init_from {args.init_from}")
    if origin:
        check_meta(origin["meta"], str(path))
    check_args(args)
    if args.depth_budget is not None:
        args.skip_rates = [rate_from_depth(args.depth_budget, 2 * args.n_layer)]
    if args.skip_rate is None:
        args.skip_rate = DEFAULT_SKIP_RATE if args.residual == "nag" else "0"
    if not args.eval_only and rank() == 0:
        check_out_dir(args)
        if args.resume and origin and path.name != "ckpt.pt":
            put_back(path, origin["step"])
    return origin


# ---------------------------------------------------------------------------------------------------------------------
# Training


def shard(model: NAGTransformer, dtype: torch.dtype | None):
    """Share the parameters among all processes; each layer's are gathered while it runs. Branches compute in `dtype`.

    Gates, embeddings and head stay in float32, as does the sum of gradients.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
    for layer in model.layers:
        fully_shard(layer.branch, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
        fully_shard(layer)
    fully_shard(model)
    register_fsdp_forward_method(model, "run_layers")       # which measures thresholds without the head


def build(args, origin: dict | None, meta: dict, device, dtype):
    """Model and optimizers of a run, new or as a checkpoint has them; and the values of PROGRESS."""
    torch.manual_seed(args.seed)
    place = "cpu" if args.fsdp else device      # a model to be sharded goes to its devices in parts: none may hold all
    if origin:
        model = model_from(origin, place, args.init_from or args.out_dir / "ckpt.pt")
    else:
        alpha = {"alpha_scale": 0.7, "alpha_power": 0.0} if args.optimizer == "adamw" else {}
        shape = {flag: getattr(args, flag) for flag in MODEL_FLAGS}
        config = Config(vocab_size=meta["vocab_size"], **shape, **alpha)
        check_memory(config, args, device)
        model = NAGTransformer(config).to(place)
    model.activation_checkpointing = args.activation_checkpointing
    if args.fsdp:
        shard(model, torch.bfloat16 if dtype == torch.bfloat16 else None)
    model.use_kernels(args.kernels)
    optimizers = model.configure_optimizers(args.optimizer, args.learning_rate, args.matrix_learning_rate,
                                            args.gate_learning_rate, args.weight_decay)
    if not args.eval_only:
        check_memory(model.config, args, device)
    if not (args.resume and origin):
        return model, optimizers, (0, 0, math.inf)
    load_optimizers(optimizers, origin, args.out_dir / "ckpt.pt")
    return model, optimizers, tuple(origin[entry] for entry in PROGRESS)


def load_optimizers(optimizers, origin: dict, path: Path):
    """Take over each parameter's moments; rates and weight decay stay those of the flags. UserError where one does not fit."""
    def refuse(why):
        raise UserError(f"{path}: its 'optimizer' entry does not fit ({why}); start anew from its weights with --init_from "
                        f"{path} --out_dir another")

    states = origin["optimizer"]
    if not isinstance(states, list) or len(states) != len(optimizers):
        refuse(f"expected a list of {len(optimizers)}")
    for optimizer, state in zip(optimizers, states):
        groups = optimizer.state_dict()["param_groups"]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        try:
            found = {index: {name: tuple(moment.shape) for name, moment in moments.items()}
                     for index, moments in state["state"].items()}
            for parameter, moments in zip(parameters, state["state"].values()):
                if isinstance(parameter, DTensor):
                    moments |= {name: distribute_tensor(moment.to(parameter.device), parameter.device_mesh, parameter.placements)
                                for name, moment in moments.items() if moment.shape == parameter.shape}
            optimizer.load_state_dict({"state": state["state"], "param_groups": groups})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            refuse(f"{type(error).__name__} on reading it")
        for index, parameter in enumerate(parameters if origin["step"] else ()):
            shape = tuple(parameter.shape)
            wanted = ({"momentum_buffer": shape} if isinstance(optimizer, torch.optim.Muon) else
                      {"step": (), "exp_avg": shape, "exp_avg_sq": shape})
            if found.get(index) != wanted:
                refuse(f"found {found.get(index)} for a parameter that has {wanted}")


def check_memory(config: Config, args, device):
    """Refuse what surely exceeds the memory, before the machine swaps: a bound from below, so nothing that fits is refused.

    Counted are weights, gradients and a moment in float32, the stream before each layer, and the logits' gradient.
    """
    tokens = args.micro_batch * args.block_size
    needed = tokens * (4 * config.n_layer * config.n_embd + 8 * config.vocab_size)
    needed += 12 * config.least_params // (n_ranks() if args.fsdp else 1)
    there = memory_of(device)
    if there is not None and needed > there:
        raise UserError(f"--n_layer {args.n_layer} --n_embd {args.n_embd} --n_directions {args.n_directions} --micro_batch "
                        f"{args.micro_batch} --block_size {args.block_size}: need {needed / 2**30:,.1f} GiB of memory or "
                        f"more, but {device} has {there / 2**30:,.1f}; lower --micro_batch, or take a smaller model")


@contextlib.contextmanager
def stop_signals(asked: list[str]):
    """While within, SIGINT, SIGTERM and SIGUSR1 put their names into `asked`, for the loop to look at.

    A second SIGINT interrupts. Cluster schedulers send SIGUSR1 some time before SIGTERM; Windows has no such signal.
    """
    def heard(number, frame):
        if number == signal.SIGINT and "SIGINT" in asked:
            raise KeyboardInterrupt
        asked.append(signal.Signals(number).name)

    known = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]
    handlers = {number: signal.signal(number, heard) for number in known}
    lost = False
    try:
        yield
    except RuntimeError:
        lost = True
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if lost and asked:      # torchrun tells of a lost process by a signal, which may come before the error that it causes
            signal.raise_signal(getattr(signal, asked[-1]))


class Objective(nn.Module):
    """The loss as a module, which is what DistributedDataParallel takes."""

    def __init__(self, model: NAGTransformer, autocast):
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, tokens, targets, depth=None):
        with self.autocast():
            return self.model.loss(tokens, targets, depth)


class Run:
    """A run in training: its model, its optimizers, how far it is, and where it is written."""

    def __init__(self, args, model, optimizers, progress: tuple[int, float, float], blocks: Blocks, evaluator: Evaluator,
                 meta: dict, compiled: bool):
        self.args, self.model, self.optimizers = args, model, optimizers
        self.step, self.flops, self.best_val_loss = progress
        self.blocks, self.evaluator, self.meta = blocks, evaluator, meta
        self.path, self.saved = args.out_dir / "ckpt.pt", self.step
        self.settings = {flag: value for flag, value in vars(args).items()
                         if flag not in ("given", "resume", "init_from", "out_dir", "eval_only", "depth_budget", "fsdp")}
        self.micro_tokens = args.micro_batch * args.block_size
        self.micro_batches = args.batch_tokens // self.micro_tokens
        self.choice = RandomShare if args.choose == "random" else TopShare
        self.skipped_in_a_row = 0
        self.asked: list[str] = []      # names of the signals that have come to this process
        self.stop: str | None = None    # why all processes stop after this step
        self.objective = Objective(model, evaluator.autocast)
        if compiled:
            self.compile()
        if n_ranks() > 1 and not args.fsdp:
            on_cuda = [evaluator.device.index] if evaluator.device.type == "cuda" else None
            self.objective = DistributedDataParallel(self.objective, on_cuda, gradient_as_bucket_view=True)

    def compile(self):
        """Compile the loss. A count of kept tokens is a shape, and each shape a graph: 9 with a warm-up, see rates_at.

        --allocation global has new counts after each evaluation: there they are symbols, so that a second graph serves
        all that follow.
        """
        torch._dynamo.config.recompile_limit = 16
        self.objective.compile(dynamic=None if self.args.allocation == "global" else False)

    def progress(self) -> float:
        """Share of the run that is done."""
        return self.flops / self.args.flop_budget if self.args.flop_budget else self.step / self.args.steps

    def full_step_flops(self) -> float:
        """FLOPs of one step at full depth, forward and backward."""
        return 3 * self.model.flops_per_token() * self.args.batch_tokens

    def typical_step_flops(self) -> float:
        """FLOPs of one step at the rates that it trains for."""
        kept = [1 - rate for rate in typical_rates(self.args)]
        return 3 * self.model.flops_per_token(kept) * self.args.batch_tokens

    def timed_micro_batch(self) -> float:
        """Seconds that the first micro-batch takes at full depth once all is warmed up (and compiled). It changes nothing."""
        device = self.evaluator.device
        for _ in range(2):
            started = time.perf_counter()
            try:
                self.objective(*self.blocks.micro_batch(self.args.seed, 0, self.args.micro_batch, device)).backward()
            except Exception as error:
                if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                    raise
                raise UserError(f"--compile: torch.compile does not work here ({type(error).__name__}; on a CPU it needs a "
                                f"C++ compiler); run with --no-compile") from error
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize()
        return time.perf_counter() - started

    def take_step(self, learning_rate_factor: float, rates: list[float]) -> dict:
        """One optimizer step, each layer skipping at its rate. Returns what the log says about it.

        Where the loss or the gradient is not finite the step is left out, and counted; UserError after ten in a row.
        """
        loss, stops = summed([self.accumulate(rates), bool(self.asked)], self.evaluator.device)
        if stops:       # in all processes after the same step, whenever the signal has come to each
            self.stop = self.asked[0] if self.asked else "a signal to another process"
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.grad_clip)
        grad_norm = (grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm).item()
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if finite:
            self.update(learning_rate_factor)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        kept = [kept_count(rate, self.micro_tokens) / self.micro_tokens for rate in rates]
        self.step, self.flops = self.step + 1, self.flops + 3 * self.model.flops_per_token(kept) * self.args.batch_tokens
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if self.skipped_in_a_row == 10:
            raise self.diverged(f"loss is {loss:g} and the norm of the gradient {grad_norm:g} in the tenth step in a row, at "
                                f"{learning_rate_factor:.3g} of the peak learning rate")
        return {"step": self.step, "loss": loss, "grad_norm": grad_norm, "lr_factor": learning_rate_factor,
                "flops": self.flops, "skip_rate": sum(rates) / len(rates), "tokens": self.step * self.args.batch_tokens,
                **({} if finite else {"left_out": True})}

    def update(self, learning_rate_factor: float):
        """Let the optimizers move the weights."""
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = group["initial_lr"] * learning_rate_factor
        try:
            for optimizer in self.optimizers:
                optimizer.step()
        except RuntimeError as error:
            if "overflow" not in str(error):        # how PyTorch refuses a rate that float32 cannot hold
                raise
            raise self.diverged("a learning rate too large for float32") from error

    def accumulate(self, rates: list[float]) -> float:
        """Gradients of this process's micro-batches of a step, averaged over all processes with the last; returns this
        process's share of the mean loss."""
        args, device = self.args, self.evaluator.device
        depth = self.choice(rates, self.micro_tokens) if any(rates) else None
        loss = torch.zeros((), device=device)
        for micro in range(rank(), self.micro_batches, n_ranks()):
            first = (self.step * self.micro_batches + micro) * args.micro_batch
            torch.manual_seed(hash((args.seed, self.step, micro)) % 2**63)       # for dropout and --choose random
            batch = self.blocks.micro_batch(args.seed, first, args.micro_batch, device)
            with self.synchronised(micro + n_ranks() >= self.micro_batches):
                micro_loss = self.objective(*batch, depth)
                (micro_loss * (n_ranks() / self.micro_batches)).backward()
            loss += micro_loss.detach() / self.micro_batches
        return loss.item()

    def synchronised(self, wanted: bool):
        """Whether the backward pass within averages gradients over the processes."""
        if self.args.fsdp:
            self.model.set_requires_gradient_sync(wanted)
        several = isinstance(self.objective, DistributedDataParallel)
        return self.objective.no_sync() if several and not wanted else contextlib.nullcontext()

    def evaluate(self) -> dict:
        """Measure the thresholds anew, and what the model is worth with them at the rates that it trains for."""
        self.evaluator.refresh_cuts()
        if self.args.residual == "nag" and not self.model.can_skip():
            raise self.diverged("weights are not finite")
        typical = self.evaluator.allocated(typical_rates(self.args))
        return {**self.evaluator(self.evaluator.depth(typical)), "eval_skip_rate": sum(typical) / len(typical)}

    def diverged(self, found: str) -> UserError:
        return UserError(f"step {self.step}: {found}; {self.path} holds step {self.saved}. Start again with a lower "
                         f"--matrix_learning_rate, --learning_rate, --gate_learning_rate or --weight_decay, or a longer "
                         f"--warmup_steps")

    def is_due(self, every: int | None) -> bool:
        """Whether this step ends a stretch of so many, or the run. None: the end alone."""
        return self.progress() >= 1 or every is not None and self.step % every == 0

    def save(self, written: Path | None = None):
        """Make the run as it stands, or the file that holds it already, the newest checkpoint; --keep of them stay."""
        if rank() == 0:
            with self.answered(self.path):
                if self.args.keep > 1 and self.path.exists():
                    second_name(self.path, self.path.with_name(f"ckpt-{self.saved:07d}.pt"))
                if written:
                    second_name(written, self.path)
        if not written:
            self.write(self.path)
        self.saved = self.step
        if rank() == 0:
            for old in checkpoints(self.args.out_dir)[self.args.keep:]:
                old.unlink(missing_ok=True)

    def write(self, path: Path):
        """Write all that the run needs to go on, gathered from all processes, into a file."""
        weights, states = gathered(self.model.state_dict()), gathered([each.state_dict() for each in self.optimizers])
        if rank() == 0:
            with self.answered(path):
                save_checkpoint(path, self.model, self.meta, weights, **{entry: getattr(self, entry) for entry in PROGRESS},
                                train=self.settings, versions=versions(), optimizer=states)

    @contextlib.contextmanager
    def answered(self, path: Path):
        """What cannot be written within is answered in one line."""
        try:
            yield
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}) at step {self.step}; what it held before still "
                            f"stands; make room and go on with --resume") from error


@contextlib.contextmanager
def memory_answered(args):
    """An allocation that fails is answered in one line that names the flags it depends on."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "Allocator" not in str(error):
            raise
        spared = "" if args.activation_checkpointing else " add --activation_checkpointing,"
        raise UserError(f"--micro_batch {args.micro_batch} --block_size {args.block_size} --n_embd {args.n_embd} --n_layer "
                        f"{args.n_layer}: there is not enough memory; lower --micro_batch,{spared} lower --block_size, or "
                        f"take a smaller model") from error


def train(args):
    """What the flags say: a run, its continuation, or an evaluation."""
    origin = settle_flags(args)
    device, dtype, compiled = settle_system(args)
    with processes(device), memory_answered(args):
        train_blocks, val_blocks, meta = open_data(args, origin and origin["meta"])
        encoding = encoding_if_there(meta)

        def autocast():
            return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)

        model, optimizers, progress = build(args, origin, meta, device, dtype)
        evaluator = Evaluator(model, args, train_blocks, val_blocks, encoding and encoding.token_bytes(), autocast)
        if args.eval_only:
            tell(evaluator.dial(Log((args.init_from or args.out_dir / "ckpt.pt").parent / "log.jsonl")))
            return
        run = Run(args, model, optimizers, progress, train_blocks, evaluator, meta, compiled)
        if run.progress() >= 1:
            tell(f"{run.path}: all of the run's {run.step} steps are done; give a larger --steps or --flop_budget to go on")
            return
        warmup = announce(run, device, dtype)
        log = Log(args.out_dir / "log.jsonl", run.step)
        log.write(command=sys.argv, versions=versions(), config=vars(model.config), train=run.settings, device=str(device),
                  dtype=str(dtype)[6:], compiled=compiled, parameters=model.num_params(), step=run.step, processes=n_ranks())
        found = loop(run, log, warmup, encoding)
        if run.stop:
            tell(f"{run.stop}: stopped after step {run.step}, saved in {run.path}; go on with: python "
                 f"train.py{out_dir_flag(args)} --resume")
        else:
            close(run, log, found, encoding)


def announce(run: Run, device, dtype) -> int:
    """Say what is about to run and how long it will take; returns the steps of the warm-up."""
    args, model, typical = run.args, run.model, run.typical_step_flops()
    seconds = summed([run.timed_micro_batch()], device)[0] / n_ranks()
    step_seconds = seconds * run.micro_batches / n_ranks() * typical / run.full_step_flops()
    if step_seconds > LARGEST_STEP:
        raise UserError(f"--batch_tokens {args.batch_tokens}: one step would take about {readable(step_seconds)} here; try "
                        f"--batch_tokens {run.micro_tokens * max(1, int(run.micro_batches / step_seconds))}")
    all_steps = args.flop_budget / typical if args.flop_budget else args.steps
    steps_left = math.ceil((1 - run.progress()) * all_steps)
    where = f"{device}" if n_ranks() == 1 else f"{n_ranks()} × {device.type}"
    tell(f"{model.num_params():,} parameters ({args.residual}, {args.n_layer} blocks of width {args.n_embd}) on {where}, "
         f"{str(dtype)[6:]}; {args.batch_tokens:,} tokens a step, {typical / args.batch_tokens:,.0f} FLOPs a token; "
         f"{steps_left} steps in about {readable(step_seconds * steps_left)}")
    return args.warmup_steps if args.warmup_steps is not None else min(50, math.ceil(all_steps / 4))


def loop(run: Run, log: Log, warmup: int, encoding) -> dict:
    """Train until the run is done or a signal asks to stop. Returns the last evaluation."""
    args, evaluator, found = run.args, run.evaluator, {}
    peak = peak_flops(evaluator.device)
    bar = tqdm(total=args.flop_budget or args.steps, initial=run.flops if args.flop_budget else run.step, dynamic_ncols=True,
               unit="FLOP" if args.flop_budget else "step", unit_scale=bool(args.flop_budget), disable=rank() > 0)
    if run.step == 0:
        run.save()          # so that a full disk is found now, and --resume knows this run's flags whenever it is killed
    with bar, stop_signals(run.asked):
        while run.progress() < 1 and not run.stop:
            started, flops = time.perf_counter(), run.flops
            factor = learning_rate_factor(run.step, run.progress(), warmup, args.min_lr)
            entry = run.take_step(factor, evaluator.allocated(rates_at(run.step, args)))
            seconds, flops = time.perf_counter() - started, run.flops - flops
            entry |= {"tokens_per_s": round(args.batch_tokens / seconds),
                      "mfu": round(flops / seconds / peak / n_ranks(), 4) if peak else None}
            evaluated = run.is_due(args.eval_every)
            if evaluated:
                found = run.evaluate()
            log.write(**entry, **(found if evaluated else {}))
            best = run.path.with_name("best.pt") if evaluated and found["val_loss"] < run.best_val_loss else None
            if best:
                run.best_val_loss = found["val_loss"]
                run.write(best)
            if run.is_due(args.save_every or args.eval_every):
                run.save(best)
            bar.set_postfix_str(f"loss {entry['loss']:.3f}, {entry['tokens_per_s']:,} tokens/s")
            bar.update(flops if args.flop_budget else 1)
            if evaluated and rank() == 0:
                bar.write(f"step {run.step}: {evaluation_text(found)}")
                warn_of_idle_layers(found, bar)
            if encoding and args.sample_every and run.step % args.sample_every == 0 and run.progress() < 1:
                text = sample_text(run.model, encoding, args.seed)      # by all processes: weights may be shared
                if rank() == 0:
                    bar.write(escaped(text, keep="\n\t"))
        if run.step > run.saved:
            run.save()
    return found


def warn_of_idle_layers(found: dict, bar):
    for layer, share in enumerate(found["kept_share"]):
        if share < 0.01:
            bar.write(f"warning: layer {layer} runs for {share:.2%} of the tokens; it hardly learns any more")


def out_dir_flag(args) -> str:
    return f" --out_dir {args.out_dir}" if args.out_dir != Path("out") else ""


def close(run: Run, log: Log, found: dict, encoding):
    """The end of a run: its figures, a sample, the dial, and the commands that come next."""
    args, here = run.args, out_dir_flag(run.args)
    marks = ", each character with the layers it ran" if args.residual == "nag" else ""
    if run.best_val_loss < found["val_loss"]:
        tell(f"\n{run.path.with_name('best.pt')} holds the lowest validation loss on the way, {run.best_val_loss:.4f}")
    tell(f"\n{run.model.num_params():,} parameters, {evaluation_text(found)}; checkpoint in {run.path}."
         + (f" A sample{marks}:\n" if encoding else ""))
    there = ["--checkpoint", str(run.path)] if here else []
    if encoding and rank() == 0:
        sample.main([*there, "--seed", str(args.seed)] + (["--show_depth"] if args.residual == "nag" else []))
    if args.residual == "nag" and args.choose == "modulator":
        tell(f"\nThe same checkpoint at several depths:\n\n{run.evaluator.dial(log)}")
    more = f"--flop_budget {2 * args.flop_budget:g}" if args.flop_budget else f"--steps {2 * args.steps}"
    dial = " --skip_rate 0.5 --show_depth" if args.residual == "nag" else ""
    tell(f"\nNext:  python sample.py {' '.join(there)}{' ' if there else ''}--prompt 'def '{dial}\n"
         f"       python train.py{here} --resume {more}")


def evaluation_text(found: dict) -> str:
    bpb = f", {found['bits_per_byte']:.4f} bits per byte" if found["bits_per_byte"] else ""
    return f"validation loss {found['val_loss']:.4f} nats per token{bpb}"


def sample_text(model, encoding, seed: int) -> str:
    """300 characters that the model writes from the start of a document."""
    tokens = model.generate([[encoding.end_of_text]], 300, temperature=0.8, seed=seed)[0]
    return encoding.decode(tokens[1:].numpy()).decode("utf-8", errors="replace")[:300]


LOST_PROCESS = re.compile("connection (closed|reset|refused)|socket|nccl|gloo", re.IGNORECASE)     # PyTorch has no type for it


def train_unless_left_alone(args):
    """Train. Where another process has ended, this one waits for that to be told, upon which torchrun ends this one, too."""
    try:
        train(args)
    except RuntimeError as error:
        if not under_torchrun() or not LOST_PROCESS.search(str(error)):
            raise
        time.sleep(15)
        raise UserError("another process has ended without a word; look for it above, and go on with --resume") from error


def main(argv=None):
    forgive_output()
    args = parse_args(argv)
    try:
        exit_on_user_error(train_unless_left_alone, args, errors=(UserError, ModelError))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
