"""`python -m sparetrain_megatron SCRIPT …`: see `launcher`."""

import sys

from sparetrain_megatron.launcher import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
