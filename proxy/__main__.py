"""`p2pkv-proxy`, and `python -m p2pkv_proxy`: says what to install where the extra `proxy` is missing."""

import sys


def main() -> int:
    """Runs the proxy; returns the exit status."""
    try:
        from .cli import main as run
    except ImportError as error:
        print(f"p2pkv-proxy: {error}; it needs p2pkv's extra `proxy`: see docs/install.md", file=sys.stderr)
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
