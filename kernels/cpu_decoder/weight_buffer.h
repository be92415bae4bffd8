// Attention scores: the sums of the softmax weights of each key.
//
// While a softmax continues, the weights of all runs of keys are kept as they come out of it; when its end is known, they
// are scaled and summed. So no pass over the keys is repeated.
#pragma once

#include <memory>

#include "units.h"

// Where sums go, [keys] each; squares may be null.
struct Sums {
  float *weights, *squares;
};

// Weights of some rows, and how large the largest logit of each was when a run was taken.
class WeightBuffer {
 public:
  // Forgets all; the next ones are of so many keys and rows.
  void begin(int64_t keys, int64_t count) {
    rows = count;
    int64_t needed = (keys + KEYS - 1) / KEYS * rows;
    if (needed <= capacity) return;
    capacity = needed;
    all = std::make_unique_for_overwrite<float[]>(capacity * KEYS);
    peaks = std::make_unique_for_overwrite<float[]>(capacity);
  }

  // Those of a row at the run that begins with key `from`: [KEYS].
  float *weights(int64_t from, int64_t row) { return &all[(from / KEYS * rows + row) * KEYS]; }
  float *largest(int64_t from, int64_t row) { return &peaks[from / KEYS * rows + row]; }

  // Sums over the last `count` rows, whose softmax ended with `most` and `total` [count].
  void sum(int64_t keys, int64_t count, const float *most, const float *total, const Sums &to) {
    for (int64_t from = 0; from < keys; from += KEYS) {
      Vec sums[KEYS / WIDTH] = {}, squares[KEYS / WIDTH] = {};
      for (int64_t i = 0; i < count; i++) {
        const int64_t row = rows - count + i;
        const float peak = *largest(from, row), *some = weights(from, row);
        const float scale = (peak == most[i] ? 1 : std::exp(peak - most[i])) / total[i];
#pragma GCC unroll 8
        for (int v = 0; v < KEYS / WIDTH; v++) {
          Vec weight = load(some + v * WIDTH) * scale;
          sums[v] += weight;
          squares[v] += weight * weight;
        }
      }
      const int64_t bytes = std::min<int64_t>(KEYS, keys - from) * sizeof(float);
      memcpy(to.weights + from, sums, bytes);
      if (to.squares) memcpy(to.squares + from, squares, bytes);
    }
  }

 private:
  int64_t rows = 0, capacity = 0;
  // [runs][rows][KEYS] and [runs][rows].
  std::unique_ptr<float[]> all, peaks;
};
