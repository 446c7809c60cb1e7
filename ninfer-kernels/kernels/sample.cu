// targets: sm_80 sm_90
// Token counts and acceptance of drafts: exact integer work around the choice of tokens.
#include "common/batch.cuh"
#include "common/report.cuh"
#include "ptx/bulk.cuh"

constexpr int kThreads = 256;
constexpr u32 kPromptBit = 0x80000000u;
constexpr int kWords = 8;

// `CountArg` of src/cuda/sample.rs.
struct Count {
    Batch batch;
    Matrix<const u32> ids;
    Matrix<u32> previous;  // [slots, width]
    Matrix<u32> counts;    // [slots, vocab]
    Report* report;
    int slots;
    int width;
    int vocab;
    int range;  // tokens of a block
};

namespace {

// Whether the segment has rows, and all of them are rows of the call; reports what is not.
__device__ __forceinline__ bool has_rows(const Batch& batch, const Segment& s, Report* report, bool say) {
    if (s.len <= 0) return false;
    const i64 end = static_cast<i64>(s.row) + s.len;
    if (s.row >= 0 && end <= batch.rows) return true;
    if (say) report_error(report, kSegmentRows, static_cast<u32>(end), batch.rows + 1);
    return false;
}

__device__ __forceinline__ u32 add_saturating(u32 a, u32 b) { return a + b < a ? 0xffffffffu : a + b; }

}  // namespace

// Counts of tokens, of which each block has a range, for one segment: grid (ranges, segments).
//
// Where the sequence begins, the blocks clear their ranges. Prefill: each marks the inputs in its range. Step: the first
// block counts the `fold` tokens of the round before and then remembers this round's; where a sequence begins with a fold,
// which happens at most once in its life, it alone clears, too, so that none reads what another one writes.
extern "C" __global__ void __launch_bounds__(kThreads) sample_count(const __grid_constant__ Count a) {
    grid_launch_next();
    grid_wait();
    const Segment s = a.batch.segment(blockIdx.y);
    const int t = threadIdx.x;
    const bool first = blockIdx.x == 0, say = first && t == 0;
    if (!has_rows(a.batch, s, a.report, say)) return;
    if (s.slot < 0 || s.slot >= a.slots) {
        if (say) report_error(a.report, kSlot, s.slot, a.slots);
        return;
    }
    const int columns = max(s.len, s.fold);
    if (a.batch.step && columns > a.width) {
        if (say) report_error(a.report, kRoundColumns, columns, a.width + 1);
        return;
    }
    u32* counts = a.counts.row(s.slot);
    u32* previous = a.previous.row(s.slot);
    const bool begins = s.base() <= 0, alone = a.batch.step && s.fold > 0;
    int from = blockIdx.x * a.range, to = min(from + a.range, a.vocab);
    if (alone) {
        if (!first) return;
        from = 0, to = a.vocab;
    }
    if (begins) {
        for (int i = from + t; i < to; i += kThreads) counts[i] = 0;
        __syncthreads();
    }
    if (!a.batch.step) {
        for (int i = t; i < s.len; i += kThreads) {
            const u32 id = *a.ids.row(s.row + i);
            if (id >= static_cast<u32>(from) && id < static_cast<u32>(to)) atomicOr(counts + id, kPromptBit);
        }
        return;
    }
    if (!first) return;
    for (int i = t; i < s.fold; i += kThreads) {
        // The first of equal ones counts for all.
        const u32 id = previous[i];
        u32 times = 1;
        for (int j = 0; j < i && times > 0; j++) {
            if (previous[j] == id) times = 0;
        }
        if (times == 0 || id >= static_cast<u32>(a.vocab)) continue;
        for (int j = i + 1; j < s.fold; j++) times += previous[j] == id;
        counts[id] = add_saturating(counts[id], times);
    }
    __syncthreads();
    for (int i = t; i < s.len; i += kThreads) previous[i] = *a.ids.row(s.row + i);
}

// `AcceptArg` of src/cuda/sample.rs.
struct Accept {
    Batch batch;
    Matrix<const u32> ids;
    Matrix<const u32> chosen;
    Matrix<u32> result;  // [segments, width + 1]
    Matrix<int> realign;
    Matrix<int> last;
    Matrix<int> chain;
    Report* report;
    int width;
    int links;  // rows of `chain` for a segment
};

namespace {

// Words of a segment that folds nothing.
__device__ __forceinline__ int word(const Segment& s, u32 start, int row, int len, int i) {
    const u32 most = 0x7fffffffu;
    switch (i) {
        case 0: return s.slot;
        case 1: return static_cast<int>(start < most ? start : most);
        case 2: return row;
        case 3: return len;
        case 5: return s.bank;
        default: return 0;
    }
}

}  // namespace

// The longest run of drafts that equal the chosen tokens, what it emits, and the segments of the passes behind it. One warp
// a segment.
extern "C" __global__ void __launch_bounds__(32) sample_accept(const __grid_constant__ Accept a) {
    grid_launch_next();
    grid_wait();
    const int index = blockIdx.x, lane = threadIdx.x;
    const Segment s = a.batch.segment(index);
    int len = has_rows(a.batch, s, a.report, lane == 0) ? s.len : 0;
    if (len > a.width) {
        if (lane == 0) report_error(a.report, kRoundColumns, len, a.width + 1);
        len = 0;
    }
    int accepted = 0;
    for (int first = 1; first < len; first += 32) {
        const int i = first + lane;
        const bool equal = i < len && *a.ids.row(s.row + i) == *a.chosen.row(s.row + i - 1);
        const u32 wrong = ~__ballot_sync(kAllLanes, equal);
        accepted += wrong == 0 ? 32 : __ffs(static_cast<int>(wrong)) - 1;
        if (wrong != 0) break;
    }
    const int emitted = len == 0 ? 0 : accepted + 1;
    u32* result = a.result.row(index);
    if (lane == 0) result[0] = accepted;
    for (int i = lane; i < a.width; i += 32) result[1 + i] = i < emitted ? *a.chosen.row(s.row + i) : kNone;
    const u32 start = s.start;
    if (lane < kWords) a.realign.row(index)[lane] = word(s, start + 1, s.row, emitted, lane);
    if (lane == 0) *a.last.row(index) = len == 0 ? -1 : s.row + accepted;
    for (int i = lane; i < a.links * kWords; i += 32) {
        const int link = i / kWords;
        a.chain.row(static_cast<i64>(link) * a.batch.segments + index)[i % kWords] =
            word(s, start + accepted + 1 + link, index, min(emitted, 1), i % kWords);
    }
}
