"""Write text with a trained model, at full depth or less, and show where the depth went.

    python sample.py                                              from the start of a document
    python sample.py --prompt 'def ' --skip_rate 0.5              every layer skips about half of the tokens
    python sample.py --depth_budget 12 --show_depth               12 layers a token on average, coloured by how many ran
    cat notes.txt | python sample.py --prompt_file - --num_samples 3
    python sample.py --interactive                                one prompt a line, until Ctrl-D
    python sample.py --export model.safetensors                   the weights for other programs, and for --checkpoint
"""

import codecs
import json
import os
import sys
from pathlib import Path

from prepare_data import (Parser, UserError, check_meta, encoding_from_meta, escaped, exit_on_user_error,
                          forgive_output, non_negative_float, non_negative_int, number_type, path_type, positive_float,
                          positive_int, seed_number, skip_rates)

share = number_type(float, lambda value: 0 < value <= 1, "a number above 0 and at most 1")


def parse_args(argv=None):
    parser = Parser(description="Write text with a trained model, at full depth or less.")
    text = parser.add_argument_group("text")
    text.add_argument("--checkpoint", type=path_type, default=Path("out/ckpt.pt"),
                      help="file that train.py has written, or --export")
    prompt = text.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default="", help="text to continue; empty: the start of a document")
    prompt.add_argument("--prompt_file", type=path_type, default=None, help="file with the text to continue; -: standard input")
    prompt.add_argument("--interactive", action="store_true", help="read prompts line by line from standard input")
    prompt.add_argument("--export", type=path_type, default=None, metavar="FILE.safetensors",
                        help="write no text but the weights, config and meta to this file (needs safetensors)")
    text.add_argument("--raw", action="store_true",
                      help="print control characters as they are, which can command the terminal; else as \\x1b, \\r, "
                           "but for line ends and tabs")
    text.add_argument("--num_samples", type=positive_int, default=1, help="texts to write; sample i uses seed + i")
    text.add_argument("--max_new_tokens", type=non_negative_int, default=300, help="tokens to write after the prompt")
    choice = parser.add_argument_group("choice of the next token")
    choice.add_argument("--temperature", type=non_negative_float, default=0.8, help="0: always the likeliest token")
    choice.add_argument("--top_k", type=positive_int, default=None, help="draw among the k likeliest; None: all")
    choice.add_argument("--top_p", type=share, default=None,
                        help="draw among the likeliest that together hold this probability; None: all")
    choice.add_argument("--seed", type=seed_number, default=1, help="of the random draws")
    depth = parser.add_argument_group("depth")
    dial = depth.add_mutually_exclusive_group()
    dial.add_argument("--skip_rate", type=skip_rates, default=None, metavar="S|S,S,…",
                      help="share of the tokens that each layer skips, one number or one a layer; None: as it was trained")
    dial.add_argument("--depth_budget", type=positive_float, default=None, metavar="LAYERS",
                      help="the same as layers a token, on average, of 2·n_layer")
    depth.add_argument("--allocation", choices=("per_layer", "global"), default="per_layer",
                       help="each layer skips at the rate, or layers skip by their gain, at the rate on average")
    depth.add_argument("--show_depth", action="store_true", help="print the text with the layers that each token ran")
    depth.add_argument("--depth_json", type=path_type, default=None, metavar="FILE", help="write which layers each token ran")
    depth.add_argument("--depth_png", type=path_type, default=None, metavar="FILE",
                       help="draw it, layers × tokens (needs matplotlib)")
    system = parser.add_argument_group("system")
    system.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    system.add_argument("--kernels", choices=("auto", "torch", "triton"), default="auto",
                        help="of the residual stream; auto: Triton on a GPU that has it, else PyTorch")
    args = parser.parse_args(argv)
    if args.interactive and (args.depth_json or args.depth_png):
        parser.error("--interactive: has no end at which a depth file could be written; use --prompt or --show_depth")
    if args.export and (args.depth_json or args.depth_png):
        parser.error("--export: writes no text whose depth a file could hold; leave --depth_json and --depth_png out")
    if args.export and args.export.suffix != ".safetensors":
        parser.error(f"--export {args.export}: expected a name that ends in .safetensors, by which it is known later")
    return args


def check_files(args):
    """Find out now, not after the writing, whether files can be written, and that they harm no file we read."""
    taken = {"--checkpoint": args.checkpoint, "--prompt_file": args.prompt_file}
    for flag in ("--depth_json", "--depth_png", "--export"):
        path = getattr(args, flag[2:])
        if path is None:
            continue
        for other, file in taken.items():
            if file is not None and os.path.realpath(file) == os.path.realpath(path):
                raise UserError(f"{flag} {path}: the same file as {other}; choose another")
        taken[flag] = path
        try:
            new = not os.path.lexists(path)
            path.open("ab").close()
            if new:
                path.unlink()
        except OSError as error:
            raise UserError(f"{flag} {path}: cannot be written ({error.strerror}); choose another file") from error
    if args.depth_png:
        try:
            import matplotlib.figure  # noqa: F401  (which draw_depth takes)
        except ImportError as error:
            raise UserError(f"--depth_png {args.depth_png}: needs matplotlib; pip install matplotlib") from error


if __name__ == "__main__":      # answer --help and mistakes in flags before the seconds that importing torch takes
    forgive_output()
    parse_args()

from model import Config, ModelError, choose_device, export_checkpoint, load_checkpoint, memory_of


# ---------------------------------------------------------------------------------------------------------------------
# Where the depth went


class DepthMap:
    """Which layers each token of one text ran, noted while the model runs."""

    def __init__(self, n_layers: int):
        self.n_layers = n_layers
        self.ran: list[list[bool]] = []         # for each token that was run, each of its layers

    def watch(self, layer: int, before, after, rows):
        """What `NAGTransformer.forward` calls after each layer."""
        T = before.direction.size(1)
        if layer == 0:
            self.ran += [[False] * self.n_layers for _ in range(T)]
        for row in range(T) if rows is None else rows.kept.tolist():
            self.ran[row - T][layer] = True

    def without(self, n: int) -> "DepthMap":
        """The map without its first n tokens."""
        rest = DepthMap(self.n_layers)
        rest.ran = self.ran[n:]
        return rest

    def layers_run(self) -> list[int]:
        """For each token, how many layers it ran."""
        return [sum(layers) for layers in self.ran]

    def shares(self) -> list[float]:
        """For each layer, the share of the tokens that ran it."""
        return [sum(column) / len(self.ran) for column in zip(*self.ran)]


# Background colours of a 256-colour terminal, from few layers to many, under white letters.
COLOURS = (17, 19, 25, 30, 28, 64, 136, 166, 160)


def spelled(tokens: list[int], encoding) -> list[str]:
    """What each token adds to the text: characters appear with the token that completes them."""
    characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = [characters.decode(encoding.decode([token])) for token in tokens]
    if texts:
        texts[-1] += characters.decode(b"", final=True)
    return texts


def printable(text: str) -> str:
    """The text with a sign in place of each character that would not show, or would command the terminal."""
    return "".join(c if c.isprintable() else " " if c == "\t" else "⏎" if c == "\n" else "�" for c in text)


def depth_picture(texts: list[str], seen: DepthMap, in_colour: bool) -> str:
    """The text with each token's layers, a legend, and a bar for each layer.

    texts: of each token. The last token of a text has not been run (nothing was written after it) and stays unmarked.
    In colour the letters have a background; else under each line stands one of digits, 9 for all layers.
    """
    n, counts = seen.n_layers, seen.layers_run()
    lines, under = [""], [""]
    for i, text in enumerate(texts):
        level = counts[i] / n if i < len(counts) else None
        for part in text.splitlines(keepends=True):
            visible = printable(part.rstrip("\r\n"))
            colour = None if level is None else COLOURS[round(level * (len(COLOURS) - 1))]
            lines[-1] += f"\x1b[48;5;{colour};38;5;231m{visible}\x1b[0m" if in_colour and level is not None and visible else visible
            under[-1] += (" " if level is None else str(round(level * 9))) * len(visible)
            if part.endswith("\n"):
                lines.append("")
                under.append("")
    if in_colour:
        legend = "".join(f"\x1b[48;5;{colour};38;5;231m {round(i * n / (len(COLOURS) - 1))} \x1b[0m"
                         for i, colour in enumerate(COLOURS))
    else:
        lines = [part for line, digits in zip(lines, under) for part in ((line, digits) if digits.strip() else (line,))]
        legend = f"0 for none to 9 for all of the {n}"
    mean = sum(counts) / max(1, len(counts))
    picture = "\n".join(lines) + f"\n\nlayers run: {legend}; {mean:.1f} of {n} a token on average. Share of the tokens, by layer:\n"
    for layer, ran in enumerate(seen.shares()):
        kind = "attention" if layer % 2 == 0 else "MLP"
        picture += f"{layer:4d} {kind:9} {'█' * round(30 * ran):30} {ran:4.0%}\n"
    return picture


def depth_entry(tokens: list[int], texts: list[str], seen: DepthMap) -> dict:
    """The map for a program: tokens, their texts, and for each that was run its layers as 0 or 1."""
    return {"n_layers": seen.n_layers, "tokens": tokens, "texts": texts, "layers_run": seen.layers_run(),
            "ran": [[int(x) for x in layers] for layers in seen.ran], "share_by_layer": seen.shares()}


def write_depth(path: Path, tokens: list[list[int]], texts: list[list[str]], maps: list[DepthMap]):
    """The maps of all samples as JSON."""
    entries = [depth_entry(*sample) for sample in zip(tokens, texts, maps)]
    path.write_text(json.dumps({"samples": entries}) + "\n", encoding="utf-8")


def draw_depth(path: Path, maps: list[DepthMap], texts: list[list[str]]):
    """A heat map of each sample: layers upwards, tokens to the right."""
    from matplotlib.figure import Figure
    longest = max(len(seen.ran) for seen in maps)
    figure = Figure(figsize=(min(40, 2 + longest * 0.12), 1 + len(maps) * (1 + maps[0].n_layers * 0.14)), layout="constrained")
    for axes, seen, text in zip(figure.subplots(len(maps), 1, squeeze=False)[:, 0], maps, texts):
        axes.imshow(list(zip(*seen.ran)), aspect="auto", origin="lower", interpolation="nearest", cmap="Blues", vmin=0, vmax=1)
        axes.set_ylabel("layer")
        if longest <= 320:
            axes.set_xticks(range(len(seen.ran)), [printable(t).replace("$", r"\$") for t in text[:len(seen.ran)]], fontsize=6)
    axes.set_xlabel("token (dark: the layer ran for it)")
    figure.savefig(path, dpi=120, format="png")


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def standard_input():
    """Standard input as bytes."""
    if sys.stdin is None:
        raise UserError("standard input: closed, expected text; give it some, or use --prompt")
    return sys.stdin.buffer


def prompt_bytes(args) -> bytes:
    """The prompt as it was given, byte for byte."""
    try:
        if args.prompt_file is None:
            return os.fsencode(args.prompt)
        return standard_input().read() if str(args.prompt_file) == "-" else args.prompt_file.read_bytes()
    except UnicodeEncodeError as error:         # from a program; a command line cannot hold it
        raise UserError(f"--prompt: character {error.start} is half of a surrogate pair; leave it out") from error
    except OSError as error:
        raise UserError(f"--prompt_file {args.prompt_file}: cannot be read ({error.strerror})") from error


def prompt_tokens(prompt: bytes, encoding) -> list[int]:
    """Tokens of a prompt; of an empty one the end-of-text token, which stands before every document."""
    try:
        return encoding.encode(prompt).tolist() or [encoding.end_of_text]
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt: byte {error.start} is not UTF-8, which encoding {encoding.name} needs; convert the "
                        f"text") from error


def write(model, encoding, prompt: bytes, args, cuts, seed: int, seen: DepthMap) -> list[int]:
    """Print a prompt and its continuation, token by token; bytes wait until their character is whole.

    With --show_depth the text comes when it is finished. Returns all tokens.
    """
    tokens = prompt_tokens(prompt, encoding)
    characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def emit(text: str):
        if not args.show_depth:
            print(text if args.raw else escaped(text, keep="\n\t"), end="", flush=True)

    emit(characters.decode(prompt))
    for token in model.stream([tokens.copy()], args.max_new_tokens, args.temperature, args.top_k, args.top_p, seed,
                              cuts, seen.watch):
        tokens += token.tolist()
        emit(characters.decode(encoding.decode(token.tolist())))
    emit(characters.decode(b"", final=True) + "\n")
    if args.show_depth:
        in_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        shown = tokens if prompt else tokens[1:]                        # not the end-of-text that we put in front
        print(depth_picture(spelled(shown, encoding), seen.without(len(tokens) - len(shown)), in_colour))
    return tokens


def written(flag: str, path: Path, write_to):
    """Let a function write to the path of a flag. UserError where it cannot."""
    try:
        write_to(path)
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be written ({error.strerror}); make room or choose another file") from error


def check_memory(config: Config, device, path: Path):
    """UserError where the keys and values of a whole context surely exceed the memory."""
    needed, there = 8 * config.n_layer * config.n_embd * config.block_size, memory_of(device)
    if there is not None and needed > there:
        raise UserError(f"checkpoint {path}: its block_size of {config.block_size:,} tokens needs {needed / 2**30:,.1f} GiB "
                        f"of memory, but {device} has {there / 2**30:,.1f}; take another checkpoint")


def run(args):
    check_files(args)
    device = choose_device(args.device)
    model, meta = load_checkpoint(args.checkpoint, device, args.kernels)
    check_meta(meta, f"checkpoint {args.checkpoint}")
    if args.export:
        written("--export", args.export, lambda path: export_checkpoint(path, model, meta))
        return
    check_memory(model.config, device, args.checkpoint)
    encoding = encoding_from_meta(meta)
    rate = args.skip_rate[0] if args.skip_rate and len(args.skip_rate) == 1 else args.skip_rate
    cuts = model.cuts_for(rate, args.depth_budget, args.allocation)
    if args.interactive:
        lines = standard_input()
        print("A prompt a line; Ctrl-D ends.", file=sys.stderr)
        for line in lines:
            write(model, encoding, line.rstrip(b"\r\n"), args, cuts, args.seed, DepthMap(len(model.layers)))
        return
    prompt, maps, tokens = prompt_bytes(args), [], []
    for i in range(args.num_samples):
        maps.append(DepthMap(len(model.layers)))
        tokens.append(write(model, encoding, prompt, args, cuts, args.seed + i, maps[-1]))
    texts = [spelled(sample, encoding) for sample in tokens]
    if args.depth_json:
        written("--depth_json", args.depth_json, lambda path: write_depth(path, tokens, texts, maps))
    if args.depth_png:
        written("--depth_png", args.depth_png, lambda path: draw_depth(path, maps, texts))


def main(argv=None):
    forgive_output()
    try:
        exit_on_user_error(run, parse_args(argv), errors=(UserError, ModelError))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
