/* Delays each read of the files below a directory, as a network file system without readahead does.

   gcc -shared -fPIC -O2 -o slow_reads.so slow_reads.c -ldl
   LD_PRELOAD=slow_reads.so SLOW_BELOW=/checkpoint SLOW_SECONDS=0.01 SLOW_COUNTS=FILE command ...

   FILE holds four 64-bit integers that all processes share: reads, bytes, reads in flight, and the
   most that were in flight. A copy in the kernel (copy_file_range, sendfile) is refused as it is
   between two file systems, so that programs fall back to reads. Pages of a mapped file are not
   delayed: the programs that are measured map none.  */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct counts { long reads, bytes, now, most; };

static struct counts *counts;
static const char *below;
static struct timespec delay;

__attribute__((constructor)) static void begin(void) {
    const char *seconds = getenv("SLOW_SECONDS"), *file = getenv("SLOW_COUNTS");
    const char *folder = getenv("SLOW_BELOW");
    if (!seconds || !file || !folder) return;
    int fd = open(file, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof *counts) != 0) abort();
    void *place = mmap(NULL, sizeof *counts, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (place == MAP_FAILED) abort();
    close(fd);
    double wait = atof(seconds);
    delay.tv_sec = (time_t)wait;
    delay.tv_nsec = (long)((wait - (double)delay.tv_sec) * 1e9);
    counts = place;
    below = folder;
}

static int is_slow(int fd) {
    char link[32], path[PATH_MAX];
    if (!below) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    size_t wanted = strlen(below);
    return n > (ssize_t)wanted && path[wanted] == '/' && memcmp(path, below, wanted) == 0;
}

static void wait_for_storage(void) {
    long now = __atomic_add_fetch(&counts->now, 1, __ATOMIC_RELAXED);
    long most = __atomic_load_n(&counts->most, __ATOMIC_RELAXED);
    while (now > most && !__atomic_compare_exchange_n(&counts->most, &most, now, 0, __ATOMIC_RELAXED,
                                                      __ATOMIC_RELAXED)) {}
    struct timespec left = delay;
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {}
}

static void count(ssize_t n) {
    __atomic_sub_fetch(&counts->now, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&counts->reads, 1, __ATOMIC_RELAXED);
    if (n > 0) __atomic_add_fetch(&counts->bytes, n, __ATOMIC_RELAXED);
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define READS(name, parameters, arguments) \
    ssize_t name parameters { \
        REAL(name); \
        if (!is_slow(fd)) return real arguments; \
        wait_for_storage(); \
        ssize_t n = real arguments; \
        int error = errno; \
        count(n); \
        errno = error; \
        return n; \
    }

READS(read, (int fd, void *data, size_t n_bytes), (fd, data, n_bytes))
READS(pread, (int fd, void *data, size_t n_bytes, off_t at), (fd, data, n_bytes, at))
READS(pread64, (int fd, void *data, size_t n_bytes, off64_t at), (fd, data, n_bytes, at))
READS(readv, (int fd, const struct iovec *v, int n_parts), (fd, v, n_parts))
READS(preadv, (int fd, const struct iovec *v, int n_parts, off_t at), (fd, v, n_parts, at))
READS(preadv64, (int fd, const struct iovec *v, int n_parts, off64_t at), (fd, v, n_parts, at))
READS(preadv2, (int fd, const struct iovec *v, int n_parts, off_t at, int how),
      (fd, v, n_parts, at, how))
READS(preadv64v2, (int fd, const struct iovec *v, int n_parts, off64_t at, int how),
      (fd, v, n_parts, at, how))

#define COPIES(name, parameters, arguments) \
    ssize_t name parameters { \
        REAL(name); \
        if (!is_slow(from)) return real arguments; \
        errno = EXDEV; \
        return -1; \
    }

COPIES(copy_file_range, (int from, off64_t *a, int to, off64_t *b, size_t n, unsigned how),
       (from, a, to, b, n, how))
COPIES(sendfile, (int to, int from, off_t *at, size_t n), (to, from, at, n))
COPIES(sendfile64, (int to, int from, off64_t *at, size_t n), (to, from, at, n))
