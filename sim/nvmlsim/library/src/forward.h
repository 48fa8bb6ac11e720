// What the generated functions and forward.c share: nvml.h's declarations (old
// names too) and how a call is passed to the engine.
#ifndef NVMLSIM_FORWARD_H
#define NVMLSIM_FORWARD_H

#define NVML_NO_UNVERSIONED_FUNC_DEFS
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#include "nvml_generated.h"
#include <stdint.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

// argument is one argument of a call. The value of a pointer is 0 for null.
// size bytes at in are copied to the engine, whose answer is copied to out. in
// or out is null if nothing is copied in that direction.
struct argument {
    uint64_t value;
    const void *in;
    size_t size;
    void *out;
};

#define VALUE(v) {.value = (uint64_t)(v)}
#define HANDLE(h) {.value = (uint64_t)(uintptr_t)(h).handle}
#define MEMORY(p, n) {.value = (p) != 0, .in = (p), .size = (p) ? (n) : 0, .out = (p)}
#define INPUT(p, n) {.value = (p) != 0, .in = (p), .size = (p) ? (n) : 0}
#define OUTPUT(p) {.value = (p) != 0, .out = (p)}

// Each returns the engine's answer, and NVML_ERROR_UNINITIALIZED without an
// engine. If the engine ends during a call, the call returns
// NVML_ERROR_UNKNOWN.
nvmlReturn_t forward(const char *function, const struct argument *arguments, unsigned count);
nvmlReturn_t initialize(void);
nvmlReturn_t shut_down(void);

// cuda_found reports whether the loader finds libcuda.
int cuda_found(void);

#endif
