// Attention over paged keys and values, in float whatever the caches hold.
//
// A unit of work is a few query rows of one KV head against a run of keys, with a softmax that goes on where it stopped
// (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", section 3). Sequences whose block tables
// begin alike first attend to what they share together, so that its keys are read once (Hydragen, Juravsky et al. 2024,
// section 3), then each to its own keys.
#pragma once

#include <cfloat>
#include <numeric>
#include <vector>

#include "matmul.h"

// Keys taken at a time, and query rows (tokens times the heads that share a KV head) in a unit.
constexpr int KEYS = 64;
constexpr int UNIT_ROWS = 96;
// With fewer rows it is cheaper to read keys where they are than to lay them out for a multiplication.
constexpr int FEW_ROWS = 8;
// Tokens that sequences must share for a unit of their own.
constexpr int SHARED_TOKENS = 64;

// One group of layers: where this step's tokens are stored [T], and block tables [S][width].
struct Group {
  const int64_t *slots;
  const int32_t *tables;
  int64_t width;
  int64_t window;  // 0 for full attention
};

struct Shape {
  int64_t q_heads, kv_heads, head_dim, block_size;
  int64_t per_kv() const { return q_heads / kv_heads; }
  // The block size is a power of two.
  int block_bits() const { return __builtin_ctzll(block_size); }
};

// Rows of `tokens`, a run in `order`, against the keys at [begin, end) of a sequence's table.
struct Unit {
  int64_t first, count;
  int64_t sequence;
  int64_t begin, end;
  bool resumes, ends;
};

// The units of a step for one group, in two rounds: shared keys, then own ones.
struct Plan {
  std::vector<int64_t> order;  // token rows
  std::vector<Unit> shared, own;
};

static Plan plan_units(const Shape &shape, const Group &group, int64_t sequences, const int32_t *query_start,
                       const int64_t *positions) {
  Plan plan;
  auto table = [&](int64_t s) { return group.tables + s * group.width; };
  auto length = [&](int64_t s) { return positions[query_start[s + 1] - 1] + 1; };
  std::vector<int64_t> sorted(sequences);
  std::iota(sorted.begin(), sorted.end(), 0);
  auto common = [&](int64_t a, int64_t b) {
    int64_t most = std::min(length(a), length(b)) / shape.block_size, i = 0;
    while (i < most && table(a)[i] == table(b)[i]) i++;
    return i * shape.block_size;
  };
  if (!group.window)
    std::sort(sorted.begin(), sorted.end(), [&](int64_t a, int64_t b) {
      return std::lexicographical_compare(table(a), table(a) + (length(a) + shape.block_size - 1) / shape.block_size,
                                          table(b), table(b) + (length(b) + shape.block_size - 1) / shape.block_size);
    });
  int64_t limit = std::max<int64_t>(1, UNIT_ROWS / shape.per_kv());
  auto cut = [&](std::vector<Unit> &units, Unit whole) {
    // Even parts: a thread that has none left waits for the longest.
    int64_t parts = (whole.count + limit - 1) / limit;
    for (int64_t part = 0; part < parts; part++) {
      Unit unit = whole;
      int64_t from = part * whole.count / parts, to = (part + 1) * whole.count / parts;
      unit.first = whole.first + from;
      unit.count = to - from;
      int64_t least = INT64_MAX, most = 0;
      for (int64_t i = unit.first; i < unit.first + unit.count; i++) {
        least = std::min(least, positions[plan.order[i]]);
        most = std::max(most, positions[plan.order[i]]);
      }
      unit.end = std::min(unit.end, most + 1);
      if (group.window) unit.begin = std::max(unit.begin, least - group.window + 1);
      units.push_back(unit);
    }
  };
  for (int64_t i = 0; i < sequences;) {
    int64_t together = 1, shared = 0;
    while (!group.window && i + together < sequences) {
      int64_t with_next = common(sorted[i], sorted[i + together]);
      if (together > 1) with_next = std::min(with_next, shared);
      if (with_next < SHARED_TOKENS || (together > 1 && with_next < shared / 2)) break;
      shared = with_next;
      together++;
    }
    int64_t first = plan.order.size();
    for (int64_t j = i; j < i + together; j++) {
      int64_t s = sorted[j], start = plan.order.size();
      for (int64_t row = query_start[s]; row < query_start[s + 1]; row++) plan.order.push_back(row);
      cut(plan.own, {start, int64_t(plan.order.size()) - start, s, shared, length(s), shared > 0, true});
    }
    if (shared) cut(plan.shared, {first, int64_t(plan.order.size()) - first, sorted[i], 0, shared, false, false});
    i += together;
  }
  for (auto *units : {&plan.shared, &plan.own})
    std::stable_sort(units->begin(), units->end(), [](const Unit &a, const Unit &b) {
      return a.count * (a.end - a.begin) > b.count * (b.end - b.begin);
    });
  return plan;
}

// Running softmax of every token's heads: largest logit, sum, and the weighted values in `out` [T][Hq][D].
struct Softmax {
  std::vector<float> largest, total, out;
};

template <class T>
struct Scratch {
  std::vector<T> narrow;
  std::vector<float> query, keys, values, logits, largest, total, out;
  explicit Scratch(const Shape &shape) {
    int64_t rows = std::max<int64_t>(UNIT_ROWS, shape.per_kv()), dim = shape.head_dim;
    narrow.resize(FEW_ROWS * dim);
    query.resize(rows * dim);
    out.resize(rows * dim);
    keys.resize(KEYS * dim);
    values.resize(KEYS * dim);
    logits.resize(rows * KEYS);
    largest.resize(rows);
    total.resize(rows);
  }
};

// logits [KEYS], of which those in [from, to) count: makes weights of them and scales what was summed before.
static inline void weigh(float *logits, int64_t from, int64_t to, float *largest_before, float *total, float *out,
                         int64_t head_dim) {
  for (int64_t k = 0; k < from; k++) logits[k] = -INFINITY;
  for (int64_t k = to; k < KEYS; k++) logits[k] = -INFINITY;
  Vec most = load(logits);
  for (int k = WIDTH; k < KEYS; k += WIDTH) {
    Vec next = load(logits + k);
    most = next > most ? next : most;
  }
  float before = *largest_before, now = std::max(before, largest(most));
  if (now != before) {
    float keep = std::exp(before - now);
    *total *= keep;
    for (int64_t d = 0; d < head_dim; d += WIDTH) store(out + d, load(out + d) * keep);
    *largest_before = now;
  }
  Vec weights = {};
  for (int k = 0; k < KEYS; k += WIDTH) {
    Vec weight = exponential(load(logits + k) - now);
    store(logits + k, weight);
    weights += weight;
  }
  *total += sum(weights);
}

// Sums of `WIDTH` vectors, one next to the other.
static inline Vec sums_of(const Vec *rows) {
#if defined(__AVX512F__)
  __m512 some[16];
  for (int i = 0; i < 8; i++) {
    __m512 a = (__m512)rows[2 * i], b = (__m512)rows[2 * i + 1];
    some[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  for (int i = 0; i < 4; i++) {
    __m512d a = (__m512d)some[2 * i], b = (__m512d)some[2 * i + 1];
    some[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
  }
  for (int i = 0; i < 2; i++) {
    __m512 a = some[2 * i], b = some[2 * i + 1];
    some[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  return (Vec)_mm512_add_ps(_mm512_shuffle_f32x4(some[0], some[1], 0x88), _mm512_shuffle_f32x4(some[0], some[1], 0xdd));
#else
  Vec result;
  for (int i = 0; i < WIDTH; i++) result[i] = sum(rows[i]);
  return result;
#endif
}

// Query rows that are multiplied with keys, and weights that are with values, while these are in registers.
constexpr int TOGETHER = 4;

template <int R = TOGETHER, class Call>
static inline void in_groups(int64_t rows, const Call &call) {
  if (rows == R) return call(std::integral_constant<int, R>());
  if constexpr (R > 1) in_groups<R - 1>(rows, call);
}

// Asks for what is needed soon: heads lie too far apart for the processor to guess it.
template <class T>
static inline void fetch(const T *from, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(from + d);
}

// logits [R][KEYS] = query [R][dim] times each of the keys; `ahead` [KEYS] are fetched meanwhile.
template <int R>
static inline void dots(const float *query, const float *const *keys, const float *const *ahead, int64_t count,
                        int64_t dim, float *logits) {
  for (int64_t begin = 0; begin < count; begin += WIDTH) {
    Vec sums[R][WIDTH];
    for (int64_t i = 0; i < WIDTH; i++) {
      const float *key = keys[std::min(begin + i, count - 1)];
      fetch(ahead[begin + i], dim);
      Vec some[R] = {};
      for (int64_t d = 0; d < dim; d += WIDTH) {
        Vec part = load(key + d);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) some[r] += load(query + r * dim + d) * part;
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sums[r][i] = some[r];
    }
    for (int r = 0; r < R; r++) store(logits + r * KEYS + begin, sums_of(sums[r]));
  }
}

#if defined(__AVX512BF16__)
template <int R>
static inline void dots(const Bfloat16 *query, const Bfloat16 *const *keys, const Bfloat16 *const *ahead,
                        int64_t count, int64_t dim, float *logits) {
  for (int64_t begin = 0; begin < count; begin += WIDTH) {
    Vec sums[R][WIDTH];
    for (int64_t i = 0; i < WIDTH; i++) {
      const Bfloat16 *key = keys[std::min(begin + i, count - 1)];
      fetch(ahead[begin + i], dim);
      __m512 some[R] = {};
      for (int64_t d = 0; d < dim; d += 2 * WIDTH) {
        __m512bh part = (__m512bh)_mm512_loadu_si512(key + d);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
          some[r] = _mm512_dpbf16_ps(some[r], (__m512bh)_mm512_loadu_si512(query + r * dim + d), part);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sums[r][i] = (Vec)some[r];
    }
    for (int r = 0; r < R; r++) store(logits + r * KEYS + begin, sums_of(sums[r]));
  }
}
#endif

// out [R][dim] += weights [R][KEYS] times the values at [from, to); `ahead` [KEYS] are fetched meanwhile.
template <int R, class T>
static inline void add_values(const float *weights, const T *const *values, const T *const *ahead, int64_t from,
                              int64_t to, int64_t dim, float *out) {
  for (int64_t d = 0; d < dim; d += 2 * WIDTH) {
    Vec sums[R][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
      for (int v = 0; v < 2; v++) sums[r][v] = load(out + r * dim + d + v * WIDTH);
    for (int64_t i = from; i < to; i++) {
      Vec low = load(values[i] + d), high = load(values[i] + d + WIDTH);
      fetch(ahead[i] + d, 2 * WIDTH);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        sums[r][0] += weights[r * KEYS + i] * low;
        sums[r][1] += weights[r * KEYS + i] * high;
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
      for (int v = 0; v < 2; v++) store(out + r * dim + d + v * WIDTH, sums[r][v]);
  }
}

// One unit of one KV head. query [T][heads..] with `stride` floats per token, already scaled; out [T][Hq][D].
template <class T>
static void attend(const Shape &shape, const Group &group, const Plan &plan, const Unit &unit, int64_t head,
                   const int64_t *positions, const float *query, int64_t stride, const T *k_cache, const T *v_cache,
                   Softmax &state, T *out, Scratch<T> &scratch) {
  const int64_t dim = shape.head_dim, per_kv = shape.per_kv(), rows = unit.count * per_kv;
  const int32_t *table = group.tables + unit.sequence * group.width;
  auto token_of = [&](int64_t row) { return plan.order[unit.first + row / per_kv]; };
  auto place_of = [&](int64_t row) { return token_of(row) * shape.q_heads + head * per_kv + row % per_kv; };
  for (int64_t row = 0; row < rows; row++) {
    memcpy(&scratch.query[row * dim], query + token_of(row) * stride + (head * per_kv + row % per_kv) * dim, dim * 4);
    int64_t place = place_of(row);
    scratch.largest[row] = unit.resumes ? state.largest[place] : -FLT_MAX;
    scratch.total[row] = unit.resumes ? state.total[place] : 0;
    if (unit.resumes)
      memcpy(&scratch.out[row * dim], &state.out[place * dim], dim * 4);
    else
      memset(&scratch.out[row * dim], 0, dim * 4);
  }
  if (rows <= FEW_ROWS)
    for (int64_t i = 0; i < rows * dim; i += WIDTH) store(&scratch.narrow[i], load(&scratch.query[i]));
  // Where the keys and values of a run are, and those of the next.
  const T *places[2][2][KEYS];
  auto locate = [&](int64_t begin, const T *(&run)[2][KEYS]) {
    for (int64_t i = 0; i < KEYS; i++) {
      int64_t at = std::min(begin + i, unit.end - 1);
      int64_t slot = int64_t(table[at >> shape.block_bits()]) << shape.block_bits() | (at & (shape.block_size - 1));
      run[0][i] = k_cache + (slot * shape.kv_heads + head) * dim;
      run[1][i] = v_cache + (slot * shape.kv_heads + head) * dim;
    }
  };
  locate(unit.begin, places[0]);
  for (int64_t begin = unit.begin, turn = 0; begin < unit.end; begin += KEYS, turn ^= 1) {
    int64_t count = std::min<int64_t>(KEYS, unit.end - begin);
    const auto &[keys, values] = places[turn];
    const auto &[keys_ahead, values_ahead] = places[turn ^ 1];
    locate(begin + KEYS, places[turn ^ 1]);
    auto visible = [&](int64_t row) {
      int64_t position = positions[token_of(row)];
      int64_t from = group.window ? std::max<int64_t>(0, position - group.window + 1 - begin) : 0;
      return std::pair(std::min(from, count), std::clamp<int64_t>(position + 1 - begin, 0, count));
    };
    if (rows <= FEW_ROWS) {
      for (int64_t row = 0; row < rows; row += TOGETHER)
        in_groups(std::min<int64_t>(TOGETHER, rows - row), [&](auto group_size) {
          constexpr int R = decltype(group_size)::value;
          float *logits = scratch.logits.data(), *sums = &scratch.out[row * dim];
          dots<R>(&scratch.narrow[row * dim], keys, keys_ahead, count, dim, logits);
          int64_t least = count, most = 0;
          for (int r = 0; r < R; r++) {
            auto [from, to] = visible(row + r);
            if (from < to)
              weigh(logits + r * KEYS, from, to, &scratch.largest[row + r], &scratch.total[row + r], sums + r * dim, dim);
            else
              memset(logits + r * KEYS, 0, KEYS * 4);
            least = std::min(least, from);
            most = std::max(most, to);
          }
          add_values<R>(logits, values, values_ahead, least, most, dim, sums);
        });
      continue;
    }
    // [KEYS / TILE][D][TILE] and [D / TILE][KEYS][TILE], as matrices to multiply with. What nobody may see is 0: weights
    // of 0 times what is no number would be none either.
    for (int64_t i = 0; i < KEYS; i++) {
      float *column = &scratch.keys[i / TILE * TILE * dim + i % TILE];
      for (int64_t d = 0; d < dim; d++) column[d * TILE] = i < count ? widen(keys[i][d]) : 0;
      for (int64_t d = 0; d < dim; d += WIDTH)
        store(&scratch.values[d / TILE * TILE * KEYS + i * TILE + d % TILE], i < count ? load(values[i] + d) : Vec{});
    }
    for (int64_t row = 0; row < rows; row += ROWS) {
      int64_t some = std::min<int64_t>(ROWS, rows - row);
      alignas(64) float sums[ROWS * TILE];
      for (int64_t tile = 0; tile < KEYS / TILE; tile++) {
        multiply_rows<float>(some, &scratch.query[row * dim], dim, &scratch.keys[tile * TILE * dim], dim, sums);
        for (int64_t i = 0; i < some; i++)
          memcpy(&scratch.logits[(row + i) * KEYS + tile * TILE], sums + i * TILE, TILE * 4);
      }
      for (int64_t i = row; i < row + some; i++) {
        auto [from, to] = visible(i);
        float *logits = &scratch.logits[i * KEYS];
        if (from >= to)
          memset(logits, 0, KEYS * 4);
        else
          weigh(logits, from, to, &scratch.largest[i], &scratch.total[i], &scratch.out[i * dim], dim);
      }
      for (int64_t tile = 0; tile < dim / TILE; tile++) {
        multiply_rows<float>(some, &scratch.logits[row * KEYS], KEYS, &scratch.values[tile * TILE * KEYS], KEYS, sums);
        for (int64_t i = 0; i < some; i++)
          for (int64_t d = 0; d < TILE; d += WIDTH) {
            float *into = &scratch.out[(row + i) * dim + tile * TILE + d];
            store(into, load(into) + load(sums + i * TILE + d));
          }
      }
    }
  }
  for (int64_t row = 0; row < rows; row++) {
    int64_t place = place_of(row);
    const float *sums = &scratch.out[row * dim];
    if (unit.ends) {
      float scale = 1 / scratch.total[row];
      for (int64_t d = 0; d < dim; d += WIDTH) store(out + place * dim + d, load(sums + d) * scale);
    } else {
      state.largest[place] = scratch.largest[row];
      state.total[place] = scratch.total[row];
      memcpy(&state.out[place * dim], sums, dim * 4);
    }
  }
}
