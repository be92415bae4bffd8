// Rows times a weight matrix that was laid out for it once.
#pragma once

#include <algorithm>

#include "team.h"
#include "vector.h"

// A tile is TILE output columns. ROWS times TILE sums fill the vector registers.
constexpr int VECTORS = 2;
constexpr int TILE = VECTORS * WIDTH;
#if defined(__AVX512F__)
constexpr int ROWS = 12;
#else
constexpr int ROWS = 6;
#endif
// How far ahead weights are asked for, in bytes: what the processor foresees by itself ends with its pages, and a
// multiplication of several rows leaves it too little time.
constexpr int WEIGHTS_AHEAD = 16384;

// A linear layer: packed [ceil(n / TILE)][k][TILE] in float, [..][k / 2][TILE][2] in bfloat16; bias [n] or null.
struct Linear {
  const void *packed;
  const float *bias;
  int64_t n, k;

  int64_t tiles() const { return (n + TILE - 1) / TILE; }
  // The smallest part of a row that multiplications take at once, and its place in a tile.
  template <class T>
  const T *tile(int64_t number) const { return (const T *)packed + number * TILE * k; }
  template <class T>
  T at(int64_t row, int64_t column) const;
};

template <>
inline float Linear::at<float>(int64_t row, int64_t column) const {
  return tile<float>(row / TILE)[column * TILE + row % TILE];
}

template <>
inline Bfloat16 Linear::at<Bfloat16>(int64_t row, int64_t column) const {
  return tile<Bfloat16>(row / TILE)[column / 2 * 2 * TILE + row % TILE * 2 + column % 2];
}

static inline void pack(float *to, const float *from, int64_t n, int64_t k) {
  for (int64_t row = 0; row < (n + TILE - 1) / TILE * TILE; row++)
    for (int64_t column = 0; column < k; column++)
      to[row / TILE * TILE * k + column * TILE + row % TILE] = row < n ? from[row * k + column] : 0;
}

static inline void pack(Bfloat16 *to, const Bfloat16 *from, int64_t n, int64_t k) {
  for (int64_t row = 0; row < (n + TILE - 1) / TILE * TILE; row++)
    for (int64_t column = 0; column < k; column++)
      to[row / TILE * TILE * k + column / 2 * 2 * TILE + row % TILE * 2 + column % 2] =
          row < n ? from[row * k + column] : Bfloat16{};
}

// The sums of a tile begin at 0 or with what is there.
template <int M, bool ADD>
static inline void begin_sums(Vec (&sums)[M][VECTORS], const float *out, int64_t out_stride) {
#pragma GCC unroll 16
  for (int row = 0; row < M; row++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) sums[row][v] = ADD ? load(out + row * out_stride + v * WIDTH) : Vec{};
}

template <int M>
static inline void end_sums(const Vec (&sums)[M][VECTORS], float *out, int64_t out_stride) {
#pragma GCC unroll 16
  for (int row = 0; row < M; row++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) store(out + row * out_stride + v * WIDTH, sums[row][v]);
}

// out [M][TILE] = a [M][k] times one tile, or added to what is there; rows of a and out lie their strides apart. What
// lies AHEAD bytes further than the tile is asked for meanwhile, unless that is 0.
template <int M, bool ADD, int AHEAD>
static inline void multiply(const float *a, int64_t stride, const float *b, int64_t k, float *out, int64_t out_stride) {
  Vec sums[M][VECTORS];
  begin_sums<M, ADD>(sums, out, out_stride);
  for (int64_t i = 0; i < k; i++, b += TILE) {
    Vec weights[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
      weights[v] = load(b + v * WIDTH);
      if constexpr (AHEAD) __builtin_prefetch((const char *)(b + v * WIDTH) + AHEAD);
    }
#pragma GCC unroll 16
    for (int row = 0; row < M; row++)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) sums[row][v] += a[row * stride + i] * weights[v];
  }
  end_sums<M>(sums, out, out_stride);
}

#if defined(__AVX512BF16__)
template <int M, bool ADD, int AHEAD>
static inline void multiply(const Bfloat16 *a, int64_t stride, const Bfloat16 *b, int64_t k, float *out,
                            int64_t out_stride) {
  Vec sums[M][VECTORS];
  begin_sums<M, ADD>(sums, out, out_stride);
  for (int64_t i = 0; i < k; i += 2, b += 2 * TILE) {
    __m512bh weights[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
      weights[v] = (__m512bh)_mm512_loadu_si512(b + v * 2 * WIDTH);
      if constexpr (AHEAD) __builtin_prefetch((const char *)(b + v * 2 * WIDTH) + AHEAD);
    }
#pragma GCC unroll 16
    for (int row = 0; row < M; row++) {
      int32_t pair;
      memcpy(&pair, a + row * stride + i, 4);
      __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) sums[row][v] = (Vec)_mm512_dpbf16_ps((__m512)sums[row][v], both, weights[v]);
    }
  }
  end_sums<M>(sums, out, out_stride);
}
#endif

template <class T, bool ADD, int AHEAD, int M = ROWS>
static inline void multiply_rows(int rows, const T *a, int64_t stride, const T *b, int64_t k, float *out,
                                 int64_t out_stride) {
  if (rows == M) return multiply<M, ADD, AHEAD>(a, stride, b, k, out, out_stride);
  if constexpr (M > 1) multiply_rows<T, ADD, AHEAD, M - 1>(rows, a, stride, b, k, out, out_stride);
}

// Rows whose sums a thread keeps to itself until they are complete.
constexpr int64_t KEPT_ROWS = 64;

// For every tile of columns and every few rows of a [rows][k]: `finish(row, rows, tile, sums [rows][TILE])`.
// The weights of a tile stay in the cache while all rows pass; rows are cut into even parts.
template <class T, class Finish>
static void matmul(Team &team, const T *a, int64_t rows, const Linear &linear, const Finish &finish) {
  const int64_t parts = (rows + ROWS - 1) / ROWS;
  alignas(64) float kept[KEPT_ROWS * TILE];
  auto first = [=](int64_t part) { return part * rows / parts; };
  auto compute = [&](int64_t tile, int64_t part, float *sums) {
    int64_t row = first(part), count = first(part + 1) - row;
    multiply_rows<T, false, WEIGHTS_AHEAD>(count, a + row * linear.k, linear.k, linear.tile<T>(tile), linear.k, sums,
                                           TILE);
    if (linear.bias)
      for (int i = 0; i < count; i++)
        for (int64_t c = 0; c < std::min<int64_t>(TILE, linear.n - tile * TILE); c++)
          sums[i * TILE + c] += linear.bias[tile * TILE + c];
  };
  if (rows <= KEPT_ROWS)
    team.each_repeatable(
        linear.tiles(),
        [&](int64_t tile) {
          for (int64_t part = 0; part < parts; part++) compute(tile, part, kept + first(part) * TILE);
        },
        [&](int64_t tile) {
          if (rows) finish(0, rows, tile, kept);
        });
  else
    team.each(linear.tiles(), [&](int64_t tile) {
      for (int64_t part = 0; part < parts; part++) {
        compute(tile, part, kept);
        finish(first(part), first(part + 1) - first(part), tile, kept);
      }
    });
}
