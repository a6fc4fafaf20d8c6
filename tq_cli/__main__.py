"""``python -m tq_cli`` is ``tq``."""

from __future__ import annotations

import sys

from tq_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
