// A CUDA program that proves that a container can compute on the GPU it
// claimed: adds two vectors there, checks the sum here, and says on which GPU
// it ran and how long the first context took.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cuda_runtime.h>

#define CHECK(call)                                                        \
  do {                                                                     \
    cudaError_t e = (call);                                                \
    if (e != cudaSuccess) {                                                \
      std::printf("%s: %s\n", #call, cudaGetErrorString(e));               \
      std::exit(1);                                                        \
    }                                                                      \
  } while (0)

__global__ void add(const float *a, const float *b, float *c, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}

int main() {
  auto start = std::chrono::steady_clock::now();
  CHECK(cudaFree(nullptr));
  auto ready = std::chrono::steady_clock::now();

  int count = 0;
  CHECK(cudaGetDeviceCount(&count));
  cudaDeviceProp prop;
  CHECK(cudaGetDeviceProperties(&prop, 0));

  const int n = 1 << 24;
  const size_t bytes = n * sizeof(float);
  std::vector<float> a(n), b(n), c(n, -1);
  for (int i = 0; i < n; i++) {
    a[i] = static_cast<float>(std::rand() % 1000);
    b[i] = static_cast<float>(std::rand() % 1000);
  }
  float *da, *db, *dc;
  CHECK(cudaMalloc(&da, bytes));
  CHECK(cudaMalloc(&db, bytes));
  CHECK(cudaMalloc(&dc, bytes));
  CHECK(cudaMemcpy(da, a.data(), bytes, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(db, b.data(), bytes, cudaMemcpyHostToDevice));
  add<<<(n + 255) / 256, 256>>>(da, db, dc, n);
  CHECK(cudaGetLastError());
  CHECK(cudaMemcpy(c.data(), dc, bytes, cudaMemcpyDeviceToHost));
  for (int i = 0; i < n; i++) {
    if (c[i] != a[i] + b[i]) {
      std::printf("vectorAdd: wrong at %d: %f + %f = %f\n", i, a[i], b[i], c[i]);
      return 1;
    }
  }
  std::printf("vectorAdd: ok on %s (%d SMs, %d GPUs visible), first context %lld ms\n", prop.name,
              prop.multiProcessorCount, count,
              static_cast<long long>(std::chrono::duration_cast<std::chrono::milliseconds>(ready - start).count()));
  return 0;
}
