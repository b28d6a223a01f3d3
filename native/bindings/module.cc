// The Python module atoll._native: kernels (codecs, digest, outer step) and the engine.
#include "bindings/bindings.h"

NB_MODULE(_native, m) {
  m.doc() = "Atoll's native core: codecs, digest, outer step, and the engine that moves updates.";
  atoll_core::bind_kernels(m);
  atoll_core::bind_engine(m);
}
