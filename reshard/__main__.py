"""``python -m reshard``."""

from reshard.cli import main

if __name__ == "__main__":
    main()
