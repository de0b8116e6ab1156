"""`python -m p2pkv_proxy`, the same as `p2pkv-proxy`."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
