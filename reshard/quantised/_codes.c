/* Loops over the values of quantised weights: codes to values, values to codes, comparisons.

   `reshard.quantised.loops` computes the same bits with numpy where this module was not compiled.
   A matrix is row-major; its values are float32, or bfloat16 if the item size is 2. `high` rows after
   one another share a line, which has an element for each column: a scale, a maximum, or whether all
   values are equal. The loops have no branches, so that the compiler vectorizes them. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../engine/move/values.h"

/* Columns of a row that are widened or multiplied at a time, in the fastest cache. */
#define PART_COLUMNS 2048
/* Rows that are transposed at a time; a cache line of each is in the fastest cache. */
#define PART_ROWS 256

/* Buffers need not be aligned, so elements are copied. */
static inline uint32_t load(const char *base, Py_ssize_t index) {
    uint32_t bits;
    memcpy(&bits, base + 4 * index, 4);
    return bits;
}

static inline void store(char *base, Py_ssize_t index, uint32_t bits) { memcpy(base + 4 * index, &bits, 4); }

VECTORIZED static void widen_row(const char *values, char *out, Py_ssize_t columns) {
    for (Py_ssize_t i = 0; i < columns; i++) {
        uint16_t half;
        memcpy(&half, values + 2 * i, 2);
        store(out, i, (uint32_t)half << 16);
    }
}

/* Part of a row as float32: where it is, or widened from bfloat16 into a buffer. */
static inline const char *widen(const char *values, Py_ssize_t at, Py_ssize_t itemsize, char *buffer,
                                Py_ssize_t columns) {
    const char *first = values + at * itemsize;
    if (itemsize == 4) return first;
    widen_row(first, buffer, columns);
    return buffer;
}

VECTORIZED static void decode_row(const uint8_t *codes, const char *table, const char *scales,
                                  char *out, Py_ssize_t columns) {
    for (Py_ssize_t i = 0; i < columns; i++)
        store(out, i, bits_of(float_of(load(table, codes[i])) * float_of(load(scales, i))));
}

/* The bits as float32 of an e4m3fn code. */
static inline uint32_t bits_of_e4m3(uint32_t code) {
    int32_t magnitude = code & 0x7F;
    uint32_t normal = (magnitude << 20) + (120 << 23);
    uint32_t bits = magnitude < 8 ? bits_of((float)magnitude * 0x1p-9f) : normal;
    return (magnitude == 127 ? 0x7FC00000 : bits) | (code & 0x80) << 24;
}

/* The usual codes: arithmetic is vectorized, a look-up is not. */
VECTORIZED static void decode_e4m3_row(const uint8_t *codes, const char *scales, char *out,
                                       Py_ssize_t columns) {
    for (Py_ssize_t i = 0; i < columns; i++)
        store(out, i, bits_of(float_of(bits_of_e4m3(codes[i])) * float_of(load(scales, i))));
}

/* How the finite values of a code are stored: exponent bias, mantissa bits, largest magnitude. */
typedef struct {
    const char *name;
    int32_t bias, mantissa, largest, sign;
} Format;

static const Format FORMATS[] = {
    {"float8_e4m3fn", 7, 3, 0x7E, 0x80}, {"float8_e5m2", 15, 2, 0x7B, 0x80}, {"e2m1", 1, 1, 7, 8}};
enum { E2M1 = 2 };

/* Round value / scale to nearest even; what is larger than the largest code, and NaN, becomes it. */
VECTORIZED static void encode_row(const char *values, const char *scales, uint8_t *codes,
                                  Py_ssize_t columns, const Format *format) {
    int32_t shift = 23 - format->mantissa, half = (1 << (shift - 1)) - 1;
    int32_t rebias = (127 - format->bias) << 23, smallest = rebias + (1 << 23);
    int32_t largest = format->largest, sign = format->sign;
    /* Its unit in the last place is the smallest subnormal code, so a sum with it rounds to that. */
    int32_t magic = (127 + 24 - format->bias - format->mantissa) << 23;
    for (Py_ssize_t i = 0; i < columns; i++) {
        uint32_t bits = bits_of(float_of(load(values, i)) / float_of(load(scales, i)));
        int32_t magnitude = magnitude_of(bits);
        int32_t capped = magnitude < 0x7F000000 ? magnitude : 0x7F000000;
        int32_t normal = (capped - rebias + half + (capped >> shift & 1)) >> shift;
        int32_t subnormal = (int32_t)bits_of(float_of(capped) + float_of(magic)) - magic;
        int32_t made = capped < smallest ? subnormal : normal;
        made = made < largest ? made : largest;
        codes[i] = made | (bits >> 31) * sign;
    }
}

/* As integers, magnitudes have the order of the values, with NaN above all. */
VECTORIZED static void largest_row(const char *values, char *line, Py_ssize_t columns) {
    for (Py_ssize_t i = 0; i < columns; i++) {
        int32_t before = load(line, i), magnitude = magnitude_of(load(values, i));
        store(line, i, before > magnitude ? before : magnitude);
    }
}

VECTORIZED static void compare_row(const char *values, const char *others, char *line,
                                   Py_ssize_t columns) {
    for (Py_ssize_t i = 0; i < columns; i++) {
        uint32_t value = load(values, i), other = load(others, i);
        uint32_t is_same = value == other, is_rounded = value == to_bfloat16(other) << 16;
        store(line, i, load(line, i) & (is_same | is_rounded << 1));
    }
}

/* The same for values in bfloat16, of which only NaN is rounded to other bits. */
VECTORIZED static void compare_halves_row(const char *values, const char *others, char *line,
                                          Py_ssize_t columns) {
    for (Py_ssize_t i = 0; i < columns; i++) {
        uint16_t value, other;
        memcpy(&value, values + 2 * i, 2);
        memcpy(&other, others + 2 * i, 2);
        uint16_t rounded = (other & 0x7FFF) > 0x7F80 ? 0x7FC0 : other;
        uint32_t is_same = value == other, is_rounded = value == rounded;
        store(line, i, load(line, i) & (is_same | is_rounded << 1));
    }
}

/* out[2 * i] = in[i], out[2 * i + 1] = in[128 + i]: rotates the bits of the index by one. */
static inline void shuffle(const uint8_t *in, uint8_t *out) {
    for (int i = 0; i < 128; i++) {
        out[2 * i] = in[i];
        out[2 * i + 1] = in[128 + i];
    }
}

/* Four shuffles swap the row and the column in the index of a matrix of 16 x 16. They are slower with
   AVX-512. Blocks below one another are next to one another in `out`, in one line of the cache and in one
   page of memory, where a row of blocks would be in as many as it has columns. */
UP_TO_AVX2 static void transpose_blocks(const uint8_t *in, Py_ssize_t rows, Py_ssize_t columns, uint8_t *out,
                                        Py_ssize_t width) {
    uint8_t block[256], other[256];
    for (Py_ssize_t column = 0; column + 16 <= columns; column += 16)
        for (Py_ssize_t row = 0; row < rows; row += 16) {
            for (int i = 0; i < 16; i++) memcpy(block + 16 * i, in + (row + i) * columns + column, 16);
            shuffle(block, other);
            shuffle(other, block);
            shuffle(block, other);
            shuffle(other, block);
            for (int i = 0; i < 16; i++) memcpy(out + (column + i) * width + row, block + 16 * i, 16);
        }
}

static void transpose_bytes(const uint8_t *in, Py_ssize_t rows, Py_ssize_t columns, uint8_t *out,
                            Py_ssize_t width) {
    Py_ssize_t row = 0, even = rows - rows % 16;
    while (row < even) {
        Py_ssize_t count = even - row < PART_ROWS ? even - row : PART_ROWS;
        transpose_blocks(in + row * columns, count, columns, out + row, width);
        for (Py_ssize_t column = columns - columns % 16; column < columns; column++)
            for (Py_ssize_t i = row; i < row + count; i++) out[column * width + i] = in[i * columns + column];
        row += count;
    }
    for (; row < rows; row++)
        for (Py_ssize_t column = 0; column < columns; column++) out[column * width + row] = in[row * columns + column];
}

/* The bits as float32 of an e2m1 code without its sign: 0, 0.5, 1, 1.5, 2, 3, 4, 6. */
static inline uint32_t bits_of_e2m1(uint32_t code) {
    return code > 1 ? (code + 252) << 22 : -(code & 1) & 0x3F000000;
}

/* Whether the products of all e2m1 codes and these scales, which are exponents of two, are normal numbers. */
VECTORIZED static int are_usual(const uint8_t *scales, Py_ssize_t count) {
    uint8_t others = 0;
    for (Py_ssize_t i = 0; i < count; i++) others |= (uint8_t)(scales[i] - 2) > 250;
    return !others;
}

/* The products of one column of codes of 4 bits, in one half of each byte, and their scales. A product is
   exact as bfloat16, the upper half of a float32. */
VECTORIZED static void decode_column(const uint8_t *codes, const uint8_t *scales, char *out,
                                     Py_ssize_t rows, int shift) {
    for (Py_ssize_t i = 0; i < rows; i++) {
        uint32_t code = codes[i] >> shift, scale = scales[i] ? (uint32_t)scales[i] << 23 : 1 << 22;
        float product = float_of(bits_of_e2m1(code & 7)) * float_of(scale);
        uint16_t half = bits_of(product) >> 16 | (code & 8) << 12;
        memcpy(out + 2 * i, &half, 2);
    }
}

/* The same for usual scales, by integers of 16 bits: adds the scale to the exponent of the code. */
VECTORIZED static void decode_usual_column(const uint8_t *codes, const uint8_t *scales, char *out,
                                           Py_ssize_t rows, int shift) {
    for (Py_ssize_t i = 0; i < rows; i++) {
        uint16_t code = codes[i] >> shift & 15, magnitude = code & 7;
        uint16_t exponent = (uint16_t)(scales[i] - 127) << 7;
        uint16_t half = magnitude > 1 ? (magnitude + 252) << 6 : 0x3F00;
        half = magnitude ? half + exponent : 0;
        half |= (code & 8) << 12;
        memcpy(out + 2 * i, &half, 2);
    }
}

/* Return whether buffers have the sizes of `rows` rows of `columns` elements, and their lines. */
static int check(int is_right) {
    if (!is_right) PyErr_SetString(PyExc_ValueError, "the buffers do not have the size of the matrix");
    return is_right;
}

static Py_ssize_t count_lines(Py_ssize_t rows, Py_ssize_t high) { return rows / high + (rows % high != 0); }

/* Whether `size` values are whole rows of `columns`, and a line is as long as a row of blocks. */
static int is_matrix(Py_ssize_t size, Py_ssize_t line_bytes, Py_ssize_t columns, Py_ssize_t high) {
    return columns > 0 && high > 0 && size % columns == 0 && line_bytes % 4 == 0 &&
           line_bytes / 4 % columns == 0 && line_bytes / 4 / columns == count_lines(size / columns, high);
}

/* Whether a buffer has `size` values of float32 or bfloat16. */
static int has_values(const Py_buffer *values, Py_ssize_t itemsize, Py_ssize_t size) {
    return (itemsize == 4 || itemsize == 2) && values->len % itemsize == 0 && values->len / itemsize == size;
}

/* Part of a row: the first element in the matrix and in the lines, and the number of elements. */
typedef struct {
    Py_ssize_t at, line, count;
} Part;

/* Go on to the next part of a matrix of `size` elements; return whether there is one. The first follows
   a part of zeros. */
static inline int take_part(Part *part, Py_ssize_t size, Py_ssize_t columns, Py_ssize_t high) {
    part->at += part->count;
    if (part->at == size) return 0;
    Py_ssize_t row = part->at / columns, column = part->at % columns;
    part->line = row / high * columns + column;
    part->count = columns - column < PART_COLUMNS ? columns - column : PART_COLUMNS;
    return 1;
}

/* How a dtype of codes is decoded: by arithmetic, or by a table of 256 values. */
typedef struct {
    const char *table;
    int is_e4m3;
} Decoder;

static inline void decode_part(const Decoder *decoder, const uint8_t *codes, const char *scales, char *out,
                               Py_ssize_t columns) {
    if (decoder->is_e4m3)
        decode_e4m3_row(codes, scales, out, columns);
    else
        decode_row(codes, decoder->table, scales, out, columns);
}

/* decode(codes, table, scales, out, columns, high, dtype): out = table[codes] * scales */
static PyObject *decode(PyObject *module, PyObject *args) {
    Py_buffer codes, table, scales, out;
    Py_ssize_t columns, high;
    const char *dtype;
    if (!PyArg_ParseTuple(args, "y*y*y*w*nns", &codes, &table, &scales, &out, &columns, &high, &dtype))
        return NULL;
    int is_right = check(is_matrix(codes.len, scales.len, columns, high) && table.len == 1024 &&
                         out.len % 4 == 0 && out.len / 4 == codes.len);
    if (is_right) {
        Decoder decoder = {table.buf, !strcmp(dtype, "float8_e4m3fn")};
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t row = 0; row < codes.len / columns; row++)
            decode_part(&decoder, (uint8_t *)codes.buf + row * columns,
                        (char *)scales.buf + row / high * columns * 4,
                        (char *)out.buf + row * columns * 4, columns);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&codes);
    PyBuffer_Release(&table);
    PyBuffer_Release(&scales);
    PyBuffer_Release(&out);
    if (!is_right) return NULL;
    Py_RETURN_NONE;
}

/* encode(values, itemsize, scales, codes, columns, high, format): codes = round(values / scales) */
static PyObject *encode(PyObject *module, PyObject *args) {
    Py_buffer values, scales, codes;
    Py_ssize_t itemsize, columns, high;
    const char *name;
    if (!PyArg_ParseTuple(args, "y*ny*w*nns", &values, &itemsize, &scales, &codes, &columns, &high, &name))
        return NULL;
    size_t number = 0, known = sizeof FORMATS / sizeof *FORMATS;
    while (number < known && strcmp(FORMATS[number].name, name)) number++;
    int is_right = check(number < known && is_matrix(codes.len, scales.len, columns, high) &&
                         has_values(&values, itemsize, codes.len));
    if (is_right) {
        char wide[4 * PART_COLUMNS];
        Py_BEGIN_ALLOW_THREADS
        for (Part part = {0}; take_part(&part, codes.len, columns, high);) {
            encode_row(widen(values.buf, part.at, itemsize, wide, part.count),
                       (char *)scales.buf + part.line * 4, (uint8_t *)codes.buf + part.at, part.count,
                       &FORMATS[number]);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&scales);
    PyBuffer_Release(&codes);
    if (!is_right) return NULL;
    Py_RETURN_NONE;
}

/* Pack codes of 4 bits of one row into the upper halves of bytes that have those of another row. */
VECTORIZED static void pack_row(uint8_t *codes, const uint8_t *upper, Py_ssize_t columns) {
    for (Py_ssize_t i = 0; i < columns; i++) codes[i] |= upper[i] << 4;
}

/* encode_pairs(values, itemsize, scales, codes, columns, high): like `encode` to e2m1, with the codes of two
   rows in each row of bytes; `high` is even */
static PyObject *encode_pairs(PyObject *module, PyObject *args) {
    Py_buffer values, scales, codes;
    Py_ssize_t itemsize, columns, high;
    if (!PyArg_ParseTuple(args, "y*ny*w*nn", &values, &itemsize, &scales, &codes, &columns, &high)) return NULL;
    Py_ssize_t size = itemsize > 0 ? values.len / itemsize : 0;
    int is_right = check(high % 2 == 0 && size % 2 == 0 && codes.len == size / 2 && has_values(&values, itemsize, size) &&
                         is_matrix(size, scales.len, columns, high) && codes.len % columns == 0);
    if (is_right) {
        char wide[4 * PART_COLUMNS];
        uint8_t upper[PART_COLUMNS];
        Py_BEGIN_ALLOW_THREADS
        for (Part part = {0}; take_part(&part, size, columns, high);) {
            Py_ssize_t row = part.at / columns, column = part.at % columns;
            uint8_t *packed = (uint8_t *)codes.buf + row / 2 * columns + column;
            encode_row(widen(values.buf, part.at, itemsize, wide, part.count), (char *)scales.buf + part.line * 4,
                       row % 2 ? upper : packed, part.count, &FORMATS[E2M1]);
            if (row % 2) pack_row(packed, upper, part.count);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&scales);
    PyBuffer_Release(&codes);
    if (!is_right) return NULL;
    Py_RETURN_NONE;
}

/* find_largest(values, itemsize, lines, columns, high): lines = largest magnitudes of `high` rows */
static PyObject *find_largest(PyObject *module, PyObject *args) {
    Py_buffer values, lines;
    Py_ssize_t itemsize, columns, high;
    if (!PyArg_ParseTuple(args, "y*nw*nn", &values, &itemsize, &lines, &columns, &high)) return NULL;
    Py_ssize_t size = itemsize > 0 ? values.len / itemsize : 0;
    int is_right = check(has_values(&values, itemsize, size) && is_matrix(size, lines.len, columns, high));
    if (is_right) {
        char wide[4 * PART_COLUMNS];
        Py_BEGIN_ALLOW_THREADS
        memset(lines.buf, 0, lines.len);
        for (Part part = {0}; take_part(&part, size, columns, high);) {
            largest_row(widen(values.buf, part.at, itemsize, wide, part.count),
                        (char *)lines.buf + part.line * 4, part.count);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&lines);
    if (!is_right) return NULL;
    Py_RETURN_NONE;
}

/* compare(values, itemsize, others, other_itemsize, lines, columns, high): bit 0 of each element of a line tells whether all
   values of `high` rows are those of the other matrix, bit 1 whether they are these as bfloat16 */
static PyObject *compare(PyObject *module, PyObject *args) {
    Py_buffer values, others, lines;
    Py_ssize_t itemsize, other_itemsize, columns, high;
    if (!PyArg_ParseTuple(args, "y*ny*nw*nn", &values, &itemsize, &others, &other_itemsize, &lines, &columns,
                          &high))
        return NULL;
    Py_ssize_t size = itemsize > 0 ? values.len / itemsize : 0;
    int is_right = check(has_values(&values, itemsize, size) && has_values(&others, other_itemsize, size) &&
                         is_matrix(size, lines.len, columns, high));
    if (is_right) {
        char wide[4 * PART_COLUMNS], other[4 * PART_COLUMNS];
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < lines.len / 4; i++) store(lines.buf, i, 3);
        for (Part part = {0}; take_part(&part, size, columns, high);) {
            char *line = (char *)lines.buf + part.line * 4;
            if (itemsize == 2 && other_itemsize == 2)
                compare_halves_row((char *)values.buf + 2 * part.at, (char *)others.buf + 2 * part.at, line,
                                   part.count);
            else
                compare_row(widen(values.buf, part.at, itemsize, wide, part.count),
                            widen(others.buf, part.at, other_itemsize, other, part.count), line, part.count);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&others);
    PyBuffer_Release(&lines);
    if (!is_right) return NULL;
    Py_RETURN_NONE;
}

/* compare_codes(values, itemsize, codes, table, scales, lines, columns, high, dtype): compares values with the
   products of codes and scales, like `compare` */
static PyObject *compare_codes(PyObject *module, PyObject *args) {
    Py_buffer values, codes, table, scales, lines;
    Py_ssize_t itemsize, columns, high;
    const char *dtype;
    if (!PyArg_ParseTuple(args, "y*ny*y*y*w*nns", &values, &itemsize, &codes, &table, &scales, &lines,
                          &columns, &high, &dtype))
        return NULL;
    int is_right = check(is_matrix(codes.len, lines.len, columns, high) && scales.len == lines.len &&
                         table.len == 1024 && has_values(&values, itemsize, codes.len));
    if (is_right) {
        Decoder decoder = {table.buf, !strcmp(dtype, "float8_e4m3fn")};
        char wide[4 * PART_COLUMNS], products[4 * PART_COLUMNS];
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < lines.len / 4; i++) store(lines.buf, i, 3);
        for (Part part = {0}; take_part(&part, codes.len, columns, high);) {
            decode_part(&decoder, (uint8_t *)codes.buf + part.at, (char *)scales.buf + part.line * 4,
                        products, part.count);
            compare_row(widen(values.buf, part.at, itemsize, wide, part.count), products,
                        (char *)lines.buf + part.line * 4, part.count);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&codes);
    PyBuffer_Release(&table);
    PyBuffer_Release(&scales);
    PyBuffer_Release(&lines);
    if (!is_right) return NULL;
    Py_RETURN_NONE;
}

/* transpose(matrix, out, columns, at): element `at` + i of each row of `out` is of row i of the matrix */
static PyObject *transpose(PyObject *module, PyObject *args) {
    Py_buffer matrix, out;
    Py_ssize_t columns, at;
    if (!PyArg_ParseTuple(args, "y*w*nn", &matrix, &out, &columns, &at)) return NULL;
    int is_right = check(columns > 0 && matrix.len % columns == 0 && out.len % columns == 0 && at >= 0 &&
                         at <= out.len / columns && matrix.len / columns <= out.len / columns - at);
    if (is_right) {
        Py_BEGIN_ALLOW_THREADS
        transpose_bytes(matrix.buf, matrix.len / columns, columns, (uint8_t *)out.buf + at, out.len / columns);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&matrix);
    PyBuffer_Release(&out);
    if (!is_right) return NULL;
    Py_RETURN_NONE;
}

/* decode_columns(codes, scales, out, height, first_row, first_column, columns, at, group)

   Fill part of `columns` rows of `out` from element `at` of each on, as far as the codes reach: its
   row is a column of the stored matrix. `codes` and `scales` have a row of `height` bytes for each
   two columns and for each `group` of columns of the stored matrix. */
static PyObject *decode_columns(PyObject *module, PyObject *args) {
    Py_buffer codes, scales, out;
    Py_ssize_t height, row, column, columns, at, group;
    if (!PyArg_ParseTuple(args, "y*y*w*nnnnnn", &codes, &scales, &out, &height, &row, &column, &columns,
                          &at, &group))
        return NULL;
    Py_ssize_t last = column + columns - 1;
    Py_ssize_t width = columns > 0 ? out.len / 2 / columns : 0;
    int is_right = check(height > 0 && row >= 0 && row <= height && column >= 0 && columns > 0 && at >= 0 &&
                         group > 0 && at <= width && out.len == 2 * width * columns &&
                         last / 2 < codes.len / height && last / group < scales.len / height);
    if (is_right) {
        Py_ssize_t count = height - row < width - at ? height - row : width - at;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < columns; i++) {
            const uint8_t *own = (uint8_t *)scales.buf + (column + i) / group * height + row;
            (are_usual(own, count) ? decode_usual_column : decode_column)(
                (uint8_t *)codes.buf + (column + i) / 2 * height + row, own,
                (char *)out.buf + 2 * (i * width + at), count, (column + i) % 2 * 4);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&codes);
    PyBuffer_Release(&scales);
    PyBuffer_Release(&out);
    if (!is_right) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"decode", decode, METH_VARARGS, NULL},
                                {"encode", encode, METH_VARARGS, NULL},
                                {"encode_pairs", encode_pairs, METH_VARARGS, NULL},
                                {"find_largest", find_largest, METH_VARARGS, NULL},
                                {"compare", compare, METH_VARARGS, NULL},
                                {"compare_codes", compare_codes, METH_VARARGS, NULL},
                                {"transpose", transpose, METH_VARARGS, NULL},
                                {"decode_columns", decode_columns, METH_VARARGS, NULL},
                                {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "reshard.quantised._codes", NULL, 0,
                                        methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__codes(void) { return PyModuleDef_Init(&definition); }
