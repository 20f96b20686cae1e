/* What the loops over floating-point values have in common. */

#ifndef RESHARD_VALUES_H
#define RESHARD_VALUES_H

#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "checkpoints are little-endian; numpy computes on this machine"
#endif

/* The compiler makes a loop for each level of the processor, of which one is chosen at run time.
   GCC knows x86-64-v4 (AVX-512) from 12 on; such a loop can be more than twice as fast. */
#if !defined(__x86_64__) || !defined(__GLIBC__) || !defined(__GNUC__)
#define VECTORIZED
#elif __GNUC__ >= 12 && !defined(__clang__)
#define VECTORIZED __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define VECTORIZED __attribute__((target_clones("avx2", "default")))
#endif

/* What is inlined is compiled for each level of the processor, and for each of its constant arguments. */
#ifdef __GNUC__
#define INLINED static inline __attribute__((always_inline))
#else
#define INLINED static inline
#endif

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Magnitudes are signed, as SSE2 and AVX2 compare only signed integers. */
static inline int32_t magnitude_of(uint32_t bits) { return bits & 0x7FFFFFFF; }

/* Round to nearest even: add 0x7FFF and the lowest bit that is kept, then drop 16 bits. */
static inline uint32_t to_bfloat16(uint32_t bits) {
    uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return magnitude_of(bits) > 0x7F800000 ? 0x7FC0 : rounded;
}

static inline uint32_t from_bfloat16(uint16_t bits) { return (uint32_t)bits << 16; }

static inline uint32_t from_float16(uint16_t bits) {
    int32_t magnitude = bits & 0x7FFF;
    int32_t normal = (magnitude << 13) + 0x38000000;
    int32_t special = (magnitude << 13) | 0x7F800000;
    /* The bits of 0.5 plus `magnitude` units of 2 ** -24: the value of a subnormal. */
    int32_t subnormal = bits_of(float_of(0x3F000000 + magnitude) - 0.5f);
    int32_t made = magnitude < 0x400 ? subnormal : normal;
    made = magnitude >= 0x7C00 ? special : made;
    return made | (uint32_t)(bits & 0x8000) << 16;
}

/* The conversion of float32 in loops that a macro makes for every dtype. */
#define AS_IS(bits) (bits)

/* Loads of one value as float32. */
#define LOADER(dtype, Stored, widen)                                       \
    static inline float load_##dtype(const char *base, Py_ssize_t index) { \
        Stored stored; /* copied, as buffers need not be aligned */        \
        memcpy(&stored, base + sizeof stored * index, sizeof stored);      \
        return float_of(widen(stored));                                    \
    }

/* clang-format off */
LOADER(float32, uint32_t, AS_IS)
LOADER(float16, uint16_t, from_float16)
LOADER(bfloat16, uint16_t, from_bfloat16)
/* clang-format on */

/* How many finite values a cast made infinite, and how many others it made zero. */
typedef struct {
    uint32_t overflowed, flushed;
} Counts;

/* A loop that casts contiguous values. INFINITE is the infinity of a target that can overflow, or 0. */
#define CAST_LOOP(name, Source, widen, Target, narrow, INFINITE, COUNTS_ZEROS)                 \
    VECTORIZED static Counts name(const char *source, char *target, Py_ssize_t count) {        \
        uint32_t overflowed = 0, flushed = 0;                                                  \
        for (Py_ssize_t i = 0; i < count; i++) {                                               \
            Source stored; /* copied, as buffers need not be aligned */                        \
            memcpy(&stored, source + i * sizeof(Source), sizeof(Source));                      \
            uint32_t bits = widen(stored), made = narrow(bits);                                \
            Target result = made;                                                              \
            memcpy(target + i * sizeof(Target), &result, sizeof(Target));                      \
            int32_t magnitude = magnitude_of(bits), size = made & 0x7FFF;                      \
            if (INFINITE) overflowed += (size == INFINITE) & (magnitude < 0x7F800000);         \
            if (COUNTS_ZEROS) flushed += (size == 0) & (magnitude != 0);                       \
        }                                                                                      \
        Counts counts = {overflowed, flushed};                                                 \
        return counts;                                                                         \
    }

#endif
