// Enough of CUDA to run statistics.cu on a CPU: one std::thread per CUDA thread, the blocks one after the other.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

using std::max;
using std::min;

struct Dim { unsigned x; };
struct int4 { int x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
#ifndef WARP
#define WARP 4                          // lanes
#endif

static thread_local Dim threadIdx, blockIdx;
static Dim gridDim;
static std::unique_ptr<std::barrier<>> all_threads;
static std::vector<std::unique_ptr<std::barrier<>>> warps;
static std::vector<std::vector<long long>> exchanged;          // one value of each lane, by warp
static std::atomic<int> any_of_them;
static std::vector<unsigned long long> dynamic_shared;

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(dynamic_shared.data())

static float half_to_float(unsigned short bits) {
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    return static_cast<float>(value);
}
#define HALF_TO_FLOAT(bits) half_to_float(bits)

static void __syncthreads() { all_threads->arrive_and_wait(); }

static int __syncthreads_and(int own) {
    if (!own) any_of_them = 1;
    all_threads->arrive_and_wait();
    const int result = !any_of_them;
    all_threads->arrive_and_wait();
    if (threadIdx.x == 0) any_of_them = 0;
    all_threads->arrive_and_wait();
    return result;
}

static std::vector<long long> of_warp(long long own) {
    std::barrier<>& warp = *warps[threadIdx.x / WARP];
    std::vector<long long>& values = exchanged[threadIdx.x / WARP];
    values[threadIdx.x % WARP] = own;
    warp.arrive_and_wait();
    const std::vector<long long> result = values;
    warp.arrive_and_wait();
    return result;
}
static int __any_sync(unsigned, int own) {
    for (long long value : of_warp(own)) if (value) return 1;
    return 0;
}
template <typename T> static T __shfl_xor_sync(unsigned, T own, int step) { return (T)of_warp(own)[(threadIdx.x % WARP) ^ step]; }

template <typename T, typename U> static T atomicAdd(T* at, U value) { return __atomic_fetch_add(at, T(value), __ATOMIC_RELAXED); }
static void atomicOr(int* at, int value) { __atomic_fetch_or(at, value, __ATOMIC_RELAXED); }

template <typename Better> static void replace(int* at, int value, Better better) {
    int found = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (better(value, found) && !__atomic_compare_exchange_n(at, &found, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}
static void atomicMax(int* at, int value) { replace(at, value, [](int a, int b) { return a > b; }); }
static void atomicMin(int* at, int value) { replace(at, value, [](int a, int b) { return a < b; }); }

static int __float_as_int(float value) { int bits; std::memcpy(&bits, &value, 4); return bits; }
static float __int_as_float(int bits) { float value; std::memcpy(&value, &bits, 4); return value; }
static float __fadd_rz(float a, float b) {                       // the sum is exact as a double, or a lies far below b
    const double sum = double(a) + double(b);
    const float rounded = float(sum);
    return double(rounded) > sum ? std::nextafterf(rounded, 0.0f) : rounded;
}
template <typename T> static T __ldcs(const T* at) { return *at; }

struct Counters { unsigned* at; unsigned zeroth; };
static Counters counters(unsigned* bins, unsigned zeroth) { return {bins, zeroth}; }
static void count_one(Counters own, Counters zeros, unsigned sum, float x) {
    __atomic_fetch_add(x != 0.0f ? &own.at[sum - own.zeroth] : zeros.at, 1, __ATOMIC_RELAXED);
}
static double __dmul_rn(double a, double b) { return a * b; }
static double __dadd_rn(double a, double b) { return a + b; }
static double __dsub_rn(double a, double b) { return a - b; }
static double __ddiv_rn(double a, double b) { return a / b; }

template <typename Kernel> static void launch(unsigned blocks, unsigned size, unsigned shared_bytes, Kernel kernel) {
    all_threads = std::make_unique<std::barrier<>>(size);
    gridDim.x = blocks;
    warps.clear(), exchanged.assign(size / WARP, std::vector<long long>(WARP));
    for (unsigned k = 0; k < size / WARP; k++) warps.push_back(std::make_unique<std::barrier<>>(WARP));
    dynamic_shared.assign((shared_bytes + 7) / 8, 0xDEADBEEFDEADBEEFull);
    for (unsigned block = 0; block < blocks; block++) {
        std::vector<std::thread> threads;
        for (unsigned thread = 0; thread < size; thread++)
            threads.emplace_back([=] { threadIdx.x = thread, blockIdx.x = block, kernel(); });
        for (auto& thread : threads) thread.join();
    }
}
