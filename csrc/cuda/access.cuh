// n neighbouring elements at once, by as few accesses as their bytes allow, without CUDA's runtime.
#pragma once

#include "tile.cuh"

namespace memkit::cuda {

// How so many bytes are read and written: at once, or in words.
template <int bytes>
struct Access {
  static_assert(bytes % sizeof(Word) == 0);
  static constexpr int size = sizeof(Word);
  using type = Word;
};
#if defined(__CUDACC__)
#define MEMKIT_ALIAS
#else
#define MEMKIT_ALIAS __attribute__((may_alias))
#endif
template <>
struct Access<8> {
  static constexpr int size = 8;
  typedef uint64_t MEMKIT_ALIAS type;
};
template <>
struct Access<4> {
  static constexpr int size = 4;
  typedef uint32_t MEMKIT_ALIAS type;
};
template <>
struct Access<2> {
  static constexpr int size = 2;
  typedef uint16_t MEMKIT_ALIAS type;
};
template <>
struct Access<1> {
  static constexpr int size = 1;
  typedef uint8_t type;
};
#undef MEMKIT_ALIAS

template <class S, int n>
using AccessOf = Access<int(sizeof(S)) * n>;

template <class S, int n>
bool is_aligned_for(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % AccessOf<S, n>::size == 0;
}

template <int n, class S>
MEMKIT_FN void load_raw(const S* from, S* to) {
  using Once = AccessOf<S, n>;
  MEMKIT_UNROLL
  for (int k = 0; k < n; k += Once::size / int(sizeof(S))) {
    const auto word = *reinterpret_cast<const typename Once::type*>(from + k);
    std::memcpy(to + k, &word, sizeof(word));
  }
}
template <int n, class S>
MEMKIT_FN void store_raw(const S* from, S* to) {
  using Once = AccessOf<S, n>;
  MEMKIT_UNROLL
  for (int k = 0; k < n; k += Once::size / int(sizeof(S))) {
    typename Once::type word;
    std::memcpy(&word, from + k, sizeof(word));
    if constexpr (Once::size >= 8)
      store_word(word, to + k);
    else
      *reinterpret_cast<typename Once::type*>(to + k) = word;
  }
}

template <class S, class T, int n>
MEMKIT_FN void load_values(const S* from, T (&x)[n]) {
  S raw[n];
  load_raw<n>(from, raw);
  MEMKIT_UNROLL
  for (int k = 0; k < n; ++k) x[k] = widen(raw[k]);
}
template <class S, class T, int n>
MEMKIT_FN void store_values(const T (&x)[n], S* to) {
  if constexpr (n == 1) {
    S raw[2];
    narrow(x[0], T(0), raw);
    store_raw<1>(raw, to);
  } else {
    S raw[n];
    narrow_all(x, raw);
    store_raw<n>(raw, to);
  }
}

}  // namespace memkit::cuda
