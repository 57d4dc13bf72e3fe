"""Which settings serve each arm best: one seed to search, three for what is reported. The same number of settings for each arm.

    python experiments/recipe.py            some hours on two cores; may be interrupted and started again
    python experiments/recipe.py --draw     experiments/results/recipe.md from the logs
"""

from series import Job, last, main, spread, table

TEXTS = ("stdlib", "tinyshakespeare")
MUON, ADAMW = "--optimizer muon", "--optimizer adamw"
# Around each arm's defaults, one setting at a time: train.py's flags | variant.py's changes.
SEARCH = {
    ("nag", "muon"): ["", "--matrix_learning_rate 0.01", "--matrix_learning_rate 0.03", "--learning_rate 2e-3", "--learning_rate 8e-3",
                      "--gate_learning_rate 1e-3", "--gate_learning_rate 1.6e-2", "--n_directions 4", "--n_directions 32",
                      "| alpha_scale=0.5", "| alpha_scale=2", "| alpha_scale=0.35 alpha_power=0", "| embedding_std=0.1",
                      "| log_norm_start=-0.7", "| eps=0.1", "| output_scale=0.5", "--weight_decay 0"],
    ("prenorm", "muon"): ["", "--matrix_learning_rate 0.01", "--matrix_learning_rate 0.03", "--learning_rate 2e-3", "--learning_rate 8e-3",
                          "--learning_rate 1.6e-2", "--matrix_learning_rate 0.04", "--matrix_learning_rate 0.014 --learning_rate 8e-3",
                          "--weight_decay 0", "| embedding_std=1", "| embedding_std=0.2", "| embedding_std=0.02", "| unembedding_std=0.005",
                          "| output_scale=4", "| output_scale=0.25", "| branch_scale=0.5", "| branch_scale=2"],
    ("nag", "adamw"): ["", "--matrix_learning_rate 2e-3", "--matrix_learning_rate 8e-3", "--learning_rate 2e-3", "--learning_rate 8e-3",
                       "--gate_learning_rate 1e-3", "--gate_learning_rate 1.6e-2", "--n_directions 4", "--n_directions 32",
                       "| alpha_scale=0.4", "| alpha_scale=1.2", "| alpha_scale=1 alpha_power=0.5", "| embedding_std=0.1",
                       "| log_norm_start=-0.7", "| eps=0.1", "| output_scale=0.5", "--weight_decay 0"],
    ("prenorm", "adamw"): ["", "--matrix_learning_rate 1.5e-3", "--matrix_learning_rate 6e-3", "--learning_rate 2e-3", "--learning_rate 8e-3",
                           "--learning_rate 1.6e-2", "--matrix_learning_rate 2e-3 --learning_rate 8e-3",
                           "--matrix_learning_rate 4e-3 --learning_rate 8e-3", "--weight_decay 0", "| embedding_std=1", "| embedding_std=0.2",
                           "| embedding_std=0.02", "| unembedding_std=0.005", "| output_scale=4", "| output_scale=0.25",
                           "| branch_scale=0.5", "| branch_scale=2"],
}
assert len({len(settings) for settings in SEARCH.values()}) == 1       # the same budget for each arm


def job(arm: str, optimizer: str, text: str, setting: str, seed: int) -> Job:
    flags, _, changes = setting.partition("|")
    name = "-".join(filter(None, (arm, optimizer, text, setting.replace("--", "").replace("|", "").strip().replace(" ", "_") or "default",
                                  f"seed{seed}")))
    return Job(name, f"--residual {arm} --optimizer {optimizer} --seed {seed} --skip_rates 0 --eval_every 100000 "
                     + ("--skip_rate 0 " if arm == "nag" else "") + flags, text, changes.strip())


def jobs(scale: str) -> list[Job]:
    """The defaults by three seeds, then the search by one."""
    if scale == "smoke":
        return [job("nag", "adamw", "stdlib", "| alpha_scale=0.4", 1), job("prenorm", "muon", "stdlib", "", 1)]
    reported = [job(arm, optimizer, text, "", seed) for seed in (1, 2, 3) for arm, optimizer in SEARCH for text in TEXTS]
    return reported + [job(arm, optimizer, text, setting, 1) for settings in zip(*SEARCH.values())
                       for (arm, optimizer), setting in zip(SEARCH, settings) if setting for text in TEXTS]


def draw(logs: dict, args):
    """All settings that were tried, the best first, with their losses."""
    rows = []
    for arm, optimizer in SEARCH:
        for setting in SEARCH[arm, optimizer]:
            losses = [[last(logs[name], "val_loss") for seed in (1, 2, 3)
                       if (name := job(arm, optimizer, text, setting, seed).name) in logs] for text in TEXTS]
            if any(losses):
                rows.append([arm, optimizer, f"`{setting.replace('|', '').strip()}`" if setting else "as it is", *map(spread, losses)])
    print(table(args.results / "recipe.md", ["arm", "optimizer", "setting", *TEXTS], rows))


if __name__ == "__main__":
    main("recipe", __doc__.splitlines()[0], jobs, draw)
