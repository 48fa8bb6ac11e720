// What the generated C functions and the Go side share: nvml.h's declarations
// (old names too) and handles.
#ifndef NVMLSIM_DOOR_H
#define NVMLSIM_DOOR_H

#define NVML_NO_UNVERSIONED_FUNC_DEFS
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#include "nvml_generated.h"
#include <stdint.h>
#include <stdlib.h>

#define DOOR __attribute__((visibility("default")))

// The handle given for the machine's GPU at a position, and the position of a
// handle; -1 for what is no handle of ours. Handles are addresses in a table
// that is never freed, so that a stale or foreign one is told, not followed.
void *gpu_handle(int position);
int gpu_position(uintptr_t handle);
void *set_handle(int slot);
int set_slot(uintptr_t handle);
void *object_handle(int slot);
int object_slot(uintptr_t handle);

// max_objects is how many MIG instances and devices have handles at a time.
enum { max_objects = 1 << 20 };

// library_path is the file this library was loaded from.
const char *library_path(void);
int cuda_found(void);

// keep_host_signals gives SIGURG back to the process that loaded this library.
void keep_host_signals(void);

#endif
