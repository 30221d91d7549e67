// Kernels with one fault each, and such as are close to it and right, for the tests of the simulator.
#include "cuda_on_cpu.h"

#define LAST (threadIdx.x == 15)

static int *raised, *out;

static void right() {                   // a sum over the block, a maximum over all blocks
    __shared__ int total, shares[16];
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    shares[threadIdx.x] = threadIdx.x + blockIdx.x;
    atomicAdd(&total, shares[threadIdx.x]);
    if (__any_sync(~0u, *(volatile int*)&total > 100)) atomicMax(raised, 1);
    if (!__syncthreads_and(shares[threadIdx.x] >= 0)) return;
    if (total != 120 + 16 * (int)blockIdx.x || shares[15 - threadIdx.x] != (int)(15 - threadIdx.x + blockIdx.x)) atomicAdd(out, 1);
}

static void places() {
    if (LAST) __syncthreads();          // place A
    else __syncthreads();               // place B
}

static void kinds() {
    if (LAST) __syncthreads_and(1); else __syncthreads();
}

static void leaves() {
    if (LAST) return;
    __syncthreads();
}

static void lanes() {
    if (LAST) __any_sync(~0u, 1);
    else __syncthreads();
}

static void shuffles() {
    if (LAST) return;
    __shfl_xor_sync(~0u, 1, 1);
}

static void loops() {                   // one thread comes once more than the others
    for (int k = 0; k < 3 + LAST; k++) __syncthreads();
}

static void write_read() {
    __shared__ int value;
    if (threadIdx.x == 0) value = 1;
    if (value) atomicAdd(out, 1);       // without a barrier between
    __syncthreads();
}

static void write_write() {
    DYNAMIC_SHARED(int, values);
    values[threadIdx.x / 2] = 1;
    __syncthreads();
}

static void read_write() {
    DYNAMIC_SHARED(int, values);
    values[threadIdx.x] = 1;
    __syncthreads();
    const int next = values[(threadIdx.x + 1) % 16];
    values[threadIdx.x] = next;
    __syncthreads();
}

static void atomic_read() {
    __shared__ int most;
    if (threadIdx.x == 0) most = 0;
    __syncthreads();
    atomicMax(&most, threadIdx.x);
    if (most > 3) atomicAdd(out, 1);
    __syncthreads();
}

// Every thread reads for itself what other blocks raise, and goes to a barrier if it finds it: the threads of a block
// need not find the same.
static void each_reads() {
    if (*(volatile int*)raised > (int)blockIdx.x) __syncthreads();
    atomicMax(raised, blockIdx.x + 1);
}

static void one_reads() {
    __shared__ int found;
    if (threadIdx.x == 0) found = *(volatile int*)raised;
    __syncthreads();
    if (found > (int)blockIdx.x) __syncthreads();
    atomicMax(raised, blockIdx.x + 1);
}

#define KERNEL(name)                                                                                    \
    extern "C" const char* launch_##name(unsigned seed, int* both) {                                    \
        raised = both, out = both + 1;                                                                  \
        return launch(4, 16, 64, seed, [] { name(); });                                                 \
    }
KERNEL(right)
KERNEL(places)
KERNEL(kinds)
KERNEL(leaves)
KERNEL(lanes)
KERNEL(shuffles)
KERNEL(loops)
KERNEL(write_read)
KERNEL(write_write)
KERNEL(read_write)
KERNEL(atomic_read)
KERNEL(each_reads)
KERNEL(one_reads)
