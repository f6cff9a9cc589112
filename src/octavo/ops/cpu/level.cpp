// What this CPU can run, and what this library was built for; compiled for any x86-64.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#define OCTAVO_EXPORT extern "C" __attribute__((visibility("default")))

// Matrix tiles for bfloat16 and int8: the CPU has them and Linux lets this process use their 8 KiB of state a thread.
static bool has_amx() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const unsigned needed = 1u << 22 | 1u << 24 | 1u << 25;  // amx-bf16, amx-tile, amx-int8
    if ((d & needed) != needed) return false;
    const int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

static bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}

// 0: none of the kernels; 1: AVX2 with FMA and F16C; 2: AVX-512 with BF16 and VNNI; 3: and AMX.
OCTAVO_EXPORT int32_t octavo_cpu_level() {
    __builtin_cpu_init();
    const bool base =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return !base ? 0 : !has_avx512() ? 1 : 2 + has_amx();
}

// The least level that runs this library.
OCTAVO_EXPORT int32_t octavo_needed_level() { return OCTAVO_LEVEL; }

// Changes with the C interface, so that a stale build is noticed instead of crashing.
OCTAVO_EXPORT int32_t octavo_abi_version() { return 7; }
