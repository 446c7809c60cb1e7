// Errors found on the device: the first one of a piece of work goes to mapped host memory.
#pragma once
#include "common/types.cuh"

// Codes; src/cuda/report.rs turns them into typed errors.
constexpr u32 kTokenId = 1;
constexpr u32 kHiddenRow = 2;
constexpr u32 kSourceRow = 3;
constexpr u32 kDestinationRow = 4;
constexpr u32 kSlot = 5;
constexpr u32 kContext = 6;
constexpr u32 kRecordedColumns = 7;
constexpr u32 kRoundColumns = 8;
constexpr u32 kSegmentRows = 9;
constexpr u32 kFoldedColumns = 10;
constexpr u32 kFold = 11;
constexpr u32 kBank = 12;

struct Report {
    u32 code, got, limit, unused;
};

__device__ __forceinline__ void report_error(Report* report, u32 code, u32 got, u32 limit) {
    if (atomicCAS_system(&report->code, 0u, code) == 0u) {
        report->got = got;
        report->limit = limit;
        __threadfence_system();
    }
}
