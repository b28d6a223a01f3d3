"""Print the requirements of the package with its `dev` and `data` extras, one argument each, for pip.

pip can not install the dependencies of a project without building it; this lets the build come last and alone.
"""

from __future__ import annotations

import pathlib
import tomllib

project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
print("\n".join(r.replace(" ", "") for r in [*project["dependencies"], *extras["dev"], *extras["data"]]))
