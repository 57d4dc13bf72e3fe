"""What the layers of a finished run do to the residual stream, added to its log: python experiments/measure_stream.py --out_dir OUT

One line {"stream": {"norm": …, "angle": …, "from_embedding": …}} with a number for each layer, means over validation text: RMS of the
residual after the layer (first: after the embedding), angle by which the layer turned it, angle to the embedding, in degrees.
"""

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from model import ModelError, angle_between, load_checkpoint
from prepare_data import Shards, UserError, exit_on_user_error, find_shards
from train import Blocks


@torch.no_grad()
def measure(model, tokens) -> dict:
    """The three numbers of each layer; tokens (B, T)."""
    norm, angle, from_embedding, first = [], [], [], []

    def size(stream):
        root_mean_square = stream.direction.float().square().mean(-1).sqrt()
        return root_mean_square if stream.log_norm is None else root_mean_square * stream.log_norm.exp()

    def watch(layer, before, after, rows):
        if not first:
            first.append(before.direction)
            norm.append(size(before).mean().item())
        norm.append(size(after).mean().item())
        angle.append(math.degrees(angle_between(before.direction, after.direction).mean().item()))
        from_embedding.append(math.degrees(angle_between(first[0], after.direction).mean().item()))

    model.run_layers(tokens, watch=watch)
    return {"norm": norm, "angle": angle, "from_embedding": from_embedding}


def measure_run(args):
    torch.set_num_threads(args.threads or torch.get_num_threads())
    model, meta = load_checkpoint(args.out_dir / "ckpt.pt")
    blocks = Blocks(Shards(find_shards(args.data, "val")), model.config.block_size, meta["vocab_size"], "--data")
    tokens, _ = blocks.read(blocks.spread(32), "cpu")
    with (args.out_dir / "log.jsonl").open("a") as log:
        log.write(json.dumps({"stream": measure(model, tokens)}) + "\n")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of token shards")
    parser.add_argument("--out_dir", type=Path, required=True, help="folder of the run")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads")
    exit_on_user_error(measure_run, parser.parse_args(argv), errors=(UserError, ModelError))


if __name__ == "__main__":
    main()
