// Weight matrices, laid out once for multiplications, in as few bytes as give every weight back.
#pragma once

#include <algorithm>
#include <type_traits>

#include "squeezed.h"

// A tile is TILE output columns.
constexpr int VECTORS = 2;
constexpr int TILE = VECTORS * WIDTH;

// How a linear layer's weights lie in memory: [tiles][k][TILE] as floats, [tiles][k / 2][TILE][2] in bfloat16, or
// that squeezed: where each tile begins, [tiles + 1] int64 in bytes from `packed`, then the tiles.
// Weights in bfloat16 that are multiplied with floats are floats whose lower half is 0: as exact, in half the bytes.
enum Stored : int64_t { FLOATS, HALVES, SQUEEZED };

// bias [n] or null. A tile is the smallest part of the columns that multiplications take at once.
struct Linear {
  const void *packed;
  const float *bias;
  int64_t n, k;
  Stored stored;

  int64_t tiles() const { return (n + TILE - 1) / TILE; }

  // Where a tile begins, and the last one ends.
  const char *at(int64_t tile) const {
    const int64_t bytes = TILE * k * (stored == FLOATS ? 4 : 2);
    return (const char *)packed + (stored == SQUEEZED ? ((const int64_t *)packed)[tile] : tile * bytes);
  }
};

#if CAN_SQUEEZE
static inline Unpacker unpacker_of(const Linear &linear, int64_t tile) {
  return Unpacker((const uint8_t *)linear.at(tile), linear.k * TILE / GROUP);
}
#endif

// A tile's weights, none of them squeezed any more: [k][TILE] or [k / 2][TILE][2]. What was unpacked for it stays until
// the thread asks for another.
template <class W>
static inline const W *weights_of(const Linear &linear, int64_t tile) {
#if CAN_SQUEEZE
  if constexpr (std::is_same_v<W, Bfloat16>)
    if (linear.stored == SQUEEZED) {
      static thread_local Lines<Bfloat16> unpacked;
      unpacked.resize(linear.k * TILE);
      unpacker_of(linear, tile).next(linear.k * TILE / GROUP, unpacked.data());
      return unpacked.data();
    }
#endif
  return (const W *)linear.at(tile);
}

// A row of the matrix: [k].
static inline void row_of(const Linear &linear, int64_t row, float *to) {
  const int64_t place = row % TILE;
  if (linear.stored == FLOATS) {
    const float *from = weights_of<float>(linear, row / TILE);
    for (int64_t i = 0; i < linear.k; i++) to[i] = from[i * TILE + place];
  } else {
    const Bfloat16 *from = weights_of<Bfloat16>(linear, row / TILE);
    for (int64_t i = 0; i < linear.k; i++) to[i] = widen(from[i / 2 * 2 * TILE + place * 2 + i % 2]);
  }
}

// Lays out the tile of a matrix [n][k] whose first row is this one; rows that there are not are 0.
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

// Squeezes a matrix [n][k], k a multiple of GROUP / TILE, and returns how many bytes it takes.
static inline int64_t squeeze_matrix(void *to, const Bfloat16 *from, int64_t n, int64_t k) {
  const int64_t tiles = (n + TILE - 1) / TILE;
  std::vector<Bfloat16> packed(TILE * k);
  int64_t *begins = (int64_t *)to;
  begins[0] = squeezed_begin(tiles);
  for (int64_t tile = 0; tile < tiles; tile++) {
    pack_tile(packed.data(), from, tile * TILE, n, k);
    begins[tile + 1] = begins[tile] + squeeze((uint8_t *)to + begins[tile], (const uint16_t *)packed.data(), TILE * k);
  }
  return begins[tiles];
}
#endif
