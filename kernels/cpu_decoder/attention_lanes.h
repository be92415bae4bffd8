// Attention of some rows with a row in each lane: what a key has of a number is multiplied with all rows at once, and
// neither sums nor largest logits are looked for across lanes. For more rows than are worth taking each key into
// registers for (attention.h, `dots`), and fewer than are worth laying keys out for.
#pragma once

#include "weight_buffer.h"

// A number for each row.
struct Lanes {
  union {
    Vec all;
    float each[WIDTH];
  };
  Lanes() : all{} {}
  Lanes(const float *from, int64_t rows) : all{} { std::copy_n(from, rows, each); }
  void give(float *to, int64_t rows) const { std::copy_n(each, rows, to); }
};

// Keys whose logits are summed at a time: enough for additions not to wait for each other.
constexpr int KEYS_TOGETHER = 8;

// to [dim][WIDTH] = query [rows][dim], transposed; other lanes are 0.
static inline void into_lanes(const float *query, int64_t rows, int64_t dim, float *to) {
  for (int64_t d = 0; d < dim; d++)
    for (int64_t row = 0; row < WIDTH; row++) to[d * WIDTH + row] = row < rows ? query[row * dim + d] : 0;
}

// Copies KEYS_TOGETHER keys to [KEYS_TOGETHER][dim], a part at a time: what waits for the second cache then waits
// beside something else.
template <class C>
struct Copying {
  const C *const *from;
  float *to;
  int64_t dim, d = 0;

  void go_on() {
    // As often as there are this many numbers of a key, this is all of them.
#pragma GCC unroll 8
    for (int i = 0; i < KEYS_TOGETHER * KEYS_TOGETHER / WIDTH; i++) {
      store(to, load(*from + d));
      to += WIDTH;
      d += WIDTH;
      if (d == dim) d = 0, from++;
    }
  }
};

// logits [KEYS][WIDTH] = keys [KEYS] times query [dim][WIDTH]; `ahead` [KEYS] are fetched meanwhile. What is at
// `copies` [2][KEYS_TOGETHER][dim] is lost.
template <class C>
static inline void dots_in_lanes(const float *query, const C *const *keys, const C *const *ahead, int64_t dim,
                                 float *copies, float *logits) {
  Copying<C> first{keys, copies, dim};
  for (int64_t d = 0; d < dim; d += KEYS_TOGETHER) first.go_on();
  for (int64_t begin = 0, turn = 0; begin < KEYS; begin += KEYS_TOGETHER, turn ^= 1) {
    const float *some = copies + turn * KEYS_TOGETHER * dim;
    // Behind the last ones, the same once more.
    Copying<C> next{keys + std::min<int64_t>(begin + KEYS_TOGETHER, KEYS - KEYS_TOGETHER),
                    copies + (turn ^ 1) * KEYS_TOGETHER * dim, dim};
    Vec sums[KEYS_TOGETHER] = {};
    for (int64_t d = 0; d < dim; d += KEYS_TOGETHER) {
      const bool line = d * sizeof(C) % 64 == 0;
      next.go_on();
#pragma GCC unroll 8
      for (int64_t i = 0; i < KEYS_TOGETHER; i++) {
        if (line) __builtin_prefetch(ahead[begin + i] + d, 0, 2);
        const Vec part = load(query + (d + i) * WIDTH);
#pragma GCC unroll 8
        for (int k = 0; k < KEYS_TOGETHER; k++) sums[k] += some[k * dim + d + i] * part;
      }
    }
#pragma GCC unroll 8
    for (int k = 0; k < KEYS_TOGETHER; k++) store(logits + (begin + k) * WIDTH, sums[k]);
  }
}

// logits [KEYS][WIDTH] become weights; each lane has seen `largest` and summed `total` before. Returns what the rest of
// it is to be multiplied with.
static inline Vec weigh_in_lanes(float *logits, Vec &largest, Vec &total) {
  // Several at a time, which do not wait for each other.
  constexpr int FEW = 4;
  Vec some[FEW] = {largest, largest, largest, largest};
  for (int k = 0; k < KEYS; k += FEW)
#pragma GCC unroll 4
    for (int i = 0; i < FEW; i++) {
      const Vec next = load(logits + (k + i) * WIDTH);
      some[i] = next > some[i] ? next : some[i];
    }
  Vec most = largest;
  for (const Vec &one : some) most = one > most ? one : most;
  const Vec keep = exponential(largest - most);
  Vec sums[FEW] = {};
  for (int k = 0; k < KEYS; k += FEW)
#pragma GCC unroll 4
    for (int i = 0; i < FEW; i++) {
      const Vec weight = exponential(load(logits + (k + i) * WIDTH) - most);
      store(logits + (k + i) * WIDTH, weight);
      sums[i] += weight;
    }
  largest = most;
  total = total * keep + (sums[0] + sums[1] + (sums[2] + sums[3]));
  return keep;
}
