// One CUDA process that says what it sees of its GPU and then does what its
// arguments say, in their order, a line for each:
//
//   client NAME [OPERATION]...
//
//   alloc=MIB          takes memory and keeps it
//   memory             says how much memory is free, and how much there is
//   hold=SECONDS       computes a little every 20 ms; an error ends it early
//   work=KIND:SECONDS  runs one kernel after the other and waits for each. KIND
//                      is small (24 blocks: a part of a large GPU) or full (more
//                      blocks than any GPU takes at once)
//   wait=FILE          waits until there is such a file, for two minutes
//   fault              writes to an illegal address
//   misaligned         writes an int to an odd address
//
// An operation that CUDA refuses is told and the next one is done: to be refused
// is what most of them are for. The exit status is 1 without a CUDA context, 2
// for arguments that aren't understood, else 0.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <cuda_runtime.h>
#include <sys/stat.h>
#include <unistd.h>

using Clock = std::chrono::steady_clock;

static const char *name;

static double since(Clock::time_point t) {
  return std::chrono::duration<double, std::milli>(Clock::now() - t).count();
}

// epoch is the time of day in milliseconds, to compare processes by.
static long long epoch() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// chain is a chain of dependent multiplications in each thread, so that its
// time hardly depends on how many blocks run, as long as all of them fit.
__global__ void chain(float *x, int n) {
  float v = threadIdx.x;
  for (int i = 0; i < n; i++) v = v * 1.0001f + 0.5f;
  x[blockIdx.x * blockDim.x + threadIdx.x] = v;
}

__global__ void illegal(int *p) { *p = 1; }

static void alloc(long mib) {
  void *p;
  cudaError_t e = cudaMalloc(&p, static_cast<size_t>(mib) << 20);
  std::printf("%s alloc %ld MiB: %s\n", name, mib, cudaGetErrorString(e));
}

static void memory() {
  size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  std::printf("%s memory free %zu total %zu MiB\n", name, free >> 20, total >> 20);
}

static void hold(double seconds) {
  float *x = nullptr;
  cudaError_t e = cudaMalloc(&x, 1 << 20);
  auto start = Clock::now();
  while (e == cudaSuccess && since(start) < seconds * 1000) {
    chain<<<32, 256>>>(x, 1000);
    e = cudaDeviceSynchronize();
    usleep(20000);
  }
  std::printf("%s held %.1fs: %s\n", name, since(start) / 1000, cudaGetErrorString(e));
}

static void work(const std::string &kind, double seconds) {
  const int blocks = kind == "full" ? 2112 : 24;
  const int steps = kind == "full" ? 40000 : 200000;
  float *x = nullptr;
  cudaError_t e = cudaMalloc(&x, sizeof(float) * blocks * 256);
  std::vector<double> took;
  auto start = Clock::now();
  while (e == cudaSuccess && since(start) < seconds * 1000) {
    auto t = Clock::now();
    chain<<<blocks, 256>>>(x, steps);
    e = cudaDeviceSynchronize();
    took.push_back(since(t));
  }
  const double all = since(start);
  if (e != cudaSuccess || took.empty()) {
    std::printf("%s work %s: %s\n", name, kind.c_str(), cudaGetErrorString(e));
    return;
  }
  std::sort(took.begin(), took.end());
  std::printf("%s work %s %zu kernels in %.0f ms: %.1f kernels/s p50 %.3f p99 %.3f ms\n", name, kind.c_str(), took.size(), all,
              took.size() * 1000 / all, took[took.size() / 2], took[took.size() * 99 / 100]);
}

static void wait(const char *file) {
  struct stat s;
  auto start = Clock::now();
  while (stat(file, &s) != 0) {
    if (since(start) > 120000) {
      std::printf("%s waited two minutes for %s\n", name, file);
      return;
    }
    usleep(1000);
  }
}

static void fault() {
  illegal<<<1, 1>>>(reinterpret_cast<int *>(0x10));
  std::printf("%s fault: %s\n", name, cudaGetErrorString(cudaDeviceSynchronize()));
}

static void misaligned() {
  int *x = nullptr;
  cudaMalloc(&x, 64);
  illegal<<<1, 1>>>(reinterpret_cast<int *>(reinterpret_cast<char *>(x) + 1));
  std::printf("%s misaligned: %s\n", name, cudaGetErrorString(cudaDeviceSynchronize()));
}

// operate does one operation, and returns false if there is no such.
static bool operate(const std::string &op) {
  const size_t eq = op.find('=');
  const std::string what = op.substr(0, eq), how = eq == std::string::npos ? "" : op.substr(eq + 1);
  if (what == "alloc" && !how.empty()) {
    alloc(std::atol(how.c_str()));
  } else if (what == "hold" && !how.empty()) {
    hold(std::atof(how.c_str()));
  } else if (what == "work" && how.find(':') != std::string::npos) {
    work(how.substr(0, how.find(':')), std::atof(how.c_str() + how.find(':') + 1));
  } else if (what == "wait" && !how.empty()) {
    wait(how.c_str());
  } else if (op == "memory") {
    memory();
  } else if (op == "fault") {
    fault();
  } else if (op == "misaligned") {
    misaligned();
  } else {
    return false;
  }
  cudaGetLastError(); // an error that isn't lasting ends with its operation
  std::fflush(stdout);
  return true;
}

int main(int argc, char **argv) {
  const long long began = epoch();
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s NAME [alloc=MIB | hold=S | work=KIND:S | wait=FILE | fault | misaligned]...\n", argv[0]);
    return 2;
  }
  name = argv[1];
  auto start = Clock::now();
  cudaError_t e = cudaFree(nullptr);
  std::printf("%s context %s %.0f ms\n", name, cudaGetErrorString(e), since(start));
  std::fflush(stdout);
  if (e != cudaSuccess) return 1;

  cudaDeviceProp prop;
  size_t free = 0, total = 0;
  cudaGetDeviceProperties(&prop, 0);
  cudaMemGetInfo(&free, &total);
  std::printf("%s SMs %d free %zu total %zu MiB\n", name, prop.multiProcessorCount, free >> 20, total >> 20);
  std::printf("%s user %u\n", name, static_cast<unsigned>(getuid()));
  std::fflush(stdout);
  for (int i = 2; i < argc; i++) {
    if (!operate(argv[i])) {
      std::fprintf(stderr, "%s: %s is no operation\n", name, argv[i]);
      return 2;
    }
  }
  std::printf("%s ran from %lld to %lld\n", name, began, epoch());
  return 0;
}
