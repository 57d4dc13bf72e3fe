"""Does skipping pay? Equal training FLOPs at several skip rates: what is saved in a step buys more steps. Random choice as control.

    python experiments/isoflop.py           an hour on two cores; may be interrupted and started again
    python experiments/isoflop.py --draw    table and plot from the logs
"""

from series import SEEDS, Job, by_seed, last, main, plot, spread, subtract, table, verdict

BUDGETS = {"laptop": ("4.9e12", "9.8e12"), "smoke": ("2e8",), "124m": ("3e18", "6e18"), "350m": ("1e19", "2e19")}
RATES = ("0", "0.1", "0.25", "0.4", "0.5")
CONTROLS = ("0.25", "0.5")


def name(budget: str, rate: str, choose: str) -> str:
    return f"{budget}-{rate}-{choose}"


def jobs(scale: str) -> list[Job]:
    arms = [(rate, "modulator") for rate in RATES] + [(rate, "random") for rate in CONTROLS]
    seeds = SEEDS
    if scale == "smoke":
        arms, seeds = [("0", "modulator"), ("0.25", "random")], SEEDS[:1]
    return [Job(f"{name(budget, rate, choose)}-seed{seed}", f"--flop_budget {budget} --skip_rate {rate} --choose {choose} --seed {seed} "
                f"--skip_rates {rate} --eval_every 100000")
            for seed in seeds for budget in reversed(BUDGETS[scale]) for rate, choose in arms]


def values(logs: dict, key: str, budget: str, rate: str, choose: str = "modulator") -> list[float]:
    return by_seed(logs, name(budget, rate, choose), lambda log: last(log, key))


def draw(logs: dict, args):
    rows, lines = [], {}
    for budget in BUDGETS[args.scale]:
        def of(key, rate, choose="modulator"):
            return values(logs, key, budget, rate, choose)
        for choose in ("modulator", "random"):
            for rate in RATES:
                if of("val_loss", rate, choose) and of("val_loss", "0"):
                    tokens, flops = (of(key, rate, choose)[0] / of(key, "0")[0] for key in ("tokens", "flops"))
                    gaps = subtract(of("val_loss", rate, choose), of("val_loss", "0"))
                    rows.append([budget, rate, choose, f"{tokens:.3f}", f"{flops / tokens:.3f}", spread(of("val_loss", rate, choose)),
                                 spread(gaps) if float(rate) else "–", len(gaps)])
            lines[f"{budget} FLOPs, chosen by {choose}"] = (list(map(float, RATES)), [of("val_loss", rate, choose) for rate in RATES])
    print(table(args.results / "isoflop.md", ["training FLOPs", "skip rate", "chosen by", "tokens bought", "FLOPs a token", "loss",
                                              "loss − that of rate 0", "seeds"], rows))
    plot(args.results / "isoflop.png", lines, "skip rate in training", "validation loss at that rate, nats a byte")


def claims(logs: dict) -> list[list[str]]:
    rows = []
    for budget in BUDGETS["laptop"]:
        ahead = subtract(values(logs, "val_loss", budget, "0"), values(logs, "val_loss", budget, "0.25"))
        rows += [[f"skipping 25 % is {claim} at {budget} training FLOPs", "20–25 % matches or beats full depth",
                  f"ahead by {spread(ahead)}", verdict([gap + margin for gap in ahead])]
                 for claim, margin in (("ahead of full depth", 0), ("at most 0.01 behind full depth", 0.01))]
    budget = BUDGETS["laptop"][-1]
    worse = {rate: subtract(values(logs, "val_loss", budget, rate, "random"), values(logs, "val_loss", budget, rate)) for rate in CONTROLS}
    return rows + [["the modulator chooses better than chance", "–", "; ".join(f"by {spread(gap)} at {float(rate):.0%}" for rate, gap
                    in worse.items()), verdict(*worse.values())]]


if __name__ == "__main__":
    main("isoflop", __doc__.splitlines()[0], jobs, draw)
