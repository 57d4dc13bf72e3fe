"""Loss, residual norm and rotation by depth: NAG and pre-norm at 3 to 24 blocks of equal width, and at 48 narrow ones, equal tokens.

    python experiments/depth.py             some two hours on two cores; may be interrupted and started again
    python experiments/depth.py --draw      tables and plots from the logs
"""

import math
import statistics

from series import OPTIMIZERS, SEEDS, Job, by, by_seed, last, main, plot, spread, subtract, table, verdict

NARROW = 48                             # so deep that it has to be narrower to fit in some minutes
BLOCKS = (3, 6, 12, 24, NARROW)
ARMS = {"nag": "--residual nag --skip_rate 0", "prenorm": "--residual prenorm"}
# Width by scale, of the others and of the narrow one; nothing: that of the scale.
SHAPES = {"laptop": ("--n_embd 64 --n_head 2 --steps 500", "--n_embd 48 --n_head 2 --steps 500"), "smoke": ("", ""),
          "124m": ("", "--n_embd 384 --n_head 6"), "350m": ("", "--n_embd 512 --n_head 8")}


def name(arm: str, optimizer: str, blocks: int) -> str:
    return f"{arm}-{optimizer}-{blocks}blocks"


def jobs(scale: str) -> list[Job]:
    def job(arm, optimizer, blocks, seed):
        shape = SHAPES[scale][blocks == NARROW]
        return Job(f"{name(arm, optimizer, blocks)}-seed{seed}", f"{ARMS[arm]} --optimizer {optimizer} --n_layer {blocks} {shape} "
                   f"--seed {seed} --skip_rates 0 --eval_every 100000", evaluations=("experiments/measure_stream.py",))
    if scale == "smoke":
        return [job("nag", "muon", 3, 1), job("prenorm", "muon", 6, 1)]
    return [job(arm, optimizer, blocks, seed) for optimizer in OPTIMIZERS for seed in SEEDS for blocks in BLOCKS for arm in ARMS]


def losses(logs: dict, arm: str, optimizer: str, blocks: int) -> list[float]:
    return by_seed(logs, name(arm, optimizer, blocks), lambda log: last(log, "val_loss"))


def gaps(logs: dict, optimizer: str, blocks: int) -> list[float]:
    """How far NAG is ahead."""
    return subtract(losses(logs, "prenorm", optimizer, blocks), losses(logs, "nag", optimizer, blocks))


def stream(logs: dict, arm: str, optimizer: str, blocks: int, value) -> list:
    """value(what measure_stream.py found) of each seed."""
    return by_seed(logs, name(arm, optimizer, blocks), lambda log: value(last(log, "stream")))


def late_turn(found: dict) -> float:
    """Mean angle, in degrees, of a layer of the last quarter."""
    return statistics.mean(found["angle"][-max(1, len(found["angle"]) // 4):])


def model_of(logs: dict, arm: str, optimizer: str, blocks: int) -> dict:
    """What the first line of the log says of the model."""
    return logs[f"{name(arm, optimizer, blocks)}-seed{SEEDS[0]}"][0]


def larger(logs: dict, optimizer: str, blocks: int) -> str:
    """How many times the baseline's parameters NAG has, by its modulators: the narrower the more."""
    nag, prenorm = (model_of(logs, arm, optimizer, blocks)["parameters"] for arm in ARMS)
    return f"{nag / prenorm:.3f}"


def end(found: dict) -> float:
    """The residual's RMS after the last layer."""
    return found["norm"][-1]


def growth(found: dict) -> float:
    """That in units of the embedding's."""
    return end(found) / found["norm"][0]


def draw(logs: dict, args):
    rows = [[optimizer, blocks, model_of(logs, "nag", optimizer, blocks)["config"]["n_embd"],
             *(spread(losses(logs, arm, optimizer, blocks)) for arm in ARMS), spread(gap), larger(logs, optimizer, blocks), len(gap)]
            for optimizer in OPTIMIZERS for blocks in BLOCKS if (gap := gaps(logs, optimizer, blocks))]
    print(table(args.results / "depth.md", ["optimizer", "blocks", "width", "NAG", "pre-norm", "pre-norm − NAG",
                                            "parameters, NAG ÷ pre-norm", "seeds"], rows))
    wide = [blocks for blocks in BLOCKS if blocks != NARROW]
    plot(args.results / "depth.png", {f"{arm}, {optimizer}": (wide, [losses(logs, arm, optimizer, blocks) for blocks in wide])
                                      for optimizer in OPTIMIZERS for arm in ARMS}, "blocks", "validation loss, nats a byte", log_x=True)
    for key, y in (("norm", "RMS of the residual"), ("angle", "turned by the layer, degrees"),
                   ("from_embedding", "turned since the embedding, degrees")):
        lines, first = {}, 0 if key == "norm" else 1
        for arm in ARMS:
            for blocks in (12, 24):
                by_layer = list(zip(*stream(logs, arm, "muon", blocks, lambda found: found[key])))
                lines[f"{arm}, {blocks} blocks"] = (list(range(first, first + len(by_layer))), by_layer)
        plot(args.results / f"{key}.png", lines, "after the layer (0: the embedding)", y)
    rows = [[optimizer, blocks, arm, *(spread(stream(logs, arm, optimizer, blocks, value), 2) for value in (
             end, growth, late_turn, lambda found: sum(found["angle"]), lambda found: found["from_embedding"][-1]))]
            for optimizer in OPTIMIZERS for blocks in BLOCKS for arm in ARMS if losses(logs, arm, optimizer, blocks)]
    print(table(args.results / "stream.md", ["optimizer", "blocks", "arm", "RMS at the end", "÷ RMS of the embedding",
                                             "turn of a layer of the last quarter, °", "turns of all layers, °", "embedding to end, °"], rows))


def claims(logs: dict) -> list[list[str]]:
    rows = []
    for optimizer, its_name in OPTIMIZERS.items():
        ahead = {blocks: gaps(logs, optimizer, blocks) for blocks in (3, 24)}
        if not all(ahead.values()):
            continue
        at = {blocks: f"{by(gap, 'ahead by', 'behind by')} at {blocks} blocks, parameters × {larger(logs, optimizer, blocks)}"
              for blocks, gap in ahead.items()}
        at_end, grown, late, turned = ([stream(logs, arm, optimizer, 24, value) for arm in ("prenorm", "nag")]
                                       for value in (end, growth, late_turn, lambda found: sum(found["angle"])))
        times, times_grown = ([prenorm / nag for prenorm, nag in zip(*found)] for found in (at_end, grown))
        rows += [
            [f"NAG is ahead at 24 blocks after equal tokens, {its_name}", "ahead", at[24], verdict(ahead[24])],
            [f"NAG gains on the baseline from 3 blocks to 24, {its_name}", "the gap grows with depth", "; ".join(at.values()),
             verdict(subtract(ahead[24], ahead[3]))],
            [f"the baseline's residual has grown more after the last of 24 blocks, {its_name}", "up to 120 × larger than NAG's",
             f"× {spread(grown[0], 1)} since the embedding, NAG's × {spread(grown[1], 1)}; × {spread(times, 1)} as large as NAG's, to begin with "
             f"× {statistics.mean(times) / statistics.mean(times_grown):.1f}", verdict(list(map(math.log, times_grown)))],
            [f"late layers turn the direction less in the baseline, 24 blocks, {its_name}", "hardly turn it",
             f"{spread(late[0], 1)}° a layer of the last quarter; NAG {spread(late[1], 1)}°", verdict(subtract(late[1], late[0]))],
            [f"NAG turns it more in all, 24 blocks, {its_name}", "stays meaningful at depth",
             f"{spread(turned[0], 0)}° in the baseline; NAG {spread(turned[1], 0)}°", verdict(subtract(turned[1], turned[0]))]]
    return rows


if __name__ == "__main__":
    main("depth", __doc__.splitlines()[0], jobs, draw)
