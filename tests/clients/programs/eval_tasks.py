"""`edge eval tasks` where lm-eval is installed: its packages behind edge's own, which stay as they are.

The first argument is the folder of lm-eval's packages; the others are those of `edge`.
"""

import sys

sys.path.append(sys.argv.pop(1))

from edge.cli import main

sys.exit(main())
