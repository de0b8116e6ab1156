"""`python -m p2pkv.cli`, the same as the `p2pkv` command."""

import sys

from p2pkv.cli import main

sys.exit(main())
