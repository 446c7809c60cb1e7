//! Mixture of experts: the router, and experts in steps and prompt chunks.

use std::error::Error;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ninfer_benches::{Bench, prompt_chunk, step};
use ninfer_core::backend::{Backend, DeviceWeight};
use ninfer_core::format::GroupFormat;
use ninfer_core::ops::{Experts, Route};
use ninfer_core::segment::Batch;
use ninfer_core::{DType, Result as CoreResult, View, WeightFormat};
use ninfer_kernels::cpu::{Cpu, CpuWeight};

// Sizes of the 35B-A3B layers, with an eighth of the experts.
const HIDDEN: usize = 2048;
const WIDTH: usize = 512;
const EXPERTS: usize = 32;
const TOP_K: usize = 8;

struct Layer {
    gate_up: CpuWeight,
    down: CpuWeight,
    shared_gate_up: CpuWeight,
    shared_down: CpuWeight,
}

impl Layer {
    fn new(bench: &mut Bench, format: WeightFormat) -> Result<Self, Box<dyn Error>> {
        // All experts have the same numbers, but each has memory of its own.
        let half = bench.packed(format, WIDTH, HIDDEN)?;
        let down = bench.packed(format, HIDDEN, WIDTH)?;
        Ok(Self {
            gate_up: bench.cpu().prepare(&vec![half.as_ref(); 2 * EXPERTS])?,
            down: bench.cpu().prepare(&vec![down.as_ref(); EXPERTS])?,
            shared_gate_up: bench.cpu().prepare(&[half.as_ref(), half.as_ref()])?,
            shared_down: bench.cpu().prepare(&[down.as_ref()])?,
        })
    }

    /// Bytes of `distinct` routed experts and the shared one.
    fn bytes(&self, distinct: usize) -> u64 {
        let routed = (self.gate_up.bytes() + self.down.bytes()) / EXPERTS * distinct;
        (routed + self.shared_gate_up.bytes() + self.shared_down.bytes()) as u64
    }

    fn op(&self, bench: &mut Bench, batch: Batch<Cpu>, chosen: View<Cpu>) -> CoreResult<Experts<Cpu>> {
        let rows = batch.rows;
        Ok(Experts {
            batch,
            hidden: bench.random(rows, HIDDEN)?,
            experts: chosen,
            weights: bench.filled(1e-6, rows, TOP_K + 1)?,
            gate_up: self.gate_up.clone(),
            down: self.down.clone(),
            shared_gate_up: self.shared_gate_up.clone(),
            shared_down: self.shared_down.clone(),
            residual: bench.random(rows, HIDDEN)?,
        })
    }
}

/// `TOP_K` different experts for each row, beginning where `first` says.
fn choices(bench: &mut Bench, rows: usize, first: usize) -> CoreResult<View<Cpu>> {
    let ids: Vec<u32> = (0..rows * TOP_K).map(|i| ((first + i) % EXPERTS) as u32).collect();
    bench.words(DType::I32, TOP_K, &ids)
}

fn steps(c: &mut Criterion) -> Result<(), Box<dyn Error>> {
    let mut group = c.benchmark_group("moe/step");
    for format in
        [WeightFormat::Bf16, WeightFormat::Fp8Block, WeightFormat::Nvfp4, WeightFormat::Group(GroupFormat::Q4)]
    {
        let mut bench = Bench::new()?;
        let layer = Layer::new(&mut bench, format)?;
        for rows in [1, 4] {
            // As many layers as it takes to touch every expert once, so that each comes from memory.
            let mut ops = Vec::new();
            for first in (0..EXPERTS).step_by(rows * TOP_K) {
                let batch = bench.batch(&[step(0, 0, rows as u32)])?;
                let chosen = choices(&mut bench, rows, first)?;
                ops.push(layer.op(&mut bench, batch, chosen)?);
            }
            group.throughput(Throughput::Bytes(ops.len() as u64 * layer.bytes(rows * TOP_K)));
            let recorded = bench.record(|rec| ops.into_iter().try_for_each(|op| rec.experts(op)))?;
            let id = BenchmarkId::new(format.name(), format!("T{rows}"));
            group.bench_function(id, |b| b.iter(|| bench.replay(&recorded).expect("it ran when it was recorded")));
        }
    }
    group.finish();
    Ok(())
}

fn prefill(c: &mut Criterion) -> Result<(), Box<dyn Error>> {
    let mut group = c.benchmark_group("moe/prefill");
    let rows = 128;
    group.throughput(Throughput::Elements(rows as u64));
    for format in [WeightFormat::Bf16, WeightFormat::Group(GroupFormat::Q4)] {
        let mut bench = Bench::new()?;
        let layer = Layer::new(&mut bench, format)?;
        let batch = bench.chunk(&[prompt_chunk(0, rows as u32)])?;
        let chosen = choices(&mut bench, rows, 0)?;
        let op = layer.op(&mut bench, batch, chosen)?;
        let recorded = bench.record(|rec| rec.experts(op))?;
        let id = BenchmarkId::new(format.name(), format!("T{rows}"));
        group.bench_function(id, |b| b.iter(|| bench.replay(&recorded).expect("it ran when it was recorded")));
    }
    group.finish();
    Ok(())
}

fn route(c: &mut Criterion) -> Result<(), Box<dyn Error>> {
    let mut group = c.benchmark_group("moe/route");
    // The router has one row for each of the 256 experts of the full size.
    let experts = 256;
    for rows in [1, 4] {
        let mut bench = Bench::new()?;
        let router = bench.weight(WeightFormat::Bf16, experts, HIDDEN)?;
        group.throughput(Throughput::Bytes(router.bytes() as u64));
        let ids = vec![0; rows * TOP_K];
        let op = Route {
            batch: bench.batch(&[step(0, 0, rows as u32)])?,
            input: bench.random(rows, HIDDEN)?,
            norm: bench.norm(HIDDEN)?,
            router,
            shared_gate: bench.weight(WeightFormat::Bf16, 1, HIDDEN)?,
            renormalise: true,
            hidden: bench.random(rows, HIDDEN)?,
            experts: bench.words(DType::I32, TOP_K, &ids)?,
            weights: bench.random(rows, TOP_K + 1)?,
        };
        let recorded = bench.record(|rec| rec.route(op))?;
        let id = BenchmarkId::from_parameter(format!("T{rows}"));
        group.bench_function(id, |b| b.iter(|| bench.replay(&recorded).expect("it ran when it was recorded")));
    }
    group.finish();
    Ok(())
}

fn all(c: &mut Criterion) {
    steps(c).expect("steps run");
    prefill(c).expect("prompt chunks run");
    route(c).expect("routers run");
}

criterion_group! {
    name = moe;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = all
}
criterion_main!(moe);
