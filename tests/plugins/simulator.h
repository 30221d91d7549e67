// The threads of a CUDA grid, on one CPU thread: see simulator.cpp.
#pragma once
#ifndef WARP
#define WARP 4                          // lanes
#endif

namespace simulator {

struct Dim { unsigned x; };
struct Site {                           // where a call that waits stands in the source
    const char *call, *file;
    int line;
};
struct Launch { unsigned blocks, threads, shared_bytes, seed; };
enum Access { READ, WRITE, ATOMIC, VOLATILE_READ };

// A thread's own do not change, however often it gives way.
__attribute__((const)) Dim thread_index();
__attribute__((const)) Dim block_index();
__attribute__((const)) Dim grid();
__attribute__((const)) void* dynamic_shared();

bool barrier(Site, bool own);           // of the block; whether `own` of all threads is true
const long long* exchange(Site, long long own);     // of the warp: `own` of every lane, until the next call
void touch(const volatile void* at, unsigned size, Access, void* code);     // the thread's next access; others may run before it

// Runs `kernel(own)` in every thread; nullptr, or what it did wrong. Code addresses are given as @{offset in the library}.
const char* run(Launch, void (*kernel)(void*), void* own);

}  // namespace simulator
