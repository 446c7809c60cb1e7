//! Head and choice of tokens.

use std::error::Error;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ninfer_benches::{Bench, step};
use ninfer_core::backend::DeviceWeight;
use ninfer_core::ops::{Choose, Head, HeadArgmax};
use ninfer_core::sampling::{PARAM_WORDS, SamplingParams};
use ninfer_core::{DType, WeightFormat};

/// Hidden size of the smallest published model.
const HIDDEN: usize = 1024;
/// Vocabulary rows of every published model.
const VOCAB: usize = 248_320;
/// Rows of the benchmarked head: a quarter, which still does not fit into a cache.
const HEAD_ROWS: usize = VOCAB / 4;

fn head(c: &mut Criterion) -> Result<(), Box<dyn Error>> {
    let mut group = c.benchmark_group("sample/head");
    let mut bench = Bench::new()?;
    let head = bench.weight(WeightFormat::Bf16, HEAD_ROWS, HIDDEN)?;
    group.throughput(Throughput::Bytes(head.bytes() as u64));
    for rows in [1, 4] {
        let batch = bench.batch(&[step(0, 0, rows)])?;
        let input = bench.random(rows as usize, HIDDEN)?;
        let logits = bench.random(rows as usize, HEAD_ROWS)?;
        let op = Head { batch: batch.clone(), input: input.clone(), head: head.clone(), logits };
        let recorded = bench.record(|rec| rec.head(op))?;
        let id = BenchmarkId::new("logits", format!("T{rows}"));
        group.bench_function(id, |b| b.iter(|| bench.replay(&recorded).expect("it ran when it was recorded")));

        let output = bench.words(DType::U32, 1, &vec![0; rows as usize])?;
        let op = HeadArgmax { batch, input, head: head.clone(), limit: HEAD_ROWS, output };
        let recorded = bench.record(|rec| rec.head_argmax(op))?;
        let id = BenchmarkId::new("argmax", format!("T{rows}"));
        group.bench_function(id, |b| b.iter(|| bench.replay(&recorded).expect("it ran when it was recorded")));
    }
    group.finish();
    Ok(())
}

fn choose(c: &mut Criterion) -> Result<(), Box<dyn Error>> {
    let mut group = c.benchmark_group("sample/choose");
    group.throughput(Throughput::Elements(VOCAB as u64));
    let warm = SamplingParams::greedy().with_temperature(0.7).with_seed(1);
    for (name, params) in [
        ("greedy", SamplingParams::greedy()),
        ("temperature", warm),
        ("top-k 20, top-p 0.8", warm.with_top_k(20).with_top_p(0.8)),
        ("top-p 0.95, penalties", warm.with_top_p(0.95).with_presence(1.0).with_repetition(1.1)),
    ] {
        let mut bench = Bench::new()?;
        let counts: Vec<u32> = (0..VOCAB).map(|_| u32::from(bench.numbers().below(100) == 0)).collect();
        let op = Choose {
            batch: bench.batch(&[step(0, 0, 1)])?,
            logits: bench.random(1, VOCAB)?,
            ids: bench.words(DType::U32, 1, &[0])?,
            params: bench.words(DType::U32, PARAM_WORDS, &params.to_words())?,
            counts: bench.words(DType::U32, VOCAB, &counts)?,
            limit: VOCAB,
            output: bench.words(DType::U32, 1, &[0])?,
        };
        let recorded = bench.record(|rec| rec.choose(op))?;
        let id = BenchmarkId::from_parameter(name);
        group.bench_function(id, |b| b.iter(|| bench.replay(&recorded).expect("it ran when it was recorded")));
    }
    group.finish();
    Ok(())
}

fn all(c: &mut Criterion) {
    head(c).expect("heads run");
    choose(c).expect("choices run");
}

criterion_group! {
    name = sample;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = all
}
criterion_main!(sample);
