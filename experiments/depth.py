"""Loss, residual norm and rotation by depth: NAG and pre-norm at 3 to 24 blocks of equal width, and at 48 narrow ones, equal tokens.

    python experiments/depth.py             an hour and a half on two cores; may be interrupted and started again
    python experiments/depth.py --draw      tables and plots from the logs

Both arms under Muon, which serves each of them better than AdamW (recipe.py). Their settings were found at 8 blocks; at 24 some others are
tried by one seed, as many for each arm, and what helps is run by all.
"""

import math
import statistics

from recipe import DEFAULTS, SEARCH_SEED, SEARCH_STEPS, in_a_name, said
from series import SEEDS, Job, by, by_seed, last, main, plot, spread, subtract, table, verdict

NARROW = 48                             # so deep that it has to be narrower to fit in some minutes
BLOCKS = (3, 6, 12, 24, NARROW)
ARMS = {"nag": "--residual nag --skip_rate 0", "prenorm": "--residual prenorm"}
# Width by scale, of the others and of the narrow one; nothing: that of the scale.
SHAPES = {"laptop": ("--n_embd 64 --n_head 2 --steps 500", "--n_embd 48 --n_head 2 --steps 500"), "smoke": ("", ""),
          "124m": ("", "--n_embd 384 --n_head 6"), "350m": ("", "--n_embd 512 --n_head 8")}
DEEP = 24
# Tried at DEEP blocks: train.py's flags | variant.py's changes; nothing: the defaults.
SEARCH = {"nag": ["", "--matrix_learning_rate 0.014", "--matrix_learning_rate 0.03", "| alpha_scale=2", "| alpha_scale=0.35 alpha_power=0",
                  "| alpha_scale=0.7 alpha_power=0"],
          "prenorm": ["", "--matrix_learning_rate 0.014", "--matrix_learning_rate 0.03", "| output_scale=0", "| output_scale=1",
                      "| embedding_std=0.5"]}
BEST = {"nag": "--matrix_learning_rate 0.03 | alpha_scale=2", "prenorm": "--matrix_learning_rate 0.03"}      # what helped, together
assert len({len(settings) for settings in SEARCH.values()}) == 1       # the same budget for each arm


def name(arm: str, blocks: int, kind: str = "") -> str:
    return f"{arm}-muon-{blocks}blocks{kind}"


def job(scale: str, arm: str, blocks: int, seed: int) -> Job:
    """A run that is reported."""
    shape = SHAPES[scale][blocks == NARROW]
    return Job(f"{name(arm, blocks)}-seed{seed}", f"{ARMS[arm]} --optimizer muon --n_layer {blocks} {shape} "
               f"--seed {seed} --skip_rates 0 --eval_every 100000", evaluations=("experiments/measure_stream.py",))


def deep(scale: str, arm: str, seed: int, kind: str, setting: str) -> Job:
    """One of DEEP blocks at a setting."""
    like = job(scale, arm, DEEP, seed)
    flags, _, changes = setting.partition("|")
    return like._replace(name=f"{name(arm, DEEP, kind)}-seed{seed}", flags=f"{like.flags} {flags}", changes=changes)


def searched(scale: str, arm: str, setting: str) -> Job:
    """A shorter one, by a seed of its own, that tries a setting."""
    tried = deep(scale, arm, SEARCH_SEED, f"-{in_a_name(setting) or DEFAULTS}", f"--steps {SEARCH_STEPS[scale]} {setting}")
    return tried._replace(evaluations=())


def jobs(scale: str) -> list[Job]:
    if scale == "smoke":
        return [job(scale, "nag", 3, 1), job(scale, "prenorm", 6, 1)]
    reported = [job(scale, arm, blocks, seed) for seed in SEEDS for blocks in BLOCKS for arm in ARMS]
    reported += [deep(scale, arm, seed, "-best", BEST[arm]) for seed in SEEDS for arm in ARMS]
    return reported + [searched(scale, arm, setting) for settings in zip(*SEARCH.values()) for arm, setting in zip(SEARCH, settings)]


def losses(logs: dict, arm: str, blocks: int, kind: str = "") -> list[float]:
    return by_seed(logs, name(arm, blocks, kind), lambda log: last(log, "val_loss"))


def gaps(logs: dict, blocks: int, kind: str = "") -> list[float]:
    """How far NAG is ahead."""
    return subtract(losses(logs, "prenorm", blocks, kind), losses(logs, "nag", blocks, kind))


def stream(logs: dict, arm: str, blocks: int, value) -> list:
    """value(what measure_stream.py found) of each seed."""
    return by_seed(logs, name(arm, blocks), lambda log: value(last(log, "stream")))


def late_turn(found: dict) -> float:
    """Mean angle, in degrees, of a layer of the last quarter."""
    return statistics.mean(found["angle"][-max(1, len(found["angle"]) // 4):])


def larger(logs: dict, blocks: int) -> str:
    """How many times the baseline's parameters NAG has, by its modulators: the narrower the more."""
    nag, prenorm = (by_seed(logs, name(arm, blocks), lambda log: last(log, "parameters"))[0] for arm in ARMS)
    return f"{nag / prenorm:.3f}"


def end(found: dict) -> float:
    """The residual's RMS after the last layer."""
    return found["norm"][-1]


def growth(found: dict) -> float:
    """That in units of the embedding's."""
    return end(found) / found["norm"][0]


def turns(found: dict) -> float:
    """The angles of all layers added, in degrees; turns that go back count as well."""
    return sum(found["angle"])


def from_embedding(found: dict) -> float:
    """The angle between the embedding and what the last layer leaves, in degrees."""
    return found["from_embedding"][-1]


def draw(logs: dict, args):
    shown = [(blocks, "") for blocks in BLOCKS]
    shown.insert(BLOCKS.index(DEEP) + 1, (DEEP, "-best"))
    rows = [[f"{blocks}{', what suits it' * bool(kind)}", by_seed(logs, name("nag", blocks), lambda log: last(log, "config"))[0]["n_embd"],
             *(spread(losses(logs, arm, blocks, kind)) for arm in ARMS), spread(gap), larger(logs, blocks), len(gap)]
            for blocks, kind in shown if (gap := gaps(logs, blocks, kind))]
    print(table(args.results / "depth.md", ["blocks", "width", "NAG", "pre-norm", "pre-norm − NAG",
                                            "parameters, NAG ÷ pre-norm", "seeds"], rows))
    wide = [blocks for blocks in BLOCKS if blocks != NARROW]
    plot(args.results / "depth.png", {arm: (wide, [losses(logs, arm, blocks) for blocks in wide]) for arm in ARMS},
         "blocks", "validation loss, nats a byte", log_x=True)
    for key, y in (("norm", "RMS of the residual"), ("angle", "turned by the layer, degrees"),
                   ("from_embedding", "turned since the embedding, degrees")):
        lines, first = {}, 0 if key == "norm" else 1
        for arm in ARMS:
            for blocks in (12, DEEP):
                by_layer = list(zip(*stream(logs, arm, blocks, lambda found: found[key])))
                lines[f"{arm}, {blocks} blocks"] = (list(range(first, first + len(by_layer))), by_layer)
        plot(args.results / f"{key}.png", lines, "after the layer (0: the embedding)", y)
    rows = [[blocks, arm, *(spread(stream(logs, arm, blocks, value), 2) for value in (
             end, growth, late_turn, turns, from_embedding))]
            for blocks in BLOCKS for arm in ARMS if losses(logs, arm, blocks)]
    print(table(args.results / "stream.md", ["blocks", "arm", "RMS at the end", "÷ RMS of the embedding",
                                             "turn of a layer of the last quarter, °", "turns of all layers, °", "embedding to end, °"], rows))
    rows = [[arm, said(setting or DEFAULTS), f"{last(logs[run], 'val_loss'):.4f}"] for arm, settings in SEARCH.items() for setting in settings
            if (run := searched(args.scale, arm, setting).name) in logs]
    print(table(args.results / "depth-search.md", ["arm", "setting", "loss"], rows))


def claims(logs: dict, scale: str) -> list[list[str]]:
    ahead, tuned = {blocks: gaps(logs, blocks) for blocks in (3, DEEP)}, gaps(logs, DEEP, "-best")
    if not all(ahead.values()):
        return []
    at = {blocks: f"{by(gap, 'ahead by', 'behind by')} at {blocks} blocks, parameters × {larger(logs, blocks)}"
          for blocks, gap in ahead.items()}
    at_end, grown, late, turned, away = ([stream(logs, arm, DEEP, value) for arm in ("prenorm", "nag")]
                                         for value in (end, growth, late_turn, turns, from_embedding))
    times, times_grown = ([prenorm / nag for prenorm, nag in zip(*found)] for found in (at_end, grown))
    return [
        ["NAG is ahead at 24 blocks after equal tokens", "ahead", at[DEEP], verdict(ahead[DEEP])],
        ["NAG is ahead at 24 blocks after equal tokens, each arm at what suits it there", "ahead", by(tuned, "ahead by", "behind by"),
         verdict(tuned)],
        ["NAG gains on the baseline from 3 blocks to 24", "the gap grows with depth", "; ".join(at.values()),
         verdict(subtract(ahead[DEEP], ahead[3]))],
        ["the baseline's residual has grown more after the last of 24 blocks", "up to 120 × larger than NAG's",
         f"× {spread(grown[0], 1)} since the embedding, NAG's × {spread(grown[1], 1)}; × {spread(times, 1)} as large as NAG's, to begin with "
         f"× {statistics.mean(times) / statistics.mean(times_grown):.1f}", verdict(list(map(math.log, times_grown)))],
        ["late layers turn the direction less in the baseline, 24 blocks", "hardly turn it",
         f"{spread(late[0], 1)}° a layer of the last quarter; NAG {spread(late[1], 1)}°", verdict(subtract(late[1], late[0]))],
        ["the turns of all layers add up to more in NAG, 24 blocks", "stays meaningful at depth",
         f"{spread(turned[0], 0)}° in the baseline; NAG {spread(turned[1], 0)}°", verdict(subtract(turned[1], turned[0]))],
        ["NAG ends further from the embedding, 24 blocks", "stays meaningful at depth",
         f"{spread(away[0], 0)}° from it in the baseline; NAG {spread(away[1], 0)}°", verdict(subtract(away[1], away[0]))]]


if __name__ == "__main__":
    main("depth", __doc__.splitlines()[0], jobs, draw)
