// targets: sm_80
// Inputs of products as E2M1 codes with an E4M3 scale for 16 columns and an f32 scale for the row: the values of codes and
// group scales, which bf16 holds exactly. The definition is ninfer_core's ActivationPrecision::E2m1Group16. One block a row.
#include "common/row_norm.cuh"
#include "ptx/bulk.cuh"

constexpr float kGroupsMax = 6.0f * 448.0f;
constexpr float kLeastAmax = 0x1p-100f;

// `E2m1Arg` of src/cuda/norm.rs.
struct Stage {
    Matrix<const u8> x;  // f32 or bf16 rows; the stride counts elements
    Matrix<bf16> y;
    const float* gain;  // zero-centred; null: no norm
    float* scales;      // [rows]
    int cols;
    int padded;  // columns written, zeros behind `cols`
    float eps;
    int wide;  // x is f32
};

namespace {

// Nearest number with `bits` bits of fraction, ties to even, at least 2^-bits of 2^least apart.
__device__ __forceinline__ float round_to(float x, int bits, int least) {
    const u32 exponent = max(__float_as_uint(x) & 0x7f800000u, static_cast<u32>(127 + least) << 23);
    const float large = __uint_as_float(exponent + (static_cast<u32>(23 - bits) << 23 | 1u << 22));
    return (x + large) - large;
}

__device__ __forceinline__ float round_e4m3(float x) { return fminf(round_to(x, 3, -6), 448.0f); }
__device__ __forceinline__ float round_e2m1(float x) { return round_to(fminf(fmaxf(x, -6.0f), 6.0f), 1, 0); }

}  // namespace

extern "C" __global__ void __launch_bounds__(kNormThreads) e2m1_stage(const __grid_constant__ Stage a) {
    grid_launch_next();
    grid_wait();
    __shared__ float partial[kNormThreads / 32];
    __shared__ u32 most[kNormThreads / 32];
    const bf16* narrow = reinterpret_cast<const bf16*>(a.x.data) + blockIdx.x * a.x.stride;
    const float* wide = reinterpret_cast<const float*>(a.x.data) + blockIdx.x * a.x.stride;
    bf16* y = a.y.row(blockIdx.x);
    const float factor = a.gain != nullptr ? norm_factor(narrow, a.cols, a.eps, partial) : 1.0f;
    auto value = [&](int c) {
        if (c >= a.cols) return 0.0f;
        if (a.wide) return wide[c];
        const float v = to_float(narrow[c]);
        return a.gain != nullptr ? v * factor * (1.0f + a.gain[c]) : v;
    };
    // Magnitudes are ordered like their bits; what is no number is above all.
    u32 bits = 0;
#pragma unroll 1
    for (int c = threadIdx.x; c < a.cols; c += kNormThreads) bits = max(bits, __float_as_uint(value(c)) & 0x7fffffffu);
    bits = __reduce_max_sync(kAllLanes, bits);
    if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = bits;
    __syncthreads();
    for (int w = 0; w < kNormThreads / 32; w++) bits = max(bits, most[w]);
    const bool broken = bits >= 0x7f800000u;
    const float amax = fmaxf(__uint_as_float(bits), kLeastAmax), reciprocal = kGroupsMax / amax;
    if (threadIdx.x == 0) a.scales[blockIdx.x] = broken ? not_a_number() : amax / kGroupsMax;
    // Sixteen neighbouring lanes have a group; `padded` is a multiple of 64.
#pragma unroll 1
    for (int first = 0; first < a.padded; first += kNormThreads) {
        const int c = first + threadIdx.x;
        const float u = (broken ? 0.0f : value(c)) * reciprocal;
        float largest = fabsf(u);
#pragma unroll
        for (int offset = 8; offset > 0; offset >>= 1) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, offset));
        const float scale = round_e4m3(largest / 6.0f);
        const float code = scale == 0.0f ? 0.0f : round_e2m1(u / scale);
        if (c < a.padded) y[c] = to_bf16(code * scale);
    }
}
