"""`python -m shardproof`: the same as the `shardproof` command."""

import sys

from shardproof.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
