"""`python -m specwire.cli` is `specwire`."""

import sys

from specwire.cli.main import main

sys.exit(main())
