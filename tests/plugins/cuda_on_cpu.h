// Enough of CUDA to run statistics.cu on a CPU. What includes this is compiled with -fsanitize=thread, whose calls before
// every access to memory end in simulator.cpp: there threads give way to each other, and races are seen.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simulator.h"

using std::max;
using std::min;

struct int4 { int x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };

#define threadIdx (simulator::thread_index())
#define blockIdx (simulator::block_index())
#define gridDim (simulator::grid())

#define __global__
#define __device__
#define __shared__ __attribute__((section("cuda_shared"))) static
#define __launch_bounds__(...)
#define DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(simulator::dynamic_shared())

static float half_to_float(unsigned short bits) {
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    return static_cast<float>(value);
}
#define HALF_TO_FLOAT(bits) half_to_float(bits)

// The call as it stands in the kernel's source.
#define SITE const char* file = __builtin_FILE(), int line = __builtin_LINE()
static void __syncthreads(SITE) { simulator::barrier({"__syncthreads", file, line}, true); }
static int __syncthreads_and(int own, SITE) { return simulator::barrier({"__syncthreads_and", file, line}, own != 0); }
static int __any_sync(unsigned, int own, SITE) {
    const long long* all = simulator::exchange({"__any_sync", file, line}, own != 0);
    return std::any_of(all, all + WARP, [](long long each) { return each != 0; });
}
template <typename T> static T __shfl_xor_sync(unsigned, T own, int step, SITE) {
    return (T)simulator::exchange({"__shfl_xor_sync", file, line}, (long long)own)[(threadIdx.x % WARP) ^ step];
}

// Only one thread runs at a time, and gives way before the access only, in `touch`.
#define QUIET static __attribute__((no_sanitize("thread"), noinline))
#define CHANGES simulator::touch(at, sizeof *at, simulator::ATOMIC, __builtin_return_address(0))
template <typename T, typename U> QUIET T atomicAdd(T* at, U value) { CHANGES; const T found = *at; *at = found + T(value); return found; }
QUIET void atomicOr(int* at, int value) { CHANGES; *at |= value; }
QUIET void atomicMax(int* at, int value) { CHANGES; if (*at < value) *at = value; }
QUIET void atomicMin(int* at, int value) { CHANGES; if (*at > value) *at = value; }

static int __float_as_int(float value) { int bits; std::memcpy(&bits, &value, 4); return bits; }
static float __int_as_float(int bits) { float value; std::memcpy(&value, &bits, 4); return value; }
static float __fadd_rz(float a, float b) {                       // the sum is exact as a double, or a lies far below b
    const double sum = double(a) + double(b);
    const float rounded = float(sum);
    return double(rounded) > sum ? std::nextafterf(rounded, 0.0f) : rounded;
}
template <typename T> static T __ldcs(const T* at) { return *at; }
template <typename T> static T __ldcg(const T* at) { return *(const volatile T*)at; }
static void __threadfence() {}
static void load_vector(int* bits, const int4* at, int wanted) { if (wanted) std::memcpy(bits, at, sizeof(int4)); }

struct Counters { unsigned* at; unsigned zeroth; };
static Counters counters(unsigned* bins, unsigned zeroth) { return {bins, zeroth}; }
static inline __attribute__((always_inline)) void count_one(Counters own, Counters zeros, unsigned sum, float x) {
    atomicAdd(x != 0.0f ? &own.at[sum - own.zeroth] : zeros.at, 1u);
}
static double __dmul_rn(double a, double b) { return a * b; }
static double __dadd_rn(double a, double b) { return a + b; }
static double __dsub_rn(double a, double b) { return a - b; }
static double __ddiv_rn(double a, double b) { return a / b; }

// The kernel in all threads of all blocks; nullptr, or what it did wrong.
template <typename Kernel> static const char* launch(unsigned blocks, unsigned size, unsigned shared_bytes, unsigned seed, Kernel kernel) {
    return simulator::run({blocks, size, shared_bytes, seed}, [](void* own) { (*static_cast<Kernel*>(own))(); }, &kernel);
}
