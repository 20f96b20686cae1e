/* Weighted sums of float32 values in float64, and their means.

   `reshard.tensors.averages.sums` computes the same bits with numpy where this module was not compiled. The
   compiler may not contract a product and a sum to one operation, which would round only once; it is
   told so in setup.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../../engine/move/values.h"

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

static int check(int is_right) {
    if (!is_right) PyErr_SetString(PyExc_ValueError, "the buffers do not have as many elements");
    return is_right;
}

/* add(values, sums, factor, begins): sums += values * factor; if `begins`, sums = values * factor */
static PyObject *add(PyObject *module, PyObject *args) {
    Py_buffer values, sums;
    double factor;
    int begins;
    if (!PyArg_ParseTuple(args, "y*w*dp", &values, &sums, &factor, &begins)) return NULL;
    Py_ssize_t count = values.len / 4;
    int is_right = check(values.len == 4 * count && sums.len == 8 * count);
    if (is_right) {
        Py_BEGIN_ALLOW_THREADS
        (begins ? begin_sums : add_to_sums)(values.buf, sums.buf, count, factor);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&sums);
    if (!is_right) return NULL;
    Py_RETURN_NONE;
}

/* divide(sums, divisor, means) -> whether all means, rounded to float32, are finite */
static PyObject *divide(PyObject *module, PyObject *args) {
    Py_buffer sums, means;
    double divisor;
    if (!PyArg_ParseTuple(args, "y*dw*", &sums, &divisor, &means)) return NULL;
    Py_ssize_t count = means.len / 4;
    int is_right = check(means.len == 4 * count && sums.len == 8 * count), is_finite = 0;
    if (is_right) {
        Py_BEGIN_ALLOW_THREADS
        is_finite = divide_sums(sums.buf, means.buf, count, divisor);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&sums);
    PyBuffer_Release(&means);
    return is_right ? PyBool_FromLong(is_finite) : NULL;
}

static PyMethodDef methods[] = {
    {"add", add, METH_VARARGS, NULL}, {"divide", divide, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "reshard.tensors.averages._sums", NULL, 0, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__sums(void) { return PyModuleDef_Init(&definition); }
