"""``python -m dspine_local``."""

import sys

from dspine_local.cli import main

sys.exit(main())
