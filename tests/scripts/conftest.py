import sys
from pathlib import Path

# Python puts a script's own folder on the path; here scripts run in the tests' process. At the end,
# so that no script stands before a module of the same name.
sys.path.append(str(Path(__file__).parents[2] / "scripts/reproduce"))
