// Passes calls to the engine, a child process: the nvidia-smi that was installed with
// this library, which is the simulator's program under another name.
// This side has no threads and no state of the hardware.
//
// The engine holds one end of a control socket. Each connection is a separate
// socket pair, whose other end is sent over the control socket. A connection
// serves one call at a time, so a call that blocks doesn't delay others. When
// this process is gone, or closes the control socket, the engine ends.
#define _GNU_SOURCE
#include "forward.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum {
    max_message = 1 << 16, // as in package engine
    max_idle = 16,
    engine_fd = 3, // the control socket in the engine
};

struct connection {
    struct connection *next;
    int fd;
    int busy;
    unsigned generation; // of the engine at the other end
    unsigned char buffer[max_message];
};

// All of this is guarded by the lock. It is never held during a call.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int initialized; // calls of nvmlInit minus calls of nvmlShutdown
static int starting;    // initializations in progress
static int control = -1;
static pid_t engine;
static unsigned generation;
static struct connection *connections;

static void discard(struct connection *c)
{
    struct connection **at = &connections;
    while (*at && *at != c)
        at = &(*at)->next;
    if (*at)
        *at = c->next;
    close(c->fd);
    free(c);
}

// forget_engine closes the control socket and the connections. A connection in
// use is closed by its call.
static void forget_engine(void)
{
    struct connection *c, *next;
    for (c = connections; c; c = next) {
        next = c->next;
        if (!c->busy)
            discard(c);
    }
    close(control);
    control = -1;
    initialized = 0;
    generation++;
}

static void stop_engine(void)
{
    if (control < 0)
        return;
    shutdown(control, SHUT_RDWR); // even if a process that is being started still has a copy
    forget_engine();
    while (waitpid(engine, 0, 0) < 0 && errno == EINTR)
        ;
}

// After a fork only the parent has the engine; the child has none.
static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }

static void after_fork_in_child(void)
{
    struct connection *c;
    for (c = connections; c; c = c->next)
        c->busy = 0; // the other threads don't exist in the child
    if (control >= 0)
        forget_engine();
    starting = 0;
    pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void loaded(void)
{
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
}

__attribute__((destructor)) static void unloaded(void)
{
    if (pthread_mutex_trylock(&lock))
        return;
    stop_engine();
    pthread_mutex_unlock(&lock);
}

// to_programs is the path from the directory of this library to that of nvidia-smi.
// The installation writes another one in its place (package driverroot).
char to_programs[256] = "NVMLSIM-PROGRAMS:../../bin";

static int has_engine(char *path, size_t size, int length, const char *dir, const char *below)
{
    int n = snprintf(path, size, "%.*s/%s/nvidia-smi", length, dir, below);
    return n > 0 && (size_t)n < size && access(path, X_OK) == 0;
}

// engine_program finds nvidia-smi where the installation has put it. In a container
// it may be elsewhere: then in the usual directories of programs.
static int engine_program(char *path, size_t size)
{
    static const char *const usual[] = {"usr/bin", "bin", "usr/local/bin", "usr/sbin", "sbin", "usr/local/sbin"};
    char file[PATH_MAX];
    Dl_info info;
    size_t i;

    if (!dladdr((void *)engine_program, &info) || !info.dli_fname || !realpath(info.dli_fname, file))
        return -1;
    if (has_engine(path, size, (int)(strrchr(file, '/') - file), file, strchr(to_programs, ':') + 1))
        return 0;
    for (i = 0; i < sizeof usual / sizeof *usual; i++)
        if (has_engine(path, size, 0, "", usual[i]))
            return 0;
    return -1;
}

// spawn starts the engine. It inherits one end of the control socket and the
// standard files, and runs in a new session, so that it doesn't get this
// process's signals from a terminal.
static int spawn(const char *path, int end)
{
    char *arguments[] = {"nvmlsim-engine", (char *)path, 0};
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attributes;
    sigset_t none, all;
    int failed;

    sigemptyset(&none);
    sigfillset(&all);
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&attributes);
    failed = posix_spawn_file_actions_adddup2(&files, end, engine_fd) ||
             posix_spawn_file_actions_addclosefrom_np(&files, engine_fd + 1) ||
             posix_spawnattr_setsigmask(&attributes, &none) || posix_spawnattr_setsigdefault(&attributes, &all) ||
             posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF) ||
             posix_spawn(&engine, path, &files, &attributes, arguments, environ);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&files);
    return failed ? -1 : 0;
}

static int start_engine(void)
{
    char path[PATH_MAX];
    int pair[2], failed;

    if (control >= 0)
        return 0;
    if (engine_program(path, sizeof path) || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair))
        return -1;
    failed = spawn(path, pair[1]);
    close(pair[1]);
    if (failed) {
        close(pair[0]);
        return -1;
    }
    control = pair[0];
    return 0;
}

static ssize_t send_all(int fd, const struct msghdr *m)
{
    ssize_t n;
    do
        n = sendmsg(fd, m, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    return n;
}

// pass sends one end of a connection to the engine.
static int pass(int end)
{
    char nothing = 0;
    struct iovec data = {&nothing, 1};
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } rights = {.room = {0}};
    struct msghdr m = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = rights.room, .msg_controllen = sizeof rights.room};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);

    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof end);
    memcpy(CMSG_DATA(c), &end, sizeof end);
    return send_all(control, &m) == 1 ? 0 : -1;
}

static struct connection *connect_engine(void)
{
    int pair[2], failed;
    struct connection *c = malloc(sizeof *c);

    if (!c)
        return 0;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) {
        free(c);
        return 0;
    }
    failed = pass(pair[1]) ? errno : 0;
    close(pair[1]);
    if (failed) {
        close(pair[0]);
        free(c);
        if (failed == EPIPE || failed == ECONNRESET)
            stop_engine(); // it is dead
        return 0;
    }
    c->fd = pair[0];
    c->generation = generation;
    c->next = connections;
    connections = c;
    return c;
}

// borrow returns an unused connection, or creates one. 0 on failure: a resource
// is missing, or the engine has ended.
static struct connection *borrow(void)
{
    struct connection *c;
    for (c = connections; c && (c->busy || c->generation != generation); c = c->next)
        ;
    if (!c)
        c = connect_engine();
    if (c)
        c->busy = 1;
    return c;
}

static void give_back(struct connection *c)
{
    int idle = 0;
    struct connection *other;
    for (other = connections; other; other = other->next)
        idle += !other->busy;
    c->busy = 0;
    if (c->generation != generation || idle >= max_idle)
        discard(c);
}

static unsigned char *put(unsigned char *at, const void *from, size_t n)
{
    if (n)
        memcpy(at, from, n);
    return at + n;
}

// encode writes a request: the function's name, the number of arguments, and
// the value and the memory of each. 0 if it doesn't fit.
static size_t encode(unsigned char *buffer, const char *function, const struct argument *arguments, unsigned count)
{
    unsigned char *at = buffer, length = (unsigned char)strlen(function), n = (unsigned char)count;
    size_t need = 2 + length;
    unsigned i;

    for (i = 0; i < count; i++) {
        if (arguments[i].size > max_message)
            return 0;
        need += sizeof(uint64_t) + sizeof(uint32_t) + arguments[i].size;
    }
    if (need > max_message)
        return 0;
    at = put(at, &length, 1);
    at = put(at, function, length);
    at = put(at, &n, 1);
    for (i = 0; i < count; i++) {
        uint32_t size = (uint32_t)arguments[i].size;
        at = put(at, &arguments[i].value, sizeof arguments[i].value);
        at = put(at, &size, sizeof size);
        at = put(at, arguments[i].in, size);
    }
    return need;
}

// decode reads an answer: the return code, and the memory to copy to arguments.
// -1 for a malformed answer.
static int decode(const unsigned char *buffer, size_t length, const struct argument *arguments, unsigned count, nvmlReturn_t *code)
{
    const unsigned char *at = buffer + sizeof(int32_t), *end = buffer + length;
    int32_t answer;

    if (length < sizeof answer)
        return -1;
    memcpy(&answer, buffer, sizeof answer);
    while (at < end) {
        unsigned i = *at++;
        uint32_t size;
        if ((size_t)(end - at) < sizeof size)
            return -1;
        memcpy(&size, at, sizeof size);
        at += sizeof size;
        if ((size_t)(end - at) < size || i >= count || !arguments[i].out)
            return -1;
        memcpy(arguments[i].out, at, size);
        at += size;
    }
    *code = (nvmlReturn_t)answer;
    return 0;
}

// exchange makes a call over a connection. -1 if the engine doesn't answer.
static int exchange(struct connection *c, size_t size, const struct argument *arguments, unsigned count, nvmlReturn_t *code)
{
    struct iovec data = {c->buffer, size};
    struct msghdr m = {.msg_iov = &data, .msg_iovlen = 1};
    ssize_t n;

    if (send_all(c->fd, &m) != (ssize_t)size)
        return -1;
    do
        n = recv(c->fd, c->buffer, sizeof c->buffer, 0);
    while (n < 0 && errno == EINTR);
    return n <= 0 ? -1 : decode(c->buffer, (size_t)n, arguments, count, code);
}

// finish returns a connection for reuse, and stops the engine if it didn't
// answer.
static nvmlReturn_t finish(struct connection *c, int failed, nvmlReturn_t code)
{
    if (failed && c->generation != generation)
        code = NVML_ERROR_UNINITIALIZED; // nvmlShutdown was called in the meantime
    else if (failed) {
        code = NVML_ERROR_UNKNOWN;
        stop_engine();
    }
    give_back(c);
    return code;
}

nvmlReturn_t forward(const char *function, const struct argument *arguments, unsigned count)
{
    nvmlReturn_t code = NVML_ERROR_UNINITIALIZED;
    struct connection *c = 0;
    size_t size;
    int failed;

    pthread_mutex_lock(&lock);
    if (initialized && !(c = borrow()) && control >= 0)
        code = NVML_ERROR_INSUFFICIENT_RESOURCES;
    pthread_mutex_unlock(&lock);
    if (!c)
        return code;
    size = encode(c->buffer, function, arguments, count);
    failed = size ? exchange(c, size, arguments, count, &code) : 0;
    if (!size)
        code = NVML_ERROR_INVALID_ARGUMENT;
    pthread_mutex_lock(&lock);
    code = finish(c, failed, code);
    pthread_mutex_unlock(&lock);
    return code;
}

nvmlReturn_t initialize(void)
{
    nvmlReturn_t code = NVML_ERROR_DRIVER_NOT_LOADED;
    struct connection *c = 0;
    int failed;

    pthread_mutex_lock(&lock);
    if (start_engine() == 0)
        c = borrow();
    starting += c != 0;
    if (!initialized && !starting)
        stop_engine();
    pthread_mutex_unlock(&lock);
    if (!c)
        return code;
    failed = exchange(c, encode(c->buffer, "Init", 0, 0), 0, 0, &code);
    pthread_mutex_lock(&lock);
    starting--;
    if (failed) {
        if (c->generation == generation)
            stop_engine();
        code = NVML_ERROR_DRIVER_NOT_LOADED;
    } else if (code == NVML_SUCCESS && c->generation == generation)
        initialized++;
    else if (code == NVML_SUCCESS)
        code = NVML_ERROR_UNINITIALIZED; // the engine has ended in the meantime
    give_back(c);
    if (!initialized && !starting)
        stop_engine();
    pthread_mutex_unlock(&lock);
    return code;
}

nvmlReturn_t shut_down(void)
{
    nvmlReturn_t code = NVML_ERROR_UNINITIALIZED;

    pthread_mutex_lock(&lock);
    if (initialized) {
        code = NVML_SUCCESS;
        if (--initialized == 0 && !starting)
            stop_engine();
    }
    pthread_mutex_unlock(&lock);
    return code;
}

// NVML asks libcuda for the CUDA version, and finds libcuda through the loader.
int cuda_found(void)
{
    void *cuda = dlopen("libcuda.so.1", RTLD_LAZY);
    if (!cuda)
        return 0;
    dlclose(cuda);
    return 1;
}
