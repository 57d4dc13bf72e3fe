"""train.py with other initial values than model.py's, or other random rates than its own, to search a recipe:

    python experiments/variant.py alpha_scale=0.7 alpha_power=0 -- --steps 100 --optimizer adamw

Everything after -- is train.py's. To go on with the run, or to evaluate it, give the same changes again. What can be changed, and
what it is otherwise:

    alpha_scale, alpha_power    α of layer l starts at alpha_scale · l^−alpha_power (1, ½; under AdamW 0.7, 0)
    embedding_std               of the embedding: 0.02; in the baseline 1
    unembedding_std             of the head, whose rows NAG normalises: 1/√d
    log_norm_start              log-norm of each token at the start, which sets the temperature of the first logits: −1.2
    bias                        b of the modulators, which shifts all first gains: 0
    branch_scale                factor on the branches' matrices: 1
    output_scale                factor on those of their outputs: 1; in the baseline, on 1/√L: ¼
    eps                         of the normaliser in the update: 1e-6
    rate_power                  of the rates drawn for random:S: S·(0, ⅕ … 1)^rate_power; 1, and above it low rates are the rule
"""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import model
import train

CHANGES = ("alpha_scale", "alpha_power", "embedding_std", "unembedding_std", "log_norm_start", "bias", "branch_scale",
           "output_scale", "eps", "rate_power")
NAG_ALONE = {"alpha_scale", "alpha_power", "log_norm_start", "bias", "eps"}


def change(settings: dict[str, float]):
    """Let every new model begin with these settings. They are part of this process, not of a checkpoint."""
    as_it_is = model.NAGTransformer.init_weights

    @torch.no_grad()
    def init_weights(self):
        as_it_is(self)
        nag = self.config.residual == "nag"
        if "embedding_std" in settings:
            self.embedding.weight.mul_(settings["embedding_std"] / (0.02 if nag else 1))
        if "unembedding_std" in settings:
            self.unembedding.weight.mul_(settings["unembedding_std"] * self.config.n_embd**0.5)
        for name, parameter in self.named_parameters():
            if ".branch." in name:
                parameter.mul_(settings.get("branch_scale", 1))
            if ".output." in name and "output_scale" in settings:
                parameter.mul_(settings["output_scale"] / (1 if nag else 0.25))
        if not nag:
            if idle := NAG_ALONE & settings.keys():
                raise train.UserError(f"{', '.join(sorted(idle))}: nothing to change with --residual prenorm, which has none")
            return
        if "log_norm_start" in settings:
            self.log_norm_start.fill_(settings["log_norm_start"])
        scale, power = settings.get("alpha_scale", self.config.alpha_scale), settings.get("alpha_power", self.config.alpha_power)
        for l, layer in enumerate(self.layers, start=1):
            layer.alpha.fill_(scale * l**-power)
            layer.bias.fill_(settings.get("bias", 0))

    model.NAGTransformer.init_weights = init_weights
    if "eps" in settings:
        operations = model.operations

        def with_eps(*args):
            chosen = operations(*args)
            return chosen._replace(nag_update=functools.partial(chosen.nag_update, eps=settings["eps"]))

        model.operations = with_eps
    if "rate_power" in settings:
        rates_at = train.rates_at

        def skewed(step, args):
            if not args.skip_rate.startswith("random:"):
                raise train.UserError(f"rate_power: changes the rates of --skip_rate random:S; here it is {args.skip_rate}")
            highest = float(args.skip_rate.removeprefix("random:"))
            return [highest * (rate / highest) ** settings["rate_power"] if rate else 0.0 for rate in rates_at(step, args)]

        train.rates_at = skewed


def setting(text: str) -> tuple[str, float]:
    """NAME=NUMBER."""
    name, _, number = text.partition("=")
    if name not in CHANGES:
        raise train.UserError(f"{text}: expected one of {', '.join(CHANGES)}, = and a number; train.py's flags come after --")
    try:
        return name, float(number)
    except ValueError:
        raise train.UserError(f"{text}: expected a number after {name}=") from None


def main(argv: list[str]):
    if argv[:1] in (["-h"], ["--help"]):
        return print(__doc__)
    at = argv.index("--") if "--" in argv else len(argv)
    train.exit_on_user_error(lambda: change(dict(map(setting, argv[:at]))))
    train.main(argv[at + 1:])


if __name__ == "__main__":
    main(sys.argv[1:])
