// What kernels use of the hardware, Hopper's: instructions of PTX under names. On a CPU the tests put an emulation in place.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

#ifndef EMULATED
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define BY_VALUE __grid_constant__
struct __align__(16) Words { u32 w[4]; };
struct __align__(64) TensorMap { u64 opaque[16]; };

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void wait_for_kernel_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ void copy_async(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void signal_init(u64* signal, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(signal)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void signals_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void signal_arrive(u64* signal) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(signal)) : "memory");
}
__device__ __forceinline__ void signal_expect(u64* signal, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(signal)), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void signal_wait(u64* signal, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra READY;\nbra AGAIN;\n"
        "READY:\n}"
        ::"r"(shared_address(signal)), "r"(parity) : "memory");
}
__device__ __forceinline__ void copy_bulk(void* shared, const void* global, u32 bytes, u64* signal) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(signal)) : "memory");
}
// The box of 16 rows that begins at a row and at a 32-bit word of it; what lies outside the tensor is zero.
__device__ __forceinline__ void copy_box(void* shared, const TensorMap* map, int word, int row, u64* signal) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(shared_address(shared)), "l"(map), "r"(word), "r"(row), "r"(shared_address(signal)) : "memory");
}
// The same of a tensor [columns, rows, 128 bytes], of all columns; 16 bytes lie where `swizzle` puts them.
__device__ __forceinline__ void copy_columns(void* shared, const TensorMap* map, int row, u64* signal) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {0, %2, 0}], [%3];"
                 ::"r"(shared_address(shared)), "l"(map), "r"(row), "r"(shared_address(signal)) : "memory");
}
__device__ __forceinline__ void fetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// A barrier of the warps that multiply.
__device__ __forceinline__ void sync_multipliers(int threads) {
    asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}
__device__ __forceinline__ void sync_warp() { __syncwarp(); }
template <typename T> __device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) value += __shfl_xor_sync(0xffffffffu, value, other);
    return value;
}
__device__ __forceinline__ int warp_max(int value) { return __reduce_max_sync(0xffffffffu, value); }
__device__ __forceinline__ int from_lane(int value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
// The sum of the lanes up to one's own.
__device__ __forceinline__ int warp_scan(int value) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_up_sync(0xffffffffu, value, distance);
        if (lane >= distance) value += before;
    }
    return value;
}
// Of the eight lanes with the same number modulo 4, which share two columns of a product.
__device__ __forceinline__ float column_max(float value) {
#pragma unroll
    for (int other = 4; other < 32; other *= 2) value = max(value, __shfl_xor_sync(0xffffffffu, value, other));
    return value;
}
__device__ __forceinline__ float column_sum(float value) {
#pragma unroll
    for (int other = 4; other < 32; other *= 2) value += __shfl_xor_sync(0xffffffffu, value, other);
    return value;
}

// Four 8 x 8 matrices of 16-bit numbers, of which lane i has row i % 8 of matrix i / 8; a lane gets two numbers of each as an
// operand of a product has them, of the matrix or of its transpose.
__device__ __forceinline__ void load_matrices(u32 (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void load_matrices_turned(u32 (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(shared_address(row)) : "memory");
}
// The transpose of a matrix that lies in a warp's registers.
__device__ __forceinline__ u32 turned_matrix(u32 value) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(value));
    return r;
}
__device__ __forceinline__ void mma_bf16(float* c, const u32* a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_int8(int* c, const u32* a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The largest of four neighbouring lanes'.
__device__ __forceinline__ u32 quad_max(u32 value) {
    value = max(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return max(value, __shfl_xor_sync(0xffffffffu, value, 2));
}
// Byte SELECT of four words.
template <int SELECT> __device__ __forceinline__ u32 bytes_of(u32 a, u32 b, u32 c, u32 d) {
    constexpr u32 two = (4 + SELECT) << 4 | SELECT;
    return __byte_perm(__byte_perm(a, b, two), __byte_perm(c, d, two), 0x5410);
}
// Four codes in high nibbles as signed bytes, 16 times the code less 8: (word ^ 0x88888888) & 0xf0f0f0f0.
__device__ __forceinline__ u32 signed_codes(u32 word) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0x28;" : "=r"(r) : "r"(word), "r"(0x88888888u), "r"(0xf0f0f0f0u));
    return r;
}
__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float number_of(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ float reciprocal_root(float x) { return rsqrtf(x); }
__device__ __forceinline__ float from_bf16(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ u16 to_bf16(float x) {
    u16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}
// Two numbers as bf16, the first in the lower half.
__device__ __forceinline__ u32 pair_of_bf16(float first, float second) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
    return r;
}
__device__ __forceinline__ float power_of_2(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ int arrive(int* counter) {
    __threadfence();
    return atomicAdd(counter, 1);
}
__device__ __forceinline__ float load_partial(const float* p) { return __ldcg(p); }
__device__ __forceinline__ Words load_partials(const float* p) {
    const float4 x = __ldcg((const float4*)p);
    return {__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w)};
}
__device__ __forceinline__ float exponential(float x) { return __expf(x); }
#endif
