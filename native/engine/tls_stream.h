// A stream in TLS 1.3: OpenSSL shakes hands (tls_handshake.h), then the records are ours
// (tls_records.h).
//
// Owner, threads: see stream.h. Failure: also kRefused, where the other end does not keep to TLS.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/stream.h"
#include "engine/tls_handshake.h"

namespace atoll_core::engine {

// `shared` outlives it. `named`: see TlsOptions.
std::unique_ptr<Stream> tls_stream(Fd fd, const TlsHandshakes& shared, bool dialled, bool named,
                                   std::uint64_t records_per_key);

}  // namespace atoll_core::engine
