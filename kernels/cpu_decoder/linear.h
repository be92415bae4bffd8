// Weight matrices, packed once for multiplications, in the fewest bytes that reproduce every weight.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <sys/mman.h>
#include <type_traits>

#include "ggml_codes.h"
#include "squeezed.h"

// Allocates memory in large pages if the system provides them, because a pass over all weights visits each page once.
// Returns null if there is no memory.
static inline void *large_pages(int64_t bytes) {
  constexpr int64_t page = 2 << 20;
  bytes = (bytes + page - 1) / page * page;
  void *memory = std::aligned_alloc(page, bytes);
#if defined(MADV_HUGEPAGE)
  if (memory) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  return memory;
}

// How a linear layer's weights lie in memory.
// FLOATS: [tiles][k][TILE]. BF16: [tiles][k / 2][TILE][2].
// SQUEEZED_N: either of these, squeezed; N bytes of a weight are not 0 throughout the matrix. First comes where each
// tile begins, [tiles + 1] int64 in bytes from `packed`, then the tiles.
// CODES_N, ROUNDED_N: [tiles][k / SHARED] groups of N-bit codes, of floats or of weights that were rounded to bfloat16.
// Weights in bfloat16 that are multiplied with floats are floats whose lower half is 0: just as exact, in half the
// bytes.
enum Stored : int64_t { FLOATS, BF16, SQUEEZED_2, SQUEEZED_3, SQUEEZED_4, CODES_4, CODES_8, ROUNDED_4, ROUNDED_8 };

static inline bool is_squeezed(Stored stored) { return stored >= SQUEEZED_2 && stored <= SQUEEZED_4; }
static inline bool is_coded(Stored stored) { return stored >= CODES_4; }
// Bytes of a weight in the form in which it is multiplied.
static inline int bytes_of(Stored stored) {
  return stored == BF16 || stored == SQUEEZED_2 || stored == ROUNDED_4 || stored == ROUNDED_8 ? 2 : 4;
}

// If weights are computed from codes, calls `use` with the bits of a code and whether the weights were rounded.
template <class Use>
static inline void with_code(Stored stored, const Use &use) {
  if (stored == CODES_4) use.template operator()<4, false>();
  if (stored == CODES_8) use.template operator()<8, false>();
  if (stored == ROUNDED_4) use.template operator()<4, true>();
  if (stored == ROUNDED_8) use.template operator()<8, true>();
}

// Bytes of a tile; for a squeezed tile, the most bytes that it takes without its head.
static inline int64_t tile_bytes(Stored stored, int64_t k) {
  int64_t bytes = TILE * k * bytes_of(stored);
  with_code(stored, [&]<int BITS, bool ROUNDED>() { bytes = k / SHARED * sizeof(Coded<BITS>); });
  return bytes;
}

// bias [n] or null. A tile is the smallest number of columns that multiplications take at once.
struct Linear {
  const void *packed;
  const float *bias;
  int64_t n, k;
  Stored stored;

  int64_t tiles() const { return (n + TILE - 1) / TILE; }

  // Where a tile begins; for `tiles()`, where the last tile ends.
  const char *at(int64_t tile) const {
    return (const char *)packed +
           (is_squeezed(stored) ? ((const int64_t *)packed)[tile] : tile * tile_bytes(stored, k));
  }
};

// Loads a tile's weights for two inputs. Two, because bfloat16 lies in pairs, and because a loop over single inputs
// spends up to a twelfth of its time on counting.
static inline void load_weights(const float *from, Vec (&weights)[2][VECTORS]) {
#pragma GCC unroll 2
  for (int input = 0; input < 2; input++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) weights[input][v] = load(from + (input * VECTORS + v) * WIDTH);
}

static inline void load_weights(const Bfloat16 *from, Vec (&weights)[2][VECTORS]) {
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; v++) {
    const PairVec pairs = *(const PairVec *)(from + v * 2 * WIDTH);
    weights[0][v] = (Vec)(pairs << 16);
    weights[1][v] = (Vec)(pairs & ~0xffff);
  }
}

// The most inputs that a reader returns at once: a tile's weights for these inputs leave half of the first-level cache
// to others.
template <class W>
constexpr int64_t MOST_INPUTS = 24576 / (TILE * sizeof(W));

// Reads a tile's weights in order, some inputs at a time: [inputs][TILE] or [inputs / 2][TILE][2], unsqueezed. The
// returned weights stay valid until the next call.
template <class W>
class Reader;

template <>
class Reader<Bfloat16> {
 public:
  Reader(const Linear &linear, int64_t tile)
      : from(linear.at(tile)), stored(linear.stored)
#if CAN_SQUEEZE
        , unpacker(from, is_squeezed(stored) ? linear.k * TILE / GROUP : 0)
#endif
  {}

  const Bfloat16 *next(int64_t inputs) {
    if (stored == BF16) {
      const char *given = from;
      from += inputs * TILE * 2;
      return (const Bfloat16 *)given;
    }
    with_code(stored, [&]<int BITS, bool ROUNDED>() { from = decode<BITS, ROUNDED>(from, inputs, unpacked); });
#if CAN_SQUEEZE
    if (stored == SQUEEZED_2) from = unpacker.next<2>(inputs * TILE / GROUP, unpacked);
#endif
    return unpacked;
  }

  // Where the next weights lie.
  const char *at() const { return from; }

 private:
  const char *from;
  Stored stored;
#if CAN_SQUEEZE
  Unpacker unpacker;
#endif
  alignas(64) Bfloat16 unpacked[MOST_INPUTS<Bfloat16> * TILE];
};

template <>
class Reader<float> {
 public:
  Reader(const Linear &linear, int64_t tile)
      : from(linear.at(tile)), stored(linear.stored), halves(linear, tile)
#if CAN_SQUEEZE
        , unpacker(from, is_squeezed(stored) ? linear.k * TILE / GROUP : 0)
#endif
  {}

  const float *next(int64_t inputs) {
    if (stored == FLOATS) {
      const char *given = from;
      from += inputs * TILE * 4;
      return (const float *)given;
    }
    with_code(stored, [&]<int BITS, bool ROUNDED>() { from = decode<BITS, ROUNDED>(from, inputs, widened); });
#if CAN_SQUEEZE
    const int64_t groups = inputs * TILE / GROUP;
    if (stored == SQUEEZED_3) from = unpacker.next<3>(groups, widened);
    if (stored == SQUEEZED_4) from = unpacker.next<4>(groups, widened);
#endif
    if (stored == BF16 || stored == SQUEEZED_2) widen(inputs);
    return widened;
  }

  const char *at() const { return from; }

 private:
  void widen(int64_t inputs) {
    // A few inputs at a time, so that their weights are still in the cache.
    constexpr int64_t few = 64;
    for (int64_t begin = 0; begin < inputs; begin += few) {
      const int64_t some = std::min(few, inputs - begin);
      const Bfloat16 *given = halves.next(some);
      for (int64_t i = 0; i < some; i += 2) {
        Vec weights[2][VECTORS];
        load_weights(given + i * TILE, weights);
        memcpy(widened + (begin + i) * TILE, weights, sizeof(weights));
      }
    }
    from = halves.at();
  }

  const char *from;
  Stored stored;
  Reader<Bfloat16> halves;
#if CAN_SQUEEZE
  Unpacker unpacker;
#endif
  alignas(64) float widened[MOST_INPUTS<float> * TILE];
};

// Writes a row of the matrix to `to` [k].
static inline void row_of(const Linear &linear, int64_t row, float *to) {
  Reader<float> reader(linear, row / TILE);
  constexpr int64_t most = MOST_INPUTS<float>;
  for (int64_t begin = 0; begin < linear.k; begin += most) {
    const int64_t inputs = std::min(most, linear.k - begin);
    const float *from = reader.next(inputs);
    for (int64_t i = 0; i < inputs; i++) to[begin + i] = from[i * TILE + row % TILE];
  }
}

// Packs the tile of a matrix [n][k] that begins with row `first`; rows past the last row are 0.
static inline void pack_tile(float *to, const float *from, int64_t first, int64_t n, int64_t k) {
  for (int64_t row = 0; row < TILE; row++)
    for (int64_t column = 0; column < k; column++)
      to[column * TILE + row] = first + row < n ? from[(first + row) * k + column] : 0;
}

static inline void pack_tile(Bfloat16 *to, const Bfloat16 *from, int64_t first, int64_t n, int64_t k) {
  for (int64_t row = 0; row < TILE; row++)
    for (int64_t column = 0; column < k; column++)
      to[column / 2 * 2 * TILE + row * 2 + column % 2] =
          first + row < n ? from[(first + row) * k + column] : Bfloat16{};
}

template <class W>
static inline void pack(W *to, const W *from, int64_t n, int64_t k) {
  for (int64_t row = 0; row < n; row += TILE) pack_tile(to + row * k, from, row, n, k);
}

#if CAN_SQUEEZE
// Where the first tile of a squeezed matrix begins.
static inline int64_t squeezed_begin(int64_t tiles) { return ((tiles + 1) * 8 + 63) / 64 * 64; }

// Squeezes a matrix [n][k], k a multiple of GROUP / TILE, and returns how many bytes the squeezed matrix takes.
template <int BYTES>
static inline int64_t squeeze_matrix(void *to, const Unsqueezed<BYTES> *from, int64_t n, int64_t k) {
  const int64_t tiles = (n + TILE - 1) / TILE;
  std::vector<Unsqueezed<BYTES>> packed(TILE * k);
  std::vector<Bits<BYTES>> bits(packed.size());
  int64_t *begins = (int64_t *)to;
  begins[0] = squeezed_begin(tiles);
  for (int64_t tile = 0; tile < tiles; tile++) {
    pack_tile(packed.data(), from, tile * TILE, n, k);
    memcpy(bits.data(), packed.data(), packed.size() * sizeof(packed[0]));
    begins[tile + 1] = begins[tile] + squeeze<BYTES>((uint8_t *)to + begins[tile], bits.data(), TILE * k);
  }
  return begins[tiles];
}
#endif
