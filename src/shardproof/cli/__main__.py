"""`python -m shardproof.cli`: the module that an outer torchrun starts."""

import sys

from shardproof.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
