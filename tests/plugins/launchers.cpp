// The kernels as functions that ctypes can call.
#include "cuda_on_cpu.h"
#include KERNELS

extern "C" void launch_sweep(unsigned blocks, unsigned size, unsigned shared, const void* segments, int count, const u64* pointers, const int* halves,
                             void* partials, u32* scratch, int* nonfinite, int* taken) {
    launch(blocks, size, shared, [=] { sweep((const Segment*)segments, count, pointers, halves, (Partial*)partials, scratch, nonfinite, taken); });
}

extern "C" void launch_finish(unsigned blocks, unsigned size, unsigned shared, const int* first_of_tensor, const void* partials, const u32* scratch,
                              const double* wanted, void* records, u64* running, int* binades, const int* nonfinite, int skip) {
    launch(blocks, size, shared, [=] {
        finish(first_of_tensor, (const Partial*)partials, scratch, wanted, (Record*)records, running, binades, nonfinite, skip);
    });
}

extern "C" unsigned sizes(int which) { return which == 0 ? sizeof(Segment) : which == 1 ? sizeof(Partial) : sizeof(Record); }
