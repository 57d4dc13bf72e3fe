"""The experiments: each runs in its smallest form, goes on after a kill, and the committed tables are those of the committed logs."""

import json
import math
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time

import pytest
import torch

from conftest import ROOT, fails, tiny_model, tiny_tokens

EXPERIMENTS = ROOT / "experiments"
sys.path.insert(0, str(EXPERIMENTS))

import claims  # noqa: E402  (after the path is set)
import dial  # noqa: E402
import isoflop  # noqa: E402
import measure_stream  # noqa: E402
import overheads  # noqa: E402
import recipe  # noqa: E402
import series  # noqa: E402
import train  # noqa: E402
import variant  # noqa: E402

RESULTS = sorted((EXPERIMENTS / "results").glob("*.md"))


@pytest.fixture(scope="module")
def texts(short_text, tmp_path_factory):
    """A folder with short texts under the names that the experiments ask for."""
    folder = tmp_path_factory.mktemp("texts")
    for name in ("stdlib", "tinyshakespeare"):
        (folder / name).symlink_to(short_text)
    return folder


@pytest.fixture
def unchanged(monkeypatch):
    """What variant.py replaces is put back when the test is over."""
    import model
    monkeypatch.setattr(model.NAGTransformer, "init_weights", model.NAGTransformer.init_weights)
    monkeypatch.setattr(model, "operations", model.operations)
    monkeypatch.setattr(train, "rates_at", train.rates_at)


def start(script, texts, folder, *flags):
    return subprocess.Popen([sys.executable, str(script), "--scale", "smoke", "--data", str(texts), "--runs", str(folder / "runs"),
                             "--out_dir", str(folder), *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("name", [*claims.SERIES, "overheads"])
def test_an_experiment_runs_in_its_smallest_form_and_only_once(name, texts, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in EXPERIMENTS.rglob("*.*") if path.suffix in (".jsonl", ".md", ".png")}
    first = start(EXPERIMENTS / f"{name}.py", texts, tmp_path)
    printed, error = first.communicate()
    assert first.returncode == 0, error
    logs = sorted((tmp_path / "logs").rglob("*.jsonl"))
    assert logs and all(path.stat().st_size < 200_000 for path in logs)
    tables = {path: path.read_text() for path in (tmp_path / "results").glob("*.md")}
    filled = [text for text in tables.values() if text.count("\n") > 2]
    assert filled and all(text.strip() in printed for text in tables.values())
    if name != "overheads":         # which has no run to go on with
        written = {path: path.stat().st_mtime_ns for path in logs}
        again = start(EXPERIMENTS / f"{name}.py", texts, tmp_path)
        assert again.communicate()[0] == printed and again.returncode == 0
        assert written == {path: path.stat().st_mtime_ns for path in logs}, "a finished run was run again"
    assert before == {path: path.stat().st_mtime_ns for path in before}, "a smoke test has no business among the committed results"


LONG = """
import sys
sys.path.insert(0, {folder!r})
import series
series.main("long", "", lambda scale: [series.Job("run", "--steps 150 --save_every 20 --eval_every 100000 --seed 1")],
            lambda logs, args: print(*logs))
"""


def test_a_killed_series_goes_on_where_it_was(texts, tmp_path):
    script = tmp_path / "long.py"
    script.write_text(LONG.format(folder=str(EXPERIMENTS)))
    log = tmp_path / "runs" / "smoke" / "long" / "run" / "log.jsonl"

    def steps():
        found = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [entry["step"] for entry in found if "loss" in entry]

    stopped = start(script, texts, tmp_path)
    while len(steps()) < 5 and stopped.poll() is None:
        time.sleep(0.05)
    stopped.send_signal(signal.SIGTERM)
    assert "the same command goes on" in stopped.communicate()[1] and stopped.returncode == 130
    reached = len(steps())
    assert 5 <= reached < 150 and not list((tmp_path / "logs").rglob("*.jsonl"))
    finished = start(script, texts, tmp_path)
    printed, error = finished.communicate()
    assert finished.returncode == 0 and printed.strip() == "run", error
    assert steps() == list(range(1, 151))
    starts = [json.loads(line)["step"] for line in log.read_text().splitlines() if "command" in line]
    assert starts == [0, reached], "the run did not go on, it began anew"


def test_a_run_that_fails_is_named_in_one_line(texts, tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text(LONG.format(folder=str(EXPERIMENTS)).replace("--steps 150", "--n_head 3"))
    wrong = start(script, texts, tmp_path)
    error = wrong.communicate()[1].splitlines()[-1]
    assert wrong.returncode == 2 and "--n_embd 16 --n_head 3" in error and error.startswith("wrong.py: error:")


@pytest.fixture(scope="module")
def drawn_anew(tmp_path_factory):
    """Tables and plots from the committed logs."""
    folder = tmp_path_factory.mktemp("drawn")
    shutil.copytree(EXPERIMENTS / "logs", folder / "logs")
    claims.main(["--out_dir", str(folder)])
    return folder / "results"


def test_the_committed_tables_are_those_of_the_committed_logs(drawn_anew):
    drawn = {path.name: path.read_text() for path in drawn_anew.glob("*.md")}
    assert drawn == {path.name: path.read_text() for path in RESULTS}


def test_all_plots_are_drawn(drawn_anew):
    pytest.importorskip("matplotlib")
    drawn = {path.name for path in drawn_anew.glob("*.png") if path.stat().st_size > 5000}
    assert drawn == {path.name for path in (EXPERIMENTS / "results").glob("*.png")}


def test_readme_has_the_numbers_of_the_tables():
    readme = (ROOT / "README.md").read_text()
    named = [path for path in RESULTS if f"experiments/results/{path.name}" in readme]
    assert {path.name for path in named} >= {"claims.md"}
    for path in named:
        assert path.read_text().strip() in readme, f"{path.name} is not in README.md as it stands"
    tables = "".join(path.read_text() for path in RESULTS)
    for figure in re.findall(r"-?\d[\d.]* ± \d[\d.]*\d", readme):          # those in its sentences too
        assert figure in tables, f"{figure} is in README.md and in no table"


def test_readme_says_in_figures_what_the_logs_say():
    """Differences that no table shows; where a log changes, the sentence has to."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    args = series.parse_args("", [])
    dials, searches = (series.finished_logs(each, claims.SERIES[each].jobs("laptop"), args) for each in ("dial", "recipe"))

    def mean(name, rate, allocation="per_layer"):
        return statistics.mean(dial.found(dials, name, rate, way=(allocation, "modulator")))

    wide, low = "random-0.8", "random-0.8-low"
    baseline = statistics.mean(dial.found(dials, "prenorm", 0.0, way=("per_layer", "static")))
    assert f"(and {mean('random-0.5', 0.0) - baseline:.3f} against the baseline)" in readme
    cost, to_half, to_more = mean(wide, 0.0) - mean("full", 0.0), mean(wide, 0.5) - mean(wide, 0.0), mean(wide, 0.6) - mean(wide, 0.0)
    assert f"Rates up to 0.8 lose {to_half:.3f} to 50 % and {to_more:.3f} to 60 %, and cost {cost:.3f} at full depth" in readme
    cost, to_less, to_half = mean(low, 0.0) - mean("full", 0.0), mean(low, 0.4) - mean(low, 0.0), mean(low, 0.5) - mean(low, 0.0)
    assert f"they cost {cost:.3f}, and lose {to_less:.3f} to 40 % and {to_half:.3f} to 50 %" in readme
    better = statistics.mean(series.subtract(dial.found(dials, "random-0.5", 0.25), dial.found(dials, "quarter", 0.25)))
    assert f"training at that quarter is better by {better:.3f} there" in readme
    assert f"by thresholds in each layer it loses {mean('full', 0.1) - mean('full', 0.0):.3f} to 10 %" in readme
    assert f"serve it best: {mean('full', 0.1, 'global') - mean('full', 0.0):.3f} to 10 %" in readme

    def gain(arm, optimizer):
        found = {setting: series.last(searches[job.name], "val_loss") for setting in recipe.SEARCH[arm, optimizer]
                 if (job := recipe.searched(arm, optimizer, setting, "laptop")).name in searches}
        return f"{found[''] - min(found.values()):.3f}"

    assert len(recipe.SEARCH["nag", "muon"]) == int(re.search(r"(\d+) settings each", readme)[1])
    assert (f"{gain('prenorm', 'muon')} under Muon and {gain('prenorm', 'adamw')} under AdamW, NAG {gain('nag', 'muon')} and "
            f"{gain('nag', 'adamw')}") in readme


def test_logs_are_small_and_have_no_absolute_paths():
    logs = list((EXPERIMENTS / "logs").rglob("*.jsonl"))
    assert logs
    for path in logs:
        assert path.stat().st_size < 200_000
        assert '"/' not in path.read_text(), "a path of one machine"


@pytest.mark.parametrize("name", claims.SERIES)
def test_printed_commands_can_be_pasted(name, capsys, monkeypatch):
    series.main(name, "", claims.SERIES[name].jobs, None, ["--print_commands"])
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert len(lines) >= 2
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    for line in lines:
        once = line.startswith("python experiments/measure_stream.py ")     # adds a line to the log: not on 8 GPUs at once
        launcher, script, *words = (line.removeprefix(series.ON_GPUS if not once else "python")).split(" ")
        assert launcher == "" and (ROOT / script).is_file()
        if once:
            continue
        at = words.index("--") + 1 if "--" in words else 0
        for word in words[:max(0, at - 1)]:
            variant.setting(word)
        args = train.parse_args(words[at:])
        if not args.eval_only:
            train.check_args(args)
            assert args.n_embd in (768, 1024, 384, 512) and args.batch_tokens == 524288


def test_a_verdict_needs_more_than_the_seeds_differ():
    assert series.verdict([0.010, 0.014, 0.012]) == "seen"
    assert series.verdict([0.010, 0.030, 0.012]) == "not seen at this size"
    assert series.verdict([-0.010, 0.030, 0.012]) == "not seen at this size"
    assert series.verdict([-0.010, -0.014, -0.012]) == "opposite"
    assert series.verdict([1.0, 1.0]) == series.verdict([]) == series.NOT_YET


def test_a_verdict_on_several_conditions_needs_each_of_them():
    clear, clearer = [0.18, 0.18, 0.18], [0.55, 0.54, 0.56]
    assert series.verdict(clear, clearer) == "seen"
    assert series.verdict(clear, [-0.1, 0.1, 0.2]) == series.verdict(clear, [-each for each in clearer]) == "not seen at this size"
    assert series.verdict([0.1, 0.1], [0.1, 0.1]) == series.NOT_YET


def test_a_run_with_other_flags_is_not_gone_on_with(texts, tmp_path):
    script = tmp_path / "long.py"
    script.write_text(LONG.format(folder=str(EXPERIMENTS)).replace("--steps 150", "--steps 2"))
    assert start(script, texts, tmp_path).wait() == 0
    shutil.rmtree(tmp_path / "logs")
    script.write_text(script.read_text().replace("--steps 2", "--steps 2 --learning_rate 0.1"))
    other = start(script, texts, tmp_path)
    error = other.communicate()[1]
    assert other.returncode == 2 and "holds a run with other flags; remove it" in error and not (tmp_path / "logs").exists()


def test_runs_made_by_the_printed_commands_are_drawn(tmp_path):
    """Their folders are named in the commands; here a small run's log stands there."""
    job = series.jobs_at("124m", isoflop.jobs)[0]
    place = f"runs/124m/isoflop/{job.name}"
    args = ["--scale", "124m", "--runs", str(tmp_path / "runs"), "--out_dir", str(tmp_path), "--draw"]
    drawn = tmp_path / "results" / "isoflop.md"
    assert place in job.commands("124m", "data", place)[0]
    whole = (EXPERIMENTS / "logs" / "isoflop" / "9.8e12-0-modulator-seed1.jsonl").read_text()
    for log, rows in ((whole[:whole.index('"val_loss"')].rpartition("\n")[0] + "\n", 2), (whole, 3)):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / "log.jsonl").write_text(log)
        series.main("isoflop", "", isoflop.jobs, isoflop.draw, args)
        assert drawn.read_text().count("\n") == rows           # none of an unfinished run
    alone = drawn.read_text()
    claims.main(args[:-1])                  # which knows no --draw
    assert drawn.read_text() == alone
    loss = series.last(list(map(json.loads, whole.splitlines())), "val_loss")
    assert f"| 6e18 | NAG | 0 | 1.000 | 1.000 | 1.00 | {loss:.4f} | – | 1 |" in drawn.read_text()


def test_mistakes_cost_one_line(tmp_path, capsys):
    damaged = tmp_path / "logs" / "isoflop" / "9.8e12-0-modulator-seed1.jsonl"
    damaged.parent.mkdir(parents=True)
    damaged.write_text('{"step": ')
    assert f"{damaged}: not whole lines of JSON; remove it" in fails(claims.main, ["--out_dir", tmp_path], capsys)
    for main in (claims.main, overheads.main):
        assert f"{damaged} is a file; name a folder" in fails(main, ["--out_dir", damaged / "x"], capsys)
    assert "then add --draw" in fails(overheads.main, ["--scale", "124m"], capsys)
    assert "nowhere" in fails(measure_stream.main, ["--data", tmp_path, "--out_dir", tmp_path / "nowhere"], capsys)


def test_a_dial_is_compared_at_equal_flops(monkeypatch):
    """A loss that is 1 − share everywhere: read between the rates, for each seed at its own share."""
    shares = {rate: 1 - rate / 2 for rate in dial.RATES}
    monkeypatch.setattr(dial, "found", lambda logs, name, rate, key, way: [
        shares[rate] if key == "flops_share" else 1 - shares[rate]] * 2)
    assert dial.loss_at({}, "full", [0.83, 0.72]) == pytest.approx([0.17, 0.28])


def test_a_spread_is_half_the_range():
    assert series.spread([1.0, 2.0, 6.0]) == "3.0000 ± 2.5000"
    assert series.spread([1.0]) == "1.0000" and series.spread([]) == "–"


def test_what_a_layer_turns_and_adds_agree():
    """For a single token the norm grows by 1/cos of the angle, and the first layer's angle is that to the embedding."""
    model = tiny_model()
    found = measure_stream.measure(model, tiny_tokens(batch=1, length=1))
    assert len(found["angle"]) == len(model.layers) and len(found["norm"]) == len(model.layers) + 1
    for before, after, angle in zip(found["norm"], found["norm"][1:], found["angle"]):
        assert after / before == pytest.approx(1 / math.cos(math.radians(angle)), rel=1e-6)
    assert found["from_embedding"][0] == found["angle"][0] > 0


def test_the_baselines_norm_is_that_of_its_residual():
    model = tiny_model(residual="prenorm")
    tokens = tiny_tokens()
    found = measure_stream.measure(model, tokens)
    embedded = model.embedding.weight[tokens].square().mean(-1).sqrt().mean().item()
    assert found["norm"][0] == pytest.approx(embedded, rel=1e-6)


CHANGED = {"alpha_scale": 0.3, "alpha_power": 0, "embedding_std": 0.1, "unembedding_std": 0.1, "log_norm_start": 0, "bias": 1,
           "branch_scale": 2, "output_scale": 2, "eps": 0.5}


@pytest.mark.parametrize("name", CHANGED)
def test_a_variant_changes_what_it_says(name, unchanged):
    tokens = tiny_tokens()

    def outcome():
        fresh = tiny_model(lively=False).use_kernels("torch")
        return dict(fresh.named_parameters()), fresh(tokens)

    before, logits = outcome()
    variant.change({name: CHANGED[name]})
    after, other_logits = outcome()
    different = {key.split(".")[-1] if "layers" in key else key for key in before if not torch.equal(before[key], after[key])}
    expected = {"alpha_scale": {"alpha"}, "alpha_power": {"alpha"}, "embedding_std": {"embedding.weight"},
                "unembedding_std": {"unembedding.weight"}, "log_norm_start": {"log_norm_start"}, "bias": {"bias"}, "eps": set()}
    assert different == expected.get(name, {"weight"})
    if name != "unembedding_std":       # whose rows are normalised
        assert not torch.allclose(logits, other_logits)


def test_random_rates_may_lean_to_one_side(unchanged):
    args = train.parse_args(["--skip_rate", "random:0.8", "--n_layer", "1"])
    even = [train.rates_at(step, args)[0] for step in range(6)]
    variant.change({"rate_power": 2})
    skewed = [train.rates_at(step, args)[0] for step in range(6)]
    assert skewed == pytest.approx([0.8 * (rate / 0.8) ** 2 for rate in even]) and max(skewed) == pytest.approx(0.8)


@pytest.mark.parametrize("word", ["nothing=1", "alpha_scale", "alpha_scale=x"])
def test_a_wrong_setting_costs_one_line(word, capsys):
    assert word.split("=")[0] in fails(variant.main, [word, "--", "--steps", "1"], capsys)


@pytest.mark.parametrize("name", sorted(variant.NAG_ALONE))
def test_a_change_of_what_the_baseline_has_not_is_refused(name, unchanged):
    variant.change({name: 1.0})
    tiny_model()
    with pytest.raises(train.UserError, match=f"{name}: nothing to change with --residual prenorm"):
        tiny_model(residual="prenorm")


@pytest.mark.parametrize("rates", ["0.25", "0,0.1"])
def test_rates_that_are_not_random_are_not_skewed(rates, unchanged):
    variant.change({"rate_power": 2})
    args = train.parse_args(["--skip_rate", rates, "--n_layer", "1"])
    with pytest.raises(train.UserError, match="rate_power: .* here it is 0"):
        train.rates_at(0, args)


def test_help_of_every_script_says_what_it_does(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for module in (*claims.SERIES.values(), overheads, claims, measure_stream):
        with pytest.raises(SystemExit, match="0"):
            if module in claims.SERIES.values():
                series.main("", module.__doc__.splitlines()[0], None, None, ["--help"])
            module.main(["--help"])
        shown = capsys.readouterr().out
        assert "usage" in shown and module.__doc__.splitlines()[0] in shown
    variant.main(["--help"])
    assert variant.__doc__ in capsys.readouterr().out
