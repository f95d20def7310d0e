"""``python -m dspine_local``."""

import sys

from dspine_local.command import main

sys.exit(main())
