"""`python -m shardproof`: the same as the `shardproof` command."""

import sys

from shardproof.cli.main import main
from shardproof.cli.processes.launch import say_final

if __name__ == "__main__":
    code = main()
    say_final(code)
    sys.exit(code)
