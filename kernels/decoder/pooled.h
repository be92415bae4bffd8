// Attention of a layer, pooled over neighbouring tokens and added up.
#pragma once

#include <vector>

#include "vector.h"

// sums [slots] += the largest of each `width` neighbours, this one first, of weights [heads][slots] summed over heads.
// Entries before `first` are neither looked at nor added to.
static inline void pooled_add(const float *weights, int64_t heads, int64_t slots, int64_t stride, float *sums,
                              int64_t first, int64_t width) {
  const int64_t count = slots - first;
  // Behind the last one nothing is larger.
  thread_local std::vector<float> total;
  total.assign(count + width + WIDTH, -INFINITY);
  for (int64_t i = 0; i < count; i++) total[i] = weights[first + i];
  for (int64_t head = 1; head < heads; head++)
    for (int64_t i = 0; i < count; i++) total[i] += weights[head * stride + first + i];
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) {
    Vec most = load(&total[i]);
    for (int64_t next = 1; next < width; next++) {
      Vec other = load(&total[i + next]);
      most = other > most ? other : most;
    }
    store(sums + first + i, load(sums + first + i) + most);
  }
  for (; i < count; i++) {
    float most = total[i];
    for (int64_t next = 1; next < width; next++) most = std::max(most, total[i + next]);
    sums[first + i] += most;
  }
}
