// y = N(x) · Wᵀ for at most eight tokens, with matrices of any formats in one launch: the sums of linear.cuh, bit for bit.
//
// A block takes the row blocks of one matrix, or of the experts that the tokens chose, one after the other; the weights of
// the next ones are on their way while it multiplies. The norm, if there is one, is made by every block for itself, into
// shared memory. The last block of a router's launch chooses the experts.
//
// Grid: blocks of all parts; 8 warps that multiply and one that brings weights. Shared memory: stages (common/stage.cuh), two
// rooms for partial sums, then normed rows.
#pragma once
#include "common/experts.cuh"
#include "common/linear.cuh"
#include "common/row_norm.cuh"
#include "common/stage.cuh"
#include "common/top_k.cuh"
#include "ptx/barrier.cuh"
#include "ptx/block.cuh"

// Elements between rows in shared memory, besides the columns: two rows are half a sweep of the banks apart.
constexpr int kRowGap = 32;

// One matrix and where its result goes; `StepPart` of src/cuda/step.rs.
struct StepPart {
    Weight weight;
    void* out;
    i64 out_stride;
    int first_block, block_count;  // blocks of the grid
    int row_blocks;                // row blocks of the result (of one expert)
    int rows;                      // columns of the result: rows of the matrix (of one expert), half of them for SwiGLU
    int second_row;                // SwiGLU: first row of the second half
    int expert_rows;               // rows of the matrix of one expert, if it holds experts
    int run, gap;                  // so many columns of the result are adjacent, then so many belong to another part
    int experts;                   // experts of the matrix; 0: it is one matrix
    int unused;
};

// `StepRouter` of src/cuda/step.rs: what the last block does.
struct StepRouter {
    Matrix<const float> logits;  // [T, E]
    const float* gate;           // [T]
    Matrix<int> experts;         // [T, k]
    Matrix<float> weights;       // [T, k + 1]
    u32* arrivals;               // zero between launches; null: no choice
    int count;
    int k;
    int renormalise;
    int unused;
};

// `StepArg` of src/cuda/step.rs.
struct Step {
    Matrix<const bf16> x;
    const float* gain;           // zero-centred; null: x is the input itself
    Matrix<bf16> normed;         // N(x) goes here too, or null
    const float* column_scale;   // multiplies the result of each row of x, or null
    Matrix<const int> experts;   // [T, k]
    StepRouter router;
    int columns;  // tokens
    int cols;
    int parts;
    int epilogue;
    int k;
    float eps;
    int partials;  // bytes before the partial sums
    int rows;      // bytes before the normed rows
    StepPart part[kMaxParts];
};

namespace {

// A barrier of the warps that multiply.
__device__ __forceinline__ void step_barrier() { barrier_of<32 * kWarps>(1); }

// N(x) of all tokens into rows of shared memory, and to `normed` unless that is null. Rows are wide (is_wide) and at most
// kHeld · 256 pieces long. All warps that multiply call it; `partial` holds kStepColumns · 8 floats.
__device__ __forceinline__ void norm_step_rows(const Step& a, Matrix<bf16> normed, bf16* rows, int row_stride, float* partial) {
    const float inverse = 1.0f / static_cast<float>(a.cols);
    for (int r = 0; r < a.columns; r++) {
        HeldRow held;
        held.load(a.x.row(r), a.cols);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kHeld; i++) sum = add_squares(sum, held.piece[i]);
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) partial[8 * r + threadIdx.x / 32] = sum;
    }
    step_barrier();
    for (int r = 0; r < a.columns; r++) {
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < 8; w++) total += partial[8 * r + w];
        const float factor = rsqrtf(fmaf(total, inverse, a.eps));
        for (int c = kPiece * threadIdx.x; c < a.cols; c += kPiece * kNormThreads) {
            const uint4 v = *reinterpret_cast<const uint4*>(a.x.row(r) + c);
            const float4 low = __ldg(reinterpret_cast<const float4*>(a.gain + c));
            const float4 high = __ldg(reinterpret_cast<const float4*>(a.gain + c) + 1);
            auto pair = [&](u32 word, float first, float second) {
                return pack_bf16(low_float(word) * factor * (1.0f + first), high_float(word) * factor * (1.0f + second));
            };
            const uint4 y = {pair(v.x, low.x, low.y), pair(v.y, low.z, low.w), pair(v.z, high.x, high.y), pair(v.w, high.z, high.w)};
            *reinterpret_cast<uint4*>(rows + r * row_stride + c) = y;
            if (normed.data != nullptr) *reinterpret_cast<uint4*>(normed.row(r) + c) = y;
        }
    }
    step_barrier();
}

struct StepShared {
    StageBarriers barriers;
    ExpertGroups groups;
    float partial[kStepColumns * kWarps];
    bool last;
};

// The row blocks of a block of the grid, as addresses of records.
template <int kBlocks>
struct StepRuns {
    const StepPart* part;  // a kernel's parameter: what is read again costs no register
    const ExpertGroups* groups;
    int item, end;

    __device__ __forceinline__ bool operator()(const u8* (&from)[kBlocks]) {
        if (item >= end) return false;
        const Weight& w = part->weight;
        int block = item;
        if (part->experts > 0) {
            const int rows = part->row_blocks, group = item / rows;
            block = groups->expert[group] * (part->expert_rows / 16) + item - group * rows;
        }
        from[0] = w.records + static_cast<i64>(block) * w.blocks * record_bytes(w.format);
        if (kBlocks == 2) {
            from[kBlocks - 1] = from[0] + static_cast<i64>(part->second_row / 16) * w.blocks * record_bytes(w.format);
        }
        item += part->block_count;
        return true;
    }
};

// The product of one record of each row block; `at` is the lane's place in its token.
template <int kFormat, int kBlocks>
__device__ __forceinline__ void multiply_one(const u8* place, const Weight& w, int block, const int (&rows)[kBlocks], int lane,
                                             const bf16* at, float (&sum)[kBlocks][1][4]) {
    constexpr int kRun = kStageWarps * stage_depth(kFormat) * record_bytes(kFormat);
    const uint4 input[2] = {*reinterpret_cast<const uint4*>(at), *reinterpret_cast<const uint4*>(at + 32)};
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
        Fragment<kFormat> f;
        f.load(place + b * kRun, lane);
        float factor[2] = {};
        const bool scaled = kFormat == kFp8 && w.block_scale != nullptr;
        if (scaled) {
            const i64 row_block = rows[b] / 16 * static_cast<i64>(divide_up(w.cols, 128));
            const float* scale = w.block_scale + (row_block + block / 2) * 16 + lane / 4;
            factor[0] = scale[0], factor[1] = scale[8];
        }
        multiply_record<kFormat, 1>(f, scaled, factor, [&](int s, int) { return input[s]; }, sum[b]);
    }
}

// Adds the products of a warp's records of a stage; `first` is the number of the first one, `x` a lane's token.
template <int kFormat, int kBlocks>
__device__ __forceinline__ void multiply_stage(const u8* stage, const Weight& w, int first, const int (&rows)[kBlocks], int lane,
                                               const bf16* x, float (&sum)[kBlocks][1][4]) {
    constexpr int kNext = kStageWarps * record_bytes(kFormat);
    if (first >= w.blocks) return;
    int block = first;
    if (kFormat == kBf16) {
        const int wrap = divide_up(w.cols, 64);
        if (block >= wrap) block -= wrap;
    }
    const bf16* at = x + block * 64 + 8 * (lane % 4);
    if (stage_depth(kFormat) == 2 && first + kStageWarps < w.blocks) {
        // Two at once, so that neither waits for the other.
        multiply_one<kFormat, kBlocks>(stage, w, block, rows, lane, at, sum);
        multiply_one<kFormat, kBlocks>(stage + kNext, w, block + kStageWarps, rows, lane, at + kStageWarps * 64, sum);
    } else {
        multiply_one<kFormat, kBlocks>(stage, w, block, rows, lane, at, sum);
    }
}

// The choice of experts by the last block.
__device__ __forceinline__ void step_choose(const Step& a, StepShared& s) {
    const StepRouter& router = a.router;
    step_barrier();
    // What the block wrote before its barrier is released by this one addition.
    if (threadIdx.x == 0) s.last = add_acquire_release(router.arrivals, 1) == gridDim.x - 1;
    step_barrier();
    if (!s.last) return;
    const int token = threadIdx.x / 32;
    if (token < a.columns) {
        float* weights = router.weights.row(token);
        choose_experts(router.logits.row(token), router.count, router.k, router.renormalise != 0, router.experts.row(token), weights);
        if (threadIdx.x % 32 == 0) weights[router.k] = sigmoid(load_l2(router.gate + token));
    }
    if (threadIdx.x == 0) *router.arrivals = 0;
}

template <int kBlocks>
__device__ __forceinline__ void step(const Step& a) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ StepShared s;
    int p = 0;
    while (p + 1 < a.parts && static_cast<int>(blockIdx.x) >= a.part[p + 1].first_block) p++;
    const StepPart& part = a.part[p];
    const Weight& w = part.weight;
    const int format = w.format, lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const bool grouped = part.experts > 0;
    const int first = static_cast<int>(blockIdx.x) - part.first_block;
    StepRuns<kBlocks> runs = {&part, &s.groups, first, part.row_blocks};
    Stages<kBlocks> stages(format, shared, a.partials, s.barriers);
    __syncthreads();
    int items = part.row_blocks;
    // Weights do not depend on the kernels before; what is read behind the wait does.
    if (grouped) {
        grid_wait();
        grid_launch_next();
        s.groups.find(a.experts, a.columns, a.k, part.experts);
        items *= s.groups.count;
        runs.end = items;
    }
    if (warp == kWarps) {
#if __CUDA_ARCH__ >= 900
        if (lane == 0) stages.produce(runs, w.blocks);
        grid_wait();
#endif
        return;
    }
#if __CUDA_ARCH__ < 900
    StageCopies<kBlocks, StepRuns<kBlocks>> copies(stages, runs, w.blocks, warp, lane);
    copies.begin();
#endif
    if (!grouped) {
        if (a.gain != nullptr) {
            for (int c = 32 * threadIdx.x; c < a.cols; c += 32 * 32 * kWarps) prefetch_line(a.gain + c);
        }
        grid_wait();
        grid_launch_next();
    }
    bf16* rows = reinterpret_cast<bf16*>(shared + a.rows);
    const int row_stride = a.cols + kRowGap;
    if (a.gain != nullptr) {
        const Matrix<bf16> normed = {blockIdx.x == 0 ? a.normed.data : nullptr, a.normed.stride};
        norm_step_rows(a, normed, rows, row_stride, s.partial);
    }
    float* room = reinterpret_cast<float*>(shared + a.partials);
    int turn = 0;
    for (int item = first; item < items; item += part.block_count, turn ^= 1) {
        const int group = grouped ? item / part.row_blocks : 0;
        const int row = (grouped ? item % part.row_blocks : item) * 16;
        const int expert = grouped ? s.groups.expert[group] : 0;
        const int count = grouped ? s.groups.members[group] : a.columns;
        // Columns without a token compute the first one again; nobody reads that.
        int column = g < count ? g : 0;
        if (grouped) column = s.groups.pair[group][column] / a.k;
        const bf16* x = a.gain != nullptr ? rows + column * row_stride : a.x.row(column);
        int at[kBlocks];
        at[0] = expert * part.expert_rows + row;
        if (kBlocks == 2) at[kBlocks - 1] = at[0] + part.second_row;

        float sum[kBlocks][1][4] = {};
        const int depth = kStageWarps * stage_depth(format);
        for (int record = warp; record - warp < w.blocks; record += depth) {
#if __CUDA_ARCH__ >= 900
            barrier_wait(stages.full + 8 * stages.stage, stages.phase);
#else
            copies.wait();
#endif
            const u8* stage = stages.ring + stages.stage * stages.stage_bytes() + warp * record_bytes(format);
            switch (format) {
                case kBf16: multiply_stage<kBf16, kBlocks>(stage, w, record, at, lane, x, sum); break;
                case kFp8: multiply_stage<kFp8, kBlocks>(stage, w, record, at, lane, x, sum); break;
                case kNvfp4: multiply_stage<kNvfp4, kBlocks>(stage, w, record, at, lane, x, sum); break;
                case kQ4: multiply_stage<kQ4, kBlocks>(stage, w, record, at, lane, x, sum); break;
                case kQ5: multiply_stage<kQ5, kBlocks>(stage, w, record, at, lane, x, sum); break;
                case kQ6: multiply_stage<kQ6, kBlocks>(stage, w, record, at, lane, x, sum); break;
                default: multiply_stage<kW8, kBlocks>(stage, w, record, at, lane, x, sum); break;
            }
            __syncwarp();
#if __CUDA_ARCH__ >= 900
            if (lane == 0) barrier_arrive(stages.free + 8 * stages.stage);
#else
            copies.start();
#endif
            stages.next();
        }
        // Everybody is behind the sums of this room's last use, since the barrier of the turn between.
        float* partial = room + turn * kWarps * kBlocks * 128;
#pragma unroll
        for (int b = 0; b < kBlocks; b++) {
            for (int i = 0; i < 4; i++) {
                partial[(warp * kBlocks + b) * 128 + 16 * (2 * t + i % 2) + g + 8 * (i / 2)] = sum[b][0][i];
            }
        }
        step_barrier();
        const int e = threadIdx.x, c = e / 16, r = row + e % 16;
        if (e >= 128 || c >= count || r >= part.rows) continue;
        float total[kBlocks];
#pragma unroll
        for (int b = 0; b < kBlocks; b++) {
            total[b] = 0.0f;
#pragma unroll
            for (int v = 0; v < kWarps; v++) total[b] += partial[(v * kBlocks + b) * 128 + e];
        }
        const int target = grouped ? s.groups.pair[group][c] : c;
        const int source = grouped ? target / a.k : c;
        const float token = (a.column_scale != nullptr ? a.column_scale[source] : 1.0f) * format_factor(format);
        const int of = expert * part.expert_rows + r;
        float y = total[0] * token;
        if (w.row_scale != nullptr) y *= w.row_scale[of];
        if (kBlocks == 2) {
            float up = total[kBlocks - 1] * token;
            if (w.row_scale != nullptr) up *= w.row_scale[of + part.second_row];
            y = silu(y) * up;
        }
        const i64 place = target * part.out_stride + r + r / part.run * part.gap;
        if (a.epilogue == kFloat) {
            static_cast<float*>(part.out)[place] = y;
        } else {
            bf16* out = static_cast<bf16*>(part.out);
            out[place] = to_bf16(a.epilogue == kAdd ? to_float(out[place]) + y : y);
        }
    }
    if (kBlocks == 1 && a.router.arrivals != nullptr) step_choose(a, s);
}

}  // namespace
