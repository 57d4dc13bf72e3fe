"""Loss, residual norm and rotation by depth: NAG and pre-norm at 3 to 24 blocks of equal width, and at 48 narrow ones, equal tokens.

    python experiments/depth.py             some hours on two cores; may be interrupted and started again
    python experiments/depth.py --draw      tables and plots from the logs
"""

from series import Job, by_seed, last, main, plot, spread, table

SHAPES = {3: "--n_embd 64 --n_head 2", 6: "--n_embd 64 --n_head 2", 12: "--n_embd 64 --n_head 2", 24: "--n_embd 64 --n_head 2",
          48: "--n_embd 48 --n_head 2"}
ARMS = {"nag": "--residual nag --skip_rate 0", "prenorm": "--residual prenorm"}
SEEDS = (1, 2, 3)


def name(arm: str, optimizer: str, blocks: int) -> str:
    return f"{arm}-{optimizer}-{blocks}blocks"


def jobs(scale: str) -> list[Job]:
    def job(arm, optimizer, blocks, seed):
        shape = f"--n_layer {blocks} " + (SHAPES[blocks] + " --steps 500" if scale == "laptop" else "")
        return Job(f"{name(arm, optimizer, blocks)}-seed{seed}", f"{ARMS[arm]} --optimizer {optimizer} {shape} --seed {seed} "
                   f"--skip_rates 0 --eval_every 100000", evaluations=("experiments/measure_stream.py",))
    if scale == "smoke":
        return [job(arm, "muon", blocks, 1) for arm in ARMS for blocks in (3, 6)]
    return [job(arm, optimizer, blocks, seed) for seed in SEEDS for optimizer in ("muon", "adamw") for blocks in SHAPES for arm in ARMS]


def draw(logs: dict, args):
    rows, lines = [], {}
    for optimizer in ("muon", "adamw"):
        for blocks in SHAPES:
            losses = {arm: by_seed(logs, name(arm, optimizer, blocks), lambda log: last(log, "val_loss")) for arm in ARMS}
            if all(losses.values()):
                gaps = [prenorm - nag for nag, prenorm in zip(losses["nag"], losses["prenorm"])]
                rows.append([optimizer, f"{blocks}, {'d = 48' if blocks == 48 else 'd = 64'}", spread(losses["nag"]),
                             spread(losses["prenorm"]), spread(gaps), min(map(len, losses.values()))])
        for arm in ARMS:
            lines[f"{arm}, {optimizer}"] = (list(SHAPES), [by_seed(logs, name(arm, optimizer, blocks), lambda log: last(log, "val_loss"))
                                                           if blocks != 48 else [] for blocks in SHAPES])
    print(table(args.results / "depth.md", ["optimizer", "blocks", "NAG", "pre-norm", "pre-norm − NAG", "seeds"], rows))
    plot(args.results / "depth.png", lines, "blocks", "validation loss, nats a byte", log_x=True)
    draw_stream(logs, args)


def draw_stream(logs: dict, args):
    rows = []
    for key, y in (("norm", "RMS of the residual"), ("angle", "turned by the layer, degrees"),
                   ("from_embedding", "turned since the embedding, degrees")):
        lines = {}
        for arm in ARMS:
            for blocks in (12, 24):
                found = by_seed(logs, name(arm, "muon", blocks), lambda log: last(log, "stream")[key])
                if found:
                    lines[f"{arm}, {blocks} blocks"] = (list(range(len(found[0]))), [list(values) for values in zip(*found)])
        plot(args.results / f"{key}.png", lines, "layer", y)
    for optimizer in ("muon", "adamw"):
        for blocks in SHAPES:
            for arm in ARMS:
                found = by_seed(logs, name(arm, optimizer, blocks), lambda log: last(log, "stream"))
                if found:
                    late = max(1, len(found[0]["angle"]) // 4)
                    rows.append([optimizer, blocks, arm, spread([each["norm"][-1] for each in found]),
                                 spread([each["norm"][-1] / each["norm"][0] for each in found]),
                                 spread([sum(each["angle"][-late:]) / late for each in found]),
                                 spread([each["from_embedding"][-1] for each in found])])
    print(table(args.results / "stream.md", ["optimizer", "blocks", "arm", "norm at the end", "÷ norm of the embedding",
                                             "turn of a layer of the last quarter, °", "turned since the embedding, °"], rows))


if __name__ == "__main__":
    main("depth", __doc__.splitlines()[0], jobs, draw)
