// Statistics of all activations of a batch: the histogram of calibrators/statistics.py, bit for bit, in one read.
//
// sweep:  the tensors' elements, one after the other, are cut into tiles and the tiles dealt out evenly to the thread
//         blocks. A block keeps the histogram of its piece of a tensor (a segment) in shared memory. It starts at the
//         least bin width; when a tile holds a larger value, the width grows to what that value asks for and the bins are
//         added up, as on the CPU. Each segment ends in its own part of `scratch`: no global atomics, nothing to clear.
// finish: one block per tensor adds up the tensor's segments at the batch's own width, takes the batch's percentiles,
//         folds the batch into the running histogram and leaves one record.
//
// Widths are counted in binades: a histogram at binade e has bins of 2^(e + MIN_EXPONENT) and holds every float whose
// biased exponent is at most e. Zeros are counted, not binned: half of a ReLU's output would go to one address.
//
// Compiled with -DTHREADS -DPER_THREAD (elements of a tile per thread) -DLANES -DBLOCKS_PER_SM -DBINS -DLOG2_BINS
// -DPERCENTILES -DMIN_EXPONENT -DFINISH_THREADS. What must not be contracted is written with the intrinsics that forbid it.

#ifndef DYNAMIC_SHARED                  // tests compile this file for a CPU, with definitions of their own
#include <cuda_fp16.h>
#define HALF_TO_FLOAT(bits) __half2float(__ushort_as_half(bits))
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

#define TILE (THREADS * PER_THREAD)
#define ABS 0x7fffffff
#define INFINITE 0x7f800000
#define WIDE_BELOW 12                   // below this binade the factor exceeds float32: -(e + MIN_EXPONENT) > 127

typedef unsigned int u32;
typedef unsigned long long u64;

struct Segment {
    int tensor;
    u32 reserved;
    u64 first;                          // element
    u64 count;
};

struct Partial {
    int binade, low, high;              // ordered keys; low > high: no finite value
    u32 zeros, nans, infs;
    u32 binned;                         // finite and not zero: the sum of the bins
};

struct Record {                         // one tensor in one batch
    int binade, low, high, reserved;
    u64 elements, zeros, nans, infs;
    double percentiles[PERCENTILES];
};

__device__ static inline int ordered(int bits) { return bits ^ ((bits >> 31) & ABS); }
__device__ static inline int magnitude(int key) { return key < 0 ? ~key : key; }

// 16 elements of a tile, as float32 bits; `valid` of them exist. Element j of the thread is at place(j).
__device__ static inline u64 place(int half, int j) {
    return half ? (u64)(j / 8) * THREADS * 8 + (u64)threadIdx.x * 8 + j % 8
                : (u64)(j / 4) * THREADS * 4 + (u64)threadIdx.x * 4 + j % 4;
}

__device__ static inline int load_one(const void* base, int half, u64 element) {
    return half ? __float_as_int(HALF_TO_FLOAT(((const unsigned short*)base)[element])) : ((const int*)base)[element];
}

__device__ static inline void load_tile(const void* base, int half, int aligned, u64 first, u64 left, int* bits) {
    if (left >= TILE && aligned) {
        if (half) {
#pragma unroll
            for (int v = 0; v < PER_THREAD / 8; v++) {
                uint4 w = ((const uint4*)((const unsigned short*)base + first))[v * THREADS + threadIdx.x];
                u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    bits[8 * v + 2 * k] = __float_as_int(HALF_TO_FLOAT((unsigned short)(words[k] & 0xffff)));
                    bits[8 * v + 2 * k + 1] = __float_as_int(HALF_TO_FLOAT((unsigned short)(words[k] >> 16)));
                }
            }
        } else {
#pragma unroll
            for (int v = 0; v < PER_THREAD / 4; v++) {
                int4 w = ((const int4*)((const int*)base + first))[v * THREADS + threadIdx.x];
                bits[4 * v] = w.x, bits[4 * v + 1] = w.y, bits[4 * v + 2] = w.z, bits[4 * v + 3] = w.w;
            }
        }
    } else {
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) {
            u64 at = place(half, j);
            bits[j] = at < left ? load_one(base, half, first + at) : 0;
        }
    }
}

// Multiply the bin width by 2^shift: every count moves to bin k >> shift. A bin never moves up, so going upwards in
// pieces of `threads` bins, each taken out before it is put back, needs one register.
template <int threads, typename Count>
__device__ static inline void coarsen(Count* bins, int shift) {
    for (int start = 0; start < BINS; start += threads) {
        const int k = start + threadIdx.x;
        const Count count = bins[k];
        __syncthreads();
        bins[k] = 0;
        __syncthreads();
        if (count) atomicAdd(&bins[shift < LOG2_BINS ? k >> shift : 0], count);
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
sweep(const Segment* segments, const int* first_segment, const u64* pointers, const int* halves, Partial* partials,
      u32* scratch, int* nonfinite) {
    DYNAMIC_SHARED(u32, bins);          // LANES * BINS
    __shared__ int tile_binade, low_all, high_all;
    __shared__ u32 zeros_all, nans_all, infs_all;

    for (int s = first_segment[blockIdx.x]; s < first_segment[blockIdx.x + 1]; s++) {
        const Segment segment = segments[s];
        const void* base = (const void*)pointers[segment.tensor];
        const int half = halves[segment.tensor];
        const int aligned = (pointers[segment.tensor] & 15) == 0;
        for (int k = threadIdx.x; k < LANES * BINS; k += THREADS) bins[k] = 0;
        if (threadIdx.x == 0) {
            tile_binade = 0, low_all = ABS, high_all = ~ABS;
            zeros_all = nans_all = infs_all = 0;
        }
        int binade = 0, low = ABS, high = ~ABS;
        u32 zeros = 0, nans = 0, infs = 0;
        float factor = 0.0f;
        u32* own = bins + (threadIdx.x % LANES) * BINS;
        int bits[PER_THREAD], next[PER_THREAD];
        load_tile(base, half, aligned, segment.first, segment.count, next);
        for (u64 done = 0; done < segment.count; done += TILE) {
            const u64 left = segment.count - done;
#pragma unroll
            for (int j = 0; j < PER_THREAD; j++) bits[j] = next[j];
            if (left > TILE) load_tile(base, half, aligned, segment.first + done + TILE, left - TILE, next);

            int largest = 0;            // finite magnitude
            int odd = 0;                // a NaN or infinity
#pragma unroll
            for (int j = 0; j < PER_THREAD; j++) {
                int m = bits[j] & ABS;
                odd |= m >= INFINITE;
                largest = max(largest, m >= INFINITE ? 0 : m);
            }
            // All have binned the last tile once this barrier opens; it also tells all whether someone needs wider bins.
            if (__syncthreads_or((largest >> 23) > binade)) {
                if ((largest >> 23) > binade) atomicMax(&tile_binade, largest >> 23);
                __syncthreads();
                for (int lane = 0; lane < LANES && done; lane++) coarsen<THREADS>(bins + lane * BINS, tile_binade - binade);
                binade = tile_binade;
                factor = __int_as_float((127 - (binade + MIN_EXPONENT)) << 23);
            }
            const int whole = left >= TILE;
            if (binade >= WIDE_BELOW && whole && !odd) {
#pragma unroll
                for (int j = 0; j < PER_THREAD; j++) {
                    int key = ordered(bits[j]);
                    low = min(low, key), high = max(high, key);
                    float x = __int_as_float(bits[j] & ABS);
                    if (bits[j] & ABS) atomicAdd(&own[(int)__fmul_rn(x, factor)], 1u);
                    else zeros++;
                }
            } else {
                const double wide = ldexp(1.0, -(binade + MIN_EXPONENT));
#pragma unroll
                for (int j = 0; j < PER_THREAD; j++) {
                    int m = bits[j] & ABS;
                    if (place(half, j) >= left) continue;
                    if (m >= INFINITE) {
                        if (m > INFINITE) nans++;
                        else infs++;
                        continue;
                    }
                    int key = ordered(bits[j]);
                    low = min(low, key), high = max(high, key);
                    if (m) atomicAdd(&own[(int)__dmul_rn((double)__int_as_float(m), wide)], 1u);
                    else zeros++;
                }
            }
        }
        atomicMin(&low_all, low);
        atomicMax(&high_all, high);
        if (zeros) atomicAdd(&zeros_all, zeros);
        if (nans) atomicAdd(&nans_all, nans);
        if (infs) atomicAdd(&infs_all, infs);
        __syncthreads();
        for (int k = threadIdx.x; k < BINS; k += THREADS) {
            u32 sum = 0;
#pragma unroll
            for (int lane = 0; lane < LANES; lane++) sum += bins[lane * BINS + k];
            scratch[(u64)s * BINS + k] = sum;
        }
        if (threadIdx.x == 0) {
            const u32 binned = (u32)segment.count - zeros_all - nans_all - infs_all;
            partials[s] = {binade, low_all, high_all, zeros_all, nans_all, infs_all, binned};
            if (nans_all | infs_all) atomicOr(nonfinite, 1);
        }
        __syncthreads();                // the shared variables are set anew for the next segment
    }
}

extern "C" __global__ void __launch_bounds__(FINISH_THREADS)
finish(const int* first_of_tensor, const Partial* partials, const u32* scratch, const double* wanted, Record* records,
       u64* running, int* running_binades, const int* nonfinite, int skip_nonfinite) {
    DYNAMIC_SHARED(u64, sums);          // BINS, then FINISH_THREADS + 1 for the prefix sums
    __shared__ int binade, low, high;
    __shared__ u64 zeros, nans, infs;
    u64* prefix = sums + BINS;
    const int tensor = blockIdx.x, from = first_of_tensor[tensor], to = first_of_tensor[tensor + 1];

    if (threadIdx.x == 0) {
        binade = 0, low = ABS, high = ~ABS;
        zeros = nans = infs = 0;
        for (int s = from; s < to; s++) {
            binade = max(binade, partials[s].binade);
            low = min(low, partials[s].low), high = max(high, partials[s].high);
            zeros += partials[s].zeros, nans += partials[s].nans, infs += partials[s].infs;
        }
    }
    __syncthreads();
    // Bin k at the batch's width is 2^shift neighbouring bins of a segment whose values were smaller.
    for (int k = threadIdx.x; k < BINS; k += FINISH_THREADS) {
        u64 sum = 0;
#pragma unroll 4
        for (int s = from; s < to; s++) {
            const int shift = binade - partials[s].binade;
            const u32* bins = scratch + (u64)s * BINS;
            if (shift == 0) sum += bins[k];
            else if (shift >= LOG2_BINS) sum += k == 0 ? partials[s].binned : 0;
            else if (k < BINS >> shift)
                for (int j = 0; j < 1 << shift; j++) sum += bins[(k << shift) + j];
        }
        sums[k] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) sums[0] += zeros;
    __syncthreads();

    // Exclusive prefix sums of the threads' shares, BINS / FINISH_THREADS neighbouring bins each.
    u64 share = 0;
    for (int j = 0; j < BINS / FINISH_THREADS; j++) share += sums[threadIdx.x * (BINS / FINISH_THREADS) + j];
    prefix[threadIdx.x + 1] = share;
    if (threadIdx.x == 0) prefix[0] = 0;
    __syncthreads();
    for (int step = 1; step <= FINISH_THREADS; step *= 2) {
        u64 value = threadIdx.x + 1 >= step ? prefix[threadIdx.x + 1 - step] : 0;
        __syncthreads();
        if (threadIdx.x + 1 >= step) prefix[threadIdx.x + 1] += value;
        __syncthreads();
    }
    const u64 total = prefix[FINISH_THREADS];
    Record* record = &records[tensor];
    if (threadIdx.x == 0) {
        record->binade = binade, record->low = low, record->high = high, record->reserved = 0;
        record->elements = total + nans + infs;
        record->zeros = zeros, record->nans = nans, record->infs = infs;
        if (total == 0)
            for (int i = 0; i < PERCENTILES; i++) record->percentiles[i] = 0.0;
    }
    // The arithmetic of calibrators/kernels.py, operation by operation.
    const double width = ldexp(1.0, binade + MIN_EXPONENT);
    const double amax = (double)__int_as_float(max(magnitude(low), magnitude(high)));
    for (int i = 0; i < PERCENTILES && total; i++) {
        const double rank = __dmul_rn(__ddiv_rn(wanted[i], 100.0), (double)total);
        u64 below = prefix[threadIdx.x];
        for (int j = 0; j < BINS / FINISH_THREADS; j++) {
            const int k = threadIdx.x * (BINS / FINISH_THREADS) + j;
            const u64 count = sums[k], upto = below + count;
            const int reached = (double)upto >= rank || upto == total;
            const int before = below > 0 && ((double)below >= rank || below == total);
            if (count && reached && !before) {
                const double lower = __dmul_rn((double)k, width), upper = __dmul_rn((double)(k + 1), width);
                double inside = __ddiv_rn(__dsub_rn(rank, (double)below), (double)count);
                inside = inside < 0.0 ? 0.0 : inside > 1.0 ? 1.0 : inside;
                const double edge = upper < amax ? upper : amax;
                const double value = __dadd_rn(lower, __dmul_rn(__dsub_rn(edge, lower), inside));
                record->percentiles[i] = value < amax ? value : amax;
            }
            below = upto;
        }
    }
    if (skip_nonfinite && *nonfinite) return;

    u64* own = running + (u64)tensor * BINS;
    const int before = running_binades[tensor];
    __syncthreads();                    // all have read it before it is written
    const int now = max(before, binade);
    if (now > before) {                 // the running histogram gets wider bins
        coarsen<FINISH_THREADS>(own, now - before);
        if (threadIdx.x == 0) running_binades[tensor] = now;
    }
    const int shift = now - binade;
    for (int k = threadIdx.x; k < BINS; k += FINISH_THREADS)
        if (sums[k]) atomicAdd(&own[shift < LOG2_BINS ? k >> shift : 0], sums[k]);
}
