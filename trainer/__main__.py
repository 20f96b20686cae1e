"""``python -m trainer``: the command line, and each rank that a launcher starts."""

from __future__ import annotations

import os
import signal
import sys

from trainer.cli import main

if __name__ == "__main__":
    if "RANK" in os.environ:  # whoever started the ranks says that they were interrupted
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())
