"""What NAG costs beside pre-norm: parameters, FLOPs, time of a training step, memory held for the backward pass; NAG ÷ pre-norm.

    python experiments/overheads.py         a few minutes; steps of both arms in turn
    python experiments/overheads.py --draw  the table from the log
"""

import json
import statistics
import sys
import time

from series import ROOT, parse_args, table  # noqa: F401  (ROOT is on the path by now)

import torch

from model import Config, NAGTransformer

SHAPES = {"laptop": ((8, 128, 4, 15), (6, 384, 6, 7)), "smoke": ((2, 32, 2, 2),)}         # blocks, width, heads, pairs of steps


def held(model, tokens) -> int:
    """Bytes kept between the forward and the backward pass, besides the parameters."""
    sizes = {}

    def note(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    del loss
    return sum(size for place, size in sizes.items() if place not in own)


def step_seconds(model, optimizers, tokens) -> float:
    started = time.perf_counter()
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - started


def measure(n_layer: int, n_embd: int, n_head: int, pairs: int) -> dict:
    torch.manual_seed(1)
    tokens = torch.randint(257, (16, 257))
    arms = [NAGTransformer(Config(n_layer=n_layer, n_embd=n_embd, n_head=n_head, residual=residual)) for residual in ("nag", "prenorm")]
    optimizers = [arm.configure_optimizers() for arm in arms]
    ratios = []
    for turn in range(pairs + 1):
        seconds = [step_seconds(arm, its, tokens) for arm, its in zip(arms, optimizers)]
        ratios += [seconds[0] / seconds[1]] if turn else []         # the first warms up
    return {"blocks": n_layer, "width": n_embd, "pairs": pairs, "parameters": arms[0].num_params() / arms[1].num_params(),
            "flops": arms[0].flops_per_token() / arms[1].flops_per_token(), "step_time": statistics.median(ratios),
            "step_time_range": [min(ratios), max(ratios)], "memory": held(arms[0], tokens) / held(arms[1], tokens)}


def main(argv=None):
    args = parse_args(__doc__.splitlines()[0], argv)
    path = args.logs / "overheads.jsonl"
    if args.print_commands:
        print("python experiments/overheads.py")
        return
    if not args.draw:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({key: value for key, value in measure(*shape).items()}) + "\n" for shape in SHAPES[args.scale]))
    rows = []
    for found in map(json.loads, path.read_text().splitlines()):
        low, high = found["step_time_range"]
        rows.append([f"{found['blocks']}, d = {found['width']}", f"{found['parameters']:.3f}", f"{found['flops']:.3f}",
                     f"{found['step_time']:.3f} ({low:.3f}–{high:.3f}, {found['pairs']} pairs)", f"{found['memory']:.3f}"])
    args.results.mkdir(parents=True, exist_ok=True)
    print(table(args.results / "overheads.md", ["blocks", "parameters", "FLOPs", "step time", "memory for the backward pass"], rows))


if __name__ == "__main__":
    main(sys.argv[1:])
