/* Loops over the values of quantised weights: codes to values, values to codes, comparisons.

   `reshard.quantised.loops` computes the same bits with numpy where this module was not compiled.
   A matrix is row-major; its values are float32, or bfloat16 if the item size is 2. `high` rows after
   one another share a line, which has an element for each column: a scale, a maximum, or whether all
   values are equal. The loops have no branches, so that the compiler vectorizes them. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../engine/move/values.h"

/* Columns of a row that are multiplied at a time, in the fastest cache. */
#define PART_COLUMNS 2048
/* Bytes of a line of the cache. */
#define LINE 64

#ifdef __GNUC__
#define PREFETCH(address) __builtin_prefetch(address)
#define PREFETCH_TO_WRITE(address) __builtin_prefetch(address, 1)
#else
#define PREFETCH(address)
#define PREFETCH_TO_WRITE(address)
#endif

/* Buffers need not be aligned, so elements are copied. */
static inline uint32_t load(const char *base, Py_ssize_t index) {
    uint32_t bits;
    memcpy(&bits, base + 4 * index, 4);
    return bits;
}

static inline void store(char *base, Py_ssize_t index, uint32_t bits) { memcpy(base + 4 * index, &bits, 4); }

/* A value of a row as the bits of a float32. */
INLINED uint32_t load_value(const char *values, Py_ssize_t itemsize, Py_ssize_t index) {
    uint16_t half;
    if (itemsize == 4) return load(values, index);
    memcpy(&half, values + 2 * index, 2);
    return from_bfloat16(half);
}

VECTORIZED static void decode_row(const uint8_t *codes, const char *table, const char *zeros, const char *scales,
                                  char *out, Py_ssize_t columns) {
    for (Py_ssize_t i = 0; i < columns; i++) {
        float value = float_of(load(table, codes[i])) - float_of(load(zeros, i));
        store(out, i, bits_of(value * float_of(load(scales, i))));
    }
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

/* The bits as float32 of an e2m1 code without its sign: 0, 0.5, 1, 1.5, 2, 3, 4, 6. */
static inline uint32_t bits_of_e2m1(uint32_t code) {
    return code > 1 ? (code + 252) << 22 : -(code & 1) & 0x3F000000;
}

/* Codes of 4 bits, two in a byte, as bytes. */
VECTORIZED static void unpack_row(const uint8_t *pairs, uint8_t *codes, Py_ssize_t columns) {
    for (Py_ssize_t i = 0; i < columns / 2; i++) {
        codes[2 * i] = pairs[i] & 15;
        codes[2 * i + 1] = pairs[i] >> 4;
    }
    if (columns % 2) codes[columns - 1] = pairs[columns / 2] & 15;
}

VECTORIZED static void decode_e2m1_row(const uint8_t *codes, const char *scales, char *out, Py_ssize_t columns) {
    for (Py_ssize_t i = 0; i < columns; i++) {
        uint32_t bits = bits_of_e2m1(codes[i] & 7) | (uint32_t)(codes[i] & 8) << 28;
        store(out, i, bits_of(float_of(bits) * float_of(load(scales, i))));
    }
}

VECTORIZED static void decode_int4_row(const uint8_t *codes, const char *zeros, const char *scales, char *out,
                                       Py_ssize_t columns) {
    for (Py_ssize_t i = 0; i < columns; i++) {
        float value = (float)((int32_t)codes[i] - 8) - float_of(load(zeros, i));
        store(out, i, bits_of(value * float_of(load(scales, i))));
    }
}

/* Encode to codes with these numbers of mantissa bits, exponent bias, largest magnitude and bits before the sign;
   what is larger than the largest code, and NaN, becomes it. */
INLINED void encode_values(const char *values, Py_ssize_t itemsize, const char *scales, uint8_t *codes,
                           Py_ssize_t columns, int32_t mantissa, int32_t bias, int32_t largest, int sign) {
    int32_t shift = 23 - mantissa, half = (1 << (shift - 1)) - 1;
    int32_t rebias = (127 - bias) << 23, smallest = rebias + (1 << 23), most = rebias + (largest << shift);
    /* Its unit in the last place is the smallest subnormal code, so a sum with it rounds to that. */
    int32_t magic = (127 + 24 - bias - mantissa) << 23;
    for (Py_ssize_t i = 0; i < columns; i++) {
        uint32_t bits = bits_of(float_of(load_value(values, itemsize, i)) / float_of(load(scales, i)));
        int32_t magnitude = magnitude_of(bits), capped = magnitude < most ? magnitude : most;
        int32_t normal = (capped + (half - rebias) + (capped >> shift & 1)) >> shift;
        int32_t subnormal = (int32_t)bits_of(float_of(capped) + float_of(magic)) - magic;
        codes[i] = (capped < smallest ? subnormal : normal) | bits >> 31 << sign;
    }
}

/* Round value / scale to nearest even. */
#define ENCODE_ROW(name, mantissa, bias, largest, sign)                                                             \
    VECTORIZED static void name(const char *values, Py_ssize_t itemsize, const char *scales, uint8_t *codes,       \
                                Py_ssize_t columns) {                                                              \
        if (itemsize == 2)                                                                                         \
            encode_values(values, 2, scales, codes, columns, mantissa, bias, largest, sign);                       \
        else                                                                                                       \
            encode_values(values, 4, scales, codes, columns, mantissa, bias, largest, sign);                       \
    }

ENCODE_ROW(encode_e4m3_row, 3, 7, 0x7E, 7)
ENCODE_ROW(encode_e5m2_row, 2, 15, 0x7B, 7)
ENCODE_ROW(encode_e2m1_row, 1, 1, 7, 3)

static const struct {
    const char *name;
    void (*encode)(const char *values, Py_ssize_t itemsize, const char *scales, uint8_t *codes, Py_ssize_t columns);
} FORMATS[] = {{"float8_e4m3fn", encode_e4m3_row}, {"float8_e5m2", encode_e5m2_row}, {"e2m1", encode_e2m1_row}};

/* The bits as float32 of a scale that is stored as an exponent of two; the smallest is subnormal. */
static inline uint32_t bits_of_power(uint8_t exponent) { return exponent ? (uint32_t)exponent << 23 : 1 << 22; }

VECTORIZED static void decode_powers(const uint8_t *exponents, char *scales, Py_ssize_t columns) {
    for (Py_ssize_t i = 0; i < columns; i++) store(scales, i, bits_of_power(exponents[i]));
}

/* The code of 4 bits of a bfloat16: subtracts the scale from its exponent. */
INLINED uint16_t encode_half(const char *values, Py_ssize_t index, int16_t exponent) {
    uint16_t half;
    memcpy(&half, values + 2 * index, 2);
    int16_t magnitude = half & 0x7FFF, most = 0x4100 + exponent; /* 8 times the scale */
    magnitude = magnitude < most ? magnitude : most;
    magnitude -= exponent;
    int16_t rounded = magnitude - 0x3F00 + 0x1F + (magnitude >> 6 & 1), normal = rounded >> 6;
    int16_t subnormal = (magnitude > 0x3E80) + (magnitude >= 0x3F40); /* 0.25 and 0.75 become even codes */
    int16_t made = magnitude < 0x3F80 ? subnormal : normal;
    return (made < 7 ? made : 7) | half >> 15 << 3;
}

/* Encode two rows of bfloat16 to e2m1, with the codes of the second row in the upper halves of the bytes, by
   integers of 16 bits. The scales are usual: subnormal values become 0. */
VECTORIZED static void encode_half_rows(const char *values, const char *next, const uint8_t *exponents,
                                        uint8_t *codes, Py_ssize_t columns) {
    for (Py_ssize_t i = 0; i < columns; i++) {
        int16_t exponent = (exponents[i] - 127) * 128;
        codes[i] = encode_half(values, i, exponent) | encode_half(next, i, exponent) << 4;
    }
}

/* As integers, magnitudes have the order of the values, with NaN above all. */
VECTORIZED static void largest_row(const char *values, char *line, Py_ssize_t columns) {
    for (Py_ssize_t i = 0; i < columns; i++) {
        int32_t before = load(line, i), magnitude = magnitude_of(load(values, i));
        store(line, i, before > magnitude ? before : magnitude);
    }
}

/* The same for values in bfloat16. */
VECTORIZED static void largest_half_row(const char *values, int16_t *line, Py_ssize_t columns) {
    for (Py_ssize_t i = 0; i < columns; i++) {
        uint16_t half;
        memcpy(&half, values + 2 * i, 2);
        int16_t before = line[i], magnitude = half & 0x7FFF;
        line[i] = before > magnitude ? before : magnitude;
    }
}

INLINED void compare_values(const char *values, Py_ssize_t itemsize, const char *others, Py_ssize_t other_itemsize,
                            char *line, Py_ssize_t columns) {
    for (Py_ssize_t i = 0; i < columns; i++) {
        uint32_t value = load_value(values, itemsize, i), other = load_value(others, other_itemsize, i);
        uint32_t is_same = value == other, is_rounded = value == to_bfloat16(other) << 16;
        store(line, i, load(line, i) & (is_same | is_rounded << 1));
    }
}

VECTORIZED static void compare_row(const char *values, Py_ssize_t itemsize, const char *others,
                                   Py_ssize_t other_itemsize, char *line, Py_ssize_t columns) {
    if (itemsize == 2)
        compare_values(values, 2, others, 4, line, columns);
    else if (other_itemsize == 2)
        compare_values(values, 4, others, 2, line, columns);
    else
        compare_values(values, 4, others, 4, line, columns);
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

/* Transpose a block of 16 x 16: four shuffles swap the row and the column in the index of an element. */
static inline void transpose_block(const uint8_t *in, Py_ssize_t stride, uint8_t *out, Py_ssize_t width) {
    uint8_t block[256], other[256];
    for (int i = 0; i < 16; i++) memcpy(block + 16 * i, in + i * stride, 16);
    shuffle(block, other);
    shuffle(other, block);
    shuffle(block, other);
    shuffle(other, block);
    for (int i = 0; i < 16; i++) memcpy(out + i * width, block + 16 * i, 16);
}

/* Transpose up to LINE columns, which a row has in two lines of the cache. The rows are in other pages of
   memory, so the processor does not fetch them by itself. Vectors of more than 16 bytes are slower. */
static void transpose_strip(const uint8_t *in, Py_ssize_t rows, Py_ssize_t columns, Py_ssize_t stride,
                            uint8_t *out, Py_ssize_t width) {
    Py_ssize_t row = 0, column;
    for (; row + 16 <= rows; row += 16) {
        for (Py_ssize_t next = row + 32; next < row + 48 && next < rows; next++) {
            PREFETCH(in + next * stride);
            PREFETCH(in + next * stride + columns - 1);
        }
        for (column = 0; column + 16 <= columns; column += 16)
            transpose_block(in + row * stride + column, stride, out + column * width + row, width);
        for (; column < columns; column++)
            for (Py_ssize_t i = row; i < row + 16; i++) out[column * width + i] = in[i * stride + column];
    }
    for (; row < rows; row++)
        for (column = 0; column < columns; column++) out[column * width + row] = in[row * stride + column];
}

/* Write columns of a matrix, whose rows begin `stride` bytes apart, into rows that begin `width` bytes apart. */
static void transpose_bytes(const uint8_t *in, Py_ssize_t rows, Py_ssize_t columns, Py_ssize_t stride,
                            uint8_t *out, Py_ssize_t width) {
    for (Py_ssize_t column = 0, next; column < columns; column = next) {
        next = columns - column < LINE ? columns : column + LINE;
        /* The processor fetches the rest of long rows by itself. */
        for (Py_ssize_t row = next; row < next + LINE && row < columns; row++)
            for (Py_ssize_t i = 0; i < rows && i <= 2 * LINE; i += LINE) PREFETCH_TO_WRITE(out + row * width + i);
        transpose_strip(in + column, rows, next - column, stride, out + column * width, width);
    }
}

/* Whether scales, which are exponents of two, are in the range in which the products of all e2m1 codes are
   normal numbers, and a quarter of the scale is one. */
VECTORIZED static int are_usual(const uint8_t *scales, Py_ssize_t count) {
    uint8_t others = 0;
    for (Py_ssize_t i = 0; i < count; i++) others |= (uint8_t)(scales[i] - 3) > 249;
    return !others;
}

/* The products of one column of codes of 4 bits, in one half of each byte, and their scales. A product is
   exact as bfloat16, the upper half of a float32. */
VECTORIZED static void decode_unusual_column(const uint8_t *codes, const uint8_t *scales, char *out,
                                             Py_ssize_t rows, int shift) {
    for (Py_ssize_t i = 0; i < rows; i++) {
        uint32_t code = codes[i] >> shift;
        float product = float_of(bits_of_e2m1(code & 7)) * float_of(bits_of_power(scales[i]));
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

static void decode_column(const uint8_t *codes, const uint8_t *scales, char *out, Py_ssize_t rows, int shift) {
    (are_usual(scales, rows) ? decode_usual_column : decode_unusual_column)(codes, scales, out, rows, shift);
}

/* Return whether buffers have the sizes of `rows` rows of `columns` elements, and their lines. */
static int check(int is_right) {
    if (!is_right) PyErr_SetString(PyExc_ValueError, "the buffers do not have the size of the matrix");
    return is_right;
}

static Py_ssize_t count_lines(Py_ssize_t rows, Py_ssize_t high) { return rows / high + (rows % high != 0); }

/* Whether `size` values are whole rows of `columns`, and there are elements of the lines for them. */
static int is_matrix(Py_ssize_t size, Py_ssize_t line_bytes, Py_ssize_t itemsize, Py_ssize_t columns,
                     Py_ssize_t high) {
    return columns > 0 && high > 0 && size % columns == 0 && line_bytes % itemsize == 0 &&
           line_bytes / itemsize % columns == 0 &&
           line_bytes / itemsize / columns == count_lines(size / columns, high);
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

/* How codes are decoded: by arithmetic, or by a table of 256 values. The last two are two in a byte. */
typedef enum { BY_TABLE, E4M3, PAIRS_OF_E2M1, PAIRS_OF_INT4 } Code;

static Code find_code(const char *name) {
    return !strcmp(name, "float8_e4m3fn") ? E4M3
           : !strcmp(name, "e2m1")        ? PAIRS_OF_E2M1
           : !strcmp(name, "biased int4") ? PAIRS_OF_INT4
                                          : BY_TABLE;
}

static const char ZEROS[4 * PART_COLUMNS];

static void decode_part(Code code, const char *table, const uint8_t *codes, const char *zeros, const char *scales,
                        char *out, Py_ssize_t columns) {
    uint8_t unpacked[PART_COLUMNS];
    if (code == BY_TABLE) {
        decode_row(codes, table, zeros, scales, out, columns);
    } else if (code == E4M3) {
        decode_e4m3_row(codes, scales, out, columns);
    } else {
        unpack_row(codes, unpacked, columns);
        if (code == PAIRS_OF_E2M1)
            decode_e2m1_row(unpacked, scales, out, columns);
        else
            decode_int4_row(unpacked, zeros, scales, out, columns);
    }
}

INLINED void repeat_numbers(const char *numbers, Py_ssize_t count, Py_ssize_t wide, char *out) {
    for (Py_ssize_t n = 0; n < count; n++) {
        uint32_t bits = load(numbers, n);
        for (Py_ssize_t i = 0; i < wide; i++) store(out, n * wide + i, bits);
    }
}

/* Each number `wide` times; the usual groups are vectorized. */
VECTORIZED static void repeat_row(const char *numbers, Py_ssize_t count, Py_ssize_t wide, char *out) {
    if (wide == 16)
        repeat_numbers(numbers, count, 16, out);
    else if (wide == 32)
        repeat_numbers(numbers, count, 32, out);
    else
        repeat_numbers(numbers, count, wide, out);
}

/* The numbers of a part of a row, of which each stands for `wide` columns. */
static const char *spread(const char *row, Py_ssize_t column, Py_ssize_t count, Py_ssize_t wide, char *buffer) {
    if (wide == 1) return row + 4 * column;
    for (Py_ssize_t done = 0, times; done < count; done += times) {
        Py_ssize_t number = (column + done) / wide, rest = (number + 1) * wide - column - done;
        Py_ssize_t whole = rest == wide ? (count - done) / wide : 0;
        if (whole) {
            repeat_row(row + 4 * number, whole, wide, buffer + 4 * done);
            times = whole * wide;
        } else {
            times = rest < count - done ? rest : count - done;
            repeat_row(row + 4 * number, 1, times, buffer + 4 * done);
        }
    }
    return buffer;
}

CAST_LOOP(float32_to_bfloat16, uint32_t, AS_IS, uint16_t, to_bfloat16, 0x7F80, 0)

/* decode(codes, table, zeros, scales, out, itemsize, columns, high, wide, code): out = (table[codes] - zeros) * scales,
   as float32 or, if `itemsize` is 2, as bfloat16; returns how many finite products became infinite. A zero or a scale
   stands for `high` rows and `wide` columns; `zeros` is empty if nothing is subtracted. */
static PyObject *decode(PyObject *module, PyObject *args) {
    Py_buffer codes, table, zeros, scales, out;
    Py_ssize_t itemsize, columns, high, wide, overflowed = 0;
    const char *name;
    if (!PyArg_ParseTuple(args, "y*y*y*y*w*nnnns", &codes, &table, &zeros, &scales, &out, &itemsize, &columns, &high,
                          &wide, &name))
        return NULL;
    Code code = find_code(name);
    int packed = code >= PAIRS_OF_E2M1;
    Py_ssize_t size = itemsize > 0 ? out.len / itemsize : 0, across = wide > 0 ? count_lines(columns, wide) : 0;
    int is_right = check(has_values(&out, itemsize, size) && columns > 0 && high > 0 && wide > 0 &&
                         size % columns == 0 && table.len == 1024 && !(packed && columns % 2 && size > columns) &&
                         codes.len == (packed ? size / 2 + size % 2 : size) &&
                         scales.len % 4 == 0 && scales.len / 4 % across == 0 &&
                         scales.len / 4 / across == count_lines(size / columns, high) &&
                         (zeros.len == 0 || zeros.len == scales.len));
    if (is_right) {
        char products[4 * PART_COLUMNS], wide_scales[4 * PART_COLUMNS], wide_zeros[4 * PART_COLUMNS];
        Py_BEGIN_ALLOW_THREADS
        for (Part part = {0}; take_part(&part, size, columns, high);) {
            Py_ssize_t line = part.at / columns / high * across * 4, column = part.at % columns;
            char *into = (char *)out.buf + itemsize * part.at;
            const char *scale = spread((char *)scales.buf + line, column, part.count, wide, wide_scales);
            const char *zero =
                zeros.len ? spread((char *)zeros.buf + line, column, part.count, wide, wide_zeros) : ZEROS;
            decode_part(code, table.buf, (uint8_t *)codes.buf + (packed ? part.at / 2 : part.at), zero, scale,
                        itemsize == 4 ? into : products, part.count);
            if (itemsize == 2) overflowed += float32_to_bfloat16(products, into, part.count).overflowed;
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&codes);
    PyBuffer_Release(&table);
    PyBuffer_Release(&zeros);
    PyBuffer_Release(&scales);
    PyBuffer_Release(&out);
    return is_right ? PyLong_FromSsize_t(overflowed) : NULL;
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
    int is_right = check(number < known && is_matrix(codes.len, scales.len, 4, columns, high) &&
                         has_values(&values, itemsize, codes.len));
    if (is_right) {
        Py_BEGIN_ALLOW_THREADS
        for (Part part = {0}; take_part(&part, codes.len, columns, high);) {
            FORMATS[number].encode((char *)values.buf + itemsize * part.at, itemsize,
                                   (char *)scales.buf + part.line * 4, (uint8_t *)codes.buf + part.at, part.count);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&scales);
    PyBuffer_Release(&codes);
    if (!is_right) return NULL;
    Py_RETURN_NONE;
}

/* encode_pairs(values, itemsize, exponents, codes, columns, high): like `encode` to e2m1, with the codes of two
   rows in each row of bytes; `high` is even, and the scales are exponents of two */
static PyObject *encode_pairs(PyObject *module, PyObject *args) {
    Py_buffer values, exponents, codes;
    Py_ssize_t itemsize, columns, high;
    if (!PyArg_ParseTuple(args, "y*ny*w*nn", &values, &itemsize, &exponents, &codes, &columns, &high)) return NULL;
    Py_ssize_t size = itemsize > 0 ? values.len / itemsize : 0;
    int is_right = check(high % 2 == 0 && size % 2 == 0 && codes.len == size / 2 &&
                         has_values(&values, itemsize, size) &&
                         is_matrix(size, exponents.len, 1, columns, high) && codes.len % columns == 0);
    if (is_right) {
        char scales[4 * PART_COLUMNS];
        uint8_t upper[PART_COLUMNS];
        Py_BEGIN_ALLOW_THREADS
        for (Part part = {0}; take_part(&part, size, columns, high);) {
            Py_ssize_t row = part.at / columns, column = part.at % columns;
            if (row % 2) continue; /* encoded with the row before */
            const char *value = (char *)values.buf + itemsize * part.at, *next = value + itemsize * columns;
            const uint8_t *exponent = (uint8_t *)exponents.buf + part.line;
            uint8_t *packed = (uint8_t *)codes.buf + row / 2 * columns + column;
            if (itemsize == 2 && are_usual(exponent, part.count)) {
                encode_half_rows(value, next, exponent, packed, part.count);
                continue;
            }
            decode_powers(exponent, scales, part.count);
            encode_e2m1_row(value, itemsize, scales, packed, part.count);
            encode_e2m1_row(next, itemsize, scales, upper, part.count);
            for (Py_ssize_t i = 0; i < part.count; i++) packed[i] |= upper[i] << 4;
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&exponents);
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
    int is_right = check(has_values(&values, itemsize, size) && is_matrix(size, lines.len, 4, columns, high));
    if (is_right) {
        int16_t halves[PART_COLUMNS];
        Py_ssize_t rows = size / columns;
        Py_BEGIN_ALLOW_THREADS
        memset(lines.buf, 0, lines.len);
        for (Py_ssize_t first = 0; first < rows; first += high) {
            Py_ssize_t last = rows - first < high ? rows : first + high;
            for (Py_ssize_t column = 0, count; column < columns; column += count) {
                count = columns - column < PART_COLUMNS ? columns - column : PART_COLUMNS;
                char *line = (char *)lines.buf + (first / high * columns + column) * 4;
                const char *value = (char *)values.buf + column * itemsize;
                if (itemsize == 4) {
                    for (Py_ssize_t row = first; row < last; row++)
                        largest_row(value + row * columns * 4, line, count);
                    continue;
                }
                memset(halves, 0, sizeof halves);
                for (Py_ssize_t row = first; row < last; row++)
                    largest_half_row(value + row * columns * 2, halves, count);
                for (Py_ssize_t i = 0; i < count; i++) store(line, i, from_bfloat16(halves[i]));
            }
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&lines);
    if (!is_right) return NULL;
    Py_RETURN_NONE;
}

/* compare(values, itemsize, others, other_itemsize, lines, columns, high): bit 0 of each element of a line tells
   whether all values of `high` rows are those of the other matrix, bit 1 whether they are these as bfloat16 */
static PyObject *compare(PyObject *module, PyObject *args) {
    Py_buffer values, others, lines;
    Py_ssize_t itemsize, other_itemsize, columns, high;
    if (!PyArg_ParseTuple(args, "y*ny*nw*nn", &values, &itemsize, &others, &other_itemsize, &lines, &columns,
                          &high))
        return NULL;
    Py_ssize_t size = itemsize > 0 ? values.len / itemsize : 0;
    int is_right = check(has_values(&values, itemsize, size) && has_values(&others, other_itemsize, size) &&
                         is_matrix(size, lines.len, 4, columns, high));
    if (is_right) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < lines.len / 4; i++) store(lines.buf, i, 3);
        for (Part part = {0}; take_part(&part, size, columns, high);) {
            char *line = (char *)lines.buf + part.line * 4;
            const char *value = (char *)values.buf + itemsize * part.at;
            const char *other = (char *)others.buf + other_itemsize * part.at;
            if (itemsize == 2 && other_itemsize == 2)
                compare_halves_row(value, other, line, part.count);
            else
                compare_row(value, itemsize, other, other_itemsize, line, part.count);
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
    int is_right = check(is_matrix(codes.len, lines.len, 4, columns, high) && scales.len == lines.len &&
                         table.len == 1024 && has_values(&values, itemsize, codes.len));
    if (is_right) {
        Code code = strcmp(dtype, "float8_e4m3fn") ? BY_TABLE : E4M3;
        char products[4 * PART_COLUMNS];
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < lines.len / 4; i++) store(lines.buf, i, 3);
        for (Part part = {0}; take_part(&part, codes.len, columns, high);) {
            decode_part(code, table.buf, (uint8_t *)codes.buf + part.at, ZEROS,
                        (char *)scales.buf + part.line * 4, products, part.count);
            compare_row((char *)values.buf + itemsize * part.at, itemsize, products, 4,
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

/* compare_columns(values, itemsize, codes, exponents, lines, columns, high): compares values with the products of
   transposed codes of 4 bits and scales, like `compare`; two rows of values have their codes in a row of bytes */
static PyObject *compare_columns(PyObject *module, PyObject *args) {
    Py_buffer values, codes, exponents, lines;
    Py_ssize_t itemsize, columns, high;
    if (!PyArg_ParseTuple(args, "y*ny*y*w*nn", &values, &itemsize, &codes, &exponents, &lines, &columns, &high))
        return NULL;
    Py_ssize_t size = itemsize > 0 ? values.len / itemsize : 0;
    int is_right = check(has_values(&values, itemsize, size) && codes.len == size / 2 &&
                         is_matrix(size, exponents.len, 1, columns, high) && codes.len % columns == 0 &&
                         lines.len == 4 * exponents.len);
    if (is_right) {
        char products[2 * PART_COLUMNS];
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < lines.len / 4; i++) store(lines.buf, i, 3);
        for (Part part = {0}; take_part(&part, size, columns, high);) {
            Py_ssize_t row = part.at / columns, column = part.at % columns;
            const char *value = (char *)values.buf + itemsize * part.at;
            char *line = (char *)lines.buf + 4 * part.line;
            decode_column((uint8_t *)codes.buf + row / 2 * columns + column,
                          (uint8_t *)exponents.buf + part.line, products, part.count, row % 2 * 4);
            if (itemsize == 2)
                compare_halves_row(value, products, line, part.count);
            else
                compare_row(value, itemsize, products, 2, line, part.count);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&codes);
    PyBuffer_Release(&exponents);
    PyBuffer_Release(&lines);
    if (!is_right) return NULL;
    Py_RETURN_NONE;
}

/* transpose(matrix, columns, first, out, width, at): columns of a matrix, from the first on, fill the rows of
   `out` from an element on */
static PyObject *transpose(PyObject *module, PyObject *args) {
    Py_buffer matrix, out;
    Py_ssize_t columns, first, width, at;
    if (!PyArg_ParseTuple(args, "y*nnw*nn", &matrix, &columns, &first, &out, &width, &at)) return NULL;
    Py_ssize_t rows = columns > 0 ? matrix.len / columns : 0, count = width > 0 ? out.len / width : 0;
    int is_right = check(columns > 0 && width > 0 && matrix.len == rows * columns && out.len == count * width &&
                         first >= 0 && first <= columns && count <= columns - first && at >= 0 && at <= width &&
                         rows <= width - at);
    if (is_right) {
        Py_BEGIN_ALLOW_THREADS
        transpose_bytes((uint8_t *)matrix.buf + first, rows, count, columns, (uint8_t *)out.buf + at, width);
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
            decode_column((uint8_t *)codes.buf + (column + i) / 2 * height + row,
                          (uint8_t *)scales.buf + (column + i) / group * height + row,
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
                                {"compare_columns", compare_columns, METH_VARARGS, NULL},
                                {"transpose", transpose, METH_VARARGS, NULL},
                                {"decode_columns", decode_columns, METH_VARARGS, NULL},
                                {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "reshard.quantised._codes", NULL, 0,
                                        methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__codes(void) { return PyModuleDef_Init(&definition); }
