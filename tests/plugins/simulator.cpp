// The threads of a CUDA grid as coroutines: some blocks at a time, their threads in a random order; a thread gives way
// before some of its accesses to memory and where it waits. The seed decides. A launch fails when
//
// - threads of a block wait at different barriers at the same time, or one is gone while others wait (on hardware:
//   "illegal instruction", or a deadlock), or lanes of a warp wait at different calls;
// - two threads access the same word of shared memory between two barriers, one of them writes, and not both are atomic
//   (a volatile read is fine beside an atomic), whatever the order in which they happened to run.
#include "simulator.h"

#include <dlfcn.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

extern "C" __attribute__((weak)) char __start_cuda_shared[], __stop_cuda_shared[];     // __shared__ variables

namespace simulator {
namespace {

constexpr unsigned STACK_BYTES = 1 << 16, MOST_BLOCKS = 6;      // at a time
constexpr int WAYS = 4;

struct Block;

struct Thread {
    Block* block = nullptr;
    unsigned index = 0, place = 0;      // in `ready`
    bool gone = false;
    const Site* waits = nullptr;        // at `site`
    Site site{};
    bool of_block = false;              // waits for the block, not for the warp
    unsigned priority = 0;
    long long own = 0;
    ucontext_t context{};
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
};

struct Accessor { int thread; std::uint32_t code; };

struct Word {                           // of shared memory, since the barrier that began `since`
    std::uint64_t since;
    Accessor by[WAYS][2];               // the first two threads of each way
};

struct Block {
    unsigned index = 0, waiting = 0, gone = 0;
    std::uint64_t since = 0;
    bool all = true, all_before = true;
    std::vector<std::unique_ptr<Thread>> threads;
    std::vector<unsigned> arrived;      // lanes, by warp
    std::vector<long long> exchanged;
    std::vector<std::uint64_t> dynamic;
    std::vector<char> fixed;            // the __shared__ variables, while another block runs
    std::vector<Word> words;            // of the variables, then of `dynamic`
};

Launch launched;
void (*kernel_of)(void*);
void* own_of;
Thread* self = nullptr;
Block* resident = nullptr;              // whose __shared__ variables are in place
ucontext_t scheduler;
std::vector<Thread*> ready;
std::vector<std::unique_ptr<Block>> slots;
std::mt19937 random_bits;
std::uint64_t barriers = 0;
bool by_priority;
unsigned burst;                         // accesses in a row, on average
int fuel;
std::string fault;
std::uintptr_t library;                 // where it lies

unsigned below(unsigned limit) { return random_bits() % limit; }

std::string described(const Thread& thread) {
    std::string text = "thread " + std::to_string(thread.index);
    if (thread.gone) return text + " is gone";
    if (!thread.waits) return text + " runs";
    const char* name = std::strrchr(thread.site.file, '/');
    const std::string place = name ? name + 1 : thread.site.file;
    return text + " waits at " + thread.site.call + " (" + place + ":" + std::to_string(thread.site.line) + ")";
}

void give_way() { swapcontext(&self->context, &scheduler); }

[[noreturn]] void fail(const Block& block, const std::string& text) {
    fault = "block " + std::to_string(block.index) + ": " + text + "; seed " + std::to_string(launched.seed);
    for (;;) give_way();                // never comes back
}

void set_ready(Thread* thread) {
    thread->waits = nullptr;
    thread->place = ready.size();
    ready.push_back(thread);
}

void set_waiting(Thread* thread) {
    ready.back()->place = thread->place;
    ready[thread->place] = ready.back();
    ready.pop_back();
}

bool same(const Site& a, const Site& b) { return a.line == b.line && !std::strcmp(a.call, b.call) && !std::strcmp(a.file, b.file); }

// The thread has come to `site`: who waits with it must wait at the same, and nobody may be gone.
void meet(const Site& site, bool of_block) {
    Block& block = *self->block;
    self->site = site, self->waits = &self->site, self->of_block = of_block;
    const unsigned first = self->index / WARP * WARP;
    for (unsigned k = of_block ? 0 : first; k < (of_block ? launched.threads : first + WARP); k++) {
        const Thread& other = *block.threads[k];
        const bool of_warp = k / WARP == self->index / WARP;
        const bool apart = other.waits && (of_warp || other.of_block) && !same(other.site, site);
        if (&other != self && (other.gone || apart)) fail(block, described(*self) + ", " + described(other));
    }
    set_waiting(self);
}

void run_thread() {
    kernel_of(own_of);
    Block& block = *self->block;
    self->gone = true;
    block.gone++;
    for (const auto& other : block.threads)
        if (other->waits && (other->of_block || other->index / WARP == self->index / WARP))
            fail(block, described(*self) + ", " + described(*other));
    set_waiting(self);
    give_way();
}

void start(Block& block, unsigned index) {
    block.index = index, block.waiting = block.gone = 0;
    block.since = ++barriers;
    block.all = true;
    const unsigned fixed = __stop_cuda_shared - __start_cuda_shared;
    block.fixed.assign(fixed, char(0xA5));
    block.dynamic.assign((launched.shared_bytes + 7) / 8 + 1, 0xDEADBEEFDEADBEEFull);   // aligned to 16 bytes
    block.words.resize(fixed / 4 + 1 + launched.shared_bytes / 4 + 1);
    block.arrived.assign(launched.threads / WARP, 0);
    block.exchanged.assign(launched.threads, 0);
    while (block.threads.size() < launched.threads) block.threads.push_back(std::make_unique<Thread>());
    block.threads.resize(launched.threads);
    for (unsigned k = 0; k < launched.threads; k++) {
        Thread& thread = *block.threads[k];
        thread.block = &block, thread.index = k, thread.gone = false, thread.priority = random_bits();
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get();
        thread.context.uc_stack.ss_size = STACK_BYTES;
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, run_thread, 0);
        set_ready(&thread);
    }
}

void put_in_place(Block* block) {
    if (block == resident) return;
    const unsigned fixed = __stop_cuda_shared - __start_cuda_shared;
    if (resident) std::memcpy(resident->fixed.data(), __start_cuda_shared, fixed);
    std::memcpy(__start_cuda_shared, block->fixed.data(), fixed);
    resident = block;
}

Thread* next() {
    Thread* found = ready[below(ready.size())];
    if (by_priority)
        for (Thread* each : ready)
            if (each->priority > found->priority) found = each;
    return found;
}

std::string code_at(std::uint32_t offset) {
    char text[24];
    std::snprintf(text, sizeof text, "@{%x}", offset);
    return text;
}

constexpr const char* NAMES[WAYS] = {"reads", "writes", "changes (atomic)", "reads (volatile)"};
constexpr bool CONFLICT[WAYS][WAYS] = {
    {false, true, true, false}, {true, true, true, true}, {true, true, false, false}, {false, true, false, false}};

void check(Word& word, Access access, std::uint32_t code, int in_fixed, unsigned number) {
    const int own = self->index;
    if (word.since != self->block->since) {
        word.since = self->block->since;
        for (auto& way : word.by) way[0].thread = way[1].thread = -1;
    }
    for (int way = 0; way < WAYS; way++)
        for (const Accessor& other : word.by[way])
            if (CONFLICT[access][way] && other.thread >= 0 && other.thread != own)
                fail(*self->block, "race for " + (in_fixed ? "a __shared__ variable" : "word " + std::to_string(number) + " of dynamic shared memory") +
                     ": thread " + std::to_string(other.thread) + " " + NAMES[way] + " at " +
                     code_at(other.code) + ", thread " + std::to_string(own) + " " + NAMES[access] + " at " + code_at(code));
    Accessor* mine = word.by[access];
    if (mine[0].thread < 0) mine[0] = {own, code};
    else if (mine[0].thread != own && mine[1].thread < 0) mine[1] = {own, code};
}

void touched(std::uintptr_t at, unsigned size, Access access, std::uintptr_t from) {
    if (!self) return;
    if (--fuel < 0) {
        fuel = below(2 * burst);
        if (by_priority && !below(4)) self->priority = random_bits();
        give_way();
    }
    Block& block = *self->block;
    const std::uintptr_t fixed = (std::uintptr_t)__start_cuda_shared, dynamic = (std::uintptr_t)dynamic_shared();
    const unsigned fixed_bytes = __stop_cuda_shared - __start_cuda_shared;
    const bool in_fixed = at - fixed < fixed_bytes;
    if (!in_fixed && at - dynamic >= launched.shared_bytes) return;
    const std::uintptr_t offset = at - (in_fixed ? fixed : dynamic);
    for (std::uintptr_t k = offset / 4; k <= (offset + size - 1) / 4; k++)
        check(block.words[in_fixed ? k : fixed_bytes / 4 + 1 + k], access, from - library, in_fixed, k);
}

}  // namespace

Dim thread_index() { return {self->index}; }
Dim block_index() { return {self->block->index}; }
Dim grid() { return {launched.blocks}; }
void* dynamic_shared() { return (void*)(((std::uintptr_t)self->block->dynamic.data() + 15) / 16 * 16); }

bool barrier(Site site, bool own) {
    Block& block = *self->block;
    meet(site, true);
    block.all = block.all && own;
    if (++block.waiting == launched.threads) {
        block.all_before = block.all, block.all = true;
        block.waiting = 0;
        block.since = ++barriers;
        for (const auto& thread : block.threads) set_ready(thread.get());
    }
    give_way();
    return self->block->all_before;
}

const long long* exchange(Site site, long long own) {
    Block& block = *self->block;
    const unsigned warp = self->index / WARP;
    meet(site, false);
    self->own = own;
    if (++block.arrived[warp] == WARP) {
        block.arrived[warp] = 0;
        for (unsigned k = warp * WARP; k < (warp + 1) * WARP; k++) {
            block.exchanged[k] = block.threads[k]->own;
            set_ready(block.threads[k].get());
        }
    }
    give_way();
    return &self->block->exchanged[warp * WARP];
}

void touch(const volatile void* at, unsigned size, Access access, void* code) {
    touched((std::uintptr_t)at, size, access, (std::uintptr_t)code);
}

const char* run(Launch launch, void (*kernel)(void*), void* own) {
    static std::mutex one_at_a_time;
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    Dl_info here;
    dladdr((void*)run, &here);
    library = (std::uintptr_t)here.dli_fbase;
    launched = launch, kernel_of = kernel, own_of = own;
    random_bits.seed(launch.seed);
    fault.clear(), ready.clear();
    resident = nullptr;
    by_priority = below(2);
    burst = 4u << (3 * below(3));
    fuel = 0;
    const unsigned at_a_time = std::min(launch.blocks, 1 + below(MOST_BLOCKS));
    while (slots.size() < at_a_time) slots.push_back(std::make_unique<Block>());
    unsigned started = 0;
    while (started < at_a_time) start(*slots[started], started), started++;
    while (!ready.empty() && fault.empty()) {
        self = next();
        put_in_place(self->block);
        swapcontext(&scheduler, &self->context);
        Block& block = *self->block;
        if (block.gone == launch.threads && started < launch.blocks && fault.empty()) {
            if (resident == &block) resident = nullptr;
            start(block, started++);
        }
    }
    for (unsigned k = 0; k < at_a_time && fault.empty(); k++)
        for (const auto& thread : slots[k]->threads)
            if (thread->waits) fault = "block " + std::to_string(slots[k]->index) + ": " + described(*thread) + " for ever";
    self = nullptr;
    return fault.empty() ? nullptr : fault.c_str();
}

}  // namespace simulator

// What the compiler calls before accesses.
using simulator::touched;
#define CALLER ((std::uintptr_t)__builtin_return_address(0))
#define SEEN(size)                                                                                                   \
    void __tsan_read##size(std::uintptr_t at) { touched(at, size, simulator::READ, CALLER); }                        \
    void __tsan_write##size(std::uintptr_t at) { touched(at, size, simulator::WRITE, CALLER); }                      \
    void __tsan_unaligned_read##size(std::uintptr_t at) { touched(at, size, simulator::READ, CALLER); }              \
    void __tsan_unaligned_write##size(std::uintptr_t at) { touched(at, size, simulator::WRITE, CALLER); }            \
    void __tsan_volatile_read##size(std::uintptr_t at) { touched(at, size, simulator::VOLATILE_READ, CALLER); }      \
    void __tsan_volatile_write##size(std::uintptr_t at) { touched(at, size, simulator::WRITE, CALLER); }
extern "C" {
SEEN(1)
SEEN(2)
SEEN(4)
SEEN(8)
SEEN(16)
void __tsan_read_range(std::uintptr_t at, unsigned long size) { touched(at, size, simulator::READ, CALLER); }
void __tsan_write_range(std::uintptr_t at, unsigned long size) { touched(at, size, simulator::WRITE, CALLER); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
