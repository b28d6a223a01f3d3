// Built where OpenSSL is absent: the same header, honest answers.
#include "engine/tls.h"

namespace atoll_core::engine {

bool tls_is_built() { return false; }

Status Tls::create(const TlsOptions&, std::unique_ptr<Tls>*) {
  return bad_argument("this build has no TLS: install libssl-dev and rebuild");
}

}  // namespace atoll_core::engine
