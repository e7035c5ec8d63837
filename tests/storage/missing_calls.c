/* System calls that a file system or kernel does not have: a library to preload, which makes chosen ones fail. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    EXCHANGE, NO_REPLACE, FLOCK_DIRECTORY, FLOCK_FILE, FALLOCATE, DIRECT_OPEN, DIRECT_READ, LINK, OPENAT2,
    FSYNC_DIRECTORY, WRITEBACK, CALLS
};

static int missing[CALLS];
static int counts[CALLS];

/* Let a call fail with an error number; 0: let it work again. */
void set_missing(int call, int number) { missing[call] = number; }

/* Return how often a call has failed. */
int count_missing(int call) { return counts[call]; }

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL(call)                 \
    do {                           \
        if (missing[call]) {       \
            counts[call]++;        \
            errno = missing[call]; \
            return -1;             \
        }                          \
    } while (0)

static int is_directory(int descriptor)
{
    struct stat status;
    return fstat(descriptor, &status) == 0 && S_ISDIR(status.st_mode);
}

static int is_direct(int descriptor)
{
    int flags = fcntl(descriptor, F_GETFL);
    return flags >= 0 && flags & O_DIRECT;
}

int renameat2(int from, const char *old, int to, const char *new, unsigned int flags)
{
    if (flags & RENAME_EXCHANGE) FAIL(EXCHANGE);
    if (flags & RENAME_NOREPLACE) FAIL(NO_REPLACE);
    return NEXT(renameat2)(from, old, to, new, flags);
}

int flock(int descriptor, int operation)
{
    /* NFS has shared locks of directories, but an exclusive one takes a file that is open for writing. */
    if (!is_directory(descriptor)) FAIL(FLOCK_FILE); else if (operation & LOCK_EX) FAIL(FLOCK_DIRECTORY);
    return ((int (*)(int, int))dlsym(RTLD_NEXT, "flock"))(descriptor, operation);
}

int fallocate(int descriptor, int mode, off_t offset, off_t length)
{
    FAIL(FALLOCATE);
    return NEXT(fallocate)(descriptor, mode, offset, length);
}

int sync_file_range(int descriptor, off64_t offset, off64_t length, unsigned int flags)
{
    FAIL(WRITEBACK);
    return NEXT(sync_file_range)(descriptor, offset, length, flags);
}

int link(const char *old, const char *new)
{
    FAIL(LINK);
    return NEXT(link)(old, new);
}

int linkat(int from, const char *old, int to, const char *new, int flags)
{
    FAIL(LINK);
    return NEXT(linkat)(from, old, to, new, flags);
}

int fsync(int descriptor)
{
    if (is_directory(descriptor)) FAIL(FSYNC_DIRECTORY);
    return NEXT(fsync)(descriptor);
}

int open64(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    if (flags & O_DIRECT) FAIL(DIRECT_OPEN);
    return NEXT(open64)(path, flags, mode);
}

int open(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return open64(path, flags, mode);
}

ssize_t preadv64(int descriptor, const struct iovec *buffers, int count, off64_t offset)
{
    if (is_direct(descriptor)) FAIL(DIRECT_READ);
    return NEXT(preadv64)(descriptor, buffers, count, offset);
}

ssize_t preadv64v2(int descriptor, const struct iovec *buffers, int count, off64_t offset, int flags)
{
    if (is_direct(descriptor)) FAIL(DIRECT_READ);
    return NEXT(preadv64v2)(descriptor, buffers, count, offset, flags);
}

long syscall(long number, ...)
{
    long a[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(rest, long);
    va_end(rest);
    if (number == 437) FAIL(OPENAT2);
    return ((long (*)(long, ...))dlsym(RTLD_NEXT, "syscall"))(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
