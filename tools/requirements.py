"""Print requirements of the package, one a line, for pip: of the extras named, or all that development needs.

pip can not install the dependencies of a project without building it; this lets the build come last and alone.
"""

from __future__ import annotations

import pathlib
import sys
import tomllib

project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
named = [r for extra in sys.argv[1:] for r in extras[extra]]
print(
    "\n".join(
        r.replace(" ", "") for r in named or [*project["dependencies"], *extras["dev"], *extras["data"]]
    )
)
