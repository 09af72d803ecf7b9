"""What a script that is run as a file finds instead of our packages: it says how to run it."""

import sys
from pathlib import Path

sys.exit(f"error: scripts are run as modules, from the folder above: python -m scripts.{Path(sys.argv[0]).stem} …")
