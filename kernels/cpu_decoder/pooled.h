// Attention pooled over neighbouring tokens and added up.
#pragma once

#include <vector>

#include "vector.h"

// totals [keys] += the largest of each `width` neighbours, this one first, of weights [heads][keys] summed over heads.
// Entries before `first` are neither looked at nor added to.
static inline void pooled_add(const float *weights, int64_t heads, int64_t keys, float *totals, int64_t first,
                              int64_t width) {
  const int64_t count = keys - first;
  if (count <= 0) return;
  // Behind the last one nothing is larger.
  thread_local std::vector<float> sums;
  sums.assign(count + width + WIDTH, -INFINITY);
  for (int64_t i = 0; i < count; i++) sums[i] = weights[first + i];
  for (int64_t head = 1; head < heads; head++)
    for (int64_t i = 0; i < count; i++) sums[i] += weights[head * keys + first + i];
  for (int64_t i = 0; i < count; i += WIDTH) {
    Vec most = load(&sums[i]);
    for (int64_t next = 1; next < width; next++) {
      Vec other = load(&sums[i + next]);
      most = other > most ? other : most;
    }
    for (int64_t lane = 0; lane < std::min<int64_t>(WIDTH, count - i); lane++) totals[first + i + lane] += most[lane];
  }
}
