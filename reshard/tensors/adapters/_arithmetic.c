/* Sums of a matrix and of the product of two matrices, in float32.

   `reshard.tensors.adapters.arithmetic` computes the same bits with numpy where this module was not compiled. The
   compiler may not contract a product and a sum to one operation, which would round only once; it is
   told so in setup.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>

#include "../../engine/move/values.h"

/* A block of sums, which stays in the fastest cache. */
#define PART_ROWS 4
#define PART_COLUMNS 512
/* Products that are added between one load of a sum and its store. */
#define DEPTH 4

typedef struct {
    const char *values, *left, *right; /* (rows, columns), (rows, rank) and (rank, columns) */
    char *sums;
    Py_ssize_t rows, rank, columns;
    float scale;
} Task;

typedef float Part[PART_ROWS][PART_COLUMNS];

/* Add `depth` products, in order, to each of `count` sums of `rows` rows; the first ones are added to 0. */
INLINED void add_products(const Task *task, Py_ssize_t row, Py_ssize_t column, Py_ssize_t at, Part sums,
                          Py_ssize_t count, int rows, int depth, int is_first) {
    float factors[PART_ROWS][DEPTH];
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < depth; k++)
            factors[i][k] = load_float32(task->left, (row + i) * task->rank + at + k) * task->scale;
    const char *right = task->right + 4 * (at * task->columns + column);
    for (Py_ssize_t j = 0; j < count; j++) {
        float others[DEPTH]; /* loaded once for all rows */
        for (int k = 0; k < depth; k++) others[k] = load_float32(right, k * task->columns + j);
        for (int i = 0; i < rows; i++) {
            float sum = is_first ? 0 : sums[i][j];
            for (int k = 0; k < depth; k++) sum += factors[i][k] * others[k];
            sums[i][j] = sum;
        }
    }
}

/* Compute the product of `rows` rows and `count` columns. */
VECTORIZED static void multiply(const Task *task, Py_ssize_t row, Py_ssize_t column, Part sums, Py_ssize_t rows,
                                Py_ssize_t count) {
    Py_ssize_t at = 0;
    if (rows == PART_ROWS && task->rank >= DEPTH) {
        add_products(task, row, column, 0, sums, count, PART_ROWS, DEPTH, 1);
        for (at = DEPTH; at + DEPTH <= task->rank; at += DEPTH)
            add_products(task, row, column, at, sums, count, PART_ROWS, DEPTH, 0);
    }
    for (; at < task->rank; at++)
        for (Py_ssize_t i = 0; i < rows; i++)
            add_products(task, row + i, column, at, sums + i, count, 1, 1, at == 0);
}

/* Return how many of `count` bfloat16 values are infinite. */
static Py_ssize_t count_infinite(const char *values, Py_ssize_t count) {
    Py_ssize_t found = 0;
    for (Py_ssize_t i = 0; i < count; i++) found += isinf(load_bfloat16(values, i)) != 0;
    return found;
}

/* Write the sums of values and of float32 terms, in float32 or bfloat16; return how many finite ones became
   infinite as bfloat16, or -1 if one is not finite. The rest is undefined then, so NaN is not rounded on its own. */
INLINED Py_ssize_t add_terms(float (*load)(const char *, Py_ssize_t), const char *values, const float *terms,
                             char *sums, Py_ssize_t count, int itemsize) {
    int32_t largest = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t bits = bits_of(load(values, i) + terms[i]);
        int32_t magnitude = magnitude_of(bits);
        largest = largest > magnitude ? largest : magnitude;
        if (itemsize == 2) {
            uint16_t half = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
            memcpy(sums + 2 * i, &half, 2);
        } else {
            memcpy(sums + 4 * i, &bits, 4);
        }
    }
    if (largest >= 0x7F800000) return -1;
    /* From this magnitude on, a finite value is rounded to an infinite one. */
    return itemsize == 2 && largest >= 0x7F7F8000 ? count_infinite(sums, count) : 0;
}

#define TERM_LOOP(dtype)                                                                                           \
    VECTORIZED static Py_ssize_t add_terms_to_##dtype(const char *values, const float *terms, char *sums,          \
                                                      Py_ssize_t count, Py_ssize_t itemsize) {                     \
        return itemsize == 2 ? add_terms(load_##dtype, values, terms, sums, count, 2)                              \
                             : add_terms(load_##dtype, values, terms, sums, count, 4);                             \
    }

/* clang-format off */
TERM_LOOP(float32)
TERM_LOOP(float16)
TERM_LOOP(bfloat16)
/* clang-format on */

typedef Py_ssize_t TermLoop(const char *values, const float *terms, char *sums, Py_ssize_t count,
                            Py_ssize_t itemsize);

static const struct {
    char letter;
    int size;
    TermLoop *add_terms;
} DTYPES[] = {
    {'f', 4, add_terms_to_float32},
    {'e', 2, add_terms_to_float16},
    {'b', 2, add_terms_to_bfloat16},
};

/* Whole rows are computed one after the other, as the processor fetches memory best in its order. */
static Py_ssize_t add_matrices(const Task *task, size_t dtype, Py_ssize_t itemsize) {
    Part terms;
    Py_ssize_t overflowed = 0, size = DTYPES[dtype].size;
    for (Py_ssize_t row = 0; row < task->rows; row += PART_ROWS) {
        Py_ssize_t below = task->rows - row, rows = below < PART_ROWS ? below : PART_ROWS;
        for (Py_ssize_t column = 0; column < task->columns; column += PART_COLUMNS) {
            Py_ssize_t rest = task->columns - column, count = rest < PART_COLUMNS ? rest : PART_COLUMNS;
            multiply(task, row, column, terms, rows, count);
            for (Py_ssize_t i = 0; i < rows; i++) {
                Py_ssize_t at = (row + i) * task->columns + column;
                Py_ssize_t found = DTYPES[dtype].add_terms(task->values + size * at, terms[i],
                                                           task->sums + itemsize * at, count, itemsize);
                if (found < 0) return -1;
                overflowed += found;
            }
        }
    }
    return overflowed;
}

/* add_product(values, dtype, left, right, rank, scale, sums, itemsize)
       -> how many finite sums became infinite; -1 if a sum is not finite

   The matrices are row-major: `values` and `sums` (rows, columns), `left` (rows, rank), `right` (rank, columns).
   `left` and `right` are float32, `values` has a dtype of `DTYPES`; `sums` are float32, or bfloat16 if the item
   size is 2. The memory of `sums` is not that of another matrix. */
static PyObject *add_product(PyObject *module, PyObject *args) {
    Py_buffer values, left, right, sums;
    int letter;
    Py_ssize_t rank, itemsize, overflowed = 0;
    double scale;
    if (!PyArg_ParseTuple(args, "y*Cy*y*ndw*n", &values, &letter, &left, &right, &rank, &scale, &sums, &itemsize))
        return NULL;
    size_t dtype = 0, known = sizeof DTYPES / sizeof *DTYPES;
    while (dtype < known && DTYPES[dtype].letter != letter) dtype++;
    int is_right = dtype < known && (itemsize == 2 || itemsize == 4) && rank > 0 && left.len % (4 * rank) == 0 &&
                   right.len % (4 * rank) == 0;
    if (is_right) {
        Py_ssize_t rows = left.len / (4 * rank), columns = right.len / (4 * rank);
        Task task = {values.buf, left.buf, right.buf, sums.buf, rows, rank, columns, (float)scale};
        is_right = values.len == DTYPES[dtype].size * rows * columns && sums.len == itemsize * rows * columns;
        if (is_right) {
            Py_BEGIN_ALLOW_THREADS
            overflowed = add_matrices(&task, dtype, itemsize);
            Py_END_ALLOW_THREADS
        }
    }
    if (!is_right) PyErr_SetString(PyExc_ValueError, "the buffers do not have as many elements");
    PyBuffer_Release(&values);
    PyBuffer_Release(&left);
    PyBuffer_Release(&right);
    PyBuffer_Release(&sums);
    return is_right ? PyLong_FromSsize_t(overflowed) : NULL;
}

static PyMethodDef methods[] = {{"add_product", add_product, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                        "reshard.tensors.adapters._arithmetic",
                                        NULL,
                                        0,
                                        methods,
                                        NULL,
                                        NULL,
                                        NULL,
                                        NULL};

PyMODINIT_FUNC PyInit__arithmetic(void) { return PyModuleDef_Init(&definition); }
