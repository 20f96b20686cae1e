"""``python -m trainer``: the command line, and each rank that a launcher starts."""

from __future__ import annotations

import os
import signal
import sys

from trainer.cli import main

if __name__ == "__main__":
    if "RANK" in os.environ:  # whoever started the ranks says that they were interrupted
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = main()
    # The work is done and flushed; what the interpreter would still tear down are threads of the
    # process group, which now and then abort.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
