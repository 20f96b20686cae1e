/* Weighted sums of float32 values in float64, and their means.

   `reshard.tensors.averages.sums` computes the same bits with numpy where this module was not compiled. The
   compiler may not contract a product and a sum to one operation, which would round only once; it is
   told so in setup.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../../engine/move/values.h"

/* Sums at a time; they stay in the fastest cache. */
#define PART_ELEMENTS 1024

/* Buffers need not be aligned, so elements are copied. */
static inline double load_float(const char *base, Py_ssize_t index) {
    float value;
    memcpy(&value, base + 4 * index, 4);
    return value;
}

static inline double load_double(const char *base, Py_ssize_t index) {
    double value;
    memcpy(&value, base + 8 * index, 8);
    return value;
}

VECTORIZED static void begin_sums(const char *values, char *sums, Py_ssize_t count, double factor) {
    for (Py_ssize_t i = 0; i < count; i++) {
        double sum = load_float(values, i) * factor;
        memcpy(sums + 8 * i, &sum, 8);
    }
}

VECTORIZED static void add_to_sums(const char *values, char *sums, Py_ssize_t count, double factor) {
    for (Py_ssize_t i = 0; i < count; i++) {
        double sum = load_double(sums, i) + load_float(values, i) * factor;
        memcpy(sums + 8 * i, &sum, 8);
    }
}

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

/* Return whether all means are finite. */
static int average_rows(const char *values, Py_ssize_t rows, const char *factors, double divisor, char *means,
                        Py_ssize_t count) {
    char sums[8 * PART_ELEMENTS];
    int is_finite = 1;
    /* The reciprocal of a power of two, whose mantissa is zero, is exact: the product is the quotient. */
    uint64_t bits;
    memcpy(&bits, &divisor, 8);
    int is_power = bits << 12 == 0;
    for (Py_ssize_t at = 0; at < count; at += PART_ELEMENTS) {
        Py_ssize_t part = count - at < PART_ELEMENTS ? count - at : PART_ELEMENTS;
        for (Py_ssize_t row = 0; row < rows; row++)
            (row ? add_to_sums : begin_sums)(values + 4 * (row * count + at), sums, part, load_double(factors, row));
        is_finite &= is_power ? multiply_sums(sums, means + 4 * at, part, 1 / divisor)
                              : divide_sums(sums, means + 4 * at, part, divisor);
    }
    return is_finite;
}

/* average(values, factors, divisor, means) -> whether all means are finite

   `values` has a row of float32 for each factor, a float64. A mean is the sum of the products of a
   column, in float64, divided by a number and rounded to float32. */
static PyObject *average(PyObject *module, PyObject *args) {
    Py_buffer values, factors, means;
    double divisor;
    if (!PyArg_ParseTuple(args, "y*y*dw*", &values, &factors, &divisor, &means)) return NULL;
    Py_ssize_t rows = factors.len / 8, count = means.len / 4;
    int is_right = factors.len == 8 * rows && means.len == 4 * count && rows > 0 && values.len / 4 / rows == count &&
                   values.len == 4 * rows * count;
    int is_finite = 0;
    if (is_right) {
        Py_BEGIN_ALLOW_THREADS
        is_finite = average_rows(values.buf, rows, factors.buf, divisor, means.buf, count);
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
