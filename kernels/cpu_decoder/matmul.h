// Multiplies rows with a weight matrix that was packed once for these multiplications.
#pragma once

#include "linear.h"
#include "team.h"

// ROWS times TILE sums fill the vector registers.
#if defined(__AVX512F__)
constexpr int ROWS = 12;
#else
constexpr int ROWS = 6;
#endif

// Initializes the sums of a tile with 0 or, if ADD, with the contents of `out`.
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

// Prefetch distance for weights, in bytes. The hardware prefetcher stops at page boundaries, and a multiplication of
// several rows leaves the prefetcher too little time.
constexpr int WEIGHTS_AHEAD = 16384;
// With at most REGISTER_ROWS rows, weights in another form are unpacked in registers, while each sum waits for the
// previous sum. Weights are then prefetched REGISTER_ROWS_AHEAD bytes ahead.
constexpr int REGISTER_ROWS = 4, REGISTER_ROWS_AHEAD = 8192;

// Prefetches weights that are needed later, LINES cache lines at a time: all at once, the prefetches would hold up
// everything else. Each call advances by `step` bytes.
template <int LINES>
struct Ahead {
  const char *at = nullptr;
  int64_t step = 0;

  void fetch() {
    if constexpr (LINES > 0) {
      for (int i = 0; i < LINES; i++) __builtin_prefetch(at + i * 64);
      at += step;
    }
  }
};

// Calls `use` with a prefetcher for `each_turn` bytes per iteration, at most LINES cache lines.
template <int LINES, class Use>
static inline void with_ahead(const char *at, int64_t each_turn, const Use &use) {
  if constexpr (LINES > 1)
    if (each_turn <= (LINES - 1) * 64) return with_ahead<LINES - 1>(at, each_turn, use);
  use(Ahead<LINES>{at, each_turn});
}

// out [M][TILE] = a [M][k] times one tile, or += if ADD. Rows of `a` lie `stride` apart, rows of `out` lie `out_stride`
// apart.
template <int M, bool ADD, class W, int LINES>
static inline void multiply(const float *a, int64_t stride, const W *b, int64_t k, float *out, int64_t out_stride,
                            Ahead<LINES> ahead) {
  Vec sums[M][VECTORS];
  begin_sums<M, ADD>(sums, out, out_stride);
  for (int64_t i = 0; i < k; i += 2, b += 2 * TILE) {
    ahead.fetch();
    Vec weights[2][VECTORS];
    load_weights(b, weights);
#pragma GCC unroll 2
    for (int input = 0; input < 2; input++)
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

// out [M][TILE] = a [M][k] times one tile of codes.
template <int BITS, bool ROUNDED, int M>
static inline void multiply_coded(const float *a, const char *tile, int64_t k, float *out) {
  // Each prefetch takes as many cache lines as a line of codes touches.
  constexpr int64_t each_turn = sizeof(Coded<BITS>) * PER_LANE<BITS> / SHARED;
  Ahead<(each_turn + 63) / 64> ahead{tile + REGISTER_ROWS_AHEAD, each_turn};
  Vec sums[M][VECTORS] = {};
  for (const auto *group = (const Coded<BITS> *)tile, *end = group + k / SHARED; group < end; group++) {
    const Common<BITS> common(*group);
    for (const auto &line : group->codes) {
      ahead.fetch();
      IntVec codes[VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) codes[v] = *(const IntVec *)(line + v * WIDTH);
#pragma GCC unroll 8
      for (int i = 0; i < PER_LANE<BITS>; i++) {
        Vec weights[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
          weights[v] = weights_of<BITS, ROUNDED>(codes[v], i, common.scale[v], common.offset[v]);
#pragma GCC unroll 16
        for (int row = 0; row < M; row++)
#pragma GCC unroll 8
          for (int v = 0; v < VECTORS; v++) sums[row][v] += a[row * k + i] * weights[v];
      }
      a += PER_LANE<BITS>;
    }
  }
  end_sums<M>(sums, out, TILE);
}

template <int BITS, bool ROUNDED, int M = REGISTER_ROWS>
static inline void multiply_coded_rows(int rows, const float *a, const char *tile, int64_t k, float *out) {
  if (rows == M) return multiply_coded<BITS, ROUNDED, M>(a, tile, k, out);
  if constexpr (M > 1) multiply_coded_rows<BITS, ROUNDED, M - 1>(rows, a, tile, k, out);
}

#if CAN_SQUEEZE && defined(__AVX512BF16__)
// out [M][TILE] = a [M][k] times one squeezed tile, accumulated in the same order as for the unsqueezed tile.
template <int M>
static inline void multiply_squeezed(const Bfloat16 *a, const Linear &linear, int64_t tile, float *out) {
  constexpr int inputs = GROUP / TILE;
  const int64_t k = linear.k;
  Unpacker unpacker(linear.at(tile), k / inputs);
  Vec sums[M][VECTORS] = {};
  for (int64_t begin = 0; begin < k; begin += inputs) {
    unpacker.fetch(REGISTER_ROWS_AHEAD);
    __m512i weights[GROUP / 32];
    unpacker.next_group(weights);
#pragma GCC unroll 2
    for (int pair = 0; pair < inputs / 2; pair++)
#pragma GCC unroll 4
      for (int row = 0; row < M; row++) {
        int32_t two;
        memcpy(&two, a + row * k + begin + 2 * pair, 4);
        const __m512bh both = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++)
          sums[row][v] = (Vec)_mm512_dpbf16_ps((__m512)sums[row][v], both, (__m512bh)weights[pair * VECTORS + v]);
      }
  }
  end_sums<M>(sums, out, TILE);
}

template <int M = REGISTER_ROWS>
static inline void multiply_squeezed_rows(int rows, const Bfloat16 *a, const Linear &linear, int64_t tile, float *out) {
  if (rows == M) return multiply_squeezed<M>(a, linear, tile, out);
  if constexpr (M > 1) multiply_squeezed_rows<M - 1>(rows, a, linear, tile, out);
}
#endif

template <bool ADD, int M = ROWS, class T, class W, int LINES = 0>
static inline void multiply_rows(int rows, const T *a, int64_t stride, const W *b, int64_t k, float *out,
                                 int64_t out_stride, Ahead<LINES> ahead = {}) {
  if (rows == M) return multiply<M, ADD>(a, stride, b, k, out, out_stride, ahead);
  if constexpr (M > 1) multiply_rows<ADD, M - 1>(rows, a, stride, b, k, out, out_stride, ahead);
}

// A thread keeps the sums of up to BLOCK_ROWS rows to itself until they are complete. LEAST_BLOCK_ROWS rows justify
// reading the weights again.
constexpr int64_t BLOCK_ROWS = 256, LEAST_BLOCK_ROWS = 96;
// With at most this many rows, a piece is short enough to be computed again for a thread that has lost its core.
constexpr int64_t REPEATED_ROWS = 64;
// This many parts of a block's rows prefetch the next tile together: fewer parts wait for memory, and more parts
// prefetch in vain.
constexpr int64_t FETCHING_PARTS = 6;

// sums [rows][TILE] = a [rows][k] times one tile. Calls `done(row, count)` when the sums of some rows are complete, so
// that their further processing overlaps with the next rows. Rows are cut into even parts. Weights that need unpacking
// are unpacked a little at a time, so that unpacked weights never leave the first-level cache.
template <class W, class T, class Done>
static inline void multiply_tile(const T *a, int64_t rows, const Linear &linear, int64_t tile, float *sums,
                                 const Done &done) {
  const int64_t k = linear.k, parts = (rows + ROWS - 1) / ROWS;
  if constexpr (std::is_same_v<T, float>)
    if (is_coded(linear.stored) && rows <= REGISTER_ROWS) {
      with_code(linear.stored, [&]<int BITS, bool ROUNDED>() {
        multiply_coded_rows<BITS, ROUNDED>(rows, a, linear.at(tile), k, sums);
      });
      return done(0, rows);
    }
#if CAN_SQUEEZE && defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, Bfloat16>)
    if (linear.stored == SQUEEZED_2 && rows <= REGISTER_ROWS) {
      multiply_squeezed_rows(rows, a, linear, tile, sums);
      return done(0, rows);
    }
#endif
  Reader<W> reader(linear, tile);
  auto first = [=](int64_t part) { return part * rows / parts; };
  auto count = [=](int64_t part) { return first(part + 1) - first(part); };
  auto multiply_part = [&](int64_t part, int64_t begin, int64_t inputs, const W *weights, auto ahead) {
    const T *from = a + first(part) * k + begin;
    float *into = sums + first(part) * TILE;
    if (begin)
      multiply_rows<true>(count(part), from, k, weights, inputs, into, TILE, ahead);
    else
      multiply_rows<false>(count(part), from, k, weights, inputs, into, TILE, ahead);
  };
  if (parts == 1) {
    // Weights that need no unpacking are read all at once, where they lie; others are unpacked a few inputs at a time.
    const int64_t most = linear.stored == (std::is_same_v<W, float> ? FLOATS : BF16) ? k : 64;
    const int64_t each_turn = (linear.at(tile + 1) - linear.at(tile)) / (k / 2);
    constexpr int lines = 2 * TILE * sizeof(W) / 64;
    for (int64_t begin = 0; begin < k; begin += most) {
      const int64_t inputs = std::min(most, k - begin);
      const char *at = reader.at() + (rows > REGISTER_ROWS ? WEIGHTS_AHEAD : REGISTER_ROWS_AHEAD);
      const W *weights = reader.next(inputs);
      with_ahead<lines>(at, each_turn, [&](auto ahead) { multiply_part(0, begin, inputs, weights, ahead); });
    }
    done(0, rows);
    return;
  }
  // Prefetches the next tile, which this thread will most likely also take. Some parts share the prefetching in turns,
  // because memory takes about as long as these parts.
  const int64_t fetching = std::min(parts, FETCHING_PARTS), later = std::min(tile + 1, linear.tiles() - 1);
  const int64_t share = (linear.at(later + 1) - linear.at(later)) / fetching, each_turn = (share - 1) / (k / 2) + 1;
  const int64_t most = linear.stored == FLOATS ? k : MOST_INPUTS<W>;
  for (int64_t begin = 0; begin < k; begin += most) {
    const int64_t inputs = std::min(most, k - begin);
    const W *weights = reader.next(inputs);
    for (int64_t part = 0; part < parts; part++) {
      const char *mine = linear.at(later) + part * share + begin / 2 * each_turn;
      if (part >= fetching)
        multiply_part(part, begin, inputs, weights, Ahead<0>{});
      else
        with_ahead<2>(mine, each_turn, [&](auto ahead) { multiply_part(part, begin, inputs, weights, ahead); });
      if (begin + inputs == k) done(first(part), count(part));
    }
  }
}

// Adds nothing to sums.
struct NoAddition {
  void operator()(int64_t, int64_t, int64_t, float *) const {}
};

// For every tile of columns and every block of rows of a [rows][k]: calls `finish(row, rows, tile, sums [rows][TILE])`.
// Before `finish`, `add` may change the sums; `add` has the same arguments, and may run more than once.
// A block's rows stay in the cache of the thread that computes them; a tile's weights stay there while all rows pass.
template <class W, class T, class Finish, class Add>
static void matmul_with(PhasePool &team, const T *a, int64_t rows, const Linear &linear, const Finish &finish,
                        const Add &add) {
  const int64_t tiles = linear.tiles(), least = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  const int64_t blocks = std::max(least, std::min<int64_t>(rows / LEAST_BLOCK_ROWS, team.size));
  alignas(64) float sums[BLOCK_ROWS * TILE];
  auto first = [=](int64_t block) { return block * rows / blocks; };
  auto compute = [&](int64_t block, int64_t tile, const auto &done) {
    const int64_t begin = first(block);
    auto part_done = [&](int64_t row, int64_t count) {
      float *some = sums + row * TILE;
      if (linear.bias)
        for (int64_t i = 0; i < count; i++)
          for (int64_t c = 0; c < std::min<int64_t>(TILE, linear.n - tile * TILE); c++)
            some[i * TILE + c] += linear.bias[tile * TILE + c];
      add(begin + row, count, tile, some);
      done(begin + row, count, some);
    };
    multiply_tile<W>(a + begin * linear.k, first(block + 1) - begin, linear, tile, sums, part_done);
  };
  if (rows <= REPEATED_ROWS)
    team.each_repeatable(
        tiles, [&](int64_t tile) { compute(0, tile, [](int64_t, int64_t, const float *) {}); },
        [&](int64_t tile) { finish(0, rows, tile, sums); });
  else
    team.each(blocks * tiles, [&](int64_t piece) {
      const int64_t block = piece / tiles, tile = piece % tiles;
      compute(block, tile, [&](int64_t row, int64_t count, const float *some) { finish(row, count, tile, some); });
    });
}

template <class T, class Finish, class Add = NoAddition>
static void matmul(PhasePool &team, const T *a, int64_t rows, const Linear &linear, const Finish &finish,
                   const Add &add = {}) {
  if (!rows) return;
  if constexpr (std::is_same_v<T, float>)
    // For several parts, weights are widened once; for one part, in registers, unless weights are computed from codes.
    if (bytes_of(linear.stored) == 4 || is_coded(linear.stored) || rows > ROWS)
      return matmul_with<float>(team, a, rows, linear, finish, add);
  matmul_with<Bfloat16>(team, a, rows, linear, finish, add);
}
