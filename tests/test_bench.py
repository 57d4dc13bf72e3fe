"""Promises of bench.py; and of the kernels as a compiler for GPUs sees them, which needs no GPU."""

import json
import os
import subprocess
import sys

import pytest
import torch

from conftest import ROOT, fails

pytest.importorskip("triton", reason="Triton is not installed")
import bench  # noqa: E402

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels are timed instead")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list[dict]:
    """What the compiler made of every kernel, from a process in which kernels are compiled, not interpreted."""
    folder = tmp_path_factory.mktemp("bench")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    compilers = {}
    for i, widths in enumerate((bench.WIDTHS[::2], bench.WIDTHS[1::2])):        # side by side
        command = [sys.executable, "bench.py", "--only", "kernels", "--json", folder / f"rows{i}.jsonl", "--widths", *widths]
        compilers[folder / f"rows{i}.jsonl"] = subprocess.Popen(
            [str(part) for part in command], cwd=ROOT, env=environment | {"TRITON_CACHE_DIR": str(folder / f"cache{i}")},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for compiler in compilers.values():
        error = compiler.communicate()[1]
        if "triton.backends" in error or "ASTSource" in error:
            pytest.skip(f"this Triton has another compiler interface: {error.splitlines()[-1]}")
        assert compiler.returncode == 0, error
    return [json.loads(line) for rows in compilers for line in rows.read_text().splitlines()]


@WITHOUT_GPU
def test_every_kernel_compiles_for_three_gpus_without_spills_and_with_few_registers(compiled):
    assert {row["target"] for row in compiled} == {"sm_80", "sm_90", "gfx942"}
    assert {row["kernel"] for row in compiled} == {
        "nag_update_forward", "nag_update_backward", "nag_update_forward, rows", "nag_update_backward, rows",
        "gather_rows_backward", "modulator_forward", "modulator_backward", "add_rmsnorm_forward", "add_rmsnorm_backward"}
    assert len(compiled) == 9 * 3 * len(bench.WIDTHS)
    for row in compiled:
        assert row["spilled"] == 0 and 0 < row["registers"] <= 128, row


@WITHOUT_GPU
def test_activations_move_128_bits_at_a_time_and_are_rounded_to_bfloat16(compiled):
    for row in compiled:
        # 32 bits are numbers of one row, such as its gain; 64 the modulator's z and b, a few for each row
        allowed = {32, 64, 128} if "modulator" in row["kernel"] else {32, 128}
        assert 128 in row["bits"] and set(row["bits"]) <= allowed, row
        assert row["rounds"] or row["kernel"] == "modulator_forward", row      # which writes float32 only


def test_widths_that_8_does_not_divide_move_fewer_bits_at_a_time(tmp_path):
    """So that the test above is known to be able to fail."""
    code = ("import bench; name, kernel, arguments = bench.launches(770)[0];"
            "print(bench.facts_of(bench.compiled_for('sm_90', 770, kernel, arguments), 'sm_90')['bits'])")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          env=environment | {"TRITON_CACHE_DIR": str(tmp_path)})
    assert done.stdout.strip() == "[32]", done.stderr


@WITHOUT_GPU
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:triton.runtime.interpreter")
def test_the_gpu_table_has_a_row_for_each_function_width_and_pass(monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)        # a minute for nothing
    args = bench.parse_args(["--widths", "16", "24", "--rows", "40", "--repeats", "1"])
    rows = bench.measure_on_gpu(args, torch.device("cpu"))
    timed = [row for row in rows if "kernel_share" in row]
    names = {subject.name for subject in bench.subjects(8, 16, torch.bfloat16, "cpu")}
    assert {(row["function"], row["d"], row["pass"]) for row in timed} == {
        (name, d, which) for name in names for d in (16, 24) for which in ("forward", "backward")}
    assert all(row[key] > 0 for row in timed for key in ("kernel_share", "eager_share", "compiled_share"))
    assert len(rows) - len(timed) == 2 * 3
    assert capsys.readouterr().out.count("\n") > len(rows)


@WITHOUT_GPU
def test_mistakes_are_answered_in_one_line(tmp_path, monkeypatch, capsys):
    assert "TRITON_INTERPRET=1" in fails(bench.main, ["--only", "kernels"], capsys)
    assert "--rows" in fails(bench.main, ["--rows", "0"], capsys)
    monkeypatch.setattr(bench, "compile_for_gpus", lambda args: [])
    assert str(tmp_path) in fails(bench.main, ["--json", tmp_path], capsys)
    monkeypatch.setattr(bench, "kernels", None)
    assert "pip install triton" in fails(bench.main, [], capsys)
