"""Write text with a trained model.

    python sample.py                                              from the start of a document
    python sample.py --prompt 'def ' --temperature 0              the likeliest continuation
    cat notes.txt | python sample.py --prompt_file - --num_samples 3
    python sample.py --interactive                                one prompt a line, until Ctrl-D
"""

import codecs
import os
import sys
from pathlib import Path

from prepare_data import (Parser, UserError, encoding_from_meta, exit_on_user_error, non_negative_float,
                          non_negative_int, number_type, positive_int)

share = number_type(float, lambda value: 0 < value <= 1, "a number above 0 and at most 1")


def parse_args(argv=None):
    parser = Parser(description="Write text with a trained model.")
    text = parser.add_argument_group("text")
    text.add_argument("--checkpoint", type=Path, default=Path("out/ckpt.pt"), help="file that train.py has written")
    prompt = text.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default="", help="text to continue; empty: the start of a document")
    prompt.add_argument("--prompt_file", type=Path, default=None, help="file with the text to continue; -: standard input")
    prompt.add_argument("--interactive", action="store_true", help="read prompts line by line from standard input")
    text.add_argument("--num_samples", type=positive_int, default=1, help="texts to write; sample i uses seed + i")
    text.add_argument("--max_new_tokens", type=non_negative_int, default=300, help="tokens to write after the prompt")
    choice = parser.add_argument_group("choice of the next token")
    choice.add_argument("--temperature", type=non_negative_float, default=0.8, help="0: always the likeliest token")
    choice.add_argument("--top_k", type=positive_int, default=None, help="draw among the k likeliest; None: all")
    choice.add_argument("--top_p", type=share, default=None,
                        help="draw among the likeliest that together hold this probability; None: all")
    choice.add_argument("--seed", type=non_negative_int, default=1, help="of the random draws")
    system = parser.add_argument_group("system")
    system.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    return parser.parse_args(argv)


if __name__ == "__main__":      # answer --help and mistakes in flags before the seconds that importing torch takes
    parse_args()

from model import ModelError, choose_device, load_checkpoint


def prompt_bytes(args) -> bytes:
    """The prompt as it was given, byte for byte."""
    if args.prompt_file is None:
        return os.fsencode(args.prompt)
    try:
        return sys.stdin.buffer.read() if str(args.prompt_file) == "-" else args.prompt_file.read_bytes()
    except OSError as error:
        raise UserError(f"--prompt_file {args.prompt_file}: cannot be read ({error.strerror})") from error


def prompt_tokens(prompt: bytes, encoding) -> list[int]:
    """Tokens of a prompt; of an empty one the end-of-text token, which stands before every document."""
    try:
        return encoding.encode(prompt).tolist() or [encoding.end_of_text]
    except UnicodeDecodeError as error:
        raise UserError(f"prompt: byte {error.start} is not UTF-8, which encoding {encoding.name} needs") from error


def write(model, encoding, prompt: bytes, args, seed: int):
    """Print a prompt and its continuation, token by token. Bytes wait until their character is whole."""
    characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
    print(characters.decode(prompt), end="", flush=True)
    for token in model.stream([prompt_tokens(prompt, encoding)], args.max_new_tokens, args.temperature, args.top_k,
                              args.top_p, seed):
        print(characters.decode(encoding.decode(token.tolist())), end="", flush=True)
    print(characters.decode(b"", final=True))


def run(args):
    if hasattr(sys.stdout, "reconfigure"):      # a terminal that lacks a character shows a sign in its place
        sys.stdout.reconfigure(errors="replace")
    model, meta = load_checkpoint(args.checkpoint, choose_device(args.device))
    encoding = encoding_from_meta(meta)
    if not args.interactive:
        prompt = prompt_bytes(args)
        for i in range(args.num_samples):
            write(model, encoding, prompt, args, args.seed + i)
        return
    print("A prompt a line; Ctrl-D ends.", file=sys.stderr)
    for line in sys.stdin.buffer:
        write(model, encoding, line.rstrip(b"\r\n"), args, args.seed)


def main(argv=None):
    try:
        exit_on_user_error(run, parse_args(argv), errors=(UserError, ModelError))
    except (KeyboardInterrupt, BrokenPipeError):        # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)    # and nothing is left to flush at exit
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
