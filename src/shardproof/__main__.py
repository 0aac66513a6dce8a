"""`python -m shardproof`: the same as the `shardproof` command."""

import sys

from shardproof.cli.launch import say_final
from shardproof.cli.main import main

if __name__ == "__main__":
    code = main()
    say_final(code)
    sys.exit(code)
