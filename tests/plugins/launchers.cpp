// The kernels as functions that ctypes can call. They return nullptr, or what went wrong.
#include "cuda_on_cpu.h"
#include KERNELS

extern "C" const char* launch_sweep(unsigned blocks, unsigned size, unsigned shared, unsigned seed, const void* segments, int count,
                                    const u64* pointers, const int* halves, void* partials, u32* scratch, int* nonfinite, int* taken,
                                    int* hints) {
    return launch(blocks, size, shared, seed, [=] {
        sweep((const Segment*)segments, count, pointers, halves, (Partial*)partials, scratch, nonfinite, taken, hints);
    });
}

extern "C" const char* launch_finish(unsigned blocks, unsigned size, unsigned shared, unsigned seed, const int* first_of_tensor,
                                     const void* partials, const u32* scratch, const double* wanted, void* records, u64* running,
                                     int* binades, const int* nonfinite, int skip, u32* totals, int* arrived) {
    return launch(blocks, size, shared, seed, [=] {
        finish(first_of_tensor, (const Partial*)partials, scratch, wanted, (Record*)records, running, binades, nonfinite, skip, totals,
               arrived);
    });
}

extern "C" unsigned sizes(int which) { return which == 0 ? sizeof(Segment) : which == 1 ? sizeof(Partial) : sizeof(Record); }
