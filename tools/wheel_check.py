"""Build a wheel and prove that it imports and runs in an environment of its own, away from this source tree.

Dependencies come from the development environment through a path file, so that nothing is downloaded twice; the wheel
itself is installed and the source tree is out of reach.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

CHECK = """
import importlib.resources, sys, atoll, atoll._native
from atoll import kernels
import numpy as np
assert "src" not in atoll.__file__, atoll.__file__
values = np.arange(300, dtype=np.float32)
out = np.empty(300 + 4 * 2, dtype=np.uint8)
assert kernels.encode("int8", np.array([0, 300]), values, out)
print("wheel:", atoll.__version__, "kernels:", kernels.kernel_target(), atoll.__file__)
"""


def main() -> None:
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory(prefix="atoll-wheel-") as name:
        folder = Path(name)
        pip("wheel", "--no-deps", "--no-build-isolation", "-w", name, str(root))
        (wheel,) = folder.glob("*.whl")
        venv.create(folder / "env", with_pip=False)
        site = next((folder / "env").glob("lib/python*/site-packages"))
        pip("install", "--no-deps", "--target", str(site), str(wheel))
        (site / "dependencies.pth").write_text("\n".join(dependencies()))
        python = folder / "env" / "bin" / "python"
        run([str(python), "-c", CHECK], cwd=folder)
        run([str(python), "-m", "atoll", "--version"], cwd=folder)
        demo = "-m atoll demo --seconds 6 --peers 2 --no-kill --json --out".split()
        result = json.loads(run([str(python), *demo, name], cwd=folder))
        assert result["digests_equal"], result
        assert result["rounds"] > 0, result
    print("wheel check passed")


def dependencies() -> list[str]:
    """Folders of this environment's packages, without its editable Atoll."""
    return [entry for entry in sys.path if entry.endswith("site-packages")]


def pip(*arguments: str) -> None:
    run([sys.executable, "-m", "pip", "--quiet", *arguments])


def run(command: list[str], cwd: Path | None = None) -> str:
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("ATOLL_")}
    done = subprocess.run(command, cwd=cwd, env=kept, stdout=subprocess.PIPE, text=True, timeout=600)
    print(done.stdout, end="")
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} ... ended with {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
