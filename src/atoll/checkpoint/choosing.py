"""Which checkpoint a person means by a path and a version: `runs/mine`, `runs/mine@120`, a snapshot's own folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atoll.checkpoint.description import Description, read_description
from atoll.checkpoint.folder import CheckpointFolder
from atoll.errors import ConfigError, LocalError
from atoll.kernels import Floats
from atoll.state.manifest import Manifest, Vector
from atoll.state.snapshot import read_elements, read_manifest

_IN_A_RUN = "checkpoints"


def place_of(path: Path) -> CheckpointFolder:
    """The place at `path`: the folder itself, or the one in a run's folder. Raises LocalError if there is none."""
    for candidate in (path, path / _IN_A_RUN):
        if (candidate / "shared").is_dir():
            return CheckpointFolder(candidate)
    raise LocalError(
        f"{path} holds no checkpoints: neither it nor its {_IN_A_RUN}/ has a folder named shared; "
        "give the folder that checkpoint.path named, or the run's"
    )


@dataclass(frozen=True, slots=True)
class Chosen:
    """One version of one place."""

    folder: Path
    manifest: Manifest
    place: CheckpointFolder

    @property
    def name(self) -> str:
        return f"{self.place.path}@{self.manifest.version}"

    def description(self) -> Description:
        """The names of its parameters. Raises LocalError, also if they are another model's."""
        said = read_description(self.place.path)
        if said.layout.numel != self.manifest.numel:
            raise LocalError(
                f"{self.place.path}: model.json names parameters of {said.layout.numel} elements and version "
                f"{self.manifest.version} has {self.manifest.numel}: they belong to different models"
            )
        return said

    def read(self, vector: Vector, start: int, stop: int) -> Floats:
        values = np.empty(stop - start, dtype=np.float32)
        read_elements(self.folder, self.manifest, vector, start, values)
        return values


def choose(spec: str) -> Chosen:
    """`PLACE` for what `latest` leads to, else the newest that has a sound manifest; `PLACE@VERSION` for one version.
    Raises ConfigError for a version that is not there, LocalError for a damaged one."""
    path, at, number = spec.rpartition("@")
    if not at or not number.isdecimal():
        path, number = spec, ""
    place = place_of(Path(path))
    versions = place.all_versions()
    if number:
        version = int(number)
        if version not in versions:
            known = ", ".join(map(str, versions)) or "none"
            raise ConfigError(f"{place.path} has no version {version}; it has {known}")
    else:
        latest = place.latest()
        sound = [each.version for each in place.versions()]
        if not sound:
            raise LocalError(f"{place.path} has no checkpoint whose manifest can be read")
        version = latest.version if latest is not None and latest.version in sound else sound[0]
    folder = place.shared(version)
    return Chosen(folder, read_manifest(folder), place)
