// What CUDA kernels of the GPU engine use, for a C++ compiler of a CPU. Workgroups run one after the other, the threads of
// one as fibers, which give way at barriers and at products of tensor cores. `launch` takes cuLaunchKernel's parameters.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#define int64_t int64  // which kernels define
#define uint64_t uint64
#define alignas(bytes)
#define __shared__ static __attribute__((aligned(64)))
#define __global__
#define __device__
#define __launch_bounds__(threads)

struct Index { int x, y, z; };
struct float4 { float x, y, z, w; };
struct int4 { int x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
using std::max;
using std::min;

static constexpr int WARP = 32, STACK = 1 << 17;

struct Thread { ucontext_t context; bool done; long barriers, products; };
struct Operands { unsigned a[4], b[2]; };
static std::vector<Thread> threads;
static std::vector<Operands> operands;  // [parity of a warp's product, thread]
static ucontext_t scheduler;
static Index blockIdx, threadIdx;
static bool moved;  // since the scheduler began its round: otherwise the threads wait for each other for ever

static Thread &self() { return threads[threadIdx.x]; }

static void give_way() {
    int own = threadIdx.x;
    swapcontext(&threads[own].context, &scheduler);
}

// Until threads first … first + count - 1 have met as often as this one.
static void meet(long Thread::*times, int first, int count) {
    long mine = ++(self().*times);
    moved = true;
    auto late = [&](const Thread &each) { return each.*times < mine; };
    while (std::any_of(&threads[first], &threads[first] + count, late)) give_way();
}

static void __syncthreads() { meet(&Thread::barriers, 0, threads.size()); }

static void edge_overlap() {}
static void edge_begin() {}
static void edge_prefetch(const void *at) { (void)*(const volatile char *)at; }

template <class T> static void edge_fetch(T *to, const T *at) { *to = *at; }

static float edge_sum(float value, int count) {
    int first = threadIdx.x / WARP * WARP, own = threadIdx.x / count * count;
    Operands *all = &operands[self().products % 2 * threads.size()];
    memcpy(all[threadIdx.x].a, &value, 4);
    meet(&Thread::products, first, WARP);
    double sum = 0;
    for (int i = 0; i < count; i++) {
        memcpy(&value, all[own + i].a, 4);
        sum += value;
    }
    return sum;
}

static float edge_half(unsigned word) {
    uint16_t bits = word;
    _Float16 value;
    memcpy(&value, &bits, 2);
    return value;
}

static unsigned edge_halves(float a, float b) {
    _Float16 values[2] = {(_Float16)a, (_Float16)b};
    unsigned both;
    memcpy(&both, values, 4);
    return both;
}

static unsigned rounded(float value) {  // to bfloat16, nearest even
    unsigned bits;
    memcpy(&bits, &value, 4);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static unsigned edge_bf16(float a, float b) { return rounded(a) | rounded(b) << 16; }

static float half_of(unsigned word, int which) {
    unsigned bits = which ? word & 0xffff0000u : word << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static unsigned edge_bf16_of(unsigned codes, unsigned mask, unsigned minus) {
    unsigned both = codes & mask | 0x43004300u;
    return edge_bf16(half_of(both, 0) + half_of(minus, 0), half_of(both, 1) + half_of(minus, 1));
}

// Fragments as in section "Matrix Fragments for mma.m16n8k16 with floating point type" of the PTX ISA.
static void edge_mma(float *c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    int first = threadIdx.x / WARP * WARP, lane = threadIdx.x % WARP, group = lane / 4, place = lane % 4;
    Operands *all = &operands[self().products % 2 * threads.size()];
    all[threadIdx.x] = {{a0, a1, a2, a3}, {b0, b1}};
    meet(&Thread::products, first, WARP);
    for (int i = 0; i < 4; i++) {
        int row = group + 8 * (i / 2), column = 2 * place + i % 2;
        for (int k = 0; k < 16; k++) {
            const Operands &one = all[first + row % 8 * 4 + k % 8 / 2], &other = all[first + column * 4 + k % 8 / 2];
            c[i] += half_of(one.a[row / 8 + 2 * (k / 8)], k % 2) * half_of(other.b[k / 8], k % 2);
        }
    }
}

static void *const *parameters;

template <class... P, size_t... I>
static void call(void (*kernel)(P...), std::index_sequence<I...>) { kernel(*(P *)parameters[I]...); }

template <class... P> static void call(void (*kernel)(P...)) { call(kernel, std::index_sequence_for<P...>()); }

// Returns 0, or 1 if threads wait for each other for ever.
template <class Body> static int run(Body body, int groups_x, int groups_y, int count) {
    static Body current = body;
    static void (*entry)() = [] { current(); self().done = moved = true; };
    std::vector<std::unique_ptr<char[]>> stacks;
    for (int i = 0; i < count; i++) stacks.emplace_back(new char[STACK]);
    operands.resize(2 * count);
    for (blockIdx.y = 0; blockIdx.y < groups_y; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < groups_x; blockIdx.x++) {
            threads.assign(count, {});
            for (int i = 0; i < count; i++) {
                getcontext(&threads[i].context);
                threads[i].context.uc_stack = {stacks[i].get(), 0, STACK};
                threads[i].context.uc_link = &scheduler;
                makecontext(&threads[i].context, entry, 0);
            }
            for (bool running = moved = true; running;) {
                if (!std::exchange(moved, false)) return 1;
                running = false;
                for (threadIdx.x = 0; threadIdx.x < count; threadIdx.x++)
                    if (!self().done) {
                        running = true;
                        int own = threadIdx.x;
                        swapcontext(&scheduler, &threads[own].context);
                        threadIdx.x = own;
                    }
            }
        }
    return 0;
}
