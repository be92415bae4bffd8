// SIMD over query rows: one row per lane; each key element is broadcast and multiplied with all rows. So neither sums
// nor maximum logits need a reduction across lanes. Used if there are too many rows for `dots` (attention.h), which
// loads each key into registers, and too few rows to justify packing the keys.
#pragma once

#include "weight_buffer.h"

// One number per row.
struct Lanes {
  union {
    Vec all;
    float each[WIDTH];
  };
  Lanes() : all{} {}
  Lanes(const float *from, int64_t rows) : all{} { std::copy_n(from, rows, each); }
  void give(float *to, int64_t rows) const { std::copy_n(each, rows, to); }
};

// Keys whose logits are accumulated at a time: enough keys that additions do not wait for each other.
constexpr int KEYS_TOGETHER = 8;

// to [dim][WIDTH] = query [rows][dim], transposed; unused lanes are 0.
static inline void into_lanes(const float *query, int64_t rows, int64_t dim, float *to) {
  for (int64_t d = 0; d < dim; d++)
    for (int64_t row = 0; row < WIDTH; row++) to[d * WIDTH + row] = row < rows ? query[row * dim + d] : 0;
}

// Copies KEYS_TOGETHER keys to [KEYS_TOGETHER][dim], a part at a time, so that waits for the second-level cache overlap
// with other work.
template <class C>
struct Copying {
  const C *const *from;
  float *to;
  int64_t dim, d = 0;

  void go_on() {
    // dim / KEYS_TOGETHER calls copy all KEYS_TOGETHER keys.
#pragma GCC unroll 8
    for (int i = 0; i < KEYS_TOGETHER * KEYS_TOGETHER / WIDTH; i++) {
      store(to, load(*from + d));
      to += WIDTH;
      d += WIDTH;
      if (d == dim) d = 0, from++;
    }
  }
};

// logits [KEYS][WIDTH] = keys [KEYS] times query [dim][WIDTH], while `ahead` [KEYS] are prefetched. Overwrites `copies`
// [2][KEYS_TOGETHER][dim].
template <class C>
static inline void dots_in_lanes(const float *query, const C *const *keys, const C *const *ahead, int64_t dim,
                                 float *copies, float *logits) {
  Copying<C> first{keys, copies, dim};
  for (int64_t d = 0; d < dim; d += KEYS_TOGETHER) first.go_on();
  for (int64_t begin = 0, turn = 0; begin < KEYS; begin += KEYS_TOGETHER, turn ^= 1) {
    const float *some = copies + turn * KEYS_TOGETHER * dim;
    // After the last keys, the same keys are copied once more.
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

// Turns logits [KEYS][WIDTH] into weights. `largest` and `total` hold each lane's maximum and sum from the runs before,
// and are updated. Returns the factor for everything else that the lanes have accumulated.
static inline Vec weigh_in_lanes(float *logits, Vec &largest, Vec &total) {
  // Several keys at a time, so that their operations do not wait for each other.
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
