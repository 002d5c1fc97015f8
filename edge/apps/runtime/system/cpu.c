/* Instruction sets of this CPU. */
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#else
#include <sys/auxv.h>
#endif

#include "system.h"

/* ---- instruction sets -------------------------------------------------------------------------------------------- */

#if defined(__x86_64__)

typedef struct { uint32_t eax, ebx, ecx, edx; } registers;

static registers ask_cpu(uint32_t leaf, uint32_t part)
{
    registers r = {0, 0, 0, 0};
    __get_cpuid_count(leaf, part, &r.eax, &r.ebx, &r.ecx, &r.edx); /* stays 0 if there is no such leaf */
    return r;
}

/* XCR0: registers that the system saves when it switches threads. Needs OSXSAVE. */
static uint32_t saved_registers(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static bool has_all(uint32_t bits, uint32_t wanted)
{
    return (bits & wanted) == wanted;
}

/* By the bits of Intel's manual (volume 2A, CPUID). avx2 stands for x86-64-v3, avx512 for x86-64-v4. */
static uint64_t isa_features(void)
{
    enum { FMA = 1u << 12, SSE42 = 1u << 20, MOVBE = 1u << 22, POPCNT = 1u << 23, OSXSAVE = 1u << 27, AVX = 1u << 28,
           F16C = 1u << 29 };
    enum { BMI1 = 1u << 3, AVX2_ = 1u << 5, BMI2 = 1u << 8, AVX512F = 1u << 16, AVX512DQ = 1u << 17,
           AVX512CD = 1u << 28 };
    const uint32_t AVX512BW = 1u << 30, AVX512VL = 1u << 31, VNNI512 = 1u << 11, VNNI = 1u << 4, LZCNT = 1u << 5,
                   BF16 = 1u << 5;
    const uint32_t YMM = 0x6, ZMM = 0xE6;
    uint64_t found = 0;
    registers basic = ask_cpu(1, 0), more = ask_cpu(7, 0), newer = ask_cpu(7, 1), extended = ask_cpu(0x80000001, 0);
    if (!has_all(basic.ecx, FMA | SSE42 | MOVBE | POPCNT | OSXSAVE | AVX | F16C) || !has_all(saved_registers(), YMM)
        || !has_all(more.ebx, BMI1 | AVX2_ | BMI2) || !has_all(extended.ecx, LZCNT))
        return found;
    found |= 1u << ISA_AVX2;
    if (has_all(newer.eax, VNNI))
        found |= 1u << ISA_AVXVNNI;
    if (has_all(more.ebx, AVX512F | AVX512DQ | AVX512CD | AVX512BW | AVX512VL) && has_all(more.ecx, VNNI512)
        && has_all(saved_registers(), ZMM))
        found |= 1u << ISA_AVX512VNNI | (has_all(newer.eax, BF16) ? 1u << ISA_AVX512BF16 : 0);
    return found;
}

#else

/* i8mm stands for BF16, too, as in Armv8.6. */
static uint64_t arm_features(bool dot, bool i8mm)
{
    return 1u << ISA_NEON | (dot ? 1u << ISA_DOTPROD : 0) | (dot && i8mm ? 1u << ISA_I8MM : 0);
}

#ifdef __APPLE__

static bool has_feature(const char *name)
{
    int32_t value = 0;
    size_t size = sizeof value;
    return !sysctlbyname(name, &value, &size, NULL, 0) && value;
}

static uint64_t isa_features(void)
{
    return arm_features(has_feature("hw.optional.arm.FEAT_DotProd"),
                        has_feature("hw.optional.arm.FEAT_I8MM") && has_feature("hw.optional.arm.FEAT_BF16"));
}

#else

static uint64_t isa_features(void)
{
    /* Of Linux's asm/hwcap.h: HWCAP_ASIMDDP; HWCAP2_I8MM and HWCAP2_BF16. */
    const uint64_t DOT = 1u << 20, MATRIX = 3u << 13;
    return arm_features(getauxval(AT_HWCAP) & DOT, (getauxval(AT_HWCAP2) & MATRIX) == MATRIX);
}

#endif
#endif

bool runs_isa(const char *name)
{
    static const char *const names[ISAS] = {ISA_NAMES};
    for (uint32_t i = 0; i < ISAS; i++)
        if (!strcmp(name, names[i]))
            return isa_features() >> i & 1;
    return false;
}
