/* Reads at an offset of a file that do not need the interpreter. */

#ifndef RESHARD_READS_H
#define RESHARD_READS_H

#include <unistd.h>

/* Return the number of bytes read: less than `nbytes` if the file ends or cannot be read. */
static inline Py_ssize_t read_at(int descriptor, char *into, Py_ssize_t nbytes, long long offset) {
    Py_ssize_t filled = 0;
    while (filled < nbytes) {
        ssize_t count = pread(descriptor, into + filled, nbytes - filled, offset + filled);
        if (count <= 0) break;
        filled += count;
    }
    return filled;
}

#endif
