// Pointers that OpenSSL gives and takes back.
#pragma once

#include <memory>

namespace atoll_core::engine {

template <auto free>
struct Freeing {
  template <class T>
  void operator()(T* pointer) const {
    free(pointer);
  }
};
template <class T, auto free>
using Owned = std::unique_ptr<T, Freeing<free>>;

}  // namespace atoll_core::engine
