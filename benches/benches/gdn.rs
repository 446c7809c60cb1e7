//! Gated DeltaNet: steps that fold and record, the fold by itself, and prompt chunks.

use std::error::Error;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ninfer_benches::{Bench, prompt_chunk, step};
use ninfer_core::Result as CoreResult;
use ninfer_core::ops::{GdnFold, GdnMix, GdnParams, GdnRecord, GdnState, OutputGate};
use ninfer_core::segment::{Batch, Segment};
use ninfer_core::shape::GdnShape;
use ninfer_core::view::View;
use ninfer_kernels::cpu::{Cpu, CpuRecorded};

/// Heads of the smallest published model.
const DIMS: GdnShape = GdnShape { key_heads: 16, value_heads: 16, key_dim: 128, value_dim: 128, conv_kernel: 4 };
/// Columns of a record: the anchor and five drafts.
const WIDTH: usize = 6;
/// Bytes of the recurrent matrices of a layer, read and written.
const STATE_BYTES: u64 = 2 * 4 * (DIMS.value_heads * DIMS.key_dim * DIMS.value_dim) as u64;

struct Layer {
    params: GdnParams<Cpu>,
    state: GdnState<Cpu>,
    record: GdnRecord<Cpu>,
}

impl Layer {
    fn new(bench: &mut Bench) -> CoreResult<Self> {
        let (d, banks) = (DIMS, 2 * WIDTH);
        Ok(Self {
            params: GdnParams {
                dims: d,
                conv: bench.random(d.channels(), d.conv_kernel)?,
                a_log: bench.random(1, d.value_heads)?,
                dt_bias: bench.random(1, d.value_heads)?,
                gain: bench.filled(1.0, 1, d.value_dim)?,
                eps: 1e-6,
                gate: OutputGate::Silu,
            },
            state: GdnState {
                window: bench.random(d.channels(), d.conv_kernel - 1)?,
                matrix: bench.random(d.value_heads * d.key_dim, d.value_dim)?,
            },
            record: GdnRecord {
                width: WIDTH,
                columns: bench.random(banks, d.channels())?,
                key_value: bench.random(banks, d.keys() + d.values())?,
                // A decay of 1 and β = 0 leave the matrix as it is, so that thousands of folds keep it finite.
                gates: bench.filled(0.0, banks, 2 * d.value_heads)?,
            },
        })
    }

    fn mix(&self, bench: &mut Bench, batch: Batch<Cpu>, stepping: bool) -> CoreResult<CpuRecorded> {
        let (d, rows) = (DIMS, batch.rows);
        let view = |bench: &mut Bench, cols| -> CoreResult<View<Cpu>> { bench.random(rows, cols) };
        let op = GdnMix {
            batch,
            qkv: view(bench, d.channels())?,
            z: view(bench, d.values())?,
            a: view(bench, d.value_heads)?,
            b: view(bench, d.value_heads)?,
            params: self.params.clone(),
            state: self.state.clone(),
            record: stepping.then(|| self.record.clone()),
            output: view(bench, d.values())?,
        };
        bench.record(|rec| rec.gdn_mix(op))
    }
}

fn steps(c: &mut Criterion) -> Result<(), Box<dyn Error>> {
    let mut group = c.benchmark_group("gdn/step");
    group.throughput(Throughput::Bytes(STATE_BYTES));
    for rows in [1, 4] {
        for fold in [0, 1, 4] {
            let mut bench = Bench::new()?;
            let layer = Layer::new(&mut bench)?;
            let batch = bench.batch(&[Segment { fold, ..step(0, 64, rows) }])?;
            let recorded = layer.mix(&mut bench, batch, true)?;
            let id = BenchmarkId::new(format!("fold {fold}"), format!("T{rows}"));
            group.bench_function(id, |b| b.iter(|| bench.replay(&recorded).expect("it ran when it was recorded")));
        }
    }
    group.finish();
    Ok(())
}

fn fold(c: &mut Criterion) -> Result<(), Box<dyn Error>> {
    let mut group = c.benchmark_group("gdn/fold");
    group.throughput(Throughput::Bytes(STATE_BYTES));
    for count in [1, 4] {
        let mut bench = Bench::new()?;
        let layer = Layer::new(&mut bench)?;
        let batch = bench.batch(&[Segment { fold: count, ..step(0, 64, 1) }])?;
        let Layer { params, state, record } = layer;
        let recorded = bench.record(|rec| rec.gdn_fold(GdnFold { batch, params, state, record }))?;
        let id = BenchmarkId::from_parameter(format!("{count} columns"));
        group.bench_function(id, |b| b.iter(|| bench.replay(&recorded).expect("it ran when it was recorded")));
    }
    group.finish();
    Ok(())
}

fn prefill(c: &mut Criterion) -> Result<(), Box<dyn Error>> {
    let mut group = c.benchmark_group("gdn/prefill");
    for rows in [64, 256] {
        let mut bench = Bench::new()?;
        let layer = Layer::new(&mut bench)?;
        let batch = bench.chunk(&[prompt_chunk(0, rows)])?;
        let recorded = layer.mix(&mut bench, batch, false)?;
        group.throughput(Throughput::Elements(u64::from(rows)));
        let id = BenchmarkId::from_parameter(format!("T{rows}"));
        group.bench_function(id, |b| b.iter(|| bench.replay(&recorded).expect("it ran when it was recorded")));
    }
    group.finish();
    Ok(())
}

fn all(c: &mut Criterion) {
    steps(c).expect("steps run");
    fold(c).expect("folds run");
    prefill(c).expect("prompt chunks run");
}

criterion_group! {
    name = gdn;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = all
}
criterion_main!(gdn);
