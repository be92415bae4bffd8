// Attention weights, max-pooled over neighbouring tokens and accumulated.
#pragma once

#include <vector>

#include "vector.h"

// Sums weights [heads][keys] over heads. To each entry of totals [keys], adds the maximum of the `width` sums from that
// key on. Entries before `first` are neither read nor changed.
static inline void pooled_add(const float *weights, int64_t heads, int64_t keys, float *totals, int64_t first,
                              int64_t width) {
  const int64_t count = keys - first;
  if (count <= 0) return;
  // Sums after the last key are minus infinity, so that they never win the maximum.
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
