// Weights of models that were published in 4 or 8 bits, dequantized from their codes.
//
// Such a weight is scale * code + offset, with one scale and one offset for SHARED inputs of a column: ggml's Q4_0,
// Q4_1 and Q8_0. The product needs fewer bits than a float has. So there is at most one rounding, and every way to
// compute the weight gives the same float. A GGUF file stores scales, offsets and codes. For other files, all three are
// recovered from the weights alone, whatever format the weights came in. If a group of a matrix has none that reproduce
// all its weights, the matrix is not stored as codes. Only a zero may change its sign, which no sum that begins with 0
// shows.
#pragma once

#include <algorithm>
#include <type_traits>

#include "vector.h"

constexpr int64_t SHARED = 32;
// 8-bit codes stand for -128 to 127 and need no offset; 4-bit codes stand for 0 to 15.
template <int BITS>
constexpr bool HAS_OFFSET = BITS == 4;
// A 32-bit lane holds the codes of this many inputs of its column, the first input in the lowest bits.
template <int BITS>
constexpr int PER_LANE = 32 / BITS;

// Half precision, as scales and offsets are stored.
enum class Half : uint16_t {};

// Apart from the sign, the bits of a half, shifted, are those of a float 2^112 times smaller.
static inline float widen(Half value) {
  const uint32_t bits = (uint32_t(value) & 0x7fff) << 13;
  float size;
  memcpy(&size, &bits, 4);
  return std::copysign(size * 0x1p112f, uint32_t(value) >> 15 ? -1.0f : 1.0f);
}

// The bits of the half nearest to `size`, a magnitude below 65504.
static inline int32_t nearest_half(float size) {
  size *= 0x1p-112f;
  uint32_t bits;
  memcpy(&bits, &size, 4);
  return (bits + 0x1000) >> 13;
}

static inline Vec load(const Half *from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
  Vec value;
  for (int i = 0; i < WIDTH; i++) value[i] = widen(from[i]);
  return value;
#endif
}

// A group: scales, offsets and codes for SHARED inputs of a tile's columns.
template <int BITS>
struct Coded {
  Half scale[TILE], offset[HAS_OFFSET<BITS> ? TILE : 0];
  uint32_t codes[SHARED / PER_LANE<BITS>][TILE];
};

// The number-th codes of all lanes, as floats.
template <int BITS>
static inline Vec code_of(IntVec codes, int number) {
  if constexpr (BITS == 8) return __builtin_convertvector(codes << (24 - 8 * number) >> 24, Vec);
#if defined(__AVX512F__)
  // The lowest four bits of a lane select the value.
  const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (Vec)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)codes, 4 * number), values);
#else
  return __builtin_convertvector(codes >> (4 * number) & 15, Vec);
#endif
}

// The computed value or, if ROUNDED, the nearest bfloat16, because the weights were rounded to bfloat16.
// This is Veltkamp's splitting (Dekker 1971, "A floating-point technique for extending the available precision",
// section 5) in two operations. This is right, including ties to even, except for some numbers that use all bits of a
// float. No scale and offset of similar size make such numbers. A matrix for which the splitting is not right is not
// stored as codes.
template <bool ROUNDED, class X>
static inline X come_out(X value) {
  if constexpr (!ROUNDED) return value;
  // The product is exact, so the result is the same whether or not the product is fused with the next operation.
  const X large = value * 65536.0f;
  return (value + large) - large;
}

// The number-th weights of all lanes, from these codes.
template <int BITS, bool ROUNDED>
static inline Vec weights_of(IntVec codes, int number, Vec scale, Vec offset) {
  return come_out<ROUNDED>(code_of<BITS>(codes, number) * scale + offset);
}

// The scales and offsets of a group's columns.
template <int BITS>
struct Common {
  Vec scale[VECTORS], offset[VECTORS] = {};

  explicit Common(const Coded<BITS> &group) {
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
      scale[v] = load(group.scale + v * WIDTH);
      if constexpr (HAS_OFFSET<BITS>) offset[v] = load(group.offset + v * WIDTH);
    }
  }
};

// Dequantizes a tile's weights for the next `inputs` inputs, which are whole groups: to [inputs][TILE] floats, or to
// pairs in bfloat16 as in other bfloat16 matrices. Returns where the following groups begin.
template <int BITS, bool ROUNDED, class W>
static inline const char *decode(const char *at, int64_t inputs, W *to) {
  constexpr int count = PER_LANE<BITS>;
  const auto *from = (const Coded<BITS> *)at;
  for (const auto *end = from + inputs / SHARED; from < end; from++) {
    const Common<BITS> common(*from);
    for (const auto &line : from->codes) {
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) {
        const IntVec codes = *(const IntVec *)(line + v * WIDTH);
        Vec weights[count];
#pragma GCC unroll 8
        for (int i = 0; i < count; i++)
          weights[i] = weights_of<BITS, ROUNDED>(codes, i, common.scale[v], common.offset[v]);
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) {
          if constexpr (std::is_same_v<W, float>) {
            store(to + i * TILE + v * WIDTH, weights[i]);
          } else if (i % 2) {
            const UnsignedVec low = (UnsignedVec)weights[i - 1] >> 16, high = (UnsignedVec)weights[i];
            *(PairVec *)(to + (i - 1) * TILE + v * 2 * WIDTH) = (PairVec)(low | high);
          }
        }
      }
      to += count * TILE;
    }
  }
  return (const char *)from;
}

// Whether `use` accepts one of the halves for which `fits` holds. These halves lie together around `about`, and are
// tried from there outwards.
template <class Fits, class Use>
static inline bool any_half(float about, const Fits &fits, const Use &use) {
  const float size = std::fabs(about);
  if (!(size < 65504)) return false;
  // The bits of halves, read as integers, are in the order of the magnitudes.
  const int32_t nearest = nearest_half(size), sign = std::signbit(about) << 15;
  for (int step : {1, -1}) {
    bool more = true;
    for (int32_t bits = step > 0 ? nearest : nearest - 1; bits >= 0 && bits < 31 << 10 && more; bits += step) {
      const Half half = Half(sign | bits);
      more = fits(widen(half));
      if (more && use(half)) return true;
      // Goes on after the nearest half in any case, because all halves that fit may lie to one side.
      more |= bits == nearest;
    }
  }
  return false;
}

// One column's part of a group.
template <int BITS, bool ROUNDED>
struct Column {
  Half scale, offset;
  int32_t codes[SHARED];

  // Whether these weights were made from a scale, an offset and codes; if so, sets all three.
  bool find(const float (&weights)[SHARED]) {
    const auto [low, high] = std::minmax_element(weights, weights + SHARED);
    if constexpr (!HAS_OFFSET<BITS>) {
      // The largest weight gets the largest code.
      constexpr int most = 127;
      const float largest = std::max(std::fabs(*low), std::fabs(*high));
      return any_half(
          largest / most, [&](float half) { return come_out<ROUNDED>(most * half) == largest; },
          [&](Half half) { return take(weights, half, Half{}); });
    }
    // The lowest or the highest weight is the offset. The other end lies some codes away, mostly the most codes there
    // are.
    auto between = [&](float base, float other, int code) {
      return any_half(
          base, [&](float half) { return come_out<ROUNDED>(half) == base; },
          [&](Half zero) {
            const float from = widen(zero);
            return any_half(
                (other - from) / code, [&](float half) { return come_out<ROUNDED>(code * half + from) == other; },
                [&](Half half) { return take(weights, half, zero); });
          });
    };
    for (int code = 15; code > 0; code--)
      if (between(*low, *high, code) || between(*high, *low, code)) return true;
    return false;
  }

 private:
  bool take(const float (&weights)[SHARED], Half some_scale, Half some_offset) {
    scale = some_scale, offset = some_offset;
    const float size = widen(scale), zero = widen(offset), inverse = size ? 1 / size : 0;
    constexpr float least = HAS_OFFSET<BITS> ? 0 : -128, most = HAS_OFFSET<BITS> ? 15 : 127;
    for (int64_t i = 0; i < SHARED; i += WIDTH) {
      const Vec wanted = load(weights + i);
      // Adding and subtracting 1.5 * 2^23 rounds to an integer.
      Vec code = ((wanted - zero) * inverse + 12582912.0f) - 12582912.0f;
      code = code < least ? Vec{} + least : code;
      code = code > most ? Vec{} + most : code;
      *(IntVec *)(codes + i) = __builtin_convertvector(code, IntVec);
      // A NaN equals nothing, so a NaN always differs.
      const IntVec differ = come_out<ROUNDED>(code * size + zero) != wanted;
      for (int lane = 0; lane < WIDTH; lane++)
        if (differ[lane]) return false;
    }
    return true;
  }
};

// Recovers the codes of a dequantized matrix [n][k], tile by tile: [tiles][k / SHARED] groups. Returns false if the
// matrix was not made from such codes.
template <bool ROUNDED, int BITS, class T>
static inline bool encode(Coded<BITS> *to, const T *from, int64_t n, int64_t k) {
  if (k % SHARED) return false;
  for (int64_t first = 0; first < n; first += TILE) {
    for (int64_t group = 0; group < k / SHARED; group++, to++) {
      memset(to, 0, sizeof(*to));
      for (int64_t row = 0; row < std::min<int64_t>(TILE, n - first); row++) {
        Column<BITS, ROUNDED> column;
        float weights[SHARED];
        for (int64_t i = 0; i < SHARED; i++) weights[i] = widen(from[(first + row) * k + group * SHARED + i]);
        if (!column.find(weights)) return false;
        to->scale[row] = column.scale;
        if constexpr (HAS_OFFSET<BITS>) to->offset[row] = column.offset;
        for (int64_t i = 0; i < SHARED; i++) {
          const uint32_t code = column.codes[i] & ((1 << BITS) - 1);
          to->codes[i / PER_LANE<BITS>][row] |= code << i % PER_LANE<BITS> * BITS;
        }
      }
    }
  }
  return true;
}

// A column's part of a group, as a GGUF file stores it: the type, and the memory layout.
enum BlockKind : int64_t { Q4_0, Q4_1, Q8_0 };

template <BlockKind KIND>
struct Block {
  static constexpr int BITS = KIND == Q8_0 ? 8 : 4;
  Half scale, offset[KIND == Q4_1];
  uint8_t codes[SHARED * BITS / 8];

  // 4-bit codes: the lower halves of the bytes hold the first half of the inputs, the upper halves the second half.
  uint32_t code(int64_t i) const {
    if constexpr (BITS == 8) return codes[i];
    return i < SHARED / 2 ? codes[i] & 15 : codes[i - SHARED / 2] >> 4;
  }

  // Sets the offset of a group that has an offset; returns false if no half can hold the offset.
  bool offset_of(Half &to) const {
    if constexpr (KIND == Q4_1) to = offset[0];
    // The codes of Q4_0 stand for -8 to 7.
    if constexpr (KIND == Q4_0) {
      const float wanted = -8 * widen(scale);
      if (!(std::fabs(wanted) < 65504)) return false;
      to = Half((std::signbit(wanted) << 15) | nearest_half(std::fabs(wanted)));
    }
    return true;
  }
};

// Whether a half is finite: neither infinite nor NaN.
static inline bool is_number(Half value) { return (uint32_t(value) & 0x7c00) != 0x7c00; }

// Packs a file's blocks [n][k / SHARED], tile by tile. Returns false if a scale or an offset is not finite.
template <BlockKind KIND>
static inline bool lay_out(Coded<Block<KIND>::BITS> *to, const Block<KIND> *from, int64_t n, int64_t k) {
  constexpr int bits = Block<KIND>::BITS;
  if (k % SHARED) return false;
  const int64_t groups = k / SHARED;
  for (int64_t first = 0; first < n; first += TILE) {
    for (int64_t group = 0; group < groups; group++, to++) {
      memset(to, 0, sizeof(*to));
      for (int64_t row = 0; row < std::min<int64_t>(TILE, n - first); row++) {
        const Block<KIND> &block = from[(first + row) * groups + group];
        to->scale[row] = block.scale;
        if (!is_number(block.scale)) return false;
        if constexpr (HAS_OFFSET<bits>)
          if (!block.offset_of(to->offset[row]) || !is_number(to->offset[row])) return false;
        for (int64_t i = 0; i < SHARED; i++)
          to->codes[i / PER_LANE<bits>][row] |= block.code(i) << i % PER_LANE<bits> * bits;
      }
    }
  }
  return true;
}
