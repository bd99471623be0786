// CUDA C++ as host C++: included before an unmodified .cu file, it executes kernels block by block and thread by thread.
//
// A thread of a block is a fiber: it runs until it waits, for its warp (shuffles, ballots), for its block
// (__syncthreads) or for what another block writes (__nanosleep in a loop). A schedule says which fiber runs next, and
// how many blocks are under way at a time; what is right under CUDA's rules is right under each of them. Shared memory
// is of its exact size and holds garbage when a block begins.
//
// It finds: threads that wait for ever, threads that left before a barrier, lanes of a warp at different collectives,
// what is read before it is written; and with AddressSanitizer what lies outside of an array. It cannot find faults of
// weak memory, and nothing runs at the same time as anything else.

#include <sys/mman.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __sanitizer_start_switch_fiber(void** fake_stack_save, const void* bottom, size_t size);
extern "C" void __sanitizer_finish_switch_fiber(void* fake_stack_save, const void** bottom_old, size_t* size_old);
extern "C" void __asan_unpoison_memory_region(void const volatile* address, size_t size);
#else
inline void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
inline void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
inline void __asan_unpoison_memory_region(void const volatile*, size_t) {}
#endif

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define SHARED(type, name) type& name = emulation::shared<type>()
#define ADDRESS(type, number) (reinterpret_cast<type*>((number) + emulation::launch.offset))

struct uint3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

namespace emulation {

constexpr unsigned WARP = 32;
constexpr unsigned MOST_THREADS = 1024;
constexpr size_t STACK = 256 << 10;  // reserved; pages come with the first touch
constexpr int PATIENCE = 1000;  // rounds in which threads that wait in loops are all that can run

enum State { READY, SPINNING, AT_WARP, AT_BLOCK, RETURNED };
enum Collective { BALLOT, SHUFFLE, MATCH, SYNC };
const char* const NAMES[] = {"a ballot", "a shuffle", "a match", "__syncwarp"};

#if defined(__x86_64__)
typedef void* Context;
extern "C" void emulation_switch(Context* from, Context to);
asm(R"(
.text
.hidden emulation_switch
.globl emulation_switch
.type emulation_switch,@function
emulation_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulation_switch,.-emulation_switch
)");
inline void change(Context& from, Context& to) { emulation_switch(&from, to); }
inline void prepare(Context& context, char* stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + STACK) - 2;
    *top = reinterpret_cast<void*>(entry);  // where `ret` goes; the stack is then aligned as a call leaves it
    context = top - 6;
    memset(context, 0, 6 * sizeof(void*));
}
#else
typedef ucontext_t Context;
inline void change(Context& from, Context& to) { swapcontext(&from, &to); }
inline void prepare(Context& context, char* stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
}
#endif

struct Block;

struct Fiber {
    Context context;
    char* stack = nullptr;
    void* fake_stack = nullptr;
    Block* block = nullptr;
    uint3 thread = {0, 0, 0};
    State state = RETURNED;
    uint64_t value = 0, result = 0;
    unsigned argument = 0;
    size_t ready_at = 0;  // its place among all that can run

    unsigned lane() const { return thread.x % WARP; }
};

struct Group {  // lanes of a warp that wait for each other
    unsigned mask, arrived;
    Collective what;
};

struct Warp {
    std::vector<Group> groups;
    unsigned ready = 0;  // fibers
    uint64_t priority = 0;
};

struct Block {
    uint3 index = {0, 0, 0};
    unsigned live = 0, waiting = 0;
    int counted = 0;  // by __syncthreads_count
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    void* shared = nullptr;
    size_t shared_size = 0;
};

struct Schedule {
    enum Kind { ROUND_ROBIN, REVERSED, WARP_EAGER, LAST_WARP_EAGER, RANDOM, STARVING } kind;
    unsigned resident;  // blocks under way at a time
};

struct Launch {
    void* kernel = nullptr;
    const uint64_t* arguments = nullptr;
    int64_t offset = 0;  // from an address that a device shows to where the memory is
    uint3 grid = {1, 1, 1}, threads = {1, 1, 1};
    Schedule schedule = {Schedule::ROUND_ROBIN, 1};
    uint64_t random = 1;
    unsigned started = 0, finished = 0;
    std::vector<Block*> blocks;
    std::vector<Fiber*> ready;
    size_t slot = 0, place = 0;  // where the last fiber ran
    char error[400] = "";
};

inline Launch launch;
inline Fiber* current = nullptr;
inline Context scheduler;
inline void* scheduler_fake_stack = nullptr;
inline const void* scheduler_bottom = nullptr;
inline size_t scheduler_size = 0;

inline uint64_t draw() {
    launch.random ^= launch.random << 13;
    launch.random ^= launch.random >> 7;
    launch.random ^= launch.random << 17;
    return launch.random;
}

inline void set_state(Fiber& fiber, State state) {
    std::vector<Fiber*>& ready = launch.ready;
    fiber.block->warps[fiber.thread.x / WARP].ready += (state == READY) - (fiber.state == READY);
    if (state == READY && fiber.state != READY) {
        fiber.ready_at = ready.size();
        ready.push_back(&fiber);
    } else if (state != READY && fiber.state == READY) {
        ready.back()->ready_at = fiber.ready_at;
        ready[fiber.ready_at] = ready.back();
        ready.pop_back();
    }
    fiber.state = state;
}

inline void leave(State state) {
    Fiber* self = current;
    set_state(*self, state);
    __sanitizer_start_switch_fiber(
        state == RETURNED ? nullptr : &self->fake_stack, scheduler_bottom, scheduler_size);
    change(self->context, scheduler);
    __sanitizer_finish_switch_fiber(self->fake_stack, nullptr, nullptr);
}

template <typename... Parts>
void fail(const char* format, Parts... parts) {
    int length = 0;
    if (current)
        length = snprintf(launch.error, sizeof launch.error, "block %u, thread %u: ", current->block->index.x,
                          current->thread.x);
    snprintf(launch.error + length, sizeof launch.error - length, format, parts...);
    if (current) leave(RETURNED);  // never comes back
}

// Waiting

inline bool wake_spinners();

inline void maybe_yield() {
    if (launch.schedule.kind < Schedule::RANDOM || draw() % 4) return;
    // a loop may look before others have done what they still can
    if (launch.schedule.kind == Schedule::STARVING && draw() % 64 == 0) wake_spinners();
    if (launch.schedule.kind == Schedule::STARVING && draw() % 8 == 0)
        current->block->warps[current->thread.x / WARP].priority = draw();
    leave(READY);
}

inline void wait_for_block() {
    Block& block = *current->block;
    if (block.live < block.fibers.size()) fail("waits at __syncthreads() after other threads of its block returned");
    if (++block.waiting < block.live) return leave(AT_BLOCK);
    block.waiting = 0;
    for (Fiber& fiber : block.fibers)
        if (fiber.state == AT_BLOCK) set_state(fiber, READY);
    maybe_yield();
}

inline uint64_t answer(const Group& group, const Fiber* warp, unsigned lane) {
    uint64_t found = 0;
    if (group.what == SHUFFLE) {
        unsigned source = warp[lane].argument;
        return source < WARP && (group.mask >> source & 1) ? warp[source].value : 0xBADBADBADBADBADBull;
    }
    for (unsigned other = 0; other < WARP; ++other)
        if (group.mask >> other & 1) {
            bool counts = group.what == BALLOT ? warp[other].value != 0 : warp[other].value == warp[lane].value;
            found |= static_cast<uint64_t>(counts) << other;
        }
    return found;
}

inline uint64_t collective(Collective what, unsigned mask, uint64_t value, unsigned argument = 0) {
    Fiber* self = current;
    Block& block = *self->block;
    if (!(mask >> self->lane() & 1)) fail("is not in the mask of %s", NAMES[what]);
    self->value = value;
    self->argument = argument;
    std::vector<Group>& groups = block.warps[self->thread.x / WARP].groups;
    size_t i = 0;
    while (i < groups.size() && !(groups[i].mask & mask)) ++i;
    if (i == groups.size()) groups.push_back({mask, 0, what});
    if (groups[i].mask != mask || groups[i].what != what)
        fail("is at %s while others of its warp are at %s", NAMES[what], NAMES[groups[i].what]);
    groups[i].arrived |= 1u << self->lane();
    if (groups[i].arrived != mask) {
        leave(AT_WARP);
        return self->result;
    }
    Group group = groups[i];
    groups.erase(groups.begin() + i);
    Fiber* warp = &block.fibers[self->thread.x / WARP * WARP];
    for (unsigned lane = 0; lane < WARP; ++lane)
        if (mask >> lane & 1) warp[lane].result = answer(group, warp, lane), set_state(warp[lane], READY);
    maybe_yield();
    return self->result;
}

// Shared memory

template <typename Type>
Type& shared() {
    Block& block = *current->block;
    if (!block.shared) {
        block.shared = malloc(sizeof(Type));
        block.shared_size = sizeof(Type);
        for (size_t i = 0; i < sizeof(Type); ++i) static_cast<unsigned char*>(block.shared)[i] = draw() >> 13 | 1;
    }
    if (block.shared_size != sizeof(Type)) fail("SHARED twice in one kernel");
    return *static_cast<Type*>(block.shared);
}

// Running

inline void enter() {
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_size);
    typedef uint64_t A;
    const A* a = launch.arguments;
    // Integers and pointers go where all calls put them: what a kernel does not take does no harm.
    reinterpret_cast<void (*)(A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A)>(launch.kernel)(
        a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16],
        a[17], a[18], a[19], a[20], a[21], a[22], a[23]);
    Block& block = *current->block;
    --block.live;
    if (block.waiting) fail("returns while other threads of its block wait at __syncthreads()");
    for (const Group& group : block.warps[current->thread.x / WARP].groups)
        if (group.mask >> current->lane() & 1) fail("returns while lanes of its warp wait for it at %s", NAMES[group.what]);
    leave(RETURNED);
}

inline std::vector<char*>& spare_stacks() {
    static std::vector<char*> stacks;
    return stacks;
}

inline char* take_stack() {
    std::vector<char*>& spare = spare_stacks();
    if (spare.empty()) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        return static_cast<char*>(mmap(nullptr, STACK, PROT_READ | PROT_WRITE, flags, -1, 0));
    }
    char* stack = spare.back();
    spare.pop_back();
    return stack;
}

inline void begin(Block& block) {
    bool backwards = launch.schedule.kind == Schedule::REVERSED || launch.schedule.kind == Schedule::LAST_WARP_EAGER;
    block.index.x = backwards ? launch.grid.x - 1 - launch.started : launch.started;
    ++launch.started;
    block.live = launch.threads.x;
    block.waiting = 0;
    block.fibers.resize(launch.threads.x);
    block.warps.assign((launch.threads.x + WARP - 1) / WARP, Warp());
    for (Warp& warp : block.warps) warp.priority = draw();
    for (unsigned i = 0; i < launch.threads.x; ++i) {
        Fiber& fiber = block.fibers[i];
        if (!fiber.stack) fiber.stack = take_stack();
        __asan_unpoison_memory_region(fiber.stack, STACK);  // the last frame of an earlier thread has not returned
        fiber.block = &block;
        fiber.thread.x = i;
        fiber.state = RETURNED;
        set_state(fiber, READY);
        prepare(fiber.context, fiber.stack, enter);
    }
}

inline void end(Block& block) {
    free(block.shared);
    block.shared = nullptr;
    ++launch.finished;
}

inline bool ready(size_t slot, size_t place) { return launch.blocks[slot]->fibers[place].state == READY; }

// Look for a fiber that can run from a place on, in steps of 1 or -1 around all blocks.
inline Fiber* around(size_t slot, size_t place, bool backwards) {
    size_t slots = launch.blocks.size(), size = launch.threads.x, all = slots * size;
    size_t at = slot * size + place;
    for (size_t i = 0; i < all; ++i, at = backwards ? (at + all - 1) % all : (at + 1) % all)
        if (ready(at / size, at % size)) {
            launch.slot = at / size;
            launch.place = at % size;
            return &launch.blocks[launch.slot]->fibers[launch.place];
        }
    return nullptr;
}

inline Fiber* in_this_warp() {
    size_t first = launch.place / WARP * WARP, size = launch.threads.x;
    for (size_t i = first; i < first + WARP && i < size; ++i)
        if (ready(launch.slot, i)) {
            launch.place = i;
            return &launch.blocks[launch.slot]->fibers[i];
        }
    return nullptr;
}

// The first fiber of the most important warp that can run: others starve as long as they may.
inline Fiber* most_important() {
    uint64_t most = 0;
    for (size_t slot = 0; slot < launch.blocks.size(); ++slot) {
        std::vector<Warp>& warps = launch.blocks[slot]->warps;
        for (size_t w = 0; w < warps.size(); ++w)
            if (warps[w].ready && warps[w].priority > most)
                most = warps[w].priority, launch.slot = slot, launch.place = w * WARP;
    }
    return in_this_warp();
}

inline Fiber* next_ready() {
    size_t size = launch.threads.x;
    Fiber* fiber;
    if (launch.ready.empty()) return nullptr;
    switch (launch.schedule.kind) {
        case Schedule::ROUND_ROBIN: return around(launch.slot, (launch.place + 1) % size, false);
        case Schedule::REVERSED: return around(launch.slot, (launch.place + size - 1) % size, true);
        case Schedule::WARP_EAGER: return (fiber = in_this_warp()) ? fiber : around(launch.slot, 0, false);
        case Schedule::LAST_WARP_EAGER: return (fiber = in_this_warp()) ? fiber : around(launch.slot, size - 1, true);
        case Schedule::STARVING: return most_important();
        default: return launch.ready[draw() % launch.ready.size()];
    }
}

// Let those that wait in a loop look again; false when there are none.
inline bool wake_spinners() {
    bool any = false;
    for (Block* block : launch.blocks)
        for (Fiber& fiber : block->fibers)
            if (fiber.state == SPINNING) set_state(fiber, READY), any = true;
    return any;
}

inline void run(Fiber& fiber) {
    current = &fiber;
    __sanitizer_start_switch_fiber(&scheduler_fake_stack, fiber.stack, STACK);
    change(scheduler, fiber.context);
    __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
    current = nullptr;
}

inline void run_all() {
    int rounds = 0;
    while (launch.finished < launch.grid.x && !*launch.error) {
        for (Block* block : launch.blocks)
            if (!block->live && launch.started < launch.grid.x) begin(*block);
        Fiber* fiber = next_ready();
        if (!fiber) {
            if (!wake_spinners()) fail("all threads wait for ever");
            if (++rounds > PATIENCE) fail("all threads wait in loops, for what no thread under way will write");
            continue;
        }
        run(*fiber);
        if (fiber->state == RETURNED || fiber->state == AT_BLOCK) rounds = 0;
        if (fiber->state == RETURNED && !fiber->block->live) end(*fiber->block);
    }
}

inline Schedule schedule_of(const char* name) {
    if (!strcmp(name, "round_robin")) return {Schedule::ROUND_ROBIN, 2};
    if (!strcmp(name, "reversed")) return {Schedule::REVERSED, 3};
    if (!strcmp(name, "warp_eager")) return {Schedule::WARP_EAGER, 1};
    if (!strcmp(name, "last_warp_eager")) return {Schedule::LAST_WARP_EAGER, 4};
    if (!strncmp(name, "random", 6)) return {Schedule::RANDOM, 4};
    if (!strncmp(name, "starving", 8)) return {Schedule::STARVING, 4};
    snprintf(launch.error, sizeof launch.error, "no schedule is called %s", name);
    return {Schedule::ROUND_ROBIN, 1};
}

}  // namespace emulation

// Run a kernel; returns what went wrong, or an empty string. Arguments: 24 integers and pointers.
extern "C" inline __attribute__((used)) const char* emulate(
    void* kernel, unsigned grid, unsigned threads, const uint64_t* arguments, int64_t offset, const char* schedule) {
    using namespace emulation;
    launch = Launch();
    launch.schedule = schedule_of(schedule);
    launch.kernel = kernel;
    launch.arguments = arguments;
    launch.offset = offset;
    launch.grid.x = grid;
    launch.threads.x = threads;
    const char* seed = strchr(schedule, ':');
    launch.random = 0x9E3779B97F4A7C15ull * (seed ? strtoull(seed + 1, nullptr, 10) * 2 + 1 : 1);
    if (!grid || !threads || threads > MOST_THREADS)
        snprintf(launch.error, sizeof launch.error, "%u blocks of %u threads: no GPU takes that", grid, threads);
    std::vector<std::unique_ptr<Block>> blocks;
    while (blocks.size() < launch.schedule.resident && blocks.size() < grid) {
        blocks.emplace_back(new Block);
        launch.blocks.push_back(blocks.back().get());
    }
    if (!*launch.error) run_all();
    for (auto& block : blocks) {
        free(block->shared);
        for (Fiber& fiber : block->fibers) spare_stacks().push_back(fiber.stack);
    }
    return launch.error;
}

// What CUDA offers to kernels

#define threadIdx (emulation::current->thread)
#define blockIdx (emulation::current->block->index)
#define blockDim (emulation::launch.threads)
#define gridDim (emulation::launch.grid)

inline void __syncthreads() { emulation::wait_for_block(); }
inline int __syncthreads_count(int is) {
    __syncthreads();
    int& counted = emulation::current->block->counted;
    const int before = counted;
    __syncthreads();
    counted += is != 0;
    __syncthreads();
    return counted - before;
}
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulation::collective(emulation::SYNC, mask, 0); }
inline void __threadfence() { emulation::maybe_yield(); }
inline void __nanosleep(unsigned) { emulation::leave(emulation::SPINNING); }

inline unsigned __ballot_sync(unsigned mask, int is) { return emulation::collective(emulation::BALLOT, mask, is != 0); }
inline int __any_sync(unsigned mask, int is) { return __ballot_sync(mask, is) != 0; }
inline int __all_sync(unsigned mask, int is) { return __ballot_sync(mask, is) == mask; }

namespace emulation {
template <typename Type>
Type shuffle(unsigned mask, Type value, unsigned source) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(Type));
    bits = collective(SHUFFLE, mask, bits, source);
    memcpy(&value, &bits, sizeof(Type));
    return value;
}
template <typename Type>
unsigned matching(unsigned mask, Type value) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(Type));
    return collective(MATCH, mask, bits);
}
inline unsigned lane() { return current->lane(); }
}  // namespace emulation

template <typename Type>
unsigned __match_any_sync(unsigned mask, Type value) { return emulation::matching(mask, value); }
template <typename Type>
Type __shfl_sync(unsigned mask, Type value, int source) { return emulation::shuffle(mask, value, source % 32u); }
template <typename Type>
Type __shfl_up_sync(unsigned mask, Type value, unsigned by) {
    unsigned lane = emulation::lane();
    return emulation::shuffle(mask, value, lane < by ? lane : lane - by);
}
template <typename Type>
Type __shfl_down_sync(unsigned mask, Type value, unsigned by) {
    unsigned lane = emulation::lane();
    return emulation::shuffle(mask, value, lane + by > 31 ? lane : lane + by);
}
template <typename Type>
Type __shfl_xor_sync(unsigned mask, Type value, int with) { return emulation::shuffle(mask, value, emulation::lane() ^ with); }

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(bits) : 32; }
inline int __clzll(long long bits) { return bits ? __builtin_clzll(bits) : 64; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return static_cast<unsigned>(((static_cast<uint64_t>(high) << 32 | low) << (by & 31)) >> 32);
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<uint64_t>(a) * b >> 32; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned __int128>(a) * b >> 64;
}

namespace emulation {
template <typename To, typename From>
To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From), "of one size");
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}
// One thread runs at a time, so that reading, computing and writing is atomic when no other thread is let in between.
template <typename Type, typename Compute>
Type atomic(Type* address, Compute compute) {
    maybe_yield();
    Type old = *address;
    *address = compute(old);
    return old;
}
}  // namespace emulation

// What an instruction of a GPU returns: it has one NaN of its own, whatever the operands.
inline float as_on_a_gpu(float value) { return value == value ? value : emulation::bits_as<float>(0x7fffffffu); }

inline float __fmaf_ieee_rn(float a, float b, float c) { return as_on_a_gpu(__builtin_fmaf(a, b, c)); }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline double __dsqrt_rn(double a) { return __builtin_sqrt(a); }

inline float __uint_as_float(unsigned bits) { return emulation::bits_as<float>(bits); }
inline unsigned __float_as_uint(float value) { return emulation::bits_as<unsigned>(value); }
inline double __longlong_as_double(long long bits) { return emulation::bits_as<double>(bits); }
inline long long __double_as_longlong(double value) { return emulation::bits_as<long long>(value); }

template <typename Type>
Type atomicAdd(Type* address, Type value) {
    static_assert(static_cast<Type>(0.5) == 0, "no sum of floating-point numbers in any order");
    return emulation::atomic(address, [=](Type old) { return old + value; });
}
template <typename Type>
Type atomicMin(Type* address, Type value) { return emulation::atomic(address, [=](Type old) { return value < old ? value : old; }); }
template <typename Type>
Type atomicMax(Type* address, Type value) { return emulation::atomic(address, [=](Type old) { return value > old ? value : old; }); }
template <typename Type>
Type atomicOr(Type* address, Type value) { return emulation::atomic(address, [=](Type old) { return old | value; }); }
template <typename Type>
Type atomicExch(Type* address, Type value) { return emulation::atomic(address, [=](Type) { return value; }); }

template <typename Type>
Type __ldcs(const Type* address) { return *address; }
template <typename Type>
Type __ldcg(const Type* address) { return *address; }
template <typename Type>
Type __ldg(const Type* address) { return *address; }
