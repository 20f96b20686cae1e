/* Casts of contiguous float32, float16 and bfloat16 in memory, or as they are read from a file, with
   counts of overflow and underflow.

   `reshard.engine.move.cast` describes the rounding and computes the same bits with numpy where this
   module was not compiled. The loops have no branches, so that the compiler vectorizes them. */

#define _FILE_OFFSET_BITS 64
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../../system/reads.h"
#include "values.h"

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#define HAS_F16C_LOOP 1
#else
#define HAS_F16C_LOOP 0
#endif

/* Elements in one call of a loop, whose counters have 32 bits, like the elements. */
enum { BLOCK = 1 << 20 };

/* A NaN keeps its sign and its upper bits, like numpy's npy_floatbits_to_halfbits. */
static inline uint32_t to_float16(uint32_t bits) {
    int32_t magnitude = magnitude_of(bits);
    int32_t normal = (magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13;
    /* The unit in the last place of 0.5 is float16's smallest subnormal, so the sum rounds to it. */
    int32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000;
    int32_t payload = magnitude >> 13 & 0x3FF;
    int32_t nan = 0x7C00 | payload | (payload == 0);
    int32_t made = magnitude < 0x38800000 ? subnormal : normal;
    made = magnitude >= 0x47800000 ? 0x7C00 : made;
    made = magnitude > 0x7F800000 ? nan : made;
    return made | (bits >> 16 & 0x8000);
}

/* clang-format off */
CAST_LOOP(float32_to_bfloat16, uint32_t, AS_IS, uint16_t, to_bfloat16, 0x7F80, 0)
CAST_LOOP(float32_to_float16_by_bits, uint32_t, AS_IS, uint16_t, to_float16, 0x7C00, 1)
CAST_LOOP(bfloat16_to_float16, uint16_t, from_bfloat16, uint16_t, to_float16, 0x7C00, 1)
CAST_LOOP(float16_to_bfloat16, uint16_t, from_float16, uint16_t, to_bfloat16, 0, 0)
CAST_LOOP(float16_to_float32, uint16_t, from_float16, uint32_t, AS_IS, 0, 0)
CAST_LOOP(bfloat16_to_float32, uint16_t, from_bfloat16, uint32_t, AS_IS, 0, 0)
/* clang-format on */

#if HAS_F16C_LOOP
/* Elements between two looks for infinities and NaNs. */
enum { STRETCH = 1 << 10 };

/* The processor's own conversion, four times as fast. It makes signalling NaNs quiet, so a stretch
   with a NaN is converted by bits, and so is one with an infinity, whose causes must be counted. */
__attribute__((target("avx2,f16c"))) static Counts float32_to_float16_by_f16c(
    const char *source, char *target, Py_ssize_t count) {
    const __m256i magnitude_bits = _mm256_set1_epi32(0x7FFFFFFF);
    const __m128i size_bits = _mm_set1_epi16(0x7FFF), largest = _mm_set1_epi16(0x7BFF);
    Counts counts = {0, 0};
    for (Py_ssize_t start = 0; start < count; start += STRETCH) {
        Py_ssize_t length = count - start < STRETCH ? count - start : STRETCH, i = 0;
        const char *from = source + start * 4;
        char *to = target + start * 2;
        uint32_t zeros_before = 0, zeros_after = 0; /* twice the zeros: a bit for each byte */
        __m128i special = _mm_setzero_si128();
        for (; i + 8 <= length; i += 8) {
            __m256i bits = _mm256_loadu_si256((const __m256i *)(from + i * 4));
            __m128i made = _mm256_cvtps_ph(_mm256_castsi256_ps(bits), _MM_FROUND_TO_NEAREST_INT);
            _mm_storeu_si128((__m128i *)(to + i * 2), made);
            __m128i size = _mm_and_si128(made, size_bits);
            special = _mm_or_si128(special, _mm_cmpgt_epi16(size, largest));
            __m256i magnitude = _mm256_and_si256(bits, magnitude_bits);
            __m256i was_zero = _mm256_cmpeq_epi32(magnitude, _mm256_setzero_si256());
            __m128i is_zero = _mm_cmpeq_epi16(size, _mm_setzero_si128());
            zeros_before += __builtin_popcount(_mm256_movemask_ps(_mm256_castsi256_ps(was_zero)));
            zeros_after += __builtin_popcount(_mm_movemask_epi8(is_zero));
        }
        if (!_mm_testz_si128(special, special)) i = 0;
        Counts rest = float32_to_float16_by_bits(from + i * 4, to + i * 2, length - i);
        counts.overflowed += rest.overflowed;
        counts.flushed += rest.flushed + (i ? zeros_after / 2 - zeros_before : 0);
    }
    return counts;
}

#endif

static int has_f16c = 0; /* whether the processor converts; asked once, as the question is slow */

static void find_f16c(void) {
#if HAS_F16C_LOOP
    unsigned int eax, ebx, ecx, edx;
    int f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
    has_f16c = f16c && __builtin_cpu_supports("avx2");
#endif
}

static Counts float32_to_float16(const char *source, char *target, Py_ssize_t count) {
#if HAS_F16C_LOOP
    if (has_f16c) return float32_to_float16_by_f16c(source, target, count);
#endif
    return float32_to_float16_by_bits(source, target, count);
}

typedef struct {
    const char *source, *target;
    Py_ssize_t source_size, target_size;
    Counts (*loop)(const char *, char *, Py_ssize_t);
} Cast;

static const Cast CASTS[] = {
    {"float32", "bfloat16", 4, 2, float32_to_bfloat16},
    {"float32", "float16", 4, 2, float32_to_float16},
    {"bfloat16", "float16", 2, 2, bfloat16_to_float16},
    {"float16", "bfloat16", 2, 2, float16_to_bfloat16},
    {"float16", "float32", 2, 4, float16_to_float32},
    {"bfloat16", "float32", 2, 4, bfloat16_to_float32},
};

static const Cast *find_cast(const char *source_dtype, const char *target_dtype) {
    for (size_t number = 0; number < sizeof CASTS / sizeof *CASTS; number++) {
        const Cast *found = &CASTS[number];
        if (!strcmp(found->source, source_dtype) && !strcmp(found->target, target_dtype)) return found;
    }
    PyErr_Format(PyExc_LookupError, "no loop from %s to %s", source_dtype, target_dtype);
    return NULL;
}

typedef struct {
    unsigned long long overflowed, flushed;
} Sums;

static void cast_values(const Cast *cast, const char *source, char *target, Py_ssize_t count, Sums *sums) {
    for (Py_ssize_t start = 0; start < count; start += BLOCK) {
        Counts counts = cast->loop(source + start * cast->source_size, target + start * cast->target_size,
                                   count - start < BLOCK ? count - start : BLOCK);
        sums->overflowed += counts.overflowed;
        sums->flushed += counts.flushed;
    }
}

/* cast(source_dtype, target_dtype, source, target) -> (overflowed, flushed) */
static PyObject *cast(PyObject *module, PyObject *args) {
    const char *source_dtype, *target_dtype;
    Py_buffer source, target;
    if (!PyArg_ParseTuple(args, "ssy*w*", &source_dtype, &target_dtype, &source, &target)) return NULL;
    PyObject *result = NULL;
    Sums sums = {0, 0};
    const Cast *found = find_cast(source_dtype, target_dtype);
    if (!found) goto done;
    Py_ssize_t count = source.len / found->source_size;
    if (source.len != count * found->source_size || target.len != count * found->target_size) {
        PyErr_Format(PyExc_ValueError, "%zd and %zd bytes are not as many elements", source.len, target.len);
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    cast_values(found, source.buf, target.buf, count, &sums);
    Py_END_ALLOW_THREADS
    result = Py_BuildValue("KK", sums.overflowed, sums.flushed);
done:
    PyBuffer_Release(&source);
    PyBuffer_Release(&target);
    return result;
}

/* Replace `crc` with the checksum that continues it with bytes; return whether Python could. */
static int update_checksum(PyObject *checksum, const char *bytes, Py_ssize_t nbytes, PyObject **crc) {
    PyObject *view = PyMemoryView_FromMemory((char *)bytes, nbytes, PyBUF_READ);
    PyObject *next = view ? PyObject_CallFunctionObjArgs(checksum, view, *crc, NULL) : NULL;
    Py_XDECREF(view);
    if (!next) return 0;
    Py_DECREF(*crc);
    *crc = next;
    return 1;
}

/* read(source_dtype, target_dtype, descriptor, byte_offset, target, piece, checksum, crc)
       -> (overflowed, flushed, crc), or None if the file cannot be read up to there

   Every piece is cast while the processor's cache has it. `checksum(bytes, crc)` continues the checksum
   of the bytes that are read; it may be None. */
static PyObject *read_values(PyObject *module, PyObject *args) {
    const char *source_dtype, *target_dtype;
    int descriptor;
    long long offset;
    Py_buffer target, piece;
    PyObject *checksum, *crc, *result = NULL;
    if (!PyArg_ParseTuple(args, "ssiLw*w*OO", &source_dtype, &target_dtype, &descriptor, &offset, &target,
                          &piece, &checksum, &crc))
        return NULL;
    Py_INCREF(crc);
    Sums sums = {0, 0};
    const Cast *found = find_cast(source_dtype, target_dtype);
    if (!found) goto done;
    Py_ssize_t count = target.len / found->target_size, most = piece.len / found->source_size;
    if (target.len != count * found->target_size || !most) {
        PyErr_Format(PyExc_ValueError, "%zd and %zd bytes are not whole elements", target.len, piece.len);
        goto done;
    }
    for (Py_ssize_t start = 0; start < count; start += most) {
        Py_ssize_t values = count - start < most ? count - start : most;
        Py_ssize_t nbytes = values * found->source_size, filled;
        Py_BEGIN_ALLOW_THREADS
        filled = read_at(descriptor, piece.buf, nbytes, offset + start * found->source_size);
        if (filled == nbytes)
            cast_values(found, piece.buf, (char *)target.buf + start * found->target_size, values, &sums);
        Py_END_ALLOW_THREADS
        if (filled != nbytes) {
            result = Py_NewRef(Py_None);
            goto done;
        }
        if (checksum != Py_None && !update_checksum(checksum, piece.buf, nbytes, &crc)) goto done;
    }
    result = Py_BuildValue("KKO", sums.overflowed, sums.flushed, crc);
done:
    Py_DECREF(crc);
    PyBuffer_Release(&target);
    PyBuffer_Release(&piece);
    return result;
}

static PyMethodDef methods[] = {
    {"cast", cast, METH_VARARGS, NULL},
    {"read", read_values, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "reshard.engine.move._cast", NULL, 0, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__cast(void) {
    find_f16c();
    return PyModuleDef_Init(&definition);
}
