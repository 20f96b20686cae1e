/* Weighted sums, in float64, of float32, float16 and bfloat16 values, and their means in float32; sums of two
   rows in float32.

   `reshard.tensors.averages.sums` computes the same bits with numpy where this module was not compiled. The
   compiler may not contract a product and a sum to one operation, which would round only once; it is
   told so in setup.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../../engine/move/values.h"

/* Sums at a time; they stay in the fastest cache. */
#define PART_ELEMENTS 1024

static inline double load_double(const char *base, Py_ssize_t index) {
    double value; /* copied, as buffers need not be aligned */
    memcpy(&value, base + 8 * index, 8);
    return value;
}

/* Write the sums of a row and of float32 terms, in float32 or bfloat16; return how many finite ones became
   infinite as bfloat16, or -1 if one is not finite. The rest is undefined then, so NaN is not rounded on its own. */
INLINED Py_ssize_t add_terms(float (*load)(const char *, Py_ssize_t), const char *row, const char *terms,
                             char *sums, Py_ssize_t count, int itemsize) {
    uint32_t special = 0, overflowed = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        float term;
        memcpy(&term, terms + 4 * i, 4);
        uint32_t bits = bits_of(load(row, i) + term), magnitude = magnitude_of(bits);
        uint16_t half = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
        special |= magnitude >= 0x7F800000;
        overflowed += (half & 0x7FFF) == 0x7F80;
        if (itemsize == 2)
            memcpy(sums + 2 * i, &half, 2);
        else
            memcpy(sums + 4 * i, &bits, 4);
    }
    return special ? -1 : itemsize == 2 ? (Py_ssize_t)overflowed : 0;
}

/* Loops that begin sums with the products of a row, add the products of a row, and add terms to a row. */
#define ROW_LOOPS(dtype, Stored, widen)                                                                            \
    static inline float load_##dtype(const char *base, Py_ssize_t index) {                                         \
        Stored stored;                                                                                             \
        memcpy(&stored, base + sizeof stored * index, sizeof stored);                                              \
        return float_of(widen(stored));                                                                            \
    }                                                                                                              \
    VECTORIZED static void begin_with_##dtype(const char *row, char *sums, Py_ssize_t count, double factor) {      \
        for (Py_ssize_t i = 0; i < count; i++) {                                                                   \
            double sum = load_##dtype(row, i) * factor;                                                            \
            memcpy(sums + 8 * i, &sum, 8);                                                                         \
        }                                                                                                          \
    }                                                                                                              \
    VECTORIZED static void add_##dtype(const char *row, char *sums, Py_ssize_t count, double factor) {             \
        for (Py_ssize_t i = 0; i < count; i++) {                                                                   \
            double sum = load_double(sums, i) + load_##dtype(row, i) * factor;                                     \
            memcpy(sums + 8 * i, &sum, 8);                                                                         \
        }                                                                                                          \
    }                                                                                                              \
    VECTORIZED static Py_ssize_t add_terms_to_##dtype(const char *row, const char *terms, char *sums,              \
                                                      Py_ssize_t count, Py_ssize_t itemsize) {                     \
        return itemsize == 2 ? add_terms(load_##dtype, row, terms, sums, count, 2)                                 \
                             : add_terms(load_##dtype, row, terms, sums, count, 4);                                \
    }

/* clang-format off */
ROW_LOOPS(float32, uint32_t, AS_IS)
ROW_LOOPS(float16, uint16_t, from_float16)
ROW_LOOPS(bfloat16, uint16_t, from_bfloat16)
/* clang-format on */

typedef void RowLoop(const char *row, char *sums, Py_ssize_t count, double factor);
typedef Py_ssize_t TermLoop(const char *row, const char *terms, char *sums, Py_ssize_t count, Py_ssize_t itemsize);

static const struct {
    char letter;
    int size;
    RowLoop *begin, *add;
    TermLoop *add_terms;
} DTYPES[] = {
    {'f', 4, begin_with_float32, add_float32, add_terms_to_float32},
    {'e', 2, begin_with_float16, add_float16, add_terms_to_float16},
    {'b', 2, begin_with_bfloat16, add_bfloat16, add_terms_to_bfloat16},
};

/* Return whether all means are finite. */
VECTORIZED static int divide_sums(const char *sums, char *means, Py_ssize_t count, double divisor) {
    uint32_t special = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        float mean = (float)(load_double(sums, i) / divisor);
        memcpy(means + 4 * i, &mean, 4);
        special |= magnitude_of(bits_of(mean)) >= 0x7F800000;
    }
    return !special;
}

/* Like divide_sums, by multiplication, which takes a quarter of the time. */
VECTORIZED static int multiply_sums(const char *sums, char *means, Py_ssize_t count, double factor) {
    uint32_t special = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        float mean = (float)(load_double(sums, i) * factor);
        memcpy(means + 4 * i, &mean, 4);
        special |= magnitude_of(bits_of(mean)) >= 0x7F800000;
    }
    return !special;
}

/* Return the number of a dtype in `DTYPES`, or of none. */
static size_t find_dtype(char letter) {
    size_t number = 0;
    while (number < sizeof DTYPES / sizeof *DTYPES && DTYPES[number].letter != letter) number++;
    return number;
}

/* Return the number of values in each row; -1 if the rows do not fill the buffer. */
static Py_ssize_t count_values(const char *letters, Py_ssize_t rows, Py_ssize_t nbytes) {
    Py_ssize_t size = 0;
    for (Py_ssize_t row = 0; row < rows; row++) {
        size_t number = find_dtype(letters[row]);
        if (number == sizeof DTYPES / sizeof *DTYPES) return -1;
        size += DTYPES[number].size;
    }
    return size && nbytes % size == 0 ? nbytes / size : -1;
}

/* Return whether all means are finite. */
static int average_rows(const char *values, const char *letters, Py_ssize_t rows, const char *factors, double divisor,
                        char *means, Py_ssize_t count) {
    _Alignas(64) char sums[8 * PART_ELEMENTS];
    int is_finite = 1;
    /* The reciprocal of a power of two, whose mantissa is zero, is exact: the product is the quotient. */
    uint64_t bits;
    memcpy(&bits, &divisor, 8);
    int is_power = bits << 12 == 0;
    for (Py_ssize_t at = 0; at < count; at += PART_ELEMENTS) {
        Py_ssize_t part = count - at < PART_ELEMENTS ? count - at : PART_ELEMENTS;
        const char *begin = values;
        for (Py_ssize_t row = 0; row < rows; row++) {
            size_t dtype = find_dtype(letters[row]);
            Py_ssize_t size = DTYPES[dtype].size;
            (row ? DTYPES[dtype].add : DTYPES[dtype].begin)(begin + size * at, sums, part, load_double(factors, row));
            begin += size * count;
        }
        is_finite &= is_power ? multiply_sums(sums, means + 4 * at, part, 1 / divisor)
                              : divide_sums(sums, means + 4 * at, part, divisor);
    }
    return is_finite;
}

/* average(values, dtypes, factors, divisor, means) -> whether all means are finite

   `values` has the rows one after the other. `dtypes` has a letter for the dtype of each row, and
   `factors` a float64. A mean is the sum of the products of a column, in float64, divided by a number
   and rounded to float32. */
static PyObject *average(PyObject *module, PyObject *args) {
    Py_buffer values, factors, means;
    const char *dtypes;
    Py_ssize_t rows;
    double divisor;
    if (!PyArg_ParseTuple(args, "y*s#y*dw*", &values, &dtypes, &rows, &factors, &divisor, &means)) return NULL;
    Py_ssize_t count = count_values(dtypes, rows, values.len);
    int is_right = factors.len == 8 * rows && count >= 0 && means.len == 4 * count;
    int is_finite = 0;
    if (is_right) {
        Py_BEGIN_ALLOW_THREADS
        is_finite = average_rows(values.buf, dtypes, rows, factors.buf, divisor, means.buf, count);
        Py_END_ALLOW_THREADS
    } else {
        PyErr_SetString(PyExc_ValueError, "the buffers do not have as many elements");
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&factors);
    PyBuffer_Release(&means);
    return is_right ? PyBool_FromLong(is_finite) : NULL;
}

static int do_overlap(const Py_buffer *one, const Py_buffer *other) {
    uintptr_t first = (uintptr_t)one->buf, second = (uintptr_t)other->buf;
    return first < second + other->len && second < first + one->len;
}

/* add(values, dtype, terms, sums, itemsize) -> how many finite sums became infinite; -1 if a sum is not finite

   The terms are float32, and so are the sums, or bfloat16 if the item size is 2. Sums may be written over values
   and terms: each part is added in a buffer then. */
static PyObject *add(PyObject *module, PyObject *args) {
    Py_buffer values, terms, sums;
    int letter;
    Py_ssize_t itemsize, overflowed = 0;
    if (!PyArg_ParseTuple(args, "y*Cy*w*n", &values, &letter, &terms, &sums, &itemsize)) return NULL;
    size_t dtype = find_dtype((char)letter);
    Py_ssize_t count = terms.len / 4, size = dtype < sizeof DTYPES / sizeof *DTYPES ? DTYPES[dtype].size : 0;
    int is_right = size && (itemsize == 2 || itemsize == 4) && terms.len % 4 == 0 && values.len == size * count &&
                   sums.len == itemsize * count;
    if (is_right) {
        _Alignas(64) char made[4 * PART_ELEMENTS];
        int overlap = do_overlap(&sums, &values) || do_overlap(&sums, &terms);
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t at = 0; at < count && overflowed >= 0; at += PART_ELEMENTS) {
            Py_ssize_t part = count - at < PART_ELEMENTS ? count - at : PART_ELEMENTS;
            char *into = (char *)sums.buf + itemsize * at;
            Py_ssize_t found = DTYPES[dtype].add_terms((char *)values.buf + size * at, (char *)terms.buf + 4 * at,
                                                       overlap ? made : into, part, itemsize);
            overflowed = found < 0 ? -1 : overflowed + found;
            if (overlap) memcpy(into, made, itemsize * part);
        }
        Py_END_ALLOW_THREADS
    } else {
        PyErr_SetString(PyExc_ValueError, "the buffers do not have as many elements");
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&terms);
    PyBuffer_Release(&sums);
    return is_right ? PyLong_FromSsize_t(overflowed) : NULL;
}

static PyMethodDef methods[] = {
    {"average", average, METH_VARARGS, NULL}, {"add", add, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "reshard.tensors.averages._sums", NULL, 0, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__sums(void) { return PyModuleDef_Init(&definition); }
