"""``python -m trainer``: the command line, and each rank that a launcher starts."""

from __future__ import annotations

import os
import signal
import sys

from trainer.cli import main

if __name__ == "__main__":
    if "RANK" in os.environ:  # the process that started the ranks reports the interrupt
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = main()
    # The work is done and flushed. A normal exit would also end the threads of the process group,
    # which sometimes abort then.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
