"""What the tests share: the project on the import path, a tiny model, and a small data set of real text."""

import contextlib
import json
import multiprocessing
import os
import sys
import threading
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")       # as train.py does, and as early: before torch is imported

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"        # kernels run on the CPU; before Triton is imported

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from model import Config, NAGTransformer  # noqa: E402  (after the path is set)


def tiny_config(**changes) -> Config:
    return Config(**{"vocab_size": 61, "block_size": 16, "n_layer": 3, "n_head": 2, "n_embd": 24, "n_directions": 5} | changes)


def tiny_model(dtype=torch.float64, seed=0, lively=True, **changes) -> NAGTransformer:
    """A small model; lively: with modulators, gains and embeddings as uneven as after training."""
    torch.manual_seed(seed)
    model = NAGTransformer(tiny_config(**changes)).to(dtype)
    if lively and model.config.residual == "nag":
        with torch.no_grad():
            for layer in model.layers:
                layer.preferred.normal_(std=0.5)
                layer.bias.normal_()
                layer.mix.normal_()
                layer.beta_raw.normal_()
                layer.alpha.uniform_(0.3, 1.5)
    return model


def tiny_tokens(batch=2, length=16, seed=0, vocab_size=61):
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def python_text(tmp_path_factory) -> Path:
    """A folder of shards: one package of this Python's standard library, as bytes."""
    import sysconfig
    import prepare_data
    folder = tmp_path_factory.mktemp("data") / "text"
    prepare_data.main([str(Path(sysconfig.get_paths()["stdlib"]) / "json"),
                       str(Path(sysconfig.get_paths()["stdlib"]) / "email"), "--out_dir", str(folder)])
    return folder


@pytest.fixture(scope="session")
def short_text(python_text, tmp_path_factory) -> Path:
    """The beginning of python_text, for runs that are not to learn: so little of it that thresholds are soon measured."""
    import prepare_data
    folder = tmp_path_factory.mktemp("short")
    for split, n_tokens in (("train", 2048), ("val", 512)):
        tokens = prepare_data.Shards(prepare_data.find_shards(python_text, split)).read(0, n_tokens).astype("<u2")
        prepare_data.write_shard(folder / f"{split}_000000.bin", tokens)
    (folder / "meta.json").write_text(json.dumps({"encoding": "bytes", "vocab_size": 257, "end_of_text": 256}))
    return folder


def fails(main, argv, capsys) -> str:
    """Run a script's main, expecting a user's mistake: exit status 2 and one line on standard error, which is returned."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in argv])
    error = capsys.readouterr().err
    assert stop.value.code == 2, error
    assert error.count("\n") == 1 and error.endswith("\n"), error
    return error


def train_process(argv, printed: Path, before=None, **environment: str):
    """Start train.py in a process of its own, which may be killed: forked from one that has imported it, to save seconds.

    printed: file that gets what it prints.  before: function of a module, which it calls first.  Returns a
    multiprocessing.Process, started.
    """
    os.environ["PYTHONPATH"] = str(ROOT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train"])
    process = context.Process(target=_train, args=([str(flag) for flag in argv], printed, before, environment), daemon=True)
    process.start()
    return process


def _train(argv, printed, before, environment):
    import tqdm
    import train
    os.environ.update(environment)
    tqdm.tqdm.set_lock(threading.RLock())       # its own kind outlives a process that is killed
    with printed.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        if before:
            before()
        train.main(argv)
