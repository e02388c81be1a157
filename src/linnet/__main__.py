"""The command line as ``python -m linnet``."""

from __future__ import annotations

import sys

from linnet.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
