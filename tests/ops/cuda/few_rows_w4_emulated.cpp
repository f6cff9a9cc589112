#include "emulator.h"
#include "few_rows_w4.cu"

extern "C" void run(int tiles, int parts, int bytes, const u16* x, const Words* w, const float* scale, const u16* norm,
                    const u16* bias, const u16* residual, void* out, float* partial, int* counters, int rows, int n, int k,
                    int groups, int group_shift, int units_a_part, int activation, float eps) {
    emulator::launch({tiles, parts, 1}, THREADS, bytes, [=] {
        few_rows_w4(x, w, scale, norm, bias, residual, out, partial, counters, rows, n, k, groups, group_shift, units_a_part,
                    activation, eps, 1);
    });
}
