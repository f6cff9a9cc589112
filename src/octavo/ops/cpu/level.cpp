// What this CPU can run; compiled for any x86-64.
#include <cstdint>

// 0: none of the kernels; 1: AVX-512 with BF16 and VNNI.
extern "C" __attribute__((visibility("default"))) int32_t octavo_cpu_level() {
    __builtin_cpu_init();
    bool base = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16") &&
                __builtin_cpu_supports("fma");
    return base ? 1 : 0;
}

// Changes with the C interface, so that a stale build is noticed instead of crashing.
extern "C" __attribute__((visibility("default"))) int32_t octavo_abi_version() { return 1; }
