"""`python -m zsim`."""

import sys

from zsim.cli import main

sys.exit(main())
