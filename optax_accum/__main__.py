"""`python -m optax_accum` is the command `optax-accum`."""

import sys

from optax_accum.cli import main

if __name__ == "__main__":
    sys.exit(main())
