//! Attention: steps against caches of several lengths and types, and prompt chunks.

use std::error::Error;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ninfer_benches::{Bench, prompt_chunk, step};
use ninfer_core::ops::{Attend, KvLayer, RopeAppend, RopeTable};
use ninfer_core::segment::{Batch, PAGE_TOKENS};
use ninfer_core::{DType, Result as CoreResult, View};
use ninfer_kernels::cpu::{Cpu, CpuRecorded};

// Heads of the smallest published model.
const QUERY_HEADS: usize = 8;
const KV_HEADS: usize = 2;
const HEAD: usize = 256;
const ROTARY: usize = 64;

/// Inputs of a layer over `rows` rows, and its cache.
struct Layer {
    query_gate: View<Cpu>,
    key: View<Cpu>,
    value: View<Cpu>,
    query: View<Cpu>,
    output: View<Cpu>,
    gains: View<Cpu>,
    frequencies: View<Cpu>,
    kv: KvLayer<Cpu>,
}

impl Layer {
    fn new(bench: &mut Bench, dtype: DType, rows: usize, tokens: usize) -> CoreResult<Self> {
        let pages = tokens.div_ceil(PAGE_TOKENS);
        let table: Vec<u32> = (0..pages as u32).collect();
        Ok(Self {
            query_gate: bench.random(rows, QUERY_HEADS * 2 * HEAD)?,
            key: bench.random(rows, KV_HEADS * HEAD)?,
            value: bench.random(rows, KV_HEADS * HEAD)?,
            query: bench.random(rows, QUERY_HEADS * HEAD)?,
            output: bench.random(rows, QUERY_HEADS * HEAD)?,
            gains: bench.random(2, HEAD)?,
            frequencies: bench.random(1, ROTARY / 2)?,
            kv: KvLayer {
                keys: bench.pages(dtype, pages * KV_HEADS * PAGE_TOKENS, HEAD)?,
                values: bench.pages(dtype, pages * KV_HEADS * PAGE_TOKENS, HEAD)?,
                scales: None,
                pages: bench.words(DType::I32, pages, &table)?,
                heads: KV_HEADS,
            },
        })
    }

    fn attend(&self, bench: &mut Bench, batch: Batch<Cpu>) -> CoreResult<CpuRecorded> {
        bench.record(|rec| {
            rec.attend(Attend {
                batch,
                query: self.query.clone(),
                query_gate: self.query_gate.clone(),
                kv: self.kv.clone(),
                first_key: 0,
                output: self.output.clone(),
            })
        })
    }

    fn append(&self, bench: &mut Bench, batch: Batch<Cpu>) -> CoreResult<CpuRecorded> {
        bench.record(|rec| {
            rec.rope_append(RopeAppend {
                batch,
                query_gate: self.query_gate.clone(),
                key: self.key.clone(),
                value: self.value.clone(),
                gains: self.gains.clone(),
                eps: 1e-6,
                rope: RopeTable { frequencies: self.frequencies.clone(), magnitude: 1.0, shift: 0 },
                query: self.query.clone(),
                kv: self.kv.clone(),
            })
        })
    }
}

fn steps(c: &mut Criterion) -> Result<(), Box<dyn Error>> {
    let mut group = c.benchmark_group("attention/step");
    for dtype in [DType::F32, DType::Bf16] {
        for keys in [1024, 8192] {
            for rows in [1u32, 4] {
                let mut bench = Bench::new()?;
                let layer = Layer::new(&mut bench, dtype, rows as usize, keys)?;
                let batch = bench.batch(&[step(0, keys as u32 - rows, rows)])?;
                let recorded = layer.attend(&mut bench, batch)?;
                group.throughput(Throughput::Bytes((2 * keys * KV_HEADS * HEAD * dtype.size()) as u64));
                let id = BenchmarkId::new(format!("{dtype}/{keys} keys"), format!("T{rows}"));
                group.bench_function(id, |b| b.iter(|| bench.replay(&recorded).expect("it ran when it was recorded")));
            }
        }
    }
    group.finish();
    Ok(())
}

fn prefill(c: &mut Criterion) -> Result<(), Box<dyn Error>> {
    let mut group = c.benchmark_group("attention/prefill");
    let rows = 256u32;
    group.throughput(Throughput::Elements(u64::from(rows)));
    for start in [0, 1024] {
        let mut bench = Bench::new()?;
        let layer = Layer::new(&mut bench, DType::F32, rows as usize, (start + rows) as usize)?;
        let batch = bench.chunk(&[prompt_chunk(start, rows)])?;
        let recorded = layer.attend(&mut bench, batch)?;
        let id = BenchmarkId::new(format!("behind {start} keys"), format!("T{rows}"));
        group.bench_function(id, |b| b.iter(|| bench.replay(&recorded).expect("it ran when it was recorded")));
    }
    group.finish();
    Ok(())
}

fn append(c: &mut Criterion) -> Result<(), Box<dyn Error>> {
    let mut group = c.benchmark_group("attention/rope_append");
    for rows in [1u32, 256] {
        let mut bench = Bench::new()?;
        let layer = Layer::new(&mut bench, DType::F32, rows as usize, rows as usize)?;
        let batch = bench.chunk(&[prompt_chunk(0, rows)])?;
        let recorded = layer.append(&mut bench, batch)?;
        group.throughput(Throughput::Elements(u64::from(rows)));
        let id = BenchmarkId::new("f32", format!("T{rows}"));
        group.bench_function(id, |b| b.iter(|| bench.replay(&recorded).expect("it ran when it was recorded")));
    }
    group.finish();
    Ok(())
}

fn all(c: &mut Criterion) {
    steps(c).expect("steps run");
    prefill(c).expect("prompt chunks run");
    append(c).expect("appends run");
}

criterion_group! {
    name = attention;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = all
}
criterion_main!(attention);
