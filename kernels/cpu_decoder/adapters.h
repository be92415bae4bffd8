// Low-rank adapters (Hu et al. 2021, section 4.1) add scale * (x A^T) B^T to the products of layers.
#pragma once

#include <memory>

#include "matmul.h"

// Columns that share an A: half a tile, because a tile of gate and up has columns of two projections.
constexpr int HALF = TILE / 2;

// The matrices of a layer, and the most projections that one matrix joins.
enum Matrix : int64_t { QKV_MATRIX, OUT_MATRIX, GATE_UP_MATRIX, DOWN_MATRIX, MATRICES };
constexpr int64_t MOST_PARTS = 3;

// One matrix of an adapter, as callers store it: a [parts][rank][k], b [n][rank] in the order of the matrix's columns.
// If `rank` is 0, nothing is added.
struct AdapterMatrix {
  const float *a, *b;
  int64_t rank, parts, n, k;
  float scale[MOST_PARTS];
};

// The same matrix, in the layout for multiplication: b [2 * tiles][rank][HALF], so that everything that a tile needs is
// contiguous.
struct Addition {
  int64_t rank = 0, parts = 0, k = 0;
  float scale[MOST_PARTS] = {};
  const void *a = nullptr, *b = nullptr;
};

// Owns an adapter's weights, in floats or in bfloat16. Steps share the adapter, because a thread that lost its core may
// still read the weights when the adapter is no longer served.
class Adapter {
 public:
  // matrices: MATRICES for each layer.
  Adapter(const AdapterMatrix *matrices, int64_t count, bool halves) : halves(halves), additions(count) {
    const int64_t size = halves ? 2 : 4;
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; i++) bytes += lines(elements(matrices[i]) * size);
    memory.reset((char *)large_pages(std::max<int64_t>(bytes, 1)));
    if (!memory) throw std::bad_alloc();
    char *at = memory.get();
    for (int64_t i = 0; i < count; i++) {
      if (halves)
        pack(matrices[i], (Bfloat16 *)at, additions[i]);
      else
        pack(matrices[i], (float *)at, additions[i]);
      widest = std::max(widest, matrices[i].rank * matrices[i].parts);
      at += lines(elements(matrices[i]) * size);
    }
  }

  const Addition &of(int64_t layer, Matrix matrix) const { return additions[layer * MATRICES + matrix]; }

  // Bytes of a weight.
  int64_t size() const { return halves ? 2 : 4; }

  const bool halves;
  // The largest total rank of a matrix, over all its projections together.
  int64_t widest = 0;

 private:
  static int64_t lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }
  static int64_t elements(const AdapterMatrix &matrix) { return matrix.rank * (matrix.parts * matrix.k + matrix.n); }

  static void put(float *to, float value) { *to = value; }
  static void put(Bfloat16 *to, float value) {
    alignas(64) float values[WIDTH] = {value};
    alignas(64) Bfloat16 rounded[WIDTH];
    store(rounded, load(values));
    *to = rounded[0];
  }

  template <class W>
  static void pack(const AdapterMatrix &from, W *to, Addition &addition) {
    addition.rank = from.rank, addition.parts = from.parts, addition.k = from.k;
    memcpy(addition.scale, from.scale, sizeof(addition.scale));
    addition.a = to;
    for (int64_t i = 0; i < from.parts * from.rank * from.k; i++) put(to++, from.a[i]);
    addition.b = to;
    for (int64_t half = 0; half < from.n; half += HALF)
      for (int64_t r = 0; r < from.rank; r++)
        for (int64_t c = 0; c < HALF; c++) put(to++, from.b[(half + c) * from.rank + r]);
  }

  std::vector<Addition> additions;
  struct Free {
    void operator()(char *from) const { std::free(from); }
  };

  std::unique_ptr<char, Free> memory;
};

// Consecutive tokens of a batch that use one adapter. adapter: the return value of decoder_adapter.
struct AdapterSpan {
  const std::shared_ptr<const Adapter> *adapter;
  int64_t begin, end;
};

// sums [M][N] += x [M][k] times N rows of A: dot products along k.
template <int M, int N, class T, class W>
static inline void dot_products(const T *x, int64_t stride, const W *a, int64_t k, Vec (&sums)[M][N]) {
  int64_t i = 0;
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, Bfloat16> && std::is_same_v<W, Bfloat16>)
    for (; i + 2 * WIDTH <= k; i += 2 * WIDTH) {
      __m512bh rows[M];
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) rows[m] = (__m512bh)_mm512_loadu_si512(x + m * stride + i);
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) {
        const __m512bh weights = (__m512bh)_mm512_loadu_si512(a + n * k + i);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) sums[m][n] = (Vec)_mm512_dpbf16_ps((__m512)sums[m][n], rows[m], weights);
      }
    }
#endif
  for (; i < k; i += WIDTH) {
    Vec rows[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) rows[m] = load(x + m * stride + i);
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
      const Vec weights = load(a + n * k + i);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) sums[m][n] += rows[m] * weights;
    }
  }
}

// Rows of x, and rows of A, whose products are computed together.
constexpr int LOW_ROWS = 4, LOW_RANKS = 4;

template <int M, int N, class T, class W>
static inline void lower_some(const T *x, int64_t stride, const Addition &addition, int64_t first, float *to,
                              int64_t to_stride) {
  Vec sums[M][N] = {};
  dot_products<M, N>(x, stride, (const W *)addition.a + first * addition.k, addition.k, sums);
  for (int n = 0; n < N; n++)
    for (int m = 0; m < M; m++)
      to[m * to_stride + first + n] = sum(sums[m][n]) * addition.scale[(first + n) / addition.rank];
}

// to [rows][first to end] = scale * (x A^T), for at most LOW_ROWS rows.
template <class T, class W, int M = LOW_ROWS>
static inline void lower(int64_t rows, const T *x, int64_t stride, const Addition &addition, int64_t first, int64_t end,
                         float *to, int64_t to_stride) {
  if (rows == M) {
    for (; first + LOW_RANKS <= end; first += LOW_RANKS)
      lower_some<M, LOW_RANKS, T, W>(x, stride, addition, first, to, to_stride);
    for (; first < end; first++) lower_some<M, 1, T, W>(x, stride, addition, first, to, to_stride);
    return;
  }
  if constexpr (M > 1) lower<T, W, M - 1>(rows, x, stride, addition, first, end, to, to_stride);
}

// sums [M][TILE] += low [M][rank] times B; each half of the tile uses the products of its own projection. Rows of `low`
// lie `stride` apart. The second half's products lie `second` after the first half's products.
template <int M, class W>
static inline void expand_some(const float *low, int64_t stride, int64_t second, int64_t rank, const W *b, float *sums) {
  for (int c = 0; c < HALF; c += WIDTH) {
    Vec parts[M][2];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) parts[m][half] = load(sums + m * TILE + half * HALF + c);
    for (int64_t r = 0; r < rank; r++) {
      const Vec weights[2] = {load(b + r * HALF + c), load(b + (rank + r) * HALF + c)};
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        parts[m][0] += low[m * stride + r] * weights[0];
        parts[m][1] += low[m * stride + second + r] * weights[1];
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) store(sums + m * TILE + half * HALF + c, parts[m][half]);
  }
}

template <class W, int M = LOW_ROWS>
static inline void expand(int64_t rows, const float *low, int64_t stride, int64_t second, int64_t rank, const W *b,
                          float *sums) {
  if (rows == M) return expand_some<M>(low, stride, second, rank, b, sums);
  if constexpr (M > 1) expand<W, M - 1>(rows, low, stride, second, rank, b, sums);
}

// Prefetch distance for weights of adapters, in bytes: each adapter's weights lie in the order in which they are read.
constexpr int64_t ADAPTER_AHEAD = 4096;

static inline void ask_ahead(const void *from, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch((const char *)from + ADAPTER_AHEAD + line);
}

// What the adapters of a batch's tokens add, matrix by matrix: first `prepare` for all tokens, then `add` to each tile.
// With many rows per adapter, B is multiplied in `add`, where a tile's sums are, and read once for all rows. With few
// rows, `add` would read a little of many adapters for each tile, which is slow in memory. So B is then multiplied
// right after A, in `prepare`.
class Additions {
 public:
  Additions(const AdapterSpan *spans, int64_t count, int64_t tokens, int64_t widest_matrix) : tokens(tokens) {
    int64_t rows = 0;
    for (int64_t i = 0; i < count; i++) {
      adapters.push_back(*spans[i].adapter);
      width = std::max(width, adapters.back()->widest);
      rows += spans[i].end - spans[i].begin;
      for (int64_t begin = spans[i].begin; begin < spans[i].end; begin += LOW_ROWS)
        chunks.push_back({i, begin, std::min<int64_t>(LOW_ROWS, spans[i].end - begin)});
    }
    if (!count) return;
    adapter_of.assign(tokens, -1);
    for (int64_t i = 0; i < count; i++)
      std::fill(&adapter_of[spans[i].begin], &adapter_of[0] + spans[i].end, int32_t(i));
    low.resize(tokens * width);
    if (rows < FEW_ROWS * count) products.resize(tokens * widest_matrix);
  }

  // Whether any adapter adds to a matrix.
  bool adds_to(int64_t layer, Matrix matrix) const {
    return std::any_of(adapters.begin(), adapters.end(), [&](auto &one) { return one->of(layer, matrix).rank; });
  }

  // Multiplies x [tokens][k] with A, and also with B if rows are few. A phase of the team.
  // part(half): the projection that a half tile of the matrix belongs to; `add` takes the same `part`.
  template <class T, class Part>
  void prepare(PhasePool &team, int64_t layer, Matrix matrix, const T *x, const Linear &linear, const Part &part) {
    // If there are few chunks, threads share the columns of each chunk, or its ranks.
    const int64_t shares = int64_t(chunks.size()) < 4 * team.size ? team.size : 1;
    team.each(chunks.size() * shares, [&](int64_t piece) {
      const Chunk &chunk = chunks[piece / shares];
      const Adapter &adapter = *adapters[chunk.adapter];
      if (adapter.halves)
        prepare_chunk<Bfloat16>(chunk, adapter.of(layer, matrix), x, linear, part, piece % shares, shares);
      else
        prepare_chunk<float>(chunk, adapter.of(layer, matrix), x, linear, part, piece % shares, shares);
    });
  }

  // Adds to the sums [rows][TILE] of a tile.
  template <class Part>
  void add(int64_t layer, Matrix matrix, int64_t row, int64_t rows, int64_t tile, float *sums, const Part &part) const {
    if (!products.empty()) {
      const float *from = &products[(tile * tokens + row) * TILE];
      for (int64_t i = 0; i < rows * TILE; i += WIDTH) store(sums + i, load(sums + i) + load(from + i));
      return;
    }
    for (int64_t i = 0, some; i < rows; i += some) {
      const int32_t number = adapter_of[row + i];
      some = 1;
      if (number < 0) continue;
      while (i + some < rows && some < LOW_ROWS && adapter_of[row + i + some] == number) some++;
      const Adapter &adapter = *adapters[number];
      const Addition &addition = adapter.of(layer, matrix);
      if (adapter.halves)
        multiply_b<Bfloat16>(addition, &low[(row + i) * width], width, some, tile, part, sums + i * TILE);
      else
        multiply_b<float>(addition, &low[(row + i) * width], width, some, tile, part, sums + i * TILE);
    }
  }

 private:
  struct Chunk {
    int64_t adapter, begin, rows;
  };

  // With fewer rows per adapter than this, B is multiplied right after A.
  static constexpr int64_t FEW_ROWS = 8;

  template <class W, class T, class Part>
  void prepare_chunk(const Chunk &chunk, const Addition &addition, const T *x, const Linear &linear, const Part &part,
                     int64_t share, int64_t shares) {
    const int64_t ranks = addition.rank * addition.parts, tiles = linear.tiles();
    const T *rows = x + chunk.begin * linear.k;
    if (products.empty()) {
      lower<T, W>(chunk.rows, rows, linear.k, addition, share * ranks / shares, (share + 1) * ranks / shares,
                  &low[chunk.begin * width], width);
      return;
    }
    // Each thread computes its own products with A, of all ranks.
    static thread_local Lines<float> own;
    own.resize(LOW_ROWS * width);
    lower<T, W>(chunk.rows, rows, linear.k, addition, 0, ranks, own.data(), width);
    for (int64_t tile = share * tiles / shares; tile < (share + 1) * tiles / shares; tile++) {
      float *sums = &products[(tile * tokens + chunk.begin) * TILE];
      std::fill(sums, sums + chunk.rows * TILE, 0.0f);
      multiply_b<W>(addition, own.data(), width, chunk.rows, tile, part, sums);
    }
  }

  template <class W, class Part>
  static void multiply_b(const Addition &addition, const float *low, int64_t stride, int64_t rows, int64_t tile,
                         const Part &part, float *sums) {
    const int64_t rank = addition.rank, first = part(2 * tile), second = part(2 * tile + 1) - first;
    if (!rank) return;
    const W *b = (const W *)addition.b + tile * rank * TILE;
    ask_ahead(b, rank * TILE * sizeof(W));
    expand(rows, low + first * rank, stride, second * rank, rank, b, sums);
  }

  const int64_t tokens;
  std::vector<std::shared_ptr<const Adapter>> adapters;
  std::vector<Chunk> chunks;
  // The index of each token's adapter, -1 for none.
  std::vector<int32_t> adapter_of;
  // Scaled products with A: [tokens][width].
  int64_t width = 0;
  Lines<float> low;
  // What is added, if B is multiplied right after A: [tiles][tokens][TILE], 0 for tokens without an adapter.
  Lines<float> products;
};
