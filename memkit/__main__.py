"""`python -m memkit` is the `memkit` command."""

import sys

from .cli import main

sys.exit(main())
