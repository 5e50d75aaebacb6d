"""``python -m tpkit`` is the same as ``tpkit``; ranks are started this way."""

from tpkit.cli import main

raise SystemExit(main())
