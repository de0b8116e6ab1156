"""`vllm serve`: the `vllm` command of the CPU build looks for a distribution of that name and fails."""

from vllm.entrypoints.cli.serve import ServeSubcommand, make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    ServeSubcommand.cmd(make_arg_parser(FlexibleArgumentParser()).parse_args())
