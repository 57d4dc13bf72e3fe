"""Which settings serve each arm best: one seed to search, three for what is reported. The same number of settings for each arm.

    python experiments/recipe.py            some hours on two cores; may be interrupted and started again
    python experiments/recipe.py --draw     experiments/results/recipe.md from the logs
"""

import itertools
import math

from series import OPTIMIZERS, SEEDS, TEXT_ON_GPUS, Job, by, by_seed, last, main, spread, subtract, table, verdict

TEXTS = ("stdlib", "tinyshakespeare")
# train.py's flags | variant.py's changes: around where the search began one setting at a time, then what had helped together.
SEARCH = {
    ("nag", "muon"): ["", "--matrix_learning_rate 0.01", "--matrix_learning_rate 0.03", "--learning_rate 2e-3", "--learning_rate 8e-3",
                      "--gate_learning_rate 1e-3", "--gate_learning_rate 1.6e-2", "--n_directions 4", "--n_directions 32",
                      "| alpha_scale=0.5", "| alpha_scale=2", "| alpha_scale=0.35 alpha_power=0", "| alpha_scale=0.7 alpha_power=0",
                      "| embedding_std=0.1", "| log_norm_start=-0.7", "| eps=0.1", "| output_scale=0.5", "--weight_decay 0",
                      "--matrix_learning_rate 0.04", "--matrix_learning_rate 0.06", "--matrix_learning_rate 0.04 --gate_learning_rate 1.6e-2",
                      "--matrix_learning_rate 0.04 --n_directions 32", "--matrix_learning_rate 0.04 | alpha_scale=2",
                      "--matrix_learning_rate 0.04 | unembedding_std=0.1", "--matrix_learning_rate 0.04 | unembedding_std=0.005",
                      "--matrix_learning_rate 0.04 --learning_rate 2e-3", "--matrix_learning_rate 0.06 | output_scale=0.5",
                      "--matrix_learning_rate 0.03 | unembedding_std=0.1", "--matrix_learning_rate 0.04 | unembedding_std=0.2",
                      "--matrix_learning_rate 0.04 --learning_rate 2e-3 | unembedding_std=0.1",
                      "--matrix_learning_rate 0.03 --learning_rate 2e-3 | unembedding_std=0.1",
                      "--matrix_learning_rate 0.03 | unembedding_std=0.1 alpha_scale=2",
                      "--matrix_learning_rate 0.04 --learning_rate 1e-3",
                      "--matrix_learning_rate 0.03 --n_directions 32 | unembedding_std=0.1",
                      "--matrix_learning_rate 0.06 --learning_rate 2e-3"],
    ("prenorm", "muon"): ["", "--matrix_learning_rate 0.01", "--matrix_learning_rate 0.03", "--learning_rate 2e-3", "--learning_rate 8e-3",
                          "--learning_rate 1.6e-2", "--matrix_learning_rate 0.04", "--matrix_learning_rate 0.014 --learning_rate 8e-3",
                          "--weight_decay 0", "| embedding_std=1", "| embedding_std=0.2", "| embedding_std=0.02", "| unembedding_std=0.005",
                          "| unembedding_std=0.1", "| output_scale=4", "| output_scale=0.25", "| branch_scale=0.5", "| branch_scale=2",
                          "--matrix_learning_rate 0.06", "--matrix_learning_rate 0.04 --learning_rate 1.6e-2",
                          "--matrix_learning_rate 0.06 --learning_rate 1.6e-2",
                          "--matrix_learning_rate 0.04 | unembedding_std=0.1", "--matrix_learning_rate 0.04 | unembedding_std=0.2",
                          "--matrix_learning_rate 0.03 | unembedding_std=0.1",
                          "--matrix_learning_rate 0.04 | unembedding_std=0.1 output_scale=0.25",
                          "--matrix_learning_rate 0.04 --learning_rate 8e-3 | unembedding_std=0.1",
                          "--matrix_learning_rate 0.04 | unembedding_std=0.1 embedding_std=1",
                          "--matrix_learning_rate 0.03 | unembedding_std=0.1 embedding_std=1",
                          "--matrix_learning_rate 0.04 | unembedding_std=0.1 embedding_std=2",
                          "--matrix_learning_rate 0.04 | unembedding_std=0.1 embedding_std=1 output_scale=0.25",
                          "--matrix_learning_rate 0.03 | unembedding_std=0.1 embedding_std=1 output_scale=0.25",
                          "--matrix_learning_rate 0.04 | unembedding_std=0.1 embedding_std=1 output_scale=0",
                          "--matrix_learning_rate 0.06 | unembedding_std=0.1 output_scale=0.25",
                          "--matrix_learning_rate 0.04 --learning_rate 2e-3 | unembedding_std=0.1 output_scale=0.25",
                          "--matrix_learning_rate 0.04 --learning_rate 8e-3 | unembedding_std=0.1 embedding_std=1 output_scale=0.25"],
    ("nag", "adamw"): ["", "--matrix_learning_rate 2e-3", "--matrix_learning_rate 8e-3", "--learning_rate 2e-3", "--learning_rate 8e-3",
                       "--learning_rate 1.6e-2", "--gate_learning_rate 1e-3", "--gate_learning_rate 1.6e-2", "--n_directions 4",
                       "--n_directions 32", "| alpha_scale=0.4", "| alpha_scale=1.2", "| alpha_scale=1 alpha_power=0.5", "| embedding_std=0.1",
                       "| log_norm_start=-0.7", "| eps=0.1", "| output_scale=0.5", "--weight_decay 0",
                       "--matrix_learning_rate 3e-3", "--matrix_learning_rate 6e-3", "--matrix_learning_rate 6e-3 --learning_rate 1.6e-2",
                       "--matrix_learning_rate 6e-3 | unembedding_std=0.1", "--matrix_learning_rate 6e-3 | unembedding_std=0.005",
                       "--matrix_learning_rate 6e-3 --n_directions 4", "--matrix_learning_rate 6e-3 | alpha_scale=1.2",
                       "--matrix_learning_rate 6e-3 | alpha_scale=1.2 unembedding_std=0.1", "--matrix_learning_rate 6e-3 | output_scale=0.5",
                       "--matrix_learning_rate 8e-3 | unembedding_std=0.1", "--matrix_learning_rate 6e-3 | unembedding_std=0.2",
                       "--matrix_learning_rate 6e-3 --learning_rate 8e-3 | unembedding_std=0.1",
                       "--matrix_learning_rate 6e-3 --learning_rate 2e-3 | unembedding_std=0.1",
                       "--matrix_learning_rate 6e-3 --gate_learning_rate 1e-3 | unembedding_std=0.1",
                       "--matrix_learning_rate 6e-3 --learning_rate 1e-3 | unembedding_std=0.1",
                       "--matrix_learning_rate 8e-3 --learning_rate 2e-3 | unembedding_std=0.1",
                       "--matrix_learning_rate 6e-3 --learning_rate 2e-3 | unembedding_std=0.1 alpha_scale=1.2"],
    ("prenorm", "adamw"): ["", "--matrix_learning_rate 1.5e-3", "--matrix_learning_rate 6e-3", "--learning_rate 2e-3", "--learning_rate 8e-3",
                           "--learning_rate 1.6e-2", "--matrix_learning_rate 2e-3 --learning_rate 8e-3",
                           "--matrix_learning_rate 4e-3 --learning_rate 8e-3", "--weight_decay 0", "| embedding_std=1", "| embedding_std=0.2",
                           "| embedding_std=0.02", "| unembedding_std=0.005", "| unembedding_std=0.1", "| output_scale=4",
                           "| output_scale=0.25", "| branch_scale=0.5", "| branch_scale=2",
                           "--matrix_learning_rate 8e-3", "--matrix_learning_rate 6e-3 --learning_rate 1.6e-2",
                           "--matrix_learning_rate 8e-3 --learning_rate 1.6e-2",
                           "--matrix_learning_rate 6e-3 | unembedding_std=0.1", "--matrix_learning_rate 6e-3 | unembedding_std=0.2",
                           "--learning_rate 1.6e-2 | unembedding_std=0.1",
                           "--matrix_learning_rate 6e-3 --learning_rate 8e-3 | unembedding_std=0.1",
                           "--matrix_learning_rate 6e-3 | unembedding_std=0.1 output_scale=0.25",
                           "--matrix_learning_rate 6e-3 | unembedding_std=0.1 embedding_std=1",
                           "--matrix_learning_rate 6e-3 | unembedding_std=0.1 embedding_std=2",
                           "--matrix_learning_rate 6e-3 | unembedding_std=0.1 embedding_std=1 output_scale=0.25",
                           "--matrix_learning_rate 6e-3 --learning_rate 8e-3 | unembedding_std=0.1 embedding_std=1",
                           "--matrix_learning_rate 6e-3 --learning_rate 8e-3 | unembedding_std=0.1 embedding_std=1 output_scale=0.25",
                           "--matrix_learning_rate 6e-3 | unembedding_std=0.1 embedding_std=1 output_scale=0",
                           "--matrix_learning_rate 6e-3 --learning_rate 1.6e-2 | unembedding_std=0.1 embedding_std=1 output_scale=0.25",
                           "--matrix_learning_rate 8e-3 --learning_rate 8e-3 | unembedding_std=0.1 embedding_std=1 output_scale=0.25",
                           "--matrix_learning_rate 6e-3 --learning_rate 8e-3 | unembedding_std=0.1 embedding_std=2 output_scale=0.25"],
}
assert len({len(settings) for settings in SEARCH.values()}) == 1       # the same budget for each arm
SEARCH_SEED = 4                                                        # none of those that are reported
SEARCH_STEPS = {"laptop": 400, "smoke": 3, "124m": 2400, "350m": 3400}
# What the search began with, and its settings are added to.
START = {("nag", "muon"): "--matrix_learning_rate 0.02 | unembedding_std=0.02",
         ("prenorm", "muon"): "--matrix_learning_rate 0.02 | unembedding_std=0.02 embedding_std=0.5 output_scale=1",
         ("nag", "adamw"): "--matrix_learning_rate 4e-3 | unembedding_std=0.02",
         ("prenorm", "adamw"): "--matrix_learning_rate 3e-3 --learning_rate 4e-3 | unembedding_std=0.02 embedding_std=0.5 output_scale=1"}
DEFAULTS = "defaults"                   # what it ended with: model.py's and train.py's own
FASTER = f"{DEFAULTS} --matrix_learning_rate 0.04"      # the best in the short runs of the search


def in_a_name(setting: str) -> str:
    """The words of a setting, as part of a run's name; nothing of an empty one."""
    return "_".join(setting.replace("--", "").replace("|", "").split())


def name(arm: str, optimizer: str, text: str, setting: str) -> str:
    return "-".join((arm, optimizer, text, in_a_name(setting) or "start"))


def job(arm: str, optimizer: str, text: str, setting: str, seed: int, steps: str = "") -> Job:
    """A run with a setting on top of the start's, or of the defaults if it says so."""
    under = "" if setting.startswith(DEFAULTS) else START[arm, optimizer]
    began, added = under.partition("|"), setting.removeprefix(DEFAULTS).partition("|")
    flags, changes = (f"{began[part]} {added[part]}" for part in (0, 2))
    changes = " ".join(dict((change.partition("=")[0], change) for change in changes.split()).values())
    full_depth = "--skip_rate 0 " if arm == "nag" else ""
    return Job(f"{name(arm, optimizer, text, setting)}-seed{seed}", f"--residual {arm} --optimizer {optimizer} --seed {seed} "
               f"--skip_rates 0 --eval_every 100000 {full_depth}{steps}{flags}", text, changes)


def texts(scale: str) -> tuple[str, ...]:
    return TEXTS if scale in ("laptop", "smoke") else (TEXT_ON_GPUS,)


def searched(arm: str, optimizer: str, setting: str, scale: str) -> Job:
    return job(arm, optimizer, texts(scale)[0], setting, SEARCH_SEED, f"--steps {SEARCH_STEPS[scale]} ")


def jobs(scale: str) -> list[Job]:
    """The search by one seed, shorter and on one text; then what it led to, and its start, by three seeds on both."""
    if scale == "smoke":
        return [searched("nag", "adamw", "| alpha_scale=0.4", scale), job("prenorm", "muon", "stdlib", DEFAULTS, 1)]
    search = [searched(arm, optimizer, setting, scale) for settings in zip(*SEARCH.values())
              for (arm, optimizer), setting in zip(SEARCH, settings)]
    return search + [job(arm, optimizer, text, setting, seed) for setting in (DEFAULTS, "", FASTER) for seed in SEEDS
                     for arm, optimizer in SEARCH if setting != FASTER or optimizer == "muon" for text in texts(scale)]


def losses(logs: dict, arm: str, optimizer: str, text: str, setting: str) -> list[float]:
    return by_seed(logs, name(arm, optimizer, text, setting), lambda log: last(log, "val_loss"))


def said(setting: str) -> str:
    return {"": "where the search began", DEFAULTS: "the defaults"}.get(setting, f"`{' '.join(setting.replace('|', '').split())}`")


def draw(logs: dict, args):
    """What is reported; and all settings that were tried, the best first."""
    rows = []
    for optimizer, text, arm, setting in itertools.product(OPTIMIZERS, texts(args.scale), ("nag", "prenorm"), ("", FASTER, DEFAULTS)):
        if found := losses(logs, arm, optimizer, text, setting):
            against = spread(subtract(found, losses(logs, arm, optimizer, text, DEFAULTS))) if setting != DEFAULTS else "–"
            rows.append([optimizer, text, arm, said(setting), spread(found), against, len(found)])
    print(table(args.results / "recipe.md", ["optimizer", "text", "arm", "setting", "loss", "against the defaults",
                                             "seeds"], rows))
    rows = []
    for arm, optimizer in SEARCH:
        found = [(last(logs[run], "val_loss"), setting) for setting in SEARCH[arm, optimizer]
                 if (run := searched(arm, optimizer, setting, args.scale).name) in logs]
        start = next((loss for loss, setting in found if not setting), math.nan)
        rows += [[arm, optimizer, said(setting), f"{loss:.4f}", "–" if math.isnan(start) else f"{loss - start:+.4f}"] for loss, setting in sorted(found)]
    print(table(args.results / "recipe-search.md", ["arm", "optimizer", "setting", "loss", "against the start"], rows))


def claims(logs: dict, scale: str) -> list[list[str]]:
    rows = []
    for optimizer, its_name in OPTIMIZERS.items():
        for text in texts(scale):
            ahead = subtract(*(losses(logs, arm, optimizer, text, DEFAULTS) for arm in ("prenorm", "nag")))
            if ahead:
                nag, prenorm = (logs[f"{name(arm, optimizer, text, DEFAULTS)}-seed{SEEDS[0]}"] for arm in ("nag", "prenorm"))
                sizes = (f"{said} × {last(nag, key) / last(prenorm, key):.3f}" for key, said in (("parameters", "parameters"), ("flops", "FLOPs")))
                rows.append([f"NAG's loss is below the baseline's after equal tokens, {its_name}, {text}", "below",
                             f"{by(ahead, 'below by', 'above by')}; {', '.join(sizes)}", verdict(ahead)])
    return rows


if __name__ == "__main__":
    main("recipe", __doc__.splitlines()[0], jobs, draw)
