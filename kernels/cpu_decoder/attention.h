// Attention over paged keys and values, in float whatever type the caches hold.
//
// A unit of work is a few query rows of one KV head against a run of keys. The unit's online softmax continues where it
// stopped (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", section 3). Sequences whose block
// tables begin alike first attend together to their shared keys, so that these keys are read once (Hydragen, Juravsky
// et al. 2024, section 3). Then each sequence attends to its own keys.
#pragma once

#include <cfloat>

#include "attention_lanes.h"
#include "eight_bits.h"

// With at most this many rows, reading keys in place is cheaper than packing them for a multiplication.
template <class T>
constexpr int FEW_ROWS = sizeof(T) == 4 ? 12 : 8;

// With one row per lane, FEW_ROWS rows make this many parts.
constexpr int LANE_PARTS = (FEW_ROWS<float> + ROWS - 1) / ROWS;

// Running softmaxes that units keep: maximum logit, sum of weights, and the weighted values in `out` [softmaxes][D].
struct Softmax {
  std::unique_ptr<float[]> largest, total, out;

  void make(int64_t softmaxes, int64_t dim) {
    largest = std::make_unique_for_overwrite<float[]>(softmaxes);
    total = std::make_unique_for_overwrite<float[]>(softmaxes);
    out = std::make_unique_for_overwrite<float[]>(softmaxes * dim);
  }
};

template <class T>
struct Scratch {
  Lines<T> query, keys, values, weights;
  Lines<float> logits, largest, total, out, lanes;
  WeightBuffer kept;
  explicit Scratch(const Shape &shape) {
    int64_t rows = std::max<int64_t>(UNIT_ROWS, shape.per_kv()), dim = shape.head_dim;
    query.resize(rows * dim);
    out.resize(rows * dim);
    keys.resize(KEYS * dim);
    values.resize(KEYS * dim);
    lanes.resize(LANE_PARTS * WIDTH * dim);
    logits.resize(WIDTH * KEYS);
    weights.resize(ROWS * KEYS);
    largest.resize(rows);
    total.resize(rows);
  }
};

// A unit of one KV head.
struct Piece {
  const Unit *unit;
  int64_t head;
};

// Turns logits [KEYS] into weights, of which only those in [from, to) count, and rescales what was summed before.
template <class W>
static inline void weigh(float *logits, int64_t from, int64_t to, float *largest_before, float *total, float *out,
                         int64_t head_dim, W *weights) {
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
  Vec all = {};
  for (int k = 0; k < KEYS; k += WIDTH) {
    Vec weight = exponential(load(logits + k) - now);
    store(weights + k, weight);
    all += weight;
  }
  *total += sum(all);
}

// Transposes WIDTH rows of WIDTH floats in place.
static inline void transpose(Vec *rows) {
#if defined(__AVX512F__)
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps((__m512)rows[i], (__m512)rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps((__m512)rows[i], (__m512)rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = (__m512)_mm512_unpacklo_pd((__m512d)a[i + j], (__m512d)a[i + j + 2]);
      b[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd((__m512d)a[i + j], (__m512d)a[i + j + 2]);
    }
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 2; j++) {
      a[i + 8 * j] = _mm512_shuffle_f32x4(b[i + 8 * j], b[i + 8 * j + 4], 0x88);
      a[i + 8 * j + 4] = _mm512_shuffle_f32x4(b[i + 8 * j], b[i + 8 * j + 4], 0xdd);
    }
  for (int i = 0; i < 8; i++) {
    rows[i] = (Vec)_mm512_shuffle_f32x4(a[i], a[i + 8], 0x88);
    rows[i + 8] = (Vec)_mm512_shuffle_f32x4(a[i], a[i + 8], 0xdd);
  }
#else
  for (int i = 0; i < WIDTH; i++)
    for (int j = 0; j < i; j++) {
      float other = rows[i][j];
      rows[i][j] = rows[j][i];
      rows[j][i] = other;
    }
#endif
}

// Pack a run's keys and values as matrices for multiplication, in the order of a Linear's tiles: [KEYS / TILE][D][TILE]
// and [D / TILE][KEYS][TILE]. Keys and values from `count` on become 0, because a weight of 0 times NaN would be NaN.
// `ahead` [KEYS] are prefetched line by line: all at once, the prefetches would hold up everything else.
template <class T, class C>
static inline void lay_out_keys(const C *const *keys, const C *const *ahead, int64_t count, int64_t dim, T *to) {
  // If bfloat16 is multiplied in pairs, each pair stays together as one word.
  constexpr int64_t together = 4 / sizeof(T);
  const int64_t words = dim / together;
  for (int64_t begin = 0; begin < KEYS; begin += WIDTH)
    for (int64_t word = 0; word < words; word += WIDTH) {
      Vec some[WIDTH];
      for (int64_t i = 0; i < WIDTH; i++) {
        const C *from = keys[begin + i] + word * together;
        some[i] = begin + i >= count ? Vec{} : together == 1 ? load(from) : load((const float *)from);
        __builtin_prefetch(ahead[begin + i] + word * together, 0, 2);
      }
      transpose(some);
      float *column = (float *)to + (begin / TILE * words + word) * TILE + begin % TILE;
      for (int64_t i = 0; i < WIDTH; i++) store(column + i * TILE, some[i]);
    }
}

template <class C>
static inline void lay_out_values(const C *const *values, const C *const *ahead, int64_t count, int64_t dim,
                                  float *to) {
  for (int64_t i = 0; i < KEYS; i++)
    for (int64_t d = 0; d < dim; d += WIDTH) {
      store(to + (d / TILE * KEYS + i) * TILE + d % TILE, i < count ? load(values[i] + d) : Vec{});
      __builtin_prefetch(ahead[i] + d, 0, 2);
    }
}

#if defined(__AVX512BF16__)
// Interleaves the values of two keys for TILE columns into pairs, because bfloat16 is multiplied in pairs.
class Pairs {
 public:
  Pairs() {
    alignas(64) uint16_t low[32], high[32];
    for (int i = 0; i < 32; i++) {
      low[i] = i / 2 + i % 2 * 32;
      high[i] = low[i] + 16;
    }
    first = _mm512_load_si512(low), second = _mm512_load_si512(high);
  }

  void of(__m512i even, __m512i odd, __m512i (&pairs)[2]) const {
    pairs[0] = _mm512_permutex2var_epi16(even, first, odd);
    pairs[1] = _mm512_permutex2var_epi16(even, second, odd);
  }

 private:
  __m512i first, second;
};

static inline void lay_out_values(const Bfloat16 *const *values, const Bfloat16 *const *ahead, int64_t count,
                                  int64_t dim, Bfloat16 *to) {
  const Pairs interleave;
  for (int64_t i = 0; i < KEYS; i += 2)
    for (int64_t d = 0; d < dim; d += TILE) {
      __m512i even = i < count ? _mm512_loadu_si512(values[i] + d) : _mm512_setzero_si512();
      __m512i odd = i + 1 < count ? _mm512_loadu_si512(values[i + 1] + d) : _mm512_setzero_si512();
      __builtin_prefetch(ahead[i] + d, 0, 2);
      __builtin_prefetch(ahead[i + 1] + d, 0, 2);
      __m512i pairs[2];
      interleave.of(even, odd, pairs);
      Bfloat16 *at = to + (d / TILE * KEYS + i) * TILE;
      _mm512_storeu_si512(at, pairs[0]);
      _mm512_storeu_si512(at + TILE, pairs[1]);
    }
}
#endif

// The sums of WIDTH vectors, one sum per lane.
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

// Query rows that are multiplied with keys while the keys are in registers; likewise rows of weights with values.
constexpr int TOGETHER = 4;

template <int R = TOGETHER, class Call>
static inline void in_groups(int64_t rows, const Call &call) {
  if (rows == R) return call(std::integral_constant<int, R>());
  if constexpr (R > 1) in_groups<R - 1>(rows, call);
}

// Which rows prefetch keys and values: groups of rows that are processed one after the other take turns, because memory
// takes about as long as all groups together.
struct Turn {
  int64_t number, count;
  bool has(int64_t key) const { return key / TOGETHER % count == number; }
};

// Prefetches what is needed soon: heads lie too far apart for the hardware prefetcher to predict.
template <class T>
static inline void fetch(const T *from, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(from + d, 0, 2);
}

// The part of a query or a key that is multiplied at once: floats, or pairs of bfloat16.
template <class T>
struct Operand {
  static constexpr int SIZE = WIDTH;
  Vec values;
  template <class C>
  explicit Operand(const C *from) : values(load(from)) {}
  static Vec add(Vec sum, Operand a, Operand b) { return sum + a.values * b.values; }
};

#if defined(__AVX512BF16__)
template <>
struct Operand<Bfloat16> {
  static constexpr int SIZE = 2 * WIDTH;
  __m512bh values;
  explicit Operand(const Bfloat16 *from) : values((__m512bh)_mm512_loadu_si512(from)) {}
  static Vec add(Vec sum, Operand a, Operand b) { return (Vec)_mm512_dpbf16_ps((__m512)sum, a.values, b.values); }
};
#endif

// logits [R][KEYS] = query [R][dim] times each of the keys, while `ahead` [KEYS] are prefetched. Each part of a query
// is loaded once for a few keys.
template <int R, class T, class C>
static inline void dots(const T *query, const C *const *keys, const C *const *ahead, Turn turn, int64_t count,
                        int64_t dim, float *logits) {
  constexpr int FEW = TOGETHER;
  for (int64_t begin = 0; begin < count; begin += WIDTH) {
    Vec sums[R][WIDTH];
    for (int64_t i = 0; i < WIDTH; i += FEW) {
      const C *few[FEW];
#pragma GCC unroll 4
      for (int k = 0; k < FEW; k++) {
        few[k] = keys[std::min(begin + i + k, count - 1)];
        if (turn.has(begin + i)) fetch(ahead[begin + i + k], dim);
      }
      Vec some[R][FEW] = {};
      for (int64_t d = 0; d < dim; d += Operand<T>::SIZE) {
        const Operand<T> parts[FEW] = {Operand<T>(few[0] + d), Operand<T>(few[1] + d), Operand<T>(few[2] + d),
                                       Operand<T>(few[3] + d)};
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          const Operand<T> part(query + r * dim + d);
#pragma GCC unroll 4
          for (int k = 0; k < FEW; k++) some[r][k] = Operand<T>::add(some[r][k], part, parts[k]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int k = 0; k < FEW; k++) sums[r][i + k] = some[r][k];
    }
    for (int r = 0; r < R; r++) store(logits + r * KEYS + begin, sums_of(sums[r]));
  }
}

// Computes PARTS vectors of the result of add_values, from `d` on.
template <int R, int ROW_STEP, int KEY_STEP, int PARTS, class C>
static inline void add_part(const float *weights, const C *const *values, const C *const *ahead, Turn turn,
                            int64_t from, int64_t to, int64_t dim, int64_t d, float *out) {
  Vec sums[R][PARTS];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < PARTS; v++) sums[r][v] = load(out + r * dim + d + v * WIDTH);
  for (int64_t i = from; i < to; i++) {
    Vec some[PARTS];
#pragma GCC unroll 4
    for (int v = 0; v < PARTS; v++) some[v] = load(values[i] + d + v * WIDTH);
    if (turn.has(i)) fetch(ahead[i] + d, PARTS * WIDTH);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const float weight = weights[r * ROW_STEP + i * KEY_STEP];
#pragma GCC unroll 4
      for (int v = 0; v < PARTS; v++) sums[r][v] += weight * some[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < PARTS; v++) store(out + r * dim + d + v * WIDTH, sums[r][v]);
}

// out [R][dim] += weights times the values at [from, to), while `ahead` [KEYS] are prefetched. The weights of a row lie
// KEY_STEP apart, the weights of a key ROW_STEP apart.
template <int R, int ROW_STEP, int KEY_STEP, class C>
static inline void add_values(const float *weights, const C *const *values, const C *const *ahead, Turn turn,
                              int64_t from, int64_t to, int64_t dim, float *out) {
  int64_t d = 0;
  auto add = [&]<int PARTS>() {
    add_part<R, ROW_STEP, KEY_STEP, PARTS>(weights, values, ahead, turn, from, to, dim, d, out);
  };
  // As many sums as fit in registers.
  if constexpr (R <= TOGETHER)
    for (; d + 4 * WIDTH <= dim; d += 4 * WIDTH) add.template operator()<4>();
  for (; d < dim; d += 2 * WIDTH) add.template operator()<2>();
}

#if defined(__AVX512BF16__)
// The same with weights in bfloat16 [R][KEYS], two keys at a time, as in `lay_out_values`.
template <int R, int ROW_STEP, int KEY_STEP>
static inline void add_values(const Bfloat16 *weights, const Bfloat16 *const *values, const Bfloat16 *const *ahead,
                              Turn turn, int64_t from, int64_t to, int64_t dim, float *out) {
  const Pairs interleave;
  for (int64_t d = 0; d < dim; d += TILE) {
    Vec sums[R][VECTORS];
    begin_sums<R, true>(sums, out + d, dim);
    for (int64_t i = from & ~1; i < to; i += 2) {
      __m512i pairs[VECTORS];
      interleave.of(_mm512_loadu_si512(values[i] + d), _mm512_loadu_si512(values[i + 1] + d), pairs);
      if (turn.has(i)) fetch(ahead[i] + d, TILE), fetch(ahead[i + 1] + d, TILE);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
          int32_t both;
          memcpy(&both, weights + r * ROW_STEP + i * KEY_STEP, 4);
          sums[r][v] =
              (Vec)_mm512_dpbf16_ps((__m512)sums[r][v], (__m512bh)_mm512_set1_epi32(both), (__m512bh)pairs[v]);
        }
    }
    end_sums<R>(sums, out + d, dim);
  }
}
#endif

// Computes one piece. query [T][heads..] with `stride` floats per token, already scaled; cache_positions [T]; out
// [T][Hq][D]. `sums` receives the sums of the unit's scored tokens. If `v_scale` [Hkv][D] is not null, values are
// multiplied with these scales after they are summed. If `next` is not null, its keys are prefetched at the end.
template <class T, class C, class Out>
static void attend(const Shape &shape, const Group &group, const Plan &plan, const Piece &piece, const Piece *next,
                   const int64_t *cache_positions, const float *query, int64_t stride, const C *k_cache, const C *v_cache,
                   const float *v_scale, Softmax &state, Out *out, const Sums &sums, Scratch<T> &scratch) {
  const Unit &unit = *piece.unit;
  const int64_t dim = shape.head_dim, per_kv = shape.per_kv(), rows = unit.count * per_kv;
  auto token_of = [&](int64_t row) { return plan.order[unit.first + row / per_kv]; };
  auto head_of = [&](int64_t row) { return piece.head * per_kv + row % per_kv; };
  auto index_of = [&](int64_t row) { return token_of(row) * shape.q_heads + head_of(row); };
  for (int64_t row = 0; row < rows; row++) {
    int64_t index = index_of(row);
    const float *from = query + token_of(row) * stride + head_of(row) * dim;
    for (int64_t d = 0; d < dim; d += WIDTH) store(&scratch.query[row * dim + d], load(from + d));
    scratch.largest[row] = unit.resumes ? state.largest[index] : -FLT_MAX;
    scratch.total[row] = unit.resumes ? state.total[index] : 0;
    if (unit.resumes)
      memcpy(&scratch.out[row * dim], &state.out[index * dim], dim * 4);
    else
      memset(&scratch.out[row * dim], 0, dim * 4);
  }
  // Each way to multiply rounds differently. So if rounding must not depend on the number of rows, keys are packed for
  // any number of rows.
  const bool few = rows <= FEW_ROWS<T> && (!plan.invariant || unit.scored);
  const bool in_lanes = std::is_same_v<T, float> && few && rows > TOGETHER;
  auto each_part = [&](const auto &use) {
    const int64_t parts = (rows + ROWS - 1) / ROWS;
    for (int64_t part = 0; part < parts; part++)
      use(part * rows / parts, (part + 1) * rows / parts - part * rows / parts, part);
  };
  if constexpr (std::is_same_v<T, float>)
    if (in_lanes)
      each_part([&](int64_t row, int64_t some, int64_t part) {
        into_lanes(&scratch.query[row * dim], some, dim, &scratch.lanes[part * WIDTH * dim]);
      });
  // If rows are few, all of them are kept: their weights are computed in `kept`, and need not be copied there.
  const int64_t scored = unit.scored * per_kv, first_kept = scored && few ? 0 : rows - scored;
  if (scored) scratch.kept.begin(unit.end, rows - first_kept);
  // Pointers to the keys and values of this run, and of the next run. Positions before the first key that a row sees,
  // or after the end, point to another key of the unit.
  const C *pointers[2][2][KEYS];
  auto locate = [&](const Piece &of, int64_t begin, auto &run) {
    const int32_t *table = group.tables + of.unit->sequence * group.width;
    const int64_t last = of.unit->end - 1, size = shape.block_size;
    for (int64_t i = 0; i < KEYS;) {
      const int64_t wanted = begin + i, at = std::clamp(wanted, of.unit->least, last), within = at & (size - 1);
      const int64_t slot = int64_t(table[at >> shape.block_bits()]) * size + within;
      const int64_t first = (slot * shape.kv_heads + of.head) * dim;
      // Keys up to the end of the block lie `step` apart; before the first key and after the last key, all pointers are
      // equal.
      const int64_t step = wanted == at && at < last ? shape.kv_heads * dim : 0;
      const int64_t alike = wanted < at ? at - wanted : KEYS;
      const int64_t some = std::min(KEYS - i, step ? std::min(size - within, last - at) : alike);
      for (int64_t j = 0; j < some; j++) {
        run[0][i + j] = k_cache + first + j * step;
        run[1][i + j] = v_cache + first + j * step;
      }
      i += some;
    }
  };
  locate(piece, unit.begin, pointers[0]);
  for (int64_t begin = unit.begin, turn = 0; begin < unit.end; begin += KEYS, turn ^= 1) {
    int64_t count = std::min<int64_t>(KEYS, unit.end - begin);
    const auto &[keys, values] = pointers[turn];
    const auto &[keys_ahead, values_ahead] = pointers[turn ^ 1];
    if (begin + KEYS >= unit.end && next)
      locate(*next, next->unit->begin, pointers[turn ^ 1]);
    else
      locate(piece, begin + KEYS, pointers[turn ^ 1]);
    auto visible = [&](int64_t row) {
      int64_t number = cache_positions[token_of(row)];
      int64_t from = group.window ? std::max<int64_t>(0, number - group.window + 1 - begin) : 0;
      return std::pair(std::min(from, count), std::clamp<int64_t>(number + 1 - begin, 0, count));
    };
    auto weigh_row = [&](int64_t row, float *logits, auto *weights) {
      auto [from, to] = visible(row);
      if (from < to)
        weigh(logits, from, to, &scratch.largest[row], &scratch.total[row], &scratch.out[row * dim], dim, weights);
      else
        memset((void *)weights, 0, KEYS * sizeof(*weights));
      return std::pair(from, to);
    };
    // Turns the logits of rows into weights; returns the range of keys that any of these rows sees.
    auto weigh_rows = [&](int64_t row, int64_t some, float *logits, auto *weights) {
      int64_t least = count, most = 0;
      for (int64_t i = 0; i < some; i++) {
        auto [from, to] = weigh_row(row + i, logits + i * KEYS, weights + i * KEYS);
        least = std::min(least, from);
        most = std::max(most, to);
      }
      return std::pair(least, most);
    };
    if (in_lanes) {
      each_part([&](int64_t row, int64_t some, int64_t part) {
        const float *lanes = &scratch.lanes[part * WIDTH * dim];
        float *logits = scratch.logits.data();
        dots_in_lanes(lanes, keys, keys_ahead, dim, (float *)scratch.keys.data(), logits);
        int64_t least = count, most = 0;
        for (int64_t i = 0; i < some; i++) {
          auto [from, to] = visible(row + i);
          least = std::min(least, from);
          most = std::max(most, to);
          for (int64_t k = 0; k < from; k++) logits[k * WIDTH + i] = -INFINITY;
          for (int64_t k = to; k < KEYS; k++) logits[k * WIDTH + i] = -INFINITY;
        }
        Lanes largest(&scratch.largest[row], some), total(&scratch.total[row], some), keep;
        keep.all = weigh_in_lanes(logits, largest.all, total.all);
        largest.give(&scratch.largest[row], some);
        total.give(&scratch.total[row], some);
        for (int64_t i = 0; i < some; i++)
          for (int64_t d = 0; keep.each[i] != 1 && d < dim; d += WIDTH) {
            float *sums_before = &scratch.out[(row + i) * dim + d];
            store(sums_before, load(sums_before) * keep.each[i]);
          }
        if (scored) {
          std::copy_n(largest.each, some, scratch.kept.largest(begin, row));
          for (int64_t k = 0; k < KEYS; k += WIDTH) {
            Vec columns[WIDTH];
            for (int i = 0; i < WIDTH; i++) columns[i] = load(logits + (k + i) * WIDTH);
            transpose(columns);
            for (int64_t i = 0; i < some; i++) store(scratch.kept.weights(begin, row + i) + k, columns[i]);
          }
        }
        in_groups<ROWS>(some, [&](auto group_size) {
          constexpr int R = decltype(group_size)::value;
          add_values<R, 1, WIDTH>(logits, values, values_ahead, {0, 1}, least, most, dim, &scratch.out[row * dim]);
        });
      });
      continue;
    }
    if (few) {
      for (int64_t row = 0; row < rows; row += TOGETHER)
        in_groups(std::min<int64_t>(TOGETHER, rows - row), [&](auto group_size) {
          constexpr int R = decltype(group_size)::value;
          const Turn turn{row / TOGETHER, (rows + TOGETHER - 1) / TOGETHER};
          float *weights = scored ? scratch.kept.weights(begin, row) : scratch.logits.data();
          dots<R>(&scratch.query[row * dim], keys, keys_ahead, turn, count, dim, weights);
          auto [least, most] = weigh_rows(row, R, weights, weights);
          if (scored) std::copy_n(&scratch.largest[row], R, scratch.kept.largest(begin, row));
          add_values<R, KEYS, 1>(weights, values, values_ahead, turn, least, most, dim, &scratch.out[row * dim]);
        });
      continue;
    }
    lay_out_keys(keys, keys_ahead, count, dim, scratch.keys.data());
    // Values in place are summed in the same order, and too few rows do not justify moving the values.
    const bool in_place = rows <= FEW_ROWS<T> && !scored;
    if (!in_place) lay_out_values(values, values_ahead, count, dim, scratch.values.data());
    each_part([&](int64_t row, int64_t some, int64_t) {
      for (int64_t tile = 0; tile < KEYS / TILE; tile++)
        multiply_rows<false>(some, &scratch.query[row * dim], dim, &scratch.keys[tile * TILE * dim], dim,
                                   &scratch.logits[tile * TILE], KEYS);
      const int64_t plain = std::clamp<int64_t>(first_kept - row, 0, some);
      auto [least, most] = weigh_rows(row, plain, scratch.logits.data(), scratch.weights.data());
      if (in_place) {
        for (int64_t i = 0; i < some; i += TOGETHER)
          in_groups(std::min<int64_t>(TOGETHER, some - i), [&, from = least, to = most](auto group_size) {
            constexpr int R = decltype(group_size)::value;
            const Turn turn{i / TOGETHER, (some + TOGETHER - 1) / TOGETHER};
            add_values<R, KEYS, 1>(&scratch.weights[i * KEYS], values, values_ahead, turn, from, to, dim,
                                   &scratch.out[(row + i) * dim]);
          });
        return;
      }
      for (int64_t i = plain; i < some; i++) {
        float *weights = scratch.kept.weights(begin, row + i - first_kept);
        weigh_row(row + i, &scratch.logits[i * KEYS], weights);
        for (int k = 0; k < KEYS; k += WIDTH) store(&scratch.weights[i * KEYS + k], load(weights + k));
        *scratch.kept.largest(begin, row + i - first_kept) = scratch.largest[row + i];
      }
      for (int64_t tile = 0; tile < dim / TILE; tile++)
        multiply_rows<true>(some, scratch.weights.data(), KEYS, &scratch.values[tile * TILE * KEYS], KEYS,
                                  &scratch.out[row * dim + tile * TILE], dim);
    });
  }
  if (scored)
    scratch.kept.sum(unit.end, scored, &scratch.largest[rows - scored], &scratch.total[rows - scored], sums);
  for (int64_t row = 0; row < rows; row++) {
    int64_t index = index_of(row);
    const float *part = &scratch.out[row * dim];
    if (unit.ends) {
      const float scale = 1 / scratch.total[row], *scales = v_scale ? v_scale + piece.head * dim : nullptr;
      for (int64_t d = 0; d < dim; d += WIDTH)
        store(out + index * dim + d, scaled<C>(load(part + d) * scale, scales, d));
    } else {
      if (unit.part >= 0) index = unit.part + row / per_kv * shape.q_heads + head_of(row);
      state.largest[index] = scratch.largest[row];
      state.total[index] = scratch.total[row];
      memcpy(&state.out[index * dim], part, dim * 4);
    }
  }
}

// Merges the attention of a token whose keys were divided: out [Hq][D]. v_scale: as in `attend`.
template <class C, class T>
static inline void merge(const Shape &shape, const Merged &merged, const float *v_scale, Softmax &state, T *out) {
  const int64_t dim = shape.head_dim;
  for (int64_t head = 0; head < shape.q_heads; head++) {
    const int64_t first = merged.first + head, end = first + merged.parts * merged.step;
    float most = -FLT_MAX, total = 0;
    for (int64_t part = first; part < end; part += merged.step) most = std::max(most, state.largest[part]);
    // Sums into the buffer of the first part, which no other thread reads any more.
    float *sums = &state.out[first * dim];
    for (int64_t part = first; part < end; part += merged.step) {
      const float share = std::exp(state.largest[part] - most), *more = &state.out[part * dim];
      total += state.total[part] * share;
      for (int64_t d = 0; d < dim; d += WIDTH)
        store(sums + d, part == first ? load(more + d) * share : load(sums + d) + load(more + d) * share);
    }
    const float *scales = v_scale ? v_scale + head / shape.per_kv() * dim : nullptr;
    for (int64_t d = 0; d < dim; d += WIDTH)
      store(out + head * dim + d, scaled<C>(load(sums + d) * (1 / total), scales, d));
  }
}
