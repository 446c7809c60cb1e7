//! Projections: every weight format in steps of one and four rows, and prompt chunks.
//!
//! A step streams several matrices, as a token does, so that the weights come from memory and not from a cache.

use std::error::Error;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ninfer_benches::{Bench, prompt_chunk, step};
use ninfer_core::WeightFormat;
use ninfer_core::backend::{Backend, DeviceWeight};
use ninfer_core::format::GroupFormat;
use ninfer_core::ops::{Project, ProjectAdd, Swiglu};

/// Every format that can be packed.
const FORMATS: [WeightFormat; 11] = [
    WeightFormat::F32,
    WeightFormat::F16,
    WeightFormat::Bf16,
    WeightFormat::Fp8Tensor,
    WeightFormat::Fp8Row,
    WeightFormat::Fp8Block,
    WeightFormat::Nvfp4,
    WeightFormat::Group(GroupFormat::Q4),
    WeightFormat::Group(GroupFormat::Q5),
    WeightFormat::Group(GroupFormat::Q6),
    WeightFormat::Group(GroupFormat::W8),
];
/// In features: the hidden size of the smallest published model.
const IN: usize = 1024;
/// Out features: its feed-forward width.
const OUT: usize = 3584;
/// Weight bytes of a step, more than the last-level cache of most machines.
const STREAM: usize = 128 << 20;

fn steps(c: &mut Criterion) -> Result<(), Box<dyn Error>> {
    let mut group = c.benchmark_group("linear/step");
    for format in FORMATS {
        let mut bench = Bench::new()?;
        let packed = bench.packed(format, OUT, IN)?;
        let count = STREAM.div_ceil(packed.bytes());
        let weights: Vec<_> = (0..count).map(|_| bench.cpu().prepare(&[packed.as_ref()])).collect::<Result<_, _>>()?;
        group.throughput(Throughput::Bytes(weights.iter().map(|w| w.bytes() as u64).sum()));
        for rows in [1, 4] {
            let (batch, input) = (bench.batch(&[step(0, 0, rows)])?, bench.random(rows as usize, IN)?);
            let norm = bench.norm(IN)?;
            let output = bench.random(rows as usize, OUT)?;
            let recorded = bench.record(|rec| {
                weights.iter().try_for_each(|w| {
                    rec.project(Project {
                        batch: batch.clone(),
                        input: input.clone(),
                        norm: Some(norm.clone()),
                        parts: vec![(w.clone(), output.clone())],
                    })
                })
            })?;
            let id = BenchmarkId::new(format.name(), format!("T{rows}"));
            group.bench_function(id, |b| b.iter(|| bench.replay(&recorded).expect("it ran when it was recorded")));
        }
    }
    group.finish();
    Ok(())
}

fn prefill(c: &mut Criterion) -> Result<(), Box<dyn Error>> {
    let mut group = c.benchmark_group("linear/prefill");
    let rows = 256;
    for format in [WeightFormat::Bf16, WeightFormat::Fp8Block, WeightFormat::Group(GroupFormat::Q4)] {
        let mut bench = Bench::new()?;
        let (batch, input) = (bench.chunk(&[prompt_chunk(0, rows)])?, bench.random(rows as usize, IN)?);
        let output = bench.random(rows as usize, OUT)?;
        let weight = bench.weight(format, OUT, IN)?;
        let recorded =
            bench.record(|rec| rec.project(Project { batch, input, norm: None, parts: vec![(weight, output)] }))?;
        // A multiplication and an addition for each weight and row.
        group.throughput(Throughput::Elements(2 * u64::from(rows) * (OUT * IN) as u64));
        let id = BenchmarkId::new(format.name(), format!("T{rows}"));
        group.bench_function(id, |b| b.iter(|| bench.replay(&recorded).expect("it ran when it was recorded")));
    }
    group.finish();
    Ok(())
}

fn mlp(c: &mut Criterion) -> Result<(), Box<dyn Error>> {
    let mut group = c.benchmark_group("linear/mlp");
    let mut bench = Bench::new()?;
    let gate_up = bench.weight(WeightFormat::Bf16, 2 * OUT, IN)?;
    let down = bench.weight(WeightFormat::Bf16, IN, OUT)?;
    group.throughput(Throughput::Bytes((gate_up.bytes() + down.bytes()) as u64));
    for rows in [1, 4] {
        let batch = bench.batch(&[step(0, 0, rows)])?;
        let (residual, middle) = (bench.random(rows as usize, IN)?, bench.random(rows as usize, OUT)?);
        let norm = bench.norm(IN)?;
        let recorded = bench.record(|rec| {
            rec.swiglu(Swiglu {
                batch: batch.clone(),
                input: residual.clone(),
                norm: Some(norm),
                gate_up: gate_up.clone(),
                output: middle.clone(),
            })?;
            rec.project_add(ProjectAdd { batch, input: middle, weight: down.clone(), residual })
        })?;
        let id = BenchmarkId::new("bf16", format!("T{rows}"));
        group.bench_function(id, |b| b.iter(|| bench.replay(&recorded).expect("it ran when it was recorded")));
    }
    group.finish();
    Ok(())
}

fn all(c: &mut Criterion) {
    steps(c).expect("steps run");
    prefill(c).expect("prompt chunks run");
    mlp(c).expect("feed-forward blocks run");
}

criterion_group! {
    name = linear;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = all
}
criterion_main!(linear);
