// Uses NVML from many threads while the process forks, as nobody should, and
// says what went wrong: stress LIBRARY THREADS ROUNDS
//
// A thread calls, initializes and shuts down in turns, and waits for events. One
// more thread forks; the child must find NVML uninitialized, and use it by itself.
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { success = 0, uninitialized = 1, timeout = 10 };

static int (*init)(void), (*shutdown_)(void), (*count)(unsigned *), (*by_index)(unsigned, void **);
static int (*uuid)(void *, char *, unsigned), (*create)(void **), (*destroy)(void *);
static int (*watch)(void *, unsigned long long, void *), (*wait_)(void *, void *, unsigned);
static char first[96];
static int rounds;
static atomic_int wrong;

static void want(const char *what, int got, int expected)
{
    if (got != expected && wrong++ < 10)
        fprintf(stderr, "%s: %d, want %d\n", what, got, expected);
}

static void use(void)
{
    void *gpu;
    char text[96] = "";
    unsigned n = 0;
    want("handle", by_index(0, &gpu), success);
    want("UUID", uuid(gpu, text, sizeof text), success);
    want("the same UUID", strcmp(text, first), 0);
    want("count", count(&n), success);
    want("a GPU", n > 0, 1);
}

static void events(void)
{
    void *set, *gpu;
    char data[64];
    want("event set", create(&set), success);
    want("handle", by_index(0, &gpu), success);
    want("register", watch(gpu, 8, set), success);
    want("wait", wait_(set, data, 1), timeout);
    want("free", destroy(set), success);
}

static void *thread(void *unused)
{
    for (int i = 0; i < rounds; i++) {
        use();
        if (i % 8 == 0) {
            want("init", init(), success);
            use();
            want("shutdown", shutdown_(), success);
        }
        if (i % 16 == 0)
            events();
    }
    return unused;
}

static void child(void)
{
    unsigned n;
    want("count in a child", count(&n), uninitialized);
    want("shutdown in a child", shutdown_(), uninitialized);
    want("init in a child", init(), success);
    use();
    want("shutdown in a child", shutdown_(), success);
    want("count after shutdown", count(&n), uninitialized);
    _exit(wrong != 0);
}

static void *forks(void *unused)
{
    for (int i = 0; i < rounds; i += 8) {
        int status = -1;
        pid_t pid = fork();
        if (pid == 0)
            child();
        want("child", waitpid(pid, &status, 0) == pid ? status : -1, 0);
    }
    return unused;
}

#define FIND(f, name) (*(void **)&(f) = dlsym(lib, name))

int main(int argc, char **argv)
{
    void *lib = argc == 4 ? dlopen(argv[1], RTLD_NOW) : 0, *gpu;
    int threads;
    pthread_t id[256], forker;

    if (!lib || (threads = atoi(argv[2])) > 256)
        return fprintf(stderr, "stress LIBRARY THREADS ROUNDS: %s\n", dlerror()), 1;
    rounds = atoi(argv[3]);
    FIND(init, "nvmlInit_v2"), FIND(shutdown_, "nvmlShutdown"), FIND(count, "nvmlDeviceGetCount_v2");
    FIND(by_index, "nvmlDeviceGetHandleByIndex_v2"), FIND(uuid, "nvmlDeviceGetUUID"), FIND(create, "nvmlEventSetCreate");
    FIND(destroy, "nvmlEventSetFree"), FIND(watch, "nvmlDeviceRegisterEvents"), FIND(wait_, "nvmlEventSetWait_v2");
    want("init", init(), success);
    want("handle", by_index(0, &gpu), success);
    want("UUID", uuid(gpu, first, sizeof first), success);
    pthread_create(&forker, 0, forks, 0);
    for (int i = 0; i < threads; i++)
        pthread_create(&id[i], 0, thread, 0);
    for (int i = 0; i < threads; i++)
        pthread_join(id[i], 0);
    pthread_join(forker, 0);
    want("shutdown", shutdown_(), success);
    want("shutdown twice", shutdown_(), uninitialized);
    dlclose(lib);
    want("processes left", wait(0), -1);
    return wrong != 0;
}
