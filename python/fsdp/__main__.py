"""``python -m fsdp`` is the command ``fsdp``."""

import os
import sys

from . import command

if __name__ == "__main__":
    program = command()
    os.execv(program, [program, *sys.argv[1:]])
