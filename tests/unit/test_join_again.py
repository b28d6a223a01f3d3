"""A program of several ranks whose `join` fails may mend what was wrong and join again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from atoll.config.environment import for_rank
from support.tied import tied

JOIN_TWICE = """
import atoll, torch, torch.distributed as dist
frozen = torch.nn.Linear(2, 2).requires_grad_(False)
for _ in range(2):
    try:
        atoll.join("127.0.0.1:1", run="again", model=frozen)
    except atoll.errors.ConfigError as error:
        print(error, dist.is_initialized(), sep="|", flush=True)
"""


def test_a_join_that_failed_leaves_no_process_group_behind(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a token for tests only")
    token.chmod(0o600)
    ranks = [
        subprocess.Popen(
            tied([sys.executable, "-c", JOIN_TWICE]),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=for_rank(rank, 2, tmp_path / "meet")
            | {"PYTHONPATH": ":".join(sys.path), "ATOLL_TOKEN_FILE": str(token)},
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=120)
            why = "the model has no trainable element: nothing could be synchronised"
            assert out.splitlines() == [f"{why}|False"] * 2, err
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
