// Rows times a weight matrix that was laid out for it once.
#pragma once

#include "linear.h"
#include "team.h"

// ROWS times TILE sums fill the vector registers.
#if defined(__AVX512F__)
constexpr int ROWS = 12;
#else
constexpr int ROWS = 6;
#endif

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

// How far ahead weights are asked for, in bytes: what the processor foresees by itself ends with its pages, and a
// multiplication of several rows leaves it too little time.
constexpr int WEIGHTS_AHEAD = 16384;

// Asks for weights that are needed later, some LINES of the cache at a time: all at once they would hold up everything
// else. Each time it goes on by `step` bytes, and behind the end of a tile at the next one.
template <int LINES>
class Ahead {
 public:
  Ahead() = default;
  Ahead(const char *at, const char *end, const char *next, int64_t step) : at(at), end(end), next(next), step(step) {
    turn();
  }

  void fetch() {
    if constexpr (LINES > 0) {
      for (int i = 0; i < LINES; i++) __builtin_prefetch(at + i * 64);
      at += step;
      turn();
    }
  }

 private:
  void turn() {
    if (at < end) return;
    at += next - end;
    end = (const char *)UINTPTR_MAX;
  }

  const char *at = nullptr, *end = nullptr, *next = nullptr;
  int64_t step = 0;
};

// A tile's weights for one input, or for two: those in the lower halves, then those in the upper ones.
static inline void load_weights(const float *from, Vec (&weights)[1][VECTORS]) {
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; v++) weights[0][v] = load(from + v * WIDTH);
}

static inline void load_weights(const Bfloat16 *from, Vec (&weights)[2][VECTORS]) {
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; v++) {
    const PairVec pairs = *(const PairVec *)(from + v * 2 * WIDTH);
    weights[0][v] = (Vec)(pairs << 16);
    weights[1][v] = (Vec)(pairs & ~0xffff);
  }
}

// out [M][TILE] = a [M][k] times one tile, or added to what is there; rows of a and out lie their strides apart.
template <int M, bool ADD, class W, int LINES>
static inline void multiply(const float *a, int64_t stride, const W *b, int64_t k, float *out, int64_t out_stride,
                            Ahead<LINES> ahead) {
  constexpr int together = 4 / sizeof(W);
  Vec sums[M][VECTORS];
  begin_sums<M, ADD>(sums, out, out_stride);
  for (int64_t i = 0; i < k; i += together, b += together * TILE) {
    ahead.fetch();
    Vec weights[together][VECTORS];
    load_weights(b, weights);
#pragma GCC unroll 2
    for (int input = 0; input < together; input++)
#pragma GCC unroll 16
      for (int row = 0; row < M; row++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[row][v] += a[row * stride + i + input] * weights[input][v];
  }
  end_sums<M>(sums, out, out_stride);
}

#if defined(__AVX512BF16__)
template <int M, bool ADD, int LINES>
static inline void multiply(const Bfloat16 *a, int64_t stride, const Bfloat16 *b, int64_t k, float *out,
                            int64_t out_stride, Ahead<LINES> ahead) {
  Vec sums[M][VECTORS];
  begin_sums<M, ADD>(sums, out, out_stride);
  for (int64_t i = 0; i < k; i += 2, b += 2 * TILE) {
    ahead.fetch();
    __m512bh weights[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) weights[v] = (__m512bh)_mm512_loadu_si512(b + v * 2 * WIDTH);
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

template <bool ADD, int M = ROWS, class T, class W, int LINES = 0>
static inline void multiply_rows(int rows, const T *a, int64_t stride, const W *b, int64_t k, float *out,
                                 int64_t out_stride, Ahead<LINES> ahead = {}) {
  if (rows == M) return multiply<M, ADD>(a, stride, b, k, out, out_stride, ahead);
  if constexpr (M > 1) multiply_rows<ADD, M - 1>(rows, a, stride, b, k, out, out_stride, ahead);
}

#if CAN_SQUEEZE
// out [rows][TILE] = a [rows][k] times one tile, which is unpacked a little at a time: what is unpacked never leaves
// the first cache, and the memory is always busy. `next` is the tile that comes after it.
template <class T>
static inline void multiply_squeezed(int rows, const T *a, const Linear &linear, int64_t tile, const char *next,
                                     float *out) {
  constexpr int64_t together = 64, step = 2 * TILE * SQUEEZED_BYTES / GROUP;
  alignas(64) Bfloat16 weights[together * TILE];
  Unpacker unpacker = unpacker_of(linear, tile);
  for (int64_t i = 0; i < linear.k; i += together) {
    const int64_t columns = std::min(together, linear.k - i);
    const char *at = (const char *)unpacker.next(columns * TILE / GROUP, weights);
    const Ahead<2> ahead(at + WEIGHTS_AHEAD, linear.at(tile + 1), next, step);
    if (i)
      multiply_rows<true>(rows, a + i, linear.k, weights, columns, out, TILE, ahead);
    else
      multiply_rows<false>(rows, a, linear.k, weights, columns, out, TILE, ahead);
  }
}
#endif

// Rows whose sums a thread keeps to itself until they are complete.
constexpr int64_t KEPT_ROWS = 64;

// For every tile of columns and every few rows of a [rows][k]: `finish(row, rows, tile, sums [rows][TILE])`.
// The weights of a tile stay in the cache while all rows pass; rows are cut into even parts.
template <class W, class T, class Finish>
static void matmul_with(Team &team, const T *a, int64_t rows, const Linear &linear, const Finish &finish) {
  const int64_t parts = (rows + ROWS - 1) / ROWS, k = linear.k;
  alignas(64) float kept[KEPT_ROWS * TILE];
  auto first = [=](int64_t part) { return part * rows / parts; };
  auto multiply_part = [&](int64_t tile, const W *weights, int64_t part, float *sums) {
    const T *from = a + first(part) * k;
    const int64_t count = first(part + 1) - first(part);
    // The tile that this thread will most likely take next.
    const int64_t later = std::min(tile + team.size, linear.tiles() - 1);
    const char *next = linear.at(later);
    if (parts > 1) {
      // Few parts take turns in fetching it, as the memory needs about as long as they.
      const int64_t fetching = rows <= KEPT_ROWS ? parts : 1;
      if (part >= fetching) return multiply_rows<false>(count, from, k, weights, k, sums, TILE);
      const int64_t share = (linear.at(later + 1) - next) / fetching + 1;
      const char *mine = next + part * share;
      // A part fetches once for each float, or pair in bfloat16, of a row.
      const Ahead<2> ahead(mine, mine + share, mine, share / (k * int64_t(sizeof(W)) / 4) + 1);
      return multiply_rows<false>(count, from, k, weights, k, sums, TILE, ahead);
    }
#if CAN_SQUEEZE
    if (!weights) return multiply_squeezed(count, from, linear, tile, next, sums);
#endif
    constexpr int64_t step = VECTORS * WIDTH * 4;
    const Ahead<step / 64> ahead((const char *)weights + WEIGHTS_AHEAD, linear.at(tile + 1), next, step);
    multiply_rows<false>(count, from, k, weights, k, sums, TILE, ahead);
  };
  auto compute = [&](int64_t tile, const W *weights, int64_t part, float *sums) {
    multiply_part(tile, weights, part, sums);
    if (linear.bias)
      for (int64_t i = 0; i < first(part + 1) - first(part); i++)
        for (int64_t c = 0; c < std::min<int64_t>(TILE, linear.n - tile * TILE); c++)
          sums[i * TILE + c] += linear.bias[tile * TILE + c];
  };
  // Null where there is one part, and so no reason to unpack more at a time than is multiplied.
  auto weights_for = [&](int64_t tile) {
    return linear.stored == SQUEEZED && parts == 1 ? nullptr : weights_of<W>(linear, tile);
  };
  if (rows <= KEPT_ROWS)
    team.each_repeatable(
        linear.tiles(),
        [&](int64_t tile) {
          const W *weights = weights_for(tile);
          for (int64_t part = 0; part < parts; part++) compute(tile, weights, part, kept + first(part) * TILE);
        },
        [&](int64_t tile) { finish(0, rows, tile, kept); });
  else
    team.each(linear.tiles(), [&](int64_t tile) {
      const W *weights = weights_for(tile);
      for (int64_t part = 0; part < parts; part++) {
        compute(tile, weights, part, kept);
        finish(first(part), first(part + 1) - first(part), tile, kept);
      }
    });
}

template <class T, class Finish>
static void matmul(Team &team, const T *a, int64_t rows, const Linear &linear, const Finish &finish) {
  if (!rows) return;
  if constexpr (std::is_same_v<T, float>)
    if (linear.stored == FLOATS) return matmul_with<float>(team, a, rows, linear, finish);
  matmul_with<Bfloat16>(team, a, rows, linear, finish);
}
