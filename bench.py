"""Speed and memory, as ratios: each figure beside another one taken in the same run.

    python bench.py --only kernels        kernels.py: on a GPU, the share of its copy bandwidth that each kernel reaches, with
                                          eager and compiled PyTorch beside it, then the kernels' tests; without a GPU,
                                          what the compiler makes of the kernels for three GPUs

Times are medians of interleaved runs. Bytes are those that a kernel cannot do without (kernels.py has the table).
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from prepare_data import Parser, UserError, exit_on_user_error, forgive_output, path_type, positive_int

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}   # A100, H100, MI300
WIDTHS = (768, 1000, 2048, 4096)


def parse_args(argv=None) -> argparse.Namespace:
    parser = Parser(description="Speed and memory, as ratios.")
    parser.add_argument("--only", choices=("kernels",), default="kernels", help="what to measure")
    parser.add_argument("--widths", type=positive_int, nargs="+", default=None, metavar="D",
                        help=f"widths of the stream; None: {' '.join(map(str, WIDTHS))}, and 1024 on a GPU")
    parser.add_argument("--rows", type=positive_int, default=32768, help="tokens of the stream, on a GPU")
    parser.add_argument("--repeats", type=positive_int, default=30, help="runs of each function, on a GPU")
    parser.add_argument("--json", type=path_type, default=None, metavar="FILE", help="write each row of the table as a line of JSON")
    return parser.parse_args(argv)


if __name__ == "__main__":      # answer --help and mistakes in flags before the seconds that importing torch takes
    forgive_output()
    parse_args()

import torch
from tqdm import tqdm

from model import PLAIN, Operations, rows_of

try:
    import kernels
except ImportError:
    kernels = None


# ---------------------------------------------------------------------------------------------------------------------
# Timing


def time_once(function: Callable, device: torch.device, scratch) -> float:
    """Seconds of one call. On a GPU its clock measures, after a write that empties the cache and lets the host get ahead."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        scratch.zero_()
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def interleaved(functions: dict[str, Callable], device: torch.device, repeats: int) -> dict[str, float]:
    """Median seconds of each function, all of them called in turn, after a first call that is not counted."""
    scratch = torch.empty(2**29 if device.type == "cuda" else 0, dtype=torch.int8, device=device)
    times = {name: [] for name in functions}
    for repeat in range(-3, repeats):
        for name, function in functions.items():
            seconds = time_once(function, device, scratch)
            if repeat >= 0:
                times[name].append(seconds)
    return {name: statistics.median(each) for name, each in times.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Kernels: what is run


class Subject(NamedTuple):
    """One of the stream's functions with something to run it on."""

    name: str
    call: Callable[[Operations], Any]       # forward: the function's outputs, by these operations
    inputs: list                            # tensors with gradients
    grads: list                             # of the outputs
    units: tuple[float, float]              # reads and writes of N·d activations, forward and backward, at the least


def subjects(n_rows: int, d: int, dtype: torch.dtype, device, kept_shares=(0.75, 0.5)) -> list[Subject]:
    """The stream's functions on random tensors; those with rows once for each share of kept rows."""
    def random(*shape, dtype=dtype):
        return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()

    r, f, g, s, w = random(n_rows, d), random(n_rows, d), *(random(n_rows, dtype=torch.float32) for _ in range(2)), random(32, d)
    b, q, gain = random(32, dtype=torch.float32), random(32, dtype=torch.float32), random(d)
    beta = torch.ones(1, device=device).requires_grad_()
    G, D = torch.randn_like(r), torch.randn_like(s)
    found = [Subject("nag_update", lambda ops: ops.nag_update(r, f, g, s), [r, f, g, s], [G, D], (3, 5))]
    for share in kept_shares:
        k = round(share * n_rows)
        rows, f_kept = rows_of(torch.randperm(n_rows, device=device)[:k].sort().values, n_rows), random(k, d)
        found += [Subject(f"nag_update, {share:.0%} of rows", lambda ops, f=f_kept, rows=rows: ops.nag_update(r, f, g, s, rows),
                          [r, f_kept, g, s], [G, D], (2 + share, 2 + 3 * share)),
                  Subject(f"gather_rows, {share:.0%} of rows", lambda ops, rows=rows: ops.gather_rows(r, rows),
                          [r], [G, torch.randn_like(f_kept)], (2 * share, 2 + share))]
    return found + [
        Subject("modulator", lambda ops: ops.modulator(r, w, b, q, beta), [r, w, b, q, beta], [D], (1, 2)),
        Subject("add_rmsnorm", lambda ops: ops.add_rmsnorm(r, f, gain), [r, f, gain], [G, G.clone()], (4, 4))]


# ---------------------------------------------------------------------------------------------------------------------
# Kernels on a GPU: share of the copy bandwidth


def passes(subject: Subject, operations: Operations) -> tuple[Callable, Callable]:
    """The forward and the backward pass of a subject, as functions to be timed."""
    outputs = subject.call(operations)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)

    def forward():
        with torch.no_grad():
            subject.call(operations)

    def backward():
        torch.autograd.grad(outputs, subject.inputs, subject.grads, retain_graph=True, allow_unused=True)

    return forward, backward


def bandwidth_rows(args, device: torch.device) -> list[dict]:
    """For each function, width and pass: time as a multiple of the time that a plain copy of as many bytes takes."""
    import torch._functorch.config
    torch._functorch.config.donated_buffer = False      # a compiled backward pass is to be run many times
    found, element = [], 2
    widths = args.widths or sorted({*WIDTHS, 1024})
    for d in tqdm(widths, desc="widths", disable=None):
        torch._dynamo.reset()       # which would give up after some shapes
        by = {"kernel": Operations.of(kernels), "eager": PLAIN,
              "compiled": Operations(*(torch.compile(function, dynamic=False) for function in PLAIN))}
        for subject in subjects(args.rows, d, torch.bfloat16, device):
            both = {name: passes(subject, operations) for name, operations in by.items()}
            for which, units in enumerate(subject.units):
                moved = torch.empty(int(units * args.rows * d * element / 2), dtype=torch.int8, device=device)
                target = torch.empty_like(moved)
                functions = {name: pair[which] for name, pair in both.items()}
                seconds = interleaved({"copy": lambda: target.copy_(moved), **functions}, device, args.repeats)
                found.append({"function": subject.name, "pass": ("forward", "backward")[which], "d": d, "rows": args.rows,
                              "units": units} | {f"{name}_share": seconds["copy"] / seconds[name] for name in by})
    return found


def latency_rows(args, device: torch.device) -> list[dict]:
    """Forward passes of a few rows, as in decoding: kernel time as a share of eager time."""
    found = []
    for n_rows in (1, 16):
        for subject in subjects(n_rows, 2048, torch.bfloat16, device, kept_shares=()):
            functions = {name: passes(subject, operations)[0] for name, operations in
                         (("kernel", Operations.of(kernels)), ("eager", PLAIN))}
            seconds = interleaved(functions, device, args.repeats)
            found.append({"function": subject.name, "pass": "forward", "d": 2048, "rows": n_rows,
                          "kernel_to_eager": seconds["kernel"] / seconds["eager"], "kernel_us": 1e6 * seconds["kernel"]})
    return found


def measure_on_gpu(args, device: torch.device) -> list[dict]:
    print(f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}: share of the bandwidth of a copy of as "
          f"many bytes, bfloat16, {args.rows:,} rows")
    found = bandwidth_rows(args, device)
    print(f"\n{'function':28} {'pass':9} {'d':>5} {'units':>6} {'kernel':>8} {'eager':>8} {'compiled':>9}")
    for row in found:
        print(f"{row['function']:28} {row['pass']:9} {row['d']:5} {row['units']:6.2f} {row['kernel_share']:8.0%} "
              f"{row['eager_share']:8.0%} {row['compiled_share']:9.0%}")
    latencies = latency_rows(args, device)
    print(f"\n{'few rows':28} {'rows':>5} {'kernel / eager':>15} {'kernel, µs':>11}")
    for row in latencies:
        print(f"{row['function']:28} {row['rows']:5} {row['kernel_to_eager']:15.2f} {row['kernel_us']:11.1f}")
    return found + latencies


# ---------------------------------------------------------------------------------------------------------------------
# Kernels without a GPU: what the compiler makes of them


def launches(d: int) -> list[tuple[str, Any, dict]]:
    """Every kernel as the public functions would launch it at width d in bfloat16: name, kernel, arguments."""
    found, launch = [], kernels.launch

    def note(kernel, n_rows, most=None, **arguments):
        found.append((kernel, {"n_rows": n_rows, **arguments}))

    kernels.launch = note
    try:
        for subject in subjects(8, d, torch.bfloat16, "cpu", kept_shares=(0.5,)):
            for function in passes(subject, Operations.of(kernels)):
                function()
    finally:
        kernels.launch = launch
    named = {}
    for kernel, arguments in found:
        rows = ", rows" if "nag_update" in kernel.__name__ and arguments["inverse_ptr"] is not None else ""
        named[kernel.__name__.removesuffix("_kernel") + rows] = (kernel, arguments)
    return [(name, kernel, arguments) for name, (kernel, arguments) in named.items()]


def compiled_for(target: str, d: int, kernel, arguments: dict):
    """The kernel compiled for a GPU that need not be here; pointers are taken to be 16-byte aligned, as PyTorch's are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    backend, arch, lanes = TARGETS[target]
    if "BLOCK_D" in arguments:
        arguments = arguments | kernels.tile(d, lanes)
    types = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
    options = {name: arguments[name] for name in ("num_warps", "num_stages") if name in arguments}
    signature, constants, aligned = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if isinstance(value, torch.Tensor):
            signature[name], aligned[(i,)] = types[value.dtype], [["tt.divisibility", 16]]
        elif name == "n_rows":
            signature[name] = "i32"
        else:
            signature[name], constants[name] = "constexpr", value
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget(backend, arch, lanes), options=options | {"enable_fp_fusion": True})


def facts_of(compiled, target: str) -> dict:
    """Registers, what is spilled (bytes of stack, or registers), widths of memory accesses in bits, and whether numbers
    are rounded to bfloat16 rather than cut off."""
    if TARGETS[target][0] == "hip":
        text = compiled.asm["amdgcn"]
        dwords = {int(n or 1) for n in re.findall(r"(?:global|buffer)_(?:load|store)_dword(?:x(\d))?", text)}
        shorts = bool(re.search(r"(?:global|buffer)_(?:load|store)_(?:u?short|ubyte)", text))
        return {"registers": int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1]),
                "spilled": int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1]),
                "bits": sorted({32 * n for n in dwords} | ({16} if shorts else set())), "rounds": "0x7fff" in text}
    import triton
    text = compiled.asm["ptx"]
    found = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.[bfus](\d+)", text)
    bits = {int(n or 1) * int(size) for n, size in found}
    bits |= {8 * int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\S* .*?, (\w+)", text) if size[0].isdigit()}
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr).groups()
    return {"registers": int(registers), "spilled": int(stack), "bits": sorted(bits), "rounds": bool(re.search(r"\.rn\.bf16|add\.bf16", text))}


def compile_for_gpus(args) -> list[dict]:
    if kernels.INTERPRETED:
        raise UserError("TRITON_INTERPRET=1: kernels are interpreted, not compiled; unset it")
    print("No GPU here: what the compiler makes of the kernels, bfloat16. Spilled: bytes of stack, or registers on gfx942.")
    print(f"\n{'kernel':28} {'d':>5} {'GPU':>7} {'registers':>10} {'spilled':>8}  bits of memory accesses")
    found = []
    for d in args.widths or WIDTHS:
        for name, kernel, arguments in launches(d):
            for target in TARGETS:
                facts = facts_of(compiled_for(target, d, kernel, arguments), target)
                found.append({"kernel": name, "d": d, "target": target} | facts)
                print(f"{name:28} {d:5} {target:>7} {facts['registers']:10} {facts['spilled']:8}  {facts['bits']}")
    print(f"\n{'function':28} units of N·d activations that must be moved, forward and backward")
    for subject in subjects(8, 16, torch.bfloat16, "cpu", kept_shares=(0.75,)):
        print(f"{subject.name:28} {subject.units[0]:.2f}  {subject.units[1]:.2f}")
    return found


def run(args):
    if kernels is None:
        raise UserError("--only kernels: Triton is not installed; pip install triton (Linux)")
    on_gpu = torch.cuda.is_available()
    found = measure_on_gpu(args, torch.device("cuda")) if on_gpu else compile_for_gpus(args)
    if args.json:
        try:
            args.json.write_text("".join(json.dumps(row) + "\n" for row in found))
        except OSError as error:
            raise UserError(f"--json {args.json}: cannot be written ({error.strerror}); choose another file") from error
    if on_gpu:
        tests = Path(__file__).resolve().parent / "tests" / "test_kernels.py"
        raise SystemExit(subprocess.call([sys.executable, "-m", "pytest", "-q", str(tests)]))


def main(argv=None):
    forgive_output()
    exit_on_user_error(run, parse_args(argv))


if __name__ == "__main__":
    main()
