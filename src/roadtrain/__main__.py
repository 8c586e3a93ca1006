"""`python -m roadtrain` runs the `roadtrain` command."""

import sys

from roadtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
