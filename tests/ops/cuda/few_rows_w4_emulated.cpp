#include "emulator.h"
#include "few_rows_w4.cu"

extern "C" void run(int blocks, int parts, int bytes, const u8* w, const u8* x, const u8* scales, const float* row_scale,
                    const u8* norm, const u16* bias, const u16* residual, void* out, float* partial, int* counters, int rows,
                    int n, int units, int units_a_part, int activation, float eps) {
    const TensorMap boxes = {w, (uint64_t)(GATED ? 2 * n : n), (uint64_t)units * UNIT, KW * UNIT};
    emulator::launch({blocks, parts, 1}, MULTIPLIERS + 32, bytes, [=] {
        few_rows_w4(boxes, x, scales, row_scale, norm, bias, residual, out, partial, counters, rows, n, units, units_a_part,
                    activation, eps, 1);
    });
}
