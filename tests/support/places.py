"""A place with checkpoints of a small Llama, made without a run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from atoll.checkpoint.description import Description, write_description
from atoll.checkpoint.folder import CheckpointFolder, OwnManifest
from atoll.state.manifest import Manifest, rows_of
from atoll.state.snapshot import LoadedState, fill_snapshot
from atoll.state.tensors import ModelTensors
from atoll.train.init import initialize
from atoll.train.llama import Llama, LlamaConfig

RUN = "harbour"


def small_llama(seed: int = 0, *, tied: bool = False) -> Llama:
    model = Llama(
        LlamaConfig(
            vocab_size=256,
            dim=16,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            ffn_dim=24,
            max_seq_len=32,
            tie_embeddings=tied,
        )
    )
    initialize(model, seed)
    return model


def save(place: Path, model: Llama, version: int, *, peer: str = "a") -> Manifest:
    """One more version, `latest` from now on, with an own part of `peer`."""
    folder = CheckpointFolder(place)
    tensors = ModelTensors(model.named_parameters(remove_duplicate=False))
    anchor = tensors.read()
    state = LoadedState(anchor, np.full_like(anchor, version), version, version, 10 * version)
    rows = tuple(rows_of(state.anchor)), tuple(rows_of(state.velocity))
    with folder.draft(folder.shared(version)) as draft:
        manifest = fill_snapshot(draft, state, RUN, rows, term=1)
    own = OwnManifest(
        run=RUN, peer=peer, version=version, digest=manifest.digest, files=(), state={"note": version}
    )
    data = b"\x02\0\0\0\0\0\0\0{}"
    folder.write_own(own, iter([memoryview(data)]), len(data))
    folder.set_latest(manifest)
    said = Description(
        run=RUN,
        parameters=tensors.layout.parameters,
        config=model.config.hf_config(),
        tokenizer="bytes",
    )
    write_description(place, said)
    return manifest


def rewrite_manifest(folder: Path, **changes: object) -> None:
    """Change what a snapshot's manifest says, and nothing that would make it fit."""
    path = folder / "manifest.json"
    said = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode({**said, **changes}))
