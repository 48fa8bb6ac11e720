// A client of MPS that computes without end: the neighbour checks what it computes, the
// victim is killed.
//
//   killed neighbour MS      kernels of MS milliseconds; exits with 3 on a CUDA error, 4 on a wrong result
//   killed victim MS QUEUE   the same with QUEUE kernels at a time, unchecked. HANDLER says what
//                            SIGTERM does: finish (the kernel), exit, or nothing special
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static volatile sig_atomic_t stop = 0;
static void finish(int) { stop = 1; }
static void leave(int) { exit(0); }

static void check(const char *what, cudaError_t err) {
  if (err == cudaSuccess) return;
  printf("%s: %s\n", what, cudaGetErrorString(err));
  fflush(stdout);
  exit(3);
}

__global__ void compute(unsigned *out, size_t n, long long cycles, unsigned value) {
  size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  for (long long began = clock64(); clock64() - began < cycles;) {
  }
  for (; i < n; i += (size_t)gridDim.x * blockDim.x) out[i] = value + (unsigned)i;
}

int main(int argc, char **argv) {
  if (argc < 3) return 2;
  const bool victim = !strcmp(argv[1], "victim");
  const long long cycles = atoll(argv[2]) * 1700000; // about a millisecond at 1.7 GHz
  const int queue = argc > 3 ? atoi(argv[3]) : 1;
  const size_t n = victim ? (size_t)256 << 20 : (size_t)16 << 20;
  if (const char *handler = getenv("HANDLER")) signal(SIGTERM, !strcmp(handler, "exit") ? leave : finish);

  unsigned *out;
  check("allocate", cudaMalloc(&out, n * sizeof *out));
  std::vector<unsigned> got(victim ? 0 : n);
  printf("ready\n");
  fflush(stdout);
  for (unsigned value = 0; !stop; value++) {
    for (int i = 0; i < queue; i++) compute<<<264, 256>>>(out, n, cycles, value);
    check("compute", cudaDeviceSynchronize());
    if (victim) continue;
    check("copy", cudaMemcpy(got.data(), out, n * sizeof *out, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < n; i += 4099)
      if (got[i] != value + (unsigned)i) return 4;
  }
}
