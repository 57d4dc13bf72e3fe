"""Does skipping pay? Equal training FLOPs at several skip rates: what is saved in a step buys more steps. Random choice as control.

    python experiments/isoflop.py           some hours on two cores; may be interrupted and started again
    python experiments/isoflop.py --draw    tables and plots from the logs
"""

from series import Job, by_seed, last, main, plot, spread, table

BUDGETS = {"laptop": ("4.9e12", "9.8e12"), "smoke": ("2e8",), "124m": ("3e18", "6e18"), "350m": ("1e19", "2e19")}
RATES = ("0", "0.1", "0.25", "0.4", "0.5")
SEEDS = (1, 2, 3)


def name(budget: str, rate: str, choose: str) -> str:
    return f"{budget}-{rate}-{choose}"


def jobs(scale: str) -> list[Job]:
    arms = [(rate, "modulator") for rate in RATES] + [(rate, "random") for rate in ("0.25", "0.5")]
    if scale == "smoke":
        arms = arms[2:3]
    return [Job(f"{name(budget, rate, choose)}-seed{seed}", f"--flop_budget {budget} --skip_rate {rate} --choose {choose} --seed {seed} "
                f"--skip_rates {rate} --eval_every 100000")
            for seed in SEEDS[:1 if scale == "smoke" else None] for budget in reversed(BUDGETS[scale]) for rate, choose in arms]


def draw(logs: dict, args):
    rows, lines = [], {}
    for budget in BUDGETS[args.scale]:
        def values(key, rate, choose):
            return by_seed(logs, name(budget, rate, choose), lambda log: last(log, key))
        full_tokens, full_loss = values("tokens", "0", "modulator"), values("val_loss", "0", "modulator")
        for choose in ("modulator", "random"):
            for rate in RATES:
                loss, tokens = values("val_loss", rate, choose), values("tokens", rate, choose)
                flops = values("flops", rate, choose)
                if loss and full_loss:
                    gaps = [its - full for its, full in zip(loss, full_loss)]
                    executed = flops[0] / tokens[0] / (values("flops", "0", "modulator")[0] / full_tokens[0])
                    rows.append([budget, rate, choose, f"{tokens[0] / full_tokens[0]:.3f}", f"{executed:.3f}", spread(loss),
                                 spread(gaps) if rate != "0" else "–", len(loss)])
        lines |= {f"{budget} FLOPs, chosen by {choose}": ([float(rate) for rate in RATES],
                                                          [values("val_loss", rate, choose) for rate in RATES])
                  for choose in ("modulator", "random")}
    print(table(args.results / "isoflop.md", ["training FLOPs", "skip rate", "chosen by", "tokens bought", "FLOPs a token", "loss",
                                              "loss − that of rate 0", "seeds"], rows))
    plot(args.results / "isoflop.png", lines, "skip rate in training", "validation loss at that rate, nats a byte")


if __name__ == "__main__":
    main("isoflop", __doc__.splitlines()[0], jobs, draw)
