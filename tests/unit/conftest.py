"""`kernel_target`: on every instruction set that this machine has. `stream`: over plain TCP and over TLS."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atoll import _native
from support import engines
from support.engines import certificates


@pytest.fixture(scope="module", params=_native.kernel_targets())
def kernel_target(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.kernel_target()
    _native.set_kernel_target(request.param)
    yield request.param
    _native.set_kernel_target(before)


@pytest.fixture(params=["plain", "tls"])
def stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Engines of this test, and raw peers and peer processes, speak plain TCP or TLS. TLS is skipped if not built."""
    if request.param == "tls":
        if not _native.tls_is_built():
            pytest.skip("this build has no TLS")
        monkeypatch.setattr(engines, "TLS", certificates("peer"))
    return str(request.param)
