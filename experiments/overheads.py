"""What NAG costs beside pre-norm: parameters, FLOPs, time of a training step, memory held for the backward pass; NAG ÷ pre-norm.

    python experiments/overheads.py         a few minutes with the machine to itself; steps of both arms in turn
    python experiments/overheads.py --draw  the table from the log
"""

import json
import statistics
import time

from series import guarded, parse_args, read_log, rounded, table        # which has the project's own folder on the path

import torch

from model import Config, NAGTransformer

# Blocks, width, heads, directions, pairs of steps; where there are none, parameters and FLOPs alone.
SHAPES = {"laptop": ((8, 128, 4, 16, 15), (6, 384, 6, 16, 7), (12, 768, 12, 32, 0), (24, 1024, 16, 32, 0)), "smoke": ((2, 32, 2, 16, 2),)}


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


def measure(blocks: int, width: int, heads: int, directions: int, pairs: int) -> dict:
    torch.manual_seed(1)
    with torch.device("cpu" if pairs else "meta"):
        nag, prenorm = arms = [NAGTransformer(Config(n_layer=blocks, n_embd=width, n_head=heads, n_directions=directions, residual=residual))
                               for residual in ("nag", "prenorm")]
    found = {"blocks": blocks, "width": width, "directions": directions, "parameters": nag.num_params() / prenorm.num_params(),
             "flops": nag.flops_per_token() / prenorm.flops_per_token()}
    if not pairs:
        return found
    tokens = torch.randint(257, (16, 257))
    optimizers = [arm.configure_optimizers() for arm in arms]
    ratios = []
    for turn in range(pairs + 1):
        seconds = [step_seconds(arm, its, tokens) for arm, its in zip(arms, optimizers)]
        ratios += [seconds[0] / seconds[1]] if turn else []         # the first warms up
    return found | {"memory": held(nag, tokens) / held(prenorm, tokens), "step_time": ratios}


def draw(log: list[dict], args):
    rows = []
    for found in log:
        times = found.get("step_time")
        rows.append([found["blocks"], found["width"], found["directions"], f"{found['parameters']:.3f}", f"{found['flops']:.3f}",
                     f"{statistics.median(times):.3f} ({min(times):.3f} to {max(times):.3f}, {len(times)} pairs)" if times else "–",
                     f"{found['memory']:.3f}" if times else "–"])
    print(table(args.results / "overheads.md", ["blocks", "width", "directions", "parameters", "FLOPs", "time of a step",
                                                "memory for the backward pass"], rows))


def claims(log: list[dict]) -> list[list[str]]:
    """Seen is here what is below one part in a hundred."""
    timed, large = [found for found in log if "step_time" in found], log[-1]
    medians = [statistics.median(found["step_time"]) for found in timed]
    return [["parameters and FLOPs of the modulators are negligible", "negligible",
             f"{large['parameters'] - 1:+.1%} parameters, {large['flops'] - 1:+.1%} FLOPs at width {large['width']}, counted, not trained",
             "seen" if max(large["parameters"], large["flops"]) < 1.01 else "not seen at this size"],
            ["the backward pass needs no more memory", "–", "bytes kept for it × " + " and ".join(
                f"{found['memory']:.2f} at width {found['width']}" for found in timed),
             "seen" if max(found["memory"] for found in timed) < 1.01 else "not seen at this size"],
            ["the update costs no time of note", "easily fused", "a CPU's step × " + " and ".join(
                f"{median:.2f} at width {found['width']}" for median, found in zip(medians, timed)) + "; fused kernels not yet timed",
             "seen" if max(medians) < 1.01 else "not seen at this size"]]


def log_path(args):
    return args.logs / "overheads.jsonl"


def measure_and_draw(args):
    if not args.draw:
        args.logs.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(rounded(measure(*shape))) for shape in SHAPES[args.scale]]
        log_path(args).write_text("\n".join(lines) + "\n")
    draw(read_log(log_path(args)), args)


def main(argv=None):
    args = parse_args(__doc__.splitlines()[0], argv)
    if args.print_commands:
        print("python experiments/overheads.py")
    else:
        guarded("overheads", measure_and_draw, args)


if __name__ == "__main__":
    main()
