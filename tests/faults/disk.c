/* Library that makes a disk fail on command. When it is preloaded into a process, writes of this process to files in the
 * folder $IDEM_DISK fail while the file $IDEM_DISK_FAULT exists, with the error number that this file holds. With ENOSPC
 * only writes that make a file longer fail, as on a full disk. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char *folder, *fault;

__attribute__((constructor)) static void begin(void) {
    const char *it;
    if ((it = getenv("IDEM_DISK"))) folder = strdup(it);
    if ((it = getenv("IDEM_DISK_FAULT"))) fault = strdup(it);
}

/* Returns 1 and sets `errno` if a write to `fd` that ends at the offset `end` must fail, and 0 otherwise. An `end` of -1
 * means that the write makes the file longer. */
static int refuses(int fd, off_t end) {
    int before = errno, number = 0, file;
    char text[16] = "", link[64], path[4096] = "";
    struct stat about;
    if (!folder || !fault || fstat(fd, &about) || !S_ISREG(about.st_mode)) return errno = before, 0;
    if ((file = open(fault, O_RDONLY | O_CLOEXEC)) < 0) return errno = before, 0;
    if (read(file, text, sizeof text - 1) > 0) number = atoi(text);
    close(file);
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (readlink(link, path, sizeof path - 1) < 0 || strncmp(path, folder, strlen(folder))) return errno = before, 0;
    if (!number || (number == ENOSPC && end >= 0 && end <= about.st_size)) return errno = before, 0;
    errno = number;
    return 1;
}

/* Returns the offset at which a write of `count` bytes at the current position ends, or -1 if it appends. */
static off_t end_of(int fd, size_t count) {
    off_t at;
    if (fcntl(fd, F_GETFL) & O_APPEND) return -1;
    at = lseek(fd, 0, SEEK_CUR);
    return at < 0 ? -1 : at + (off_t)count;
}

static size_t length(const struct iovec *parts, int count) {
    size_t sum = 0;
    while (count-- > 0) sum += parts++->iov_len;
    return sum;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *bytes, size_t count) {
    static __typeof__(&write) real;
    if (!real) real = REAL(write);
    return refuses(fd, end_of(fd, count)) ? -1 : real(fd, bytes, count);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    static __typeof__(&writev) real;
    if (!real) real = REAL(writev);
    return refuses(fd, end_of(fd, length(parts, count))) ? -1 : real(fd, parts, count);
}

#define AT(name)                                                                                                       \
    ssize_t name(int fd, const void *bytes, size_t count, off_t at) {                                                  \
        static __typeof__(&name) real;                                                                                 \
        if (!real) real = REAL(name);                                                                                  \
        return refuses(fd, at + (off_t)count) ? -1 : real(fd, bytes, count, at);                                       \
    }
AT(pwrite)
AT(pwrite64)

#define PARTS_AT(name)                                                                                                 \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t at) {                                             \
        static __typeof__(&name) real;                                                                                 \
        if (!real) real = REAL(name);                                                                                  \
        return refuses(fd, at + (off_t)length(parts, count)) ? -1 : real(fd, parts, count, at);                        \
    }
PARTS_AT(pwritev)
PARTS_AT(pwritev64)

/* These functions return the error number in place of -1. */
#define ALLOCATE(name)                                                                                                 \
    int name(int fd, off_t at, off_t count) {                                                                          \
        static __typeof__(&name) real;                                                                                 \
        if (!real) real = REAL(name);                                                                                  \
        return refuses(fd, at + count) ? errno : real(fd, at, count);                                                  \
    }
ALLOCATE(posix_fallocate)
ALLOCATE(posix_fallocate64)

/* A mode keeps the file's size, or frees space. */
#define ALLOCATE_MODE(name)                                                                                            \
    int name(int fd, int mode, off_t at, off_t count) {                                                                \
        static __typeof__(&name) real;                                                                                 \
        if (!real) real = REAL(name);                                                                                  \
        return !mode && refuses(fd, at + count) ? -1 : real(fd, mode, at, count);                                      \
    }
ALLOCATE_MODE(fallocate)
ALLOCATE_MODE(fallocate64)
