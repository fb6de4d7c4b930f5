"""`python -m qfleet` is the same as `qfleet`."""

import sys

from qfleet.cli import main

sys.exit(main())
