"""`vllm serve --headless`, a node without an HTTP server: the `vllm` command of the CPU build looks for a
distribution of that name and fails."""

from __future__ import annotations

from vllm.entrypoints.cli.serve import make_arg_parser, run_headless
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    arguments.api_server_count = 0
    run_headless(arguments)
