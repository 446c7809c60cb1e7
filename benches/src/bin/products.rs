//! Time of the products of a decode step or of a prompt on a GPU, by shape, format and number of tokens.
//!
//! ```sh
//! cargo run --release -p ninfer-benches --features cuda --bin products -- --model 27b --tokens 1,4,8
//! cargo run --release -p ninfer-benches --features cuda --bin products -- --model 27b --prefill --tokens 1024,4096
//! ```
//!
//! Each product is recorded many times over different copies of its weight, more than twice the L2 cache, and the recording
//! is replayed; the time is that of the fastest of some replays divided by the products in it. Bytes are those of the
//! weights as stored on the device.

use std::time::Instant;

use clap::Parser;
use ninfer_benches::Random;
use ninfer_core::backend::{Backend, DeviceWeight};
use ninfer_core::format::{GROUP_PAD, GlobalScale, GroupFormat, NVFP4_GROUP};
use ninfer_core::ops::{Norm, Project, ProjectAdd, Swiglu};
use ninfer_core::segment::{Batch, Profile, Segment};
use ninfer_core::{DType, PackedData, PackedRef, Result, View, WeightFormat};
use ninfer_kernels::cuda::{Cuda, CudaQueue, CudaWeight};

/// Time of the products of a decode step or of a prompt on a GPU.
#[derive(Parser)]
#[command(
    after_help = "Examples:\n  products --model 35b-a3b\n  products --model 27b --tokens 1,2,4,8,16,64 --device 1\n  \
                  products --model 27b --prefill --tokens 1024,4096"
)]
struct Arguments {
    /// Shapes of which model.
    #[arg(long, default_value = "27b", value_parser = ["27b", "35b-a3b"])]
    model: String,
    /// Numbers of tokens.
    #[arg(long, default_value = "1,4,8,16", value_delimiter = ',')]
    tokens: Vec<usize>,
    /// Products of a prompt instead of a decode step.
    #[arg(long)]
    prefill: bool,
    /// Number of the GPU.
    #[arg(long, default_value_t = 0)]
    device: u32,
    /// Replays of which the fastest counts.
    #[arg(long, default_value_t = 10)]
    replays: usize,
}

#[derive(Clone, Copy)]
enum Kind {
    Project,
    Add,
    Swiglu,
}

struct Shape {
    name: &'static str,
    kind: Kind,
    format: WeightFormat,
    rows: usize,
    cols: usize,
}

const fn shape(name: &'static str, kind: Kind, format: WeightFormat, rows: usize, cols: usize) -> Shape {
    Shape { name, kind, format, rows, cols }
}

const Q4: WeightFormat = WeightFormat::Group(GroupFormat::Q4);
const Q5: WeightFormat = WeightFormat::Group(GroupFormat::Q5);
const Q6: WeightFormat = WeightFormat::Group(GroupFormat::Q6);
const W8: WeightFormat = WeightFormat::Group(GroupFormat::W8);

const DENSE: [Shape; 9] = [
    shape("GDN qkv", Kind::Project, Q4, 10_240, 5120),
    shape("GDN out", Kind::Add, Q5, 5120, 6144),
    shape("gate, up", Kind::Swiglu, Q4, 34_816, 5120),
    shape("down", Kind::Add, Q5, 5120, 17_408),
    shape("head", Kind::Project, Q6, 248_320, 5120),
    shape("MTP gate, up", Kind::Swiglu, W8, 34_816, 5120),
    shape("gate, up", Kind::Swiglu, WeightFormat::Nvfp4, 34_816, 5120),
    shape("gate, up", Kind::Swiglu, WeightFormat::Fp8Row, 34_816, 5120),
    shape("gate, up", Kind::Swiglu, WeightFormat::Bf16, 34_816, 5120),
];

const SPARSE: [Shape; 7] = [
    shape("GDN qkv", Kind::Project, Q4, 8192, 2048),
    shape("GDN out", Kind::Add, Q5, 2048, 4096),
    shape("shared gate, up", Kind::Swiglu, W8, 1024, 2048),
    shape("shared down", Kind::Add, W8, 2048, 512),
    shape("router", Kind::Project, WeightFormat::Bf16, 256, 2048),
    shape("8 experts gate, up", Kind::Swiglu, Q4, 8192, 2048),
    shape("head", Kind::Project, Q6, 248_320, 2048),
];

/// Weights of random codes and usual scales.
fn weight(gpu: &Cuda, random: &mut Random, format: WeightFormat, rows: usize, cols: usize) -> Result<CudaWeight> {
    let mut bytes = |n: usize| -> Vec<u8> { (0..n).map(|_| (random.uniform() * 127.0) as i8 as u8).collect() };
    let half = |n: usize| half::f16::from_f32(0.01).to_le_bytes().repeat(n);
    match format {
        WeightFormat::Group(g) => {
            let groups = rows * (cols.next_multiple_of(GROUP_PAD) / g.group_size());
            let (base, high, scales) = (bytes(groups * 32), bytes(groups * g.high_bytes()), half(groups));
            let data = PackedData::Group { format: g, base: &base, high: &high, scales: &scales };
            gpu.prepare(&[PackedRef::new(rows, cols, data)?])
        }
        WeightFormat::Nvfp4 => {
            let codes = bytes(rows * cols / 2);
            let scales = vec![0x30; rows * cols / NVFP4_GROUP];
            let data = PackedData::Nvfp4 { codes: &codes, scales: &scales, global: GlobalScale::Multiply(0.01) };
            gpu.prepare(&[PackedRef::new(rows, cols, data)?])
        }
        WeightFormat::Fp8Row => {
            let codes: Vec<u8> = bytes(rows * cols).iter().map(|c| c & 0xbf).collect();
            let scales = vec![0.01; rows];
            let data = PackedData::Fp8 { codes: &codes, scales: ninfer_core::format::Fp8Scales::Row(&scales) };
            gpu.prepare(&[PackedRef::new(rows, cols, data)?])
        }
        _ => {
            let elements: Vec<u8> =
                (0..rows * cols).flat_map(|_| half::bf16::from_f32(random.uniform() * 0.02).to_le_bytes()).collect();
            gpu.prepare(&[PackedRef::new(rows, cols, PackedData::Plain { dtype: DType::Bf16, bytes: &elements })?])
        }
    }
}

fn matrix(
    gpu: &Cuda,
    queue: &mut CudaQueue,
    dtype: DType,
    rows: usize,
    cols: usize,
    content: &[u8],
) -> Result<View<Cuda>> {
    let view = View::new(gpu.alloc("matrix", rows * cols * dtype.size())?, dtype, 0, rows, cols)?;
    gpu.upload(queue, &view, content)?;
    Ok(view)
}

/// Seconds of one product with `tokens` columns.
fn measure(
    gpu: &Cuda,
    weights: &[CudaWeight],
    shape: &Shape,
    (profile, tokens): (Profile, usize),
    replays: usize,
) -> Result<f64> {
    let mut queue = gpu.queue()?;
    let mut random = Random::new(2);
    let mut acts = |queue: &mut CudaQueue, cols: usize| {
        let bytes: Vec<u8> =
            (0..tokens * cols).flat_map(|_| half::bf16::from_f32(random.uniform()).to_le_bytes()).collect();
        matrix(gpu, queue, DType::Bf16, tokens, cols, &bytes)
    };
    let input = acts(&mut queue, shape.cols)?;
    let width = if let Kind::Swiglu = shape.kind { shape.rows / 2 } else { shape.rows };
    let output = acts(&mut queue, width)?;
    let gain = matrix(gpu, &mut queue, DType::F32, 1, shape.cols, &vec![0; shape.cols * 4])?;
    let segment = Segment { len: tokens as u32, ..Segment::default() };
    let table = matrix(gpu, &mut queue, DType::I32, 1, 8, bytemuck::cast_slice(&segment.to_words()))?;
    let batch = Batch::new(profile, tokens, table)?;
    let count = weights.len().max(20);
    let step = gpu.record(&mut queue, |rec| {
        for i in 0..count {
            let (weight, batch, input) = (weights[i % weights.len()].clone(), batch.clone(), input.clone());
            let norm = Some(Norm { gain: gain.clone(), eps: 1e-6 });
            match shape.kind {
                Kind::Project => rec.project(Project { batch, input, norm, parts: vec![(weight, output.clone())] })?,
                Kind::Add => rec.project_add(ProjectAdd { batch, input, weight, residual: output.clone() })?,
                Kind::Swiglu => {
                    rec.swiglu(Swiglu { batch, input, norm, gate_up: weight, output: output.clone() })?;
                }
            }
        }
        Ok(())
    })?;
    let mut best = f64::INFINITY;
    for _ in 0..replays + 2 {
        let start = Instant::now();
        for _ in 0..4 {
            gpu.replay(&mut queue, &step)?;
        }
        gpu.download(&mut queue, &output.row_range(0..0)?, &mut [])?;
        best = best.min(start.elapsed().as_secs_f64() / 4.0 / count as f64);
    }
    Ok(best)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments = Arguments::parse();
    let gpu = Cuda::new(arguments.device)?;
    println!("{}", gpu.device());
    let shapes: &[Shape] = if arguments.model == "27b" { &DENSE } else { &SPARSE };
    let profile = if arguments.prefill { Profile::Prefill } else { Profile::Step };
    println!("| product | format | rows × columns | tokens | µs | GB/s | TFLOP/s |");
    println!("|---|---|---|---|---|---|---|");
    for shape in shapes {
        let mut random = Random::new(1);
        let first = weight(&gpu, &mut random, shape.format, shape.rows, shape.cols)?;
        let copies = (150usize << 20).div_ceil(first.bytes()).clamp(2, 64);
        let mut weights = vec![first];
        while weights.len() < copies {
            weights.push(weight(&gpu, &mut random, shape.format, shape.rows, shape.cols)?);
        }
        for &tokens in &arguments.tokens {
            let seconds = measure(&gpu, &weights, shape, (profile, tokens), arguments.replays)?;
            let bytes = weights[0].bytes() as f64;
            println!(
                "| {} | {} | {} × {} | {tokens} | {:.2} | {:.0} | {:.1} |",
                shape.name,
                shape.format,
                shape.rows,
                shape.cols,
                seconds * 1e6,
                bytes / seconds / 1e9,
                2.0 * (shape.rows * shape.cols * tokens) as f64 / seconds / 1e12
            );
        }
    }
    Ok(())
}
