/* The comparison of a file with bytes in memory, piece by piece.

   `reshard.engine.output.files` does the same in Python where this module was not compiled. */

#define _FILE_OFFSET_BITS 64
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

#include "reads.h"

/* equals(descriptor, byte_offset, data, piece) -> bool, or None if the file cannot be read up to there

   Every piece is compared while the processor's cache has it. */
static PyObject *equals(PyObject *module, PyObject *args) {
    int descriptor, equal = 1;
    long long offset;
    Py_buffer data, piece;
    if (!PyArg_ParseTuple(args, "iLy*w*", &descriptor, &offset, &data, &piece)) return NULL;
    Py_ssize_t done = 0;
    Py_BEGIN_ALLOW_THREADS
    while (done < data.len && equal) {
        Py_ssize_t nbytes = data.len - done < piece.len ? data.len - done : piece.len;
        if (!nbytes || read_at(descriptor, piece.buf, nbytes, offset + done) < nbytes) break;
        equal = !memcmp(piece.buf, (char *)data.buf + done, nbytes);
        done += nbytes;
    }
    Py_END_ALLOW_THREADS
    PyObject *result = equal && done < data.len ? Py_NewRef(Py_None) : PyBool_FromLong(equal);
    PyBuffer_Release(&data);
    PyBuffer_Release(&piece);
    return result;
}

static PyMethodDef methods[] = {{"equals", equals, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "reshard.system._reads", NULL, 0, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__reads(void) { return PyModuleDef_Init(&definition); }
