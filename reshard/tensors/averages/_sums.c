/* Weighted sums, in float64, of float32, float16 and bfloat16 values, and their means in float32.

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

/* Loops that begin sums with the products of a row, and add the products of a row. */
#define ROW_LOOPS(dtype)                                                                                           \
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
    }

/* clang-format off */
ROW_LOOPS(float32)
ROW_LOOPS(float16)
ROW_LOOPS(bfloat16)
/* clang-format on */

typedef void RowLoop(const char *row, char *sums, Py_ssize_t count, double factor);

static const struct {
    char letter;
    int size;
    RowLoop *begin, *add;
} DTYPES[] = {
    {'f', 4, begin_with_float32, add_float32},
    {'e', 2, begin_with_float16, add_float16},
    {'b', 2, begin_with_bfloat16, add_bfloat16},
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

static PyMethodDef methods[] = {
    {"average", average, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "reshard.tensors.averages._sums", NULL, 0, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__sums(void) { return PyModuleDef_Init(&definition); }
