"""One checkpoint at any depth: loss against executed FLOPs, of checkpoints trained in several ways, equal steps.

    python experiments/dial.py              two hours on two cores; may be interrupted and started again
    python experiments/dial.py --draw       tables and plots from the logs
"""

import statistics
from typing import NamedTuple

from series import SEEDS, Job, by, by_seed, main, plot, spread, subtract, table, verdict

from model import interpolate


class Training(NamedTuple):
    """A way to train, and at laptop size a shape or length of its own."""

    flags: str
    laptop: str = ""
    changes: str = ""           # of variant.py


DEEP, LONG = "--n_layer 24 --n_embd 64 --n_head 2", "--steps 2100"
TRAINED = {
    "full": Training("--skip_rate 0"),
    "quarter": Training("--skip_rate 0.25"),
    "random-0.5": Training("--skip_rate random:0.5"),
    "random-0.8": Training("--skip_rate random:0.8"),
    "random-0.8-low": Training("--skip_rate random:0.8", changes="rate_power=2"),
    "prenorm": Training("--residual prenorm"),
    "full-deep": Training("--skip_rate 0", DEEP),
    "random-0.5-deep": Training("--skip_rate random:0.5", DEEP),
    "full-long": Training("--skip_rate 0", LONG),
    "random-0.5-long": Training("--skip_rate random:0.5", LONG),
}
SAID = {"": "8 blocks, 700 steps", "-deep": "24 blocks", "-long": "2100 steps"}
RATES = (0.0, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7)
DIAL = "--skip_rates " + ",".join(f"{rate:g}" for rate in RATES)
# (allocation, chosen by): per-layer and global thresholds, and the controls
WAYS = {("per_layer", "modulator"): DIAL, ("global", "modulator"): f"--allocation global {DIAL}",
        ("per_layer", "random"): f"--choose random {DIAL}", ("per_layer", "static"): f"--choose static {DIAL}"}


def jobs(scale: str) -> list[Job]:
    trained, seeds = TRAINED, SEEDS
    if scale == "smoke":
        trained, seeds = {name: TRAINED[name] for name in ("random-0.8-low", "prenorm")}, SEEDS[:1]
    elif scale != "laptop":         # deep and long themselves
        trained = {name: each for name, each in TRAINED.items() if not each.laptop}
    return [Job(f"{name}-seed{seed}", f"{flags} {laptop if scale == 'laptop' else ''} --seed {seed} --skip_rates 0 --eval_every 100000",
                changes=changes, evaluations=tuple(way for (_, choose), way in WAYS.items() if name != "prenorm" or choose == "static"))
            for seed in seeds for name, (flags, laptop, changes) in trained.items()]


def found(logs: dict, name: str, rate: float, key: str = "val_loss", way=("per_layer", "modulator")) -> list[float]:
    """What each seed's checkpoint gave at a rate."""
    def value(log):
        return [dial[key] for entry in log if (dial := entry.get("dial"))
                and (dial["allocation"], dial["choose"], dial["skip_rate"]) == (*way, rate)][-1:]
    return sum(by_seed(logs, name, value), [])


def loss_at(logs: dict, name: str, shares: list[float], way=("per_layer", "modulator")) -> list[float]:
    """The dial's loss where each seed's checkpoint executes these shares of the FLOPs, between its rates."""
    flops, losses = (list(zip(*(found(logs, name, rate, key, way) for rate in reversed(RATES)))) for key in ("flops_share", "val_loss"))
    return [interpolate(*each) for each in zip(shares, flops, losses)]


def draw(logs: dict, args):
    rows, lines = {}, {}
    for name in TRAINED:
        for way in WAYS:
            losses, flops = ([found(logs, name, rate, key, way) for rate in RATES] for key in ("val_loss", "flops_share"))
            if any(losses):
                label = f"{way[1]}{', global' * (way[0] == 'global')}"
                shares = " ".join(f"{statistics.mean(each):.2f}" if each else "–" for each in flops)
                rows[f"{name}, {label}"] = [name, label, *map(spread, losses), shares, max(map(len, losses))]
                lines[f"{name}, {label}"] = ([statistics.mean(each) if each else None for each in flops], losses)
    usual = {"full, modulator": "NAG trained at full depth", "full, modulator, global": "NAG trained at full depth, global thresholds",
             "full, static": "NAG trained at full depth, whole layers left out", "quarter, modulator": "NAG, a quarter skipped in training",
             "random-0.5, modulator": "NAG, random rates up to 0.5", "random-0.8, modulator": "NAG, random rates up to 0.8",
             "prenorm, static": "pre-norm, whole layers left out"}
    head = ["trained", "chosen by", *(f"{rate:g}" for rate in RATES), "shares of FLOPs", "seeds"]
    print(table(args.results / "dial.md", head, list(rows.values())))
    print(table(args.results / "dial-usual.md", head, [rows[label] for label in usual if label in rows]))
    x, y = "executed FLOPs, share of full depth", "validation loss, nats a byte"
    plot(args.results / "dial.png", {said: lines[label] for label, said in usual.items() if label in lines}, x, y)
    plot(args.results / "dial-ways.png", {label: line for label, line in lines.items() if label.startswith("random-0.5,")}, x, y)


def claims(logs: dict, scale: str) -> list[list[str]]:
    rows, (each_layer, overall, chance, static) = [], WAYS
    ways = {each_layer: "by thresholds in each layer", overall: "by global ones", static: "by whole layers left out"}
    for kind, said in SAID.items():
        full, random = f"full{kind}", f"random-0.5{kind}"
        lost = subtract(found(logs, random, 0.4), found(logs, random, 0.0))
        cost = subtract(found(logs, random, 0.0), found(logs, full, 0.0))
        shares = found(logs, random, 0.4, "flops_share")
        without = {way: subtract(loss_at(logs, full, shares, way), found(logs, full, 0.0)) for way in ways}
        rows.append([f"a random-rate checkpoint loses less to 40 % skipped than a full-depth one to as many FLOPs saved, {said}", "– (ours)",
                     f"{spread(lost)} lost; that {', '.join(f'{spread(its)} {ways[way]}' for way, its in without.items())}; at full "
                     f"depth {by(cost, 'behind it by', 'ahead of it by')}", verdict(*(subtract(its, lost) for its in without.values()))])
    for name, said in (("full", "full-depth"), ("random-0.5", "random-rate")):
        better = subtract(found(logs, name, 0.25, way=chance), found(logs, name, 0.25))
        rows.append([f"of a {said} checkpoint: the modulator chooses 25 % better than chance", "a dial after training",
                     by(better, "better by", "worse by"), verdict(better)])
        shares, whole = (found(logs, name, 0.25, key, static) for key in ("flops_share", "val_loss"))
        for way in (each_layer, overall):
            better = subtract(whole, loss_at(logs, name, shares, way))
            rows.append([f"of a {said} checkpoint: skipping {ways[way]} is better than leaving 4 whole layers of 16 out, equal FLOPs",
                         "a dial after training", by(better, "better by", "worse by"), verdict(better)])
    base = subtract(found(logs, "prenorm", 0.25, way=static), found(logs, "prenorm", 0.0, way=static))
    shares, at_full_depth = found(logs, "prenorm", 0.25, "flops_share", static), found(logs, "full", 0.0)
    for said, nag in (("skipping by thresholds in each layer, equal FLOPs,", loss_at(logs, "full", shares)),
                      ("skipping by global ones, equal FLOPs,", loss_at(logs, "full", shares, overall)),
                      ("with 4 layers left out too", found(logs, "full", 0.25, way=static))):
        loses = subtract(nag, at_full_depth)
        rows.append([f"full-depth NAG {said} loses less than the baseline with 4 layers of 16 left out", "a dial after training",
                     f"{spread(loses)}; baseline {spread(base)}", verdict(subtract(base, loses))])
    return rows


if __name__ == "__main__":
    main("dial", __doc__.splitlines()[0], jobs, draw)
