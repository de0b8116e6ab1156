"""The `p2pkv` command: demo, bench, doctor, waterfall."""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

import p2pkv

_COMMANDS = {
    "demo": (
        "p2pkv.demo.demo",
        "start a prefill, a decode and a plain vLLM server, and compare their answers",
    ),
    "bench": ("p2pkv.bench.bench", "measure the layer hook, the push and the link, without vLLM"),
    "doctor": ("p2pkv.cli.doctor", "show what is installed here and what p2pkv can use of it"),
    "waterfall": (
        "p2pkv.cli.waterfall",
        "show where requests spend their time on their way to the first token",
    ),
}
"""Of each command: its module, which has `add_arguments(parser)` and `run(args) -> int`, and a summary."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit code. `p2pkv --help` imports neither torch nor vLLM."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    ends = "Exit code 0 if all is well, 1 if not, as a sentence says, 2 for a wrong option, 130 after Ctrl-C."
    parser = argparse.ArgumentParser(prog="p2pkv", description=p2pkv.__doc__, epilog=ends)
    parser.add_argument("--version", action="version", version=f"p2pkv {p2pkv.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = next((each for each in arguments if not each.startswith("-")), None)
    try:
        for name, (path, summary) in _COMMANDS.items():
            command = commands.add_parser(
                name, help=summary, description=summary[0].upper() + summary[1:] + "."
            )
            if name == wanted:
                module = importlib.import_module(path)
                module.add_arguments(command)
                command.set_defaults(run=module.run)
        args = parser.parse_args(arguments)
        code = args.run(args)
        print(end="", flush=True)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads what we print has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except ImportError as error:
        parser.exit(1, f"p2pkv {wanted}: {error}; this command needs what vLLM brings: install vLLM\n")
    except OSError as error:
        parser.exit(1, f"p2pkv {wanted}: {error}\n")
    assert isinstance(code, int)
    return code
