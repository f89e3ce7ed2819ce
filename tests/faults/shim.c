/* Faults of a file system, for one process: loaded by LD_PRELOAD, it counts the calls on paths below one folder, and lets the n-th fail.

   It does nothing before `faults_begin`, and nothing in a process that was forked afterwards. Every call below the folder is a line of the
   log: number (0: not counted), "!" for the one with the fault, seconds, name, result or minus errno, path, other path, kept copy. The calls
   are made by their numbers, not by the C library's functions of the same names, which are these. Calls by threads are made one after the
   other while a log is kept, so that the lines are in the order in which things happened. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum kind { LOOK = 1, CREATE = 2, READ = 4, WRITE = 8, SYNC = 16, RENAME = 32, REMOVE = 64, FOLDER = 128, SIZE = 256, CLOSE = 512, LINK = 1024 };
enum fault { FAIL, SHORTEN, KILL };

static struct {
    volatile int active;
    pid_t process;
    char folder[PATH_MAX], copies[PATH_MAX];
    int kinds;  /* that are counted */
    enum fault fault;
    int error;  /* errno of FAIL */
    long at;    /* number of the call with the fault; 0: none */
    int always; /* all counted calls from there on have it */
    long count, kept;
    int log;
} faults;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned char written[1 << 16]; /* by open file: it was written, so closing it can fail */

struct call {
    const char *name;
    enum kind kind;
    char path[PATH_MAX], other[PATH_MAX];
    int file; /* that is open, or -1 */
    long number, kept;
    int faulty; /* the call fails with faults.error, or is shortened */
};

/* Start. `copies`: a folder on the same file system for links to files that are replaced, or NULL. */
void faults_begin(const char *folder, const char *copies, const char *log, int kinds, int fault, int error, long at, int always) {
    faults.active = 0;
    faults.process = getpid();
    snprintf(faults.folder, sizeof faults.folder, "%s", folder);
    snprintf(faults.copies, sizeof faults.copies, "%s", copies ? copies : "");
    faults.kinds = kinds;
    faults.fault = fault;
    faults.error = error;
    faults.at = at;
    faults.always = always;
    faults.count = faults.kept = 0;
    int file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    faults.log = fcntl(file, F_DUPFD_CLOEXEC, 500);
    syscall(SYS_close, file);
    faults.active = faults.log >= 0;
}

/* Let all later calls pass, and keep no log of them. */
void faults_end(void) { faults.active = 0; }

static int below(const char *path) {
    size_t length = strlen(faults.folder);
    return !strncmp(path, faults.folder, length) && (path[length] == '/' || !path[length]);
}

/* The path of an open file: the present one, also after a rename of a folder above it. */
static void path_of(int file, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
}

static void absolute(int folder, const char *name, char *path) {
    if (!name || !*name) {
        *path = 0;
        return;
    }
    if (*name == '/') {
        snprintf(path, PATH_MAX, "%s", name);
    } else {
        char base[PATH_MAX];
        if (folder == AT_FDCWD) {
            if (syscall(SYS_getcwd, base, sizeof base) < 0) *base = 0;
        } else {
            path_of(folder, base);
        }
        if (snprintf(path, PATH_MAX, "%s/%s", base, name) >= PATH_MAX) *path = 0;
    }
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/') path[--length] = 0;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static void add_line(const struct call *call, long result) {
    char line[2 * PATH_MAX + 128];
    int length = snprintf(line, sizeof line, "%ld\t%s\t%.3f\t%s\t%ld\t%s\t%s\t%ld\n", call->number, call->faulty ? "!" : "", seconds(),
                          call->name, result, call->path, call->other, call->kept);
    syscall(SYS_write, faults.log, line, length);
}

static int is_active(void) { return faults.active && getpid() == faults.process; }

/* Begin a call whose paths are set. 1: it is below the folder, `leave` must follow; 0: it is not. */
static int enter(struct call *call, enum kind kind, const char *name) {
    if (!below(call->path) && !below(call->other)) return 0;
    call->name = name;
    call->kind = kind;
    call->number = call->kept = call->faulty = 0;
    pthread_mutex_lock(&lock);
    if (kind & faults.kinds) {
        call->number = ++faults.count;
        call->faulty = faults.at && (call->number == faults.at || (faults.always && call->number > faults.at));
    }
    if (call->faulty && faults.fault == KILL) {
        add_line(call, 0);
        syscall(SYS_kill, faults.process, SIGKILL);
    }
    return 1;
}

static int fails(const struct call *call) { return call->faulty && faults.fault == FAIL; }

static size_t shortened(const struct call *call, size_t size) { return call->faulty && faults.fault == SHORTEN ? (size + 1) / 2 : size; }

static long leave(struct call *call, long result) {
    int error = fails(call) ? faults.error : errno;
    if (fails(call)) result = -1;
    if (call->kind & (WRITE | SIZE) && call->file >= 0 && call->file < (int)sizeof written) written[call->file] = 1;
    add_line(call, result < 0 ? -error : result);
    pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

static int enter_file(struct call *call, enum kind kind, const char *name, int file) {
    if (!is_active() || file < 0 || file == faults.log) return 0;
    int error = errno;
    path_of(file, call->path);
    *call->other = 0;
    call->file = file;
    errno = error;
    return enter(call, kind, name);
}

static int enter_path(struct call *call, enum kind kind, const char *name, int folder, const char *path, int other_folder, const char *other) {
    if (!is_active()) return 0;
    int error = errno;
    absolute(folder, path, call->path);
    absolute(other_folder, other, call->other);
    call->file = -1;
    errno = error;
    return enter(call, kind, name);
}

/* CALL is made unless it fails; it is also what is made outside of the folder. */
#define FILE_CALL(kind, name, file, CALL)                                  \
    struct call call;                                                      \
    if (!enter_file(&call, kind, name, file)) return CALL;                 \
    return leave(&call, fails(&call) ? -1 : (long)CALL)

#define PATH_CALL(kind, name, folder, path, other_folder, other, CALL)                          \
    struct call call;                                                                           \
    if (!enter_path(&call, kind, name, folder, path, other_folder, other)) return CALL;         \
    return leave(&call, fails(&call) ? -1 : (long)CALL)

#define WRITE_CALL(name, file, size, CALL)                                 \
    struct call call;                                                      \
    if (!enter_file(&call, WRITE, name, file)) return CALL;                \
    size = shortened(&call, size);                                         \
    return leave(&call, fails(&call) ? -1 : (long)CALL)

static int open_any(int folder, const char *path, int flags, int mode) {
    int changes = flags & (O_CREAT | O_TRUNC);
    const char *name = flags & O_TRUNC ? "truncating open" : flags & O_CREAT ? "creating open" : "open";
    PATH_CALL(changes ? CREATE : LOOK, name, folder, path, AT_FDCWD, NULL, syscall(SYS_openat, folder, path, flags, mode));
}

#define MODE                              \
    int mode = 0;                         \
    if (flags & (O_CREAT | O_TMPFILE)) {  \
        va_list list;                     \
        va_start(list, flags);            \
        mode = va_arg(list, int);         \
        va_end(list);                     \
    }

int open(const char *path, int flags, ...) { MODE return open_any(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return open_any(AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE return open_any(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE return open_any(folder, path, flags, mode); }
int creat(const char *path, mode_t mode) { return open_any(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

ssize_t read(int file, void *into, size_t size) { FILE_CALL(READ, "read", file, syscall(SYS_read, file, into, size)); }
ssize_t pread(int file, void *into, size_t size, off_t at) { FILE_CALL(READ, "pread", file, syscall(SYS_pread64, file, into, size, at)); }
ssize_t pread64(int file, void *into, size_t size, off_t at) { return pread(file, into, size, at); }
ssize_t readv(int file, const struct iovec *parts, int count) { FILE_CALL(READ, "readv", file, syscall(SYS_readv, file, parts, count)); }
ssize_t preadv(int file, const struct iovec *parts, int count, off_t at) {
    FILE_CALL(READ, "preadv", file, syscall(SYS_preadv, file, parts, count, at, 0L));
}
ssize_t preadv64(int file, const struct iovec *parts, int count, off_t at) { return preadv(file, parts, count, at); }

ssize_t write(int file, const void *from, size_t size) { WRITE_CALL("write", file, size, syscall(SYS_write, file, from, size)); }
ssize_t pwrite(int file, const void *from, size_t size, off_t at) {
    WRITE_CALL("pwrite", file, size, syscall(SYS_pwrite64, file, from, size, at));
}
ssize_t pwrite64(int file, const void *from, size_t size, off_t at) { return pwrite(file, from, size, at); }

/* One part alone is halved; of several, half are written. */
#define PARTS_CALL(name, CALL)                                                         \
    struct call call;                                                                  \
    struct iovec first;                                                                \
    if (!enter_file(&call, WRITE, name, file)) return CALL;                            \
    if (count > 1) {                                                                   \
        count = shortened(&call, count);                                               \
    } else if (count == 1) {                                                           \
        first = (struct iovec){parts->iov_base, shortened(&call, parts->iov_len)};     \
        parts = &first;                                                                \
    }                                                                                  \
    return leave(&call, fails(&call) ? -1 : (long)CALL)

ssize_t writev(int file, const struct iovec *parts, int count) { PARTS_CALL("writev", syscall(SYS_writev, file, parts, count)); }
ssize_t pwritev(int file, const struct iovec *parts, int count, off_t at) {
    PARTS_CALL("pwritev", syscall(SYS_pwritev, file, parts, count, at, 0L));
}
ssize_t pwritev64(int file, const struct iovec *parts, int count, off_t at) { return pwritev(file, parts, count, at); }

ssize_t sendfile(int file, int source, off_t *at, size_t size) {
    WRITE_CALL("sendfile", file, size, syscall(SYS_sendfile, file, source, at, size));
}
ssize_t sendfile64(int file, int source, off64_t *at, size_t size) { return sendfile(file, source, at, size); }
ssize_t copy_file_range(int source, off64_t *from, int file, off64_t *at, size_t size, unsigned flags) {
    WRITE_CALL("copy_file_range", file, size, syscall(SYS_copy_file_range, source, from, file, at, size, flags));
}

int fsync(int file) { FILE_CALL(SYNC, "fsync", file, syscall(SYS_fsync, file)); }
int fdatasync(int file) { FILE_CALL(SYNC, "fdatasync", file, syscall(SYS_fdatasync, file)); }
int ftruncate(int file, off_t size) { FILE_CALL(SIZE, "ftruncate", file, syscall(SYS_ftruncate, file, size)); }
int ftruncate64(int file, off64_t size) { return ftruncate(file, size); }
int truncate(const char *path, off_t size) { PATH_CALL(SIZE, "truncate", AT_FDCWD, path, AT_FDCWD, NULL, syscall(SYS_truncate, path, size)); }
int truncate64(const char *path, off64_t size) { return truncate(path, size); }

/* A file is closed also where closing it fails, and one that was not written closes without an error. */
int close(int file) {
    struct call call;
    int flushes = file >= 0 && file < (int)sizeof written && written[file] && is_active();
    if (!flushes || !enter_file(&call, CLOSE, "close", file)) return syscall(SYS_close, file);
    written[file] = 0;
    return leave(&call, syscall(SYS_close, file));
}

static int rename_any(int folder, const char *path, int other_folder, const char *other, unsigned flags) {
    struct call call;
    if (!enter_path(&call, RENAME, "rename", folder, path, other_folder, other))
        return syscall(SYS_renameat2, folder, path, other_folder, other, flags);
    if (fails(&call)) return leave(&call, -1);
    if (*faults.copies) { /* the file that it replaces, for an image in which this rename was lost */
        char copy[PATH_MAX + 32];
        snprintf(copy, sizeof copy, "%s/%ld", faults.copies, faults.kept + 1);
        if (!syscall(SYS_linkat, AT_FDCWD, call.other, AT_FDCWD, copy, 0)) call.kept = ++faults.kept;
    }
    return leave(&call, syscall(SYS_renameat2, folder, path, other_folder, other, flags));
}

int rename(const char *path, const char *other) { return rename_any(AT_FDCWD, path, AT_FDCWD, other, 0); }
int renameat(int folder, const char *path, int other_folder, const char *other) { return rename_any(folder, path, other_folder, other, 0); }
int renameat2(int folder, const char *path, int other_folder, const char *other, unsigned flags) {
    return rename_any(folder, path, other_folder, other, flags);
}

int unlinkat(int folder, const char *path, int flags) {
    PATH_CALL(REMOVE, flags & AT_REMOVEDIR ? "rmdir" : "unlink", folder, path, AT_FDCWD, NULL, syscall(SYS_unlinkat, folder, path, flags));
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path) {
    struct stat found;
    int is_folder = !fstatat(AT_FDCWD, path, &found, AT_SYMLINK_NOFOLLOW) && S_ISDIR(found.st_mode);
    return unlinkat(AT_FDCWD, path, is_folder ? AT_REMOVEDIR : 0);
}

int mkdirat(int folder, const char *path, mode_t mode) {
    PATH_CALL(FOLDER, "mkdir", folder, path, AT_FDCWD, NULL, syscall(SYS_mkdirat, folder, path, mode));
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int linkat(int folder, const char *path, int other_folder, const char *other, int flags) {
    PATH_CALL(LINK, "link", folder, path, other_folder, other, syscall(SYS_linkat, folder, path, other_folder, other, flags));
}
int link(const char *path, const char *other) { return linkat(AT_FDCWD, path, AT_FDCWD, other, 0); }
int symlinkat(const char *target, int folder, const char *path) {
    PATH_CALL(LINK, "symlink", folder, path, AT_FDCWD, NULL, syscall(SYS_symlinkat, target, folder, path));
}
int symlink(const char *target, const char *path) { return symlinkat(target, AT_FDCWD, path); }
