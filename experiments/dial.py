"""One checkpoint at any depth: loss against executed FLOPs, of checkpoints trained in several ways, equal steps.

    python experiments/dial.py              some hours on two cores; may be interrupted and started again
    python experiments/dial.py --draw       tables and plots from the logs
"""

from series import Job, by_seed, main, plot, spread, table

TRAINED = {"full": "--skip_rate 0", "quarter": "--skip_rate 0.25", "random-0.5": "--skip_rate random:0.5",
           "random-0.8": "--skip_rate random:0.8", "prenorm": "--residual prenorm"}
RATES = (0.0, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7)
DIAL = "--skip_rates " + ",".join(f"{rate:g}" for rate in RATES)
# (allocation, chosen by): per-layer and global thresholds, and the controls
WAYS = {("per_layer", "modulator"): DIAL, ("global", "modulator"): f"--allocation global {DIAL}",
        ("per_layer", "random"): f"--choose random {DIAL}", ("per_layer", "static"): f"--choose static {DIAL}"}
SEEDS = (1, 2, 3)


def jobs(scale: str) -> list[Job]:
    trained = {"quarter": TRAINED["quarter"], "prenorm": TRAINED["prenorm"]} if scale == "smoke" else TRAINED
    return [Job(f"{name}-seed{seed}", f"{flags} --seed {seed} --skip_rates 0 --eval_every 100000",
                evaluations=tuple(way for (_, choose), way in WAYS.items() if name != "prenorm" or choose == "static"))
            for seed in SEEDS[:1 if scale == "smoke" else None] for name, flags in trained.items()]


def draw(logs: dict, args):
    rows, lines = [], {}
    for name in TRAINED:
        for allocation, choose in WAYS:
            def found(rate, key):
                return by_seed(logs, name, lambda log: [entry["dial"][key] for entry in log if "dial" in entry
                                                        and entry["dial"]["skip_rate"] == rate and entry["dial"]["choose"] == choose
                                                        and entry["dial"]["allocation"] == allocation][-1:])
            losses, flops = ([[value for values in found(rate, key) for value in values] for rate in RATES]
                             for key in ("val_loss", "flops_share"))
            if any(losses):
                rows.append([name, f"{choose}{', global' * (allocation == 'global')}", *map(spread, losses), max(map(len, losses))])
                lines[f"{name}, {choose}{', global' * (allocation == 'global')}"] = (
                    [sum(each) / len(each) if each else None for each in flops], losses)
    print(table(args.results / "dial.md", ["trained", "chosen by", *(f"{rate:g}" for rate in RATES), "seeds"], rows))
    plot(args.results / "dial.png", {label: line for label, line in lines.items() if label.endswith(("modulator", "prenorm, static"))},
         "executed FLOPs, share of full depth", "validation loss, nats a byte", title="per-layer thresholds")
    plot(args.results / "dial-ways.png", {label: line for label, line in lines.items() if label.startswith("random-0.5")},
         "executed FLOPs, share of full depth", "validation loss, nats a byte", title="trained at random:0.5")


if __name__ == "__main__":
    main("dial", __doc__.splitlines()[0], jobs, draw)
