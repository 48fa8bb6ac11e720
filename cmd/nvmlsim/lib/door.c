#define _GNU_SOURCE
#include "door.h"

#include <dlfcn.h>
#include <signal.h>

enum { max_gpus = 128, max_sets = 256 };

// One byte per handle is enough: only addresses matter.
static char gpus[max_gpus];
static char sets[max_sets];
static char objects[max_objects];

static int position(const char *table, int n, uintptr_t p)
{
    uintptr_t first = (uintptr_t)table;
    return p >= first && p < first + (uintptr_t)n ? (int)(p - first) : -1;
}

void *gpu_handle(int i) { return i >= 0 && i < max_gpus ? &gpus[i] : 0; }
int gpu_position(uintptr_t handle) { return position(gpus, max_gpus, handle); }
void *set_handle(int i) { return i >= 0 && i < max_sets ? &sets[i] : 0; }
int set_slot(uintptr_t handle) { return position(sets, max_sets, handle); }

void *object_handle(int i) { return i >= 0 && i < max_objects ? &objects[i] : 0; }
int object_slot(uintptr_t handle) { return position(objects, max_objects, handle); }

const char *library_path(void)
{
    Dl_info info;
    return dladdr((void *)library_path, &info) && info.dli_fname ? info.dli_fname : "";
}

// NVML asks libcuda for the CUDA version, by the loader's own search.
int cuda_found(void)
{
    void *cuda = dlopen("libcuda.so.1", RTLD_LAZY);
    if (!cuda)
        return 0;
    dlclose(cuda);
    return 1;
}

// A Go runtime takes SIGURG to preempt its goroutines and doesn't pass it on,
// so the runtime inside this library would switch preemption off in a host that
// is written in Go too. The constructor runs before the runtime's, remembers
// the host's handler, and the first call puts it back. This library's own
// goroutines can do without: none runs long.
static struct sigaction host_urg;

__attribute__((constructor(101))) static void remember_host_signals(void)
{
    sigaction(SIGURG, 0, &host_urg);
}

void keep_host_signals(void)
{
    struct sigaction now;
    if (host_urg.sa_handler == SIG_DFL || host_urg.sa_handler == SIG_IGN)
        return;
    if (sigaction(SIGURG, 0, &now) == 0 && now.sa_handler != host_urg.sa_handler)
        sigaction(SIGURG, &host_urg, 0);
}

// Go doesn't allow the linker flag that names a library in a source file, so the
// name is only put among the file's strings here, as that of a symbol;
// "nvmlsim install" makes it the library's name (DT_SONAME).
DOOR const char soname __asm__("\"libnvidia-ml.so.1\"") = 1;
