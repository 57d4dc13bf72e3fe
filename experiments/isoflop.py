"""Does skipping pay? Equal training FLOPs at several skip rates: what is saved in a step buys more steps.

Beside it the other ways to spend them: random choice, rates drawn anew for each step (evaluated at full depth), fewer blocks,
and the pre-norm baseline.

    python experiments/isoflop.py           two hours on two cores; may be interrupted and started again
    python experiments/isoflop.py --draw    table and plot from the logs
"""

import statistics

from series import SEEDS, Job, by, by_seed, last, main, plot, spread, subtract, table, verdict

BUDGETS = {"laptop": ("4.9e12", "9.8e12"), "smoke": ("2e8",), "124m": ("3e18", "6e18"), "350m": ("1e19", "2e19")}
FEWER = {"laptop": 5, "smoke": 1, "124m": 8, "350m": 16}        # blocks that cost about as much as all of them at rate 0.5
KINDS = {"modulator": "NAG", "random": "NAG, random choice", "dial": "NAG, random:0.5", "fewer": "NAG, fewer blocks",
         "prenorm": "pre-norm"}
ARMS = [(rate, "modulator") for rate in ("0", "0.1", "0.25", "0.4", "0.5", "0.6")] + [
        ("0.25", "random"), ("0.5", "random"), ("0", "dial"), ("0", "fewer"), ("0", "prenorm")]       # (evaluated at, kind)


def name(budget: str, rate: str, kind: str) -> str:
    return f"{budget}-{rate}-{kind}"


def jobs(scale: str) -> list[Job]:
    arms, seeds = ARMS, SEEDS
    if scale == "smoke":
        arms, seeds = [("0", "modulator"), ("0.25", "random"), ("0", "prenorm")], SEEDS[:1]

    def flags(rate, kind):
        if kind == "prenorm":
            return "--residual prenorm"
        blocks = f" --n_layer {FEWER[scale]}" if kind == "fewer" else ""
        trained_at = "random:0.5" if kind == "dial" else rate
        return f"--skip_rate {trained_at} --choose {'random' if kind == 'random' else 'modulator'}{blocks}"

    return [Job(f"{name(budget, rate, kind)}-seed{seed}", f"--flop_budget {budget} {flags(rate, kind)} --seed {seed} "
                f"--skip_rates {rate} --eval_every 100000")
            for seed in seeds for budget in reversed(BUDGETS[scale]) for rate, kind in arms]


def values(logs: dict, key: str, budget: str, rate: str, kind: str = "modulator") -> list[float]:
    return by_seed(logs, name(budget, rate, kind), lambda log: last(log, key))


def seconds(logs: dict, *arm: str) -> list[float]:
    """Time of training, by the median pace: runs of a series share the machine with one another."""
    return by_seed(logs, name(*arm), lambda log: last(log, "tokens") / statistics.median(
        entry["tokens_per_s"] for entry in log if "tokens_per_s" in entry))


def draw(logs: dict, args):
    rows, lines = [], {}
    for budget in BUDGETS[args.scale]:
        full = (budget, "0", "modulator")
        for rate, kind in ARMS:
            arm = (budget, rate, kind)
            if (losses := values(logs, "val_loss", *arm)) and values(logs, "val_loss", *full):
                tokens, flops = (values(logs, key, *arm)[0] / values(logs, key, *full)[0] for key in ("tokens", "flops"))
                times = [its / whole for its, whole in zip(seconds(logs, *arm), seconds(logs, *full))]
                gaps = subtract(losses, values(logs, "val_loss", *full))
                rows.append([budget, KINDS[kind], rate, f"{tokens:.3f}", f"{flops / tokens:.3f}", spread(times, 2), spread(losses),
                             spread(gaps) if arm != full else "–", len(gaps)])
        for kind in ("modulator", "random"):
            rates = [rate for rate, its in ARMS if its == kind]
            lines[f"{budget} FLOPs, {KINDS[kind]}"] = (list(map(float, rates)), [values(logs, "val_loss", budget, rate, kind) for rate in rates])
    print(table(args.results / "isoflop.md", ["training FLOPs", "model", "skip rate", "tokens bought", "FLOPs a token", "time",
                                              "loss", "loss − that of rate 0", "seeds"], rows))
    plot(args.results / "isoflop.png", lines, "skip rate in training", "validation loss at that rate, nats a byte")


def claims(logs: dict, scale: str) -> list[list[str]]:
    full, quarter, half = ("0", "modulator"), ("0.25", "modulator"), ("0.5", "modulator")
    dial, fewer, baseline = ("0", "dial"), ("0", "fewer"), ("0", "prenorm")
    compared = [
        ("skipping 25 % is ahead of full depth", "20–25 % matches or beats full depth", quarter, full),
        ("skipping 50 % is ahead of full depth", "–", half, full),
        ("the modulator's choice of 25 % is ahead of chance", "–", quarter, ("0.25", "random")),
        ("the modulator's choice of 50 % is ahead of chance", "–", half, ("0.5", "random")),
        (f"skipping 50 % is ahead of a model of {FEWER[scale]} blocks at full depth", "–", half, fewer),
        ("a random-rate checkpoint at full depth is ahead of full-depth training", "– (ours)", dial, full),
        ("NAG at full depth is ahead of the baseline", "ahead", full, baseline),
        ("NAG that skips 25 % is ahead of the baseline", "ahead", quarter, baseline),
        ("a random-rate checkpoint at full depth is ahead of the baseline", "– (ours)", dial, baseline)]
    rows = []
    for claim, paper, arm, other in compared:
        leads = {budget: subtract(values(logs, "val_loss", budget, *other), values(logs, "val_loss", budget, *arm)) for budget in BUDGETS[scale]}
        measured = "; ".join(f"{by(lead, 'ahead by', 'behind by')} at {budget}" for budget, lead in leads.items())
        rows.append([f"{claim}, equal training FLOPs", paper, measured, verdict(*leads.values())])
    return rows


if __name__ == "__main__":
    main("isoflop", __doc__.splitlines()[0], jobs, draw)
