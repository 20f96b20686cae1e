"""``python -m reshard.testing.megatron``."""

import sys

if __name__ == "__main__":
    from reshard.testing.megatron.command import main

    sys.exit(main())
