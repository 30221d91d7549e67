// Statistics of all activations of a batch: the histogram of calibrators/statistics.py, bit for bit, in one read.
//
// sweep:  the tensors are cut into segments, which the thread blocks take one after the other until none is left: some
//         cost more than others. A block keeps the histogram of its segment in shared memory. It starts at the bin width
//         that the tensor is known to need (`hints`; at first the least); when a warp meets a larger value, the block
//         stops, the width grows to what that value asks for and the bins are added up, as on the CPU. Otherwise warps
//         run freely, without barriers, and ask for their next values while they count the last ones. Each segment ends
//         in its own part of `scratch`: no global atomics over bins, nothing to clear.
// finish: SLICES blocks per tensor each add up a share of the bins of the tensor's segments, at the batch's own width.
//         The last one to come takes the batch's percentiles, folds the batch into the running histogram and leaves one
//         record.
//
// Widths are counted in binades: a histogram at binade e has bins of 2^(e + MIN_EXPONENT) and holds every float whose
// biased exponent is at most e. Zeros go to a counter beside the bins that nothing reads: how many there are is what the
// bins, NaNs and infinities leave of the elements.
//
// What a value costs: |x| is added to 2^23 bin widths with rounding towards zero, which leaves the bin's number in the
// low bits of the sum; a shift and addition make it an address, a comparison tells zeros, and the counter is incremented
// (for one such instruction the hardware counts equal addresses of a warp together). Extremes are kept as the signed and
// unsigned maximum and the unsigned minimum of the raw bits, which takes three instructions for two values on sm_90.
//
// Compiled with -DTHREADS -DPER_THREAD (elements that a thread holds) -DBLOCKS_PER_SM -DBINS -DLOG2_BINS -DPERCENTILES
// -DMIN_EXPONENT -DFINISH_THREADS -DSLICES. What must not be contracted is written with the intrinsics that forbid it.

typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef DYNAMIC_SHARED                  // tests compile this file for a CPU, with definitions of their own
#include <cuda_fp16.h>
#define HALF_TO_FLOAT(bits) __half2float(__ushort_as_half(bits))
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) type name[]
#define WARP 32
typedef u32 Counters;                   // an address in shared memory

// The 16 bytes at `at` if they are wanted, asked for here and waited for where they are used.
__device__ static inline void load_vector(int* bits, const int4* at, int wanted) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %5, 0; @p ld.global.cs.v4.s32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(bits[0]), "+r"(bits[1]), "+r"(bits[2]), "+r"(bits[3])
                 : "l"(__cvta_generic_to_global(at)), "r"(wanted));
}

// Where counter `sum - zeroth` of `bins` is counted with count_one(this, sum, x).
__device__ static inline Counters counters(u32* bins, u32 zeroth) {
    return (u32)__cvta_generic_to_shared(bins) - 4u * zeroth;
}

// `zeros` is where zeros are counted: with a condition instead, the compiler makes a branch of it.
__device__ static inline void count_one(Counters own, Counters zeros, u32 sum, float x) {
    const u32 address = x != 0.0f ? own + 4u * sum : zeros;
    asm volatile("red.shared.add.u32 [%0], 1;" :: "r"(address));
}
#endif

#define WARP_TILE (WARP * PER_THREAD)
#define WARPS (THREADS / WARP)
#define EVERY_LANE 0xffffffffu
#define ABS 0x7fffffff
#define INFINITE 0x7f800000
#define MOST_BINADE (243)               // above this one 2^23 bin widths are more than a float32 holds

struct Segment {
    int tensor;
    u32 slot;                           // its number among the segments in the order of the tensors
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

// Extremes of the raw bits of floats. A negative float is a negative int, and a greater unsigned one the more negative.
struct Extremes {
    int top;                            // signed maximum; negative: there is no positive value
    u32 over, under;                    // unsigned maximum and minimum

    __device__ inline void take(int bits) {
        top = max(top, bits), over = max(over, (u32)bits), under = min(under, (u32)bits);
    }
    __device__ inline int magnitude() const { return max(top, (int)(over & ABS)); }
    __device__ inline int any() const { return under <= over; }
    __device__ inline int low() const { return any() ? ordered((int)over < 0 ? (int)over : (int)under) : ABS; }
    __device__ inline int high() const { return any() ? ordered(top >= 0 ? top : (int)under) : ~ABS; }
};

// The PER_THREAD elements that a lane has of a warp's tile, as float32 bits; `left` exist. Element j is at place(j).
__device__ static inline u32 place(int half, int lane, int j) {
    return half ? (j / 8) * WARP * 8 + lane * 8 + j % 8 : (j / 4) * WARP * 4 + lane * 4 + j % 4;
}

__device__ static inline int load_one(const void* base, int half, u32 element) {
    return half ? __float_as_int(HALF_TO_FLOAT(((const unsigned short*)base)[element])) : ((const int*)base)[element];
}

__device__ static inline void load_tile(const void* tile, int half, int aligned, int lane, u32 left, int* bits) {
    if (left >= WARP_TILE && aligned) {
        if (half) {
#pragma unroll
            for (int v = 0; v < PER_THREAD / 8; v++) {
                const uint4 w = __ldcs((const uint4*)tile + v * WARP + lane);
                const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    bits[8 * v + 2 * k] = __float_as_int(HALF_TO_FLOAT((unsigned short)(words[k] & 0xffff)));
                    bits[8 * v + 2 * k + 1] = __float_as_int(HALF_TO_FLOAT((unsigned short)(words[k] >> 16)));
                }
            }
        } else {
#pragma unroll
            for (int v = 0; v < PER_THREAD / 4; v++) {
                const int4 w = __ldcs((const int4*)tile + v * WARP + lane);
                bits[4 * v] = w.x, bits[4 * v + 1] = w.y, bits[4 * v + 2] = w.z, bits[4 * v + 3] = w.w;
            }
        }
    } else {
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) {
            const u32 at = place(half, lane, j);
            bits[j] = at < left ? load_one(tile, half, at) : 0;
        }
    }
}

// Multiply the bin width by 2^shift: every count moves to bin k >> shift. A bin never moves up, so going upwards in
// pieces of `threads` bins, each taken out before it is put back, needs one register.
template <int threads, typename Count>
__device__ static inline void coarsen(Count* bins, int shift) {
#pragma unroll 1
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
sweep(const Segment* segments, int segment_count, const u64* pointers, const int* halves, Partial* partials, u32* scratch,
      int* nonfinite, int* taken, int* hints) {
    DYNAMIC_SHARED(u32, bins);          // BINS, then WARP of which the first counts zeros
    __shared__ int wanted, upcoming, hinted, low_all, high_all;
    __shared__ u32 nans_all[2], infs_all[2], binned_all;    // two: the next segment's may come before the last's are read
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const Counters zeros_into = counters(bins + BINS, 0);

    for (int k = threadIdx.x; k < BINS + WARP; k += THREADS) bins[k] = 0;
    if (threadIdx.x == 0) {
        wanted = -1, low_all = ABS, high_all = ~ABS;
        nans_all[0] = nans_all[1] = infs_all[0] = infs_all[1] = binned_all = 0;
    }
    int turn = 0;
    int bits[PER_THREAD] = {};          // a tile; it lies here already if `ready`
    int current = blockIdx.x;
    int tensor = 0, half = 0, aligned = 0, ready = 0;
    int hint = -1;                      // thread 0: a binade that the next segment's tensor reaches, as others found
    u32 slot = 0, count = 0, left = 0;  // elements of the segment; from the warp's tile on
    const int4* own = nullptr;          // the lane's first vector of the warp's tile
    // What the next segment needs, and its first tile: asked for before the last one is put away.
    auto open = [&] {
        if (current >= segment_count) return;
        const Segment segment = segments[current];
        tensor = segment.tensor, slot = segment.slot, count = (u32)segment.count;
        const u64 base = pointers[tensor];
        half = halves[tensor];
        aligned = (base & 15) == 0;
        if (threadIdx.x == 0) hint = ((volatile int*)hints)[tensor] - 1;
        const u32 before = warp * WARP_TILE;
        left = count > before ? count - before : 0;
        own = (const int4*)(base + (segment.first + before) * (half ? 2 : 4)) + lane;
        ready = aligned && !half && left >= WARP_TILE;
#pragma unroll
        for (int v = 0; v < PER_THREAD / 4; v++) load_vector(bits + 4 * v, own + v * WARP, ready);
    };
    open();
    if (threadIdx.x == 0) hinted = hint;
    __syncthreads();
    while (current < segment_count) {
        // One thread has read it for all: other blocks raise it, and all threads must go on with the same.
        int binade = hinted;             // -1: nothing is known of the tensor
        int following = 0;              // thread 0: the next segment
        if (threadIdx.x == 0) following = gridDim.x + atomicAdd(taken, 1);
        float offset;                   // 2^23 bin widths
        Counters into;
        auto widen = [&] {
            offset = __int_as_float((min(binade, MOST_BINADE) + MIN_EXPONENT + 23 + 127) << 23);
            into = counters(bins, __float_as_int(offset));
        };
        widen();
        Extremes extremes = {~ABS, 0u, ~0u};
        for (;;) {
            const int more = left > 0;
            int largest = 0, plain = 0; // finite magnitude so far; whether all of the tile's values are finite
            Extremes taken_in = extremes;
            if (more) {
                if (!ready) load_tile(own - lane, half, aligned, lane, left, bits);
                if (left >= WARP_TILE) {
#pragma unroll
                    for (int j = 0; j < PER_THREAD; j += 2) {
                        taken_in.top = max(max(taken_in.top, bits[j]), bits[j + 1]);
                        taken_in.over = max(max(taken_in.over, (u32)bits[j]), (u32)bits[j + 1]);
                        taken_in.under = min(min(taken_in.under, (u32)bits[j]), (u32)bits[j + 1]);
                    }
                    largest = taken_in.magnitude();
                    plain = largest < INFINITE;
                }
                if (!plain) {
                    largest = 0;
#pragma unroll
                    for (int j = 0; j < PER_THREAD; j++) {
                        const int m = bits[j] & ABS;
                        largest = max(largest, m >= INFINITE ? 0 : m);
                    }
                }
            }
            const int needed = largest ? largest >> 23 : -1;
            if (__any_sync(EVERY_LANE, !more || needed > binade || *(volatile int*)&wanted > binade)) {
                // All warps meet here: those that are through, those with a larger value, and the others as they see it.
                if (needed > binade) atomicMax(&wanted, needed);
                if (threadIdx.x == 0) upcoming = following;
                if (__syncthreads_and(!more)) break;
                const int now = wanted;
                if (now > binade) {
                    if (binade >= 0) coarsen<THREADS>(bins, now - binade);
                    binade = now;
                    widen();
                    if (threadIdx.x == 0) atomicMax(&hints[tensor], now + 1);
                }
                __syncthreads();        // all have read what is wanted
                if (!more) continue;
            }
            if (plain && binade <= MOST_BINADE) {
                extremes = taken_in;
                ready = aligned && !half && left >= (WARPS + 1) * WARP_TILE;
#pragma unroll
                for (int j = 0; j < PER_THREAD; j++) {
                    const float x = __int_as_float(bits[j]);
                    count_one(into, zeros_into, __float_as_int(__fadd_rz(fabsf(x), offset)), x);
                    if (j % 4 == 3) load_vector(bits + j - 3, own + WARPS * WARP_TILE / 4 + (j / 4) * WARP, ready);
                }
            } else {
                ready = 0;
                const double wide = ldexp(1.0, -(binade + MIN_EXPONENT));
#pragma unroll 1
                for (int j = 0; j < PER_THREAD; j++) {
                    const u32 element = place(half, lane, j);
                    if (element >= left) continue;
                    const int value = load_one(own - lane, half, element), m = value & ABS;
                    if (m >= INFINITE) {
                        atomicAdd(m > INFINITE ? &nans_all[turn] : &infs_all[turn], 1u);
                        continue;
                    }
                    extremes.take(value);
                    if (m) atomicAdd(&bins[(int)__dmul_rn((double)__int_as_float(m), wide)], 1u);
                }
            }
            left = left > WARPS * WARP_TILE ? left - WARPS * WARP_TILE : 0;
            own += WARPS * WARP_TILE / (half ? 8 : 4);
        }
        const u32 last_slot = slot, last_count = count;
        const int reached = max(binade, 0);
        current = upcoming;
        open();
        if (threadIdx.x == 0) wanted = -1;
        int low = extremes.low(), high = extremes.high();
        u32 binned = 0;
#pragma unroll
        for (int k = threadIdx.x; k < BINS / 4; k += THREADS) {
            const uint4 counts = ((const uint4*)bins)[k];
            ((uint4*)bins)[k] = {0, 0, 0, 0};
            ((uint4*)(scratch + (u64)last_slot * BINS))[k] = counts;
            binned += counts.x + counts.y + counts.z + counts.w;
        }
        for (int step = WARP / 2; step; step /= 2) {
            low = min(low, __shfl_xor_sync(EVERY_LANE, low, step));
            high = max(high, __shfl_xor_sync(EVERY_LANE, high, step));
            binned += __shfl_xor_sync(EVERY_LANE, binned, step);
        }
        if (lane == 0) {
            atomicMin(&low_all, low);
            atomicMax(&high_all, high);
            atomicAdd(&binned_all, binned);
        }
        if (threadIdx.x == 0) hinted = hint;
        __syncthreads();
        if (threadIdx.x == 0) {         // the others are on their way to the next segment's end at most
            const u32 nans = nans_all[turn], infs = infs_all[turn];
            partials[last_slot] = {reached, low_all, high_all, last_count - binned_all - nans - infs, nans, infs, binned_all};
            if (nans | infs) atomicOr(nonfinite, 1);
            low_all = ABS, high_all = ~ABS;
            nans_all[turn] = infs_all[turn] = binned_all = 0;
        }
        turn ^= 1;
    }
}

#define SLICE (BINS / SLICES)           // bins of one block of `finish`
#define COLUMNS (SLICE / 4 < FINISH_THREADS ? SLICE / 4 : FINISH_THREADS)

extern "C" __global__ void __launch_bounds__(FINISH_THREADS)
finish(const int* first_of_tensor, const Partial* partials, const u32* scratch, const double* wanted, Record* records,
       u64* running, int* running_binades, const int* nonfinite, int skip_nonfinite, u32* totals, int* arrived) {
    DYNAMIC_SHARED(u32, sums);          // BINS, then FINISH_THREADS + 1 for the prefix sums
    __shared__ int binade, lowest, low, high, lower, last_one;
    __shared__ u32 zeros, nans, infs;
    __shared__ double ranks[PERCENTILES];
    u32* prefix = sums + BINS;
    const int tensor = blockIdx.x / SLICES, slice = blockIdx.x % SLICES;
    const int from = first_of_tensor[tensor], to = first_of_tensor[tensor + 1];

    if (threadIdx.x == 0) {
        binade = 0, lowest = ABS, low = ABS, high = ~ABS;
        zeros = nans = infs = 0;
    }
    __syncthreads();
    for (int s = from + threadIdx.x; s < to; s += FINISH_THREADS) {
        const Partial partial = partials[s];
        atomicMax(&binade, partial.binade);
        atomicMin(&lowest, partial.binade);
        atomicMin(&low, partial.low);
        atomicMax(&high, partial.high);
        if (partial.zeros) atomicAdd(&zeros, partial.zeros);
        if (partial.nans) atomicAdd(&nans, partial.nans);
        if (partial.infs) atomicAdd(&infs, partial.infs);
    }
    __syncthreads();
    // The segments of one binade after those of another: bin k of theirs goes to bin k >> shift at the batch's width.
    u32* total_of = totals + (u64)tensor * BINS;
    const int same = lowest == binade;
    for (int level = binade; level >= 0 && from < to;) {
        __syncthreads();                // all have read `lower`
        if (threadIdx.x == 0) lower = -1;
        for (int k = threadIdx.x; k < SLICE; k += FINISH_THREADS) sums[k] = 0;
        __syncthreads();
        for (int s = from + threadIdx.x; s < to && !same; s += FINISH_THREADS)
            if (partials[s].binade < level) atomicMax(&lower, partials[s].binade);
        const int shift = binade - level < LOG2_BINS ? binade - level : LOG2_BINS;
        for (int k = threadIdx.x % COLUMNS; k < SLICE / 4; k += COLUMNS) {
            const uint4* column = (const uint4*)scratch + slice * (SLICE / 4) + k;
            u32 counts[4] = {0, 0, 0, 0};
#pragma unroll 8
            for (int s = from + threadIdx.x / COLUMNS; s < to; s += FINISH_THREADS / COLUMNS) {
                uint4 w = {0, 0, 0, 0};
                if (same || partials[s].binade == level) w = column[(u64)s * (BINS / 4)];
                counts[0] += w.x, counts[1] += w.y, counts[2] += w.z, counts[3] += w.w;
            }
            if (shift > 1) {
                const u32 count = counts[0] + counts[1] + counts[2] + counts[3];
                if (count) atomicAdd(&sums[4 * k >> shift], count);
            } else {
                for (int j = 0; j < 4; j++)
                    if (counts[j]) atomicAdd(&sums[(4 * k + j) >> shift], counts[j]);
            }
        }
        __syncthreads();
        for (int k = threadIdx.x; k < SLICE; k += FINISH_THREADS)
            if (sums[k]) atomicAdd(&total_of[(slice * SLICE >> shift) + k], sums[k]);
        level = lower;
    }
    // The block that comes last does the rest, and leaves `totals` as they were: all zero.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last_one = atomicAdd(&arrived[tensor], 1) == SLICES - 1;
    __syncthreads();
    if (!last_one) return;
    __threadfence();
    for (int k = threadIdx.x; k < BINS; k += FINISH_THREADS) {
        sums[k] = __ldcg(&total_of[k]) + (k ? 0 : zeros);
        total_of[k] = 0;
    }
    __syncthreads();

    // Exclusive prefix sums of the threads' shares, BINS / FINISH_THREADS neighbouring bins each.
    u32 share = 0;
    for (int j = 0; j < BINS / FINISH_THREADS; j += 4) {
        const uint4 w = *(const uint4*)&sums[threadIdx.x * (BINS / FINISH_THREADS) + j];
        share += w.x + w.y + w.z + w.w;
    }
    prefix[threadIdx.x + 1] = share;
    if (threadIdx.x == 0) prefix[0] = 0;
    __syncthreads();
    for (int step = 1; step <= FINISH_THREADS; step *= 2) {
        u32 value = threadIdx.x + 1 >= step ? prefix[threadIdx.x + 1 - step] : 0;
        __syncthreads();
        if (threadIdx.x + 1 >= step) prefix[threadIdx.x + 1] += value;
        __syncthreads();
    }
    const u64 total = prefix[FINISH_THREADS];
    for (int i = threadIdx.x; i < PERCENTILES; i += FINISH_THREADS)
        ranks[i] = __dmul_rn(__ddiv_rn(wanted[i], 100.0), (double)total);
    __syncthreads();
    Record* record = &records[tensor];
    if (threadIdx.x == 0) {
        record->binade = binade, record->low = low, record->high = high, record->reserved = 0;
        record->elements = total + nans + infs;
        record->zeros = zeros, record->nans = nans, record->infs = infs;
        if (total == 0)
            for (int i = 0; i < PERCENTILES; i++) record->percentiles[i] = 0.0;
    }
    // The arithmetic of calibrators/kernels.py, operation by operation. One thread's share holds the bin asked for.
    const double width = ldexp(1.0, binade + MIN_EXPONENT);
    const double amax = (double)__int_as_float(max(magnitude(low), magnitude(high)));
    const u64 first = prefix[threadIdx.x], last = prefix[threadIdx.x + 1];
    for (int i = 0; i < PERCENTILES && first < last; i++) {
        const double rank = ranks[i];
        if (first > 0 && ((double)first >= rank || first == total)) continue;
        if ((double)last < rank && last != total) continue;
        u64 below = first;
        for (int k = threadIdx.x * (BINS / FINISH_THREADS);; k++) {
            const u64 count = sums[k], upto = below + count;
            if (count && ((double)upto >= rank || upto == total)) {
                const double left = __dmul_rn((double)k, width), upper = __dmul_rn((double)(k + 1), width);
                double inside = __ddiv_rn(__dsub_rn(rank, (double)below), (double)count);
                inside = inside < 0.0 ? 0.0 : inside > 1.0 ? 1.0 : inside;
                const double right = upper < amax ? upper : amax;
                const double value = __dadd_rn(left, __dmul_rn(__dsub_rn(right, left), inside));
                record->percentiles[i] = value < amax ? value : amax;
                break;
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
        if (sums[k]) atomicAdd(&own[shift < LOG2_BINS ? k >> shift : 0], (u64)sums[k]);
}
