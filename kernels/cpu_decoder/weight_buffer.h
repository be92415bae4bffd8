// Attention scores: for each key, the sum of its softmax weights.
//
// While a softmax continues, the weights of each run of keys are kept as the online softmax yields them. Once the
// maximum and the total are final, the weights are rescaled and summed. So no pass over the keys is repeated.
#pragma once

#include <memory>

#include "units.h"

// Destinations of the sums, [keys] each; `squares` may be null.
struct Sums {
  float *weights, *squares;
};

// Softmax weights of some rows, and each row's running maximum logit at the time when a run was processed.
class WeightBuffer {
 public:
  // Discards all weights and makes room for `keys` keys and `count` rows.
  void begin(int64_t keys, int64_t count) {
    rows = count;
    int64_t needed = (keys + KEYS - 1) / KEYS * rows;
    if (needed <= capacity) return;
    capacity = needed;
    all = std::make_unique_for_overwrite<float[]>(capacity * KEYS);
    peaks = std::make_unique_for_overwrite<float[]>(capacity);
  }

  // The weights of a row for the run that begins with key `from`: [KEYS].
  float *weights(int64_t from, int64_t row) { return &all[(from / KEYS * rows + row) * KEYS]; }
  float *largest(int64_t from, int64_t row) { return &peaks[from / KEYS * rows + row]; }

  // Sums over the last `count` rows, whose softmaxes ended with the maxima `most` and the totals `total` [count].
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
