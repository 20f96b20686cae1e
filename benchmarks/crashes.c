/* Counts the calls of libc that change files, and kills the process group at a chosen one.

   gcc -shared -fPIC -O2 -o crashes.so crashes.c -ldl
   LD_PRELOAD=crashes.so CRASH_COUNTER=FILE CRASH_AT=N command ...

   The counter is shared by all processes that are started with the same file. Writes to what is no
   regular file do not count. Every second kill at a write lets half of it through.  */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static long *counter;
static long fatal = -1;

void crash_arm(const char *file, long at) {
    int fd = open(file, O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(long)) != 0) abort();
    void *place = mmap(NULL, sizeof(long), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (place == MAP_FAILED) abort();
    close(fd);
    fatal = at;
    counter = place;
}

__attribute__((constructor)) static void begin(void) {
    const char *file = getenv("CRASH_COUNTER"), *at = getenv("CRASH_AT");
    if (file && at) crash_arm(file, atol(at));
}

/* Whether this call is the last one. */
static int last(void) {
    return counter && __atomic_fetch_add(counter, 1, __ATOMIC_SEQ_CST) == fatal;
}

static void end(void) {
    kill(0, SIGKILL);
    pause();
}

static int is_file(int fd) {
    struct stat status;
    return counter && fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define WRITES(name, parameters, half, arguments) \
    ssize_t name parameters { \
        REAL(name); \
        if (is_file(fd) && last()) { \
            if (fatal % 2 && real half < 0) abort(); \
            end(); \
        } \
        return real arguments; \
    }

WRITES(write, (int fd, const void *data, size_t n), (fd, data, n / 2), (fd, data, n))
WRITES(pwrite, (int fd, const void *data, size_t n, off_t at), (fd, data, n / 2, at),
       (fd, data, n, at))
WRITES(pwrite64, (int fd, const void *data, size_t n, off64_t at), (fd, data, n / 2, at),
       (fd, data, n, at))
WRITES(writev, (int fd, const struct iovec *v, int n), (fd, v, n / 2), (fd, v, n))

#define CHANGES(name, parameters, arguments) \
    int name parameters { \
        REAL(name); \
        if (last()) end(); \
        return real arguments; \
    }

CHANGES(fsync, (int fd), (fd))
CHANGES(fdatasync, (int fd), (fd))
CHANGES(ftruncate64, (int fd, off64_t size), (fd, size))
CHANGES(rename, (const char *a, const char *b), (a, b))
CHANGES(renameat2, (int d, const char *a, int e, const char *b, unsigned how), (d, a, e, b, how))
CHANGES(link, (const char *a, const char *b), (a, b))
CHANGES(unlink, (const char *a), (a))
CHANGES(unlinkat, (int d, const char *a, int how), (d, a, how))
CHANGES(rmdir, (const char *a), (a))
CHANGES(mkdir, (const char *a, mode_t mode), (a, mode))
